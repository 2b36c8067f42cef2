"""The online planner: follows a run's profile and writes a plan when one pays.

It reads only ``RUN/profile.jsonl`` and ``RUN/plans``, writes only ``RUN/plans``, and keeps nothing else: killed and
started again it goes on from what is there.
"""

from __future__ import annotations

import os
import time
from dataclasses import dataclass, replace
from pathlib import Path

from .console import say
from .costs import speeds_of_items
from .errors import DynmoError
from .formats.plan import Plan, header_problems, plan_numbers, plan_path, publish, read_plan
from .formats.profile import Header
from .formats.tail import ProfileTail
from .planning import Proposal, chain_of, holdings, keep_plan, propose, to_plan
from .policies import POLICIES, Evidence, Verdict
from .problem import Place, Problem, places_of
from .simulate import predict
from .state import RunState

SEGMENT_KEY = "x_segment"
MAX_DOUBLINGS = 10
"""After each refused plan the planner waits twice as long, up to a thousandfold."""


@dataclass(frozen=True, kw_only=True)
class WatchOptions:
    """How to watch; the command's help says what each option means."""

    balancer: str = "exact"
    policy: str = "threshold"
    granularity: str | None = None
    objective: str = "auto"
    min_gain: float = 0.02
    window: int = 8
    min_records: int = 3
    every: int = 5
    horizon: int = 200
    min_layers: int = 1
    memory_bytes: int | None = None
    lockstep: bool = False


@dataclass(frozen=True, kw_only=True)
class Decision:
    """What to do now: a plan to write, or none, and the line for the log."""

    plan: Plan | None
    line: str


def problem_of(header: Header, state: RunState, base: Plan, options: WatchOptions) -> Problem | None:
    """What to partition now, on the workers that are left; None while items are not sampled."""
    costs = state.window.costs(speeds_of_items(header, base.owner))
    if costs is None:
        return None
    by_id = {place.worker: place for place in places_of(header, memory_bytes=options.memory_bytes)}
    places: tuple[Place, ...] = tuple(by_id[worker] for worker in base.workers)
    return Problem(
        chain=chain_of(header, costs, options.granularity),
        places=places,
        schedule=base.schedule,
        microbatches=header.microbatches,
        virtual_stages=base.virtual_stages_per_worker,
        link_bandwidth=header.link.bandwidth_bytes_per_s if header.link else None,
        link_latency_ns=header.link.latency_ns if header.link else 0,
        min_units=options.min_layers,
        current=holdings(base, places, base.virtual_stages_per_worker),
    )


def weigh(problem: Problem, base: Plan, state: RunState, options: WatchOptions) -> tuple[Proposal, Evidence, Verdict]:
    """The balancer's proposal, the numbers for and against it, and the policy's verdict."""
    proposal = propose(
        problem,
        options.balancer,
        objective=options.objective,
        owner=base.owner,
        base_pause_ns=state.base_pause_ns,
    )
    due = state.next_event_step
    horizon = options.horizon if due is None else min(options.horizon, due - state.last_step)
    evidence = Evidence(
        current_step_ns=predict(problem, base.boundaries).step_ns,
        proposed_step_ns=proposal.timeline.step_ns,
        pause_ns=proposal.migration.pause_ns or 0,
        horizon_steps=horizon,
        moves=len(proposal.migration.moves),
    )
    return proposal, evidence, POLICIES[options.policy](evidence, options.min_gain)


def decide(state: RunState, base: Plan, options: WatchOptions) -> Decision:
    """Weigh a move now; an ask is always answered with a plan, if need be to keep the partition."""
    header = state.header
    asked = state.asked
    read_to = max(state.last_step, asked or 0)
    run_id = header.run_id if header is not None else base.run_id

    def keep(reason: str) -> Decision:
        line = f"step {read_to}: keep plan {base.plan_id}: {reason}"
        if asked is None:
            return Decision(plan=None, line=line)
        plan = keep_plan(base, run_id=run_id, read_to_step=read_to, balancer=options.balancer, reason=reason)
        return Decision(plan=plan, line=line)

    if header is None or len(state.window) < options.min_records:
        return keep(f"{len(state.window)} of {options.min_records} step records since the last change of costs")
    problem = problem_of(header, state, base, options)
    if problem is None:
        return keep(f"{state.window.unsampled()} items are not sampled yet")
    try:
        proposal, evidence, verdict = weigh(problem, base, state, options)
    except DynmoError as error:
        return keep(f"no partition: {error}")
    if not verdict.move:
        return keep(verdict.reason)
    plan = to_plan(
        proposal,
        run_id=run_id,
        balancer=options.balancer,
        base=base,
        read_to_step=read_to,
        base_step_ns=evidence.current_step_ns,
        reason=verdict.reason,
    )
    return Decision(plan=plan, line=f"step {read_to}: move from plan {base.plan_id}: {verdict.reason}")


class Watcher:
    """The thin shell around ``decide``: polls, keeps time, writes."""

    def __init__(self, run: Path, options: WatchOptions) -> None:
        self._profile = run / "profile.jsonl"
        self._plans = run / "plans"
        self._options = options
        self._tail = ProfileTail(self._profile)
        self._state = RunState(window_size=options.window)
        self._base: Plan | None = None
        self._decided_at = -1
        self._complaint = ""

    def poll(self) -> bool:
        """Read what is new and decide if it is time; whether there was anything new."""
        news = self._tail.poll()
        if news.restarted:
            say("the profile was replaced or cut: starting anew")
            self._state = RunState(window_size=self._options.window)
            self._base, self._decided_at = None, -1
        for problem in news.problems:
            say(f"{self._profile}: skipped {problem}")
        for record in news.records:
            if isinstance(record, Header):
                self._base, self._decided_at = None, -1
            self._state.feed(record)
        if (news.records or self._waiting_for_base()) and self._due():
            self._decide()
        return bool(news.records or news.problems)

    def _waiting_for_base(self) -> bool:
        return self._state.asked is not None and self._base is None

    def _due(self) -> bool:
        state = self._state
        if state.header is None:
            return False
        if state.asked is not None:
            return True
        pause = self._options.every << min(state.refusals, MAX_DOUBLINGS)
        if self._options.lockstep or (self._decided_at >= 0 and state.last_step < self._decided_at + pause):
            return False
        return len(state.window) >= self._options.min_records

    def _decide(self) -> None:
        base = self._find_base()
        if base is None or self._unanswered(base):
            return
        decision = decide(self._state, base, self._options)
        self._decided_at = self._state.last_step
        written = ""
        if decision.plan is not None:
            segment = self._state.header.segment if self._state.header is not None else 0
            plan = publish(self._plans, _stamped(decision.plan, segment))
            written = f"; wrote plan {plan.plan_id}"
        say(decision.line + written)

    def _find_base(self) -> Plan | None:
        """The plan in force: as the profile tells it, or else the newest initial partition."""
        state = self._state
        if self._base is not None and (state.in_force is None or self._base.plan_id == state.in_force):
            return self._base
        numbers = plan_numbers(self._plans) if state.in_force is None else [state.in_force]
        for number in reversed(numbers):
            try:
                plan = read_plan(plan_path(self._plans, number))
            except DynmoError as error:
                self._complain(f"plan {number} cannot be used: {error}")
                continue
            if state.in_force is None and plan.balancer != "initial":
                continue
            problems = header_problems(plan, state.header) if state.header is not None else []
            if problems:
                self._complain(f"plan {number} does not fit the profile: {problems[0]}")
                continue
            self._base = plan
            return plan
        self._complain(f"no plan in force in {self._plans} yet")
        return None

    def _unanswered(self, base: Plan) -> bool:
        """Whether a plan of this segment, based on the plan in force, still waits for its result."""
        state = self._state
        segment = state.header.segment if state.header is not None else 0
        for number in reversed(plan_numbers(self._plans)):
            if number in state.answered or number <= base.plan_id:
                break
            try:
                plan = read_plan(plan_path(self._plans, number))
            except DynmoError:
                continue  # not ours; the trainer refuses it
            ours = plan.base_plan_id == base.plan_id and (plan.extra or {}).get(SEGMENT_KEY) == segment
            if ours and (state.asked is None or plan.read_to_step >= state.asked):
                return True
        return False

    def _complain(self, text: str) -> None:
        if text != self._complaint:
            say(text)
            self._complaint = text


def _stamped(plan: Plan, segment: int) -> Plan:
    return replace(plan, extra={**(plan.extra or {}), SEGMENT_KEY: segment})


def watch(run: Path, options: WatchOptions, *, once: bool, poll_s: float, parent_pid: int | None) -> None:
    """Watch a run until it is killed, its parent is gone, or - with ``once`` - what is there has been read."""
    watcher = Watcher(run, options)
    say(f"watching {run} with balancer {options.balancer}, policy {options.policy}")
    is_child = os.getppid() == parent_pid
    while True:
        news = watcher.poll()
        if once:
            return
        if parent_pid is not None and not _alive(parent_pid, is_child):
            say(f"process {parent_pid} is gone: ending")
            return
        if not news:
            time.sleep(poll_s)


def _alive(pid: int, is_child: bool) -> bool:
    """Whether the process exists; a parent that ended shows as another parent even while nobody has reaped it."""
    if is_child:
        return os.getppid() == pid
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True
