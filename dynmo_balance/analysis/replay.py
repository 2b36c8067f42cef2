"""A recorded profile replayed under a policy, and the offline optimum.

Each record is passed to the policy as it would have been measured under the partition of the replay: an item on a
slower worker takes longer. The clock is virtual. A step takes the time that ``online.regret.step_times`` computes
from its recorded costs under the active partition; a move takes its predicted pause. The opponent knows all steps: a
dynamic program over steps and partitions with the same pauses. It is the optimum where all partitions are few enough to
be tried, else the best of the exact partitions of ranges of steps, an upper bound of the optimum.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise
from typing import Any

import numpy as np

from .._common.errors import UsageError
from ..costs.cost_window import CostWindow, speeds_of_items
from ..formats.plan import Plan, Stage
from ..formats.profile import Event, PlanResult, Record, Segment, Step
from ..formats.profile_records import WORKER_SPEED, with_speeds
from ..online.decision import WatchOptions, decide
from ..online.policies import PolicyState
from ..online.run_state import RunState
from ..partition import uniform
from ..partition.exact import solve
from ..partition.problem import PartitionProblem, worker_slots
from ..planning.migration import migration
from ..planning.plan_builder import chain_of, make_proposal, to_plan

MAX_CANDIDATES = 160
"""Partitions of the dynamic program, which takes ``candidates^2`` transitions per step."""
WIDTHS = (400, 100, 25, 5, 1)
"""Lengths in steps of the ranges whose exact partitions are candidates."""


@dataclass(frozen=True, kw_only=True)
class PolicyResult:
    """The result of a policy: the time of all steps and pauses in ns, and the number of moves."""

    policy: str
    total_ns: int
    pauses_ns: int | None
    moves: int


def at_normal_speed(segment: Segment, owners: Mapping[int, Mapping[str, int]]) -> Iterator[Step]:
    """The steps of a segment as workers of normal speed would have measured them.

    Args:
        segment: its events of measured speeds count from where they are.
        owners: plan id -> item -> worker; workers of other plans count as normal.
    """
    header = segment.header
    normal = speeds_of_items(header, {})
    for record in segment.records:
        if isinstance(record, Event):
            header = with_speeds(header, record)
        elif isinstance(record, Step):
            owner = owners.get(record.plan_id)
            yield rescaled(record, normal if owner is None else speeds_of_items(header, dict(owner)), normal)


def rescaled(step: Step, measured_at: Sequence[int], target: Sequence[int]) -> Step:
    """A record whose items were measured at some speeds, in parts per million, as it would be at others."""
    if tuple(measured_at) == tuple(target):
        return step
    columns: dict[str, Any] = {}
    for name in ("forward_ns", "backward_ns", "backward_input_ns", "backward_weight_ns"):
        samples = getattr(step, name)
        if samples is not None:
            rows = zip(samples, measured_at, target, strict=True)
            columns[name] = tuple(None if ns is None else round(ns * old / new) for ns, old, new in rows)
    return replace(step, **columns)


class RecordedRun:
    """The steps of a segment as numbers: the work of each item in each step, with gaps carried forward.

    Args:
        segment: of a profile.
        base_pause_ns: pause of a move apart from transfers.
        owners: plan id -> item -> worker, if the plans of the recorded run are known. Records of other plans count as
            measured at normal speed.
    """

    def __init__(
        self, segment: Segment, base_pause_ns: int, owners: Mapping[int, Mapping[str, int]] | None = None
    ) -> None:
        if not segment.steps:
            raise UsageError("the profile has no step records to replay; record at least one step")
        # All costs at normal speed first: the replay has another partition than the run, so other workers.
        self.segment = segment
        self.base_pause_ns = base_pause_ns
        header = segment.header
        normal = speeds_of_items(header, {})
        self.steps = tuple(at_normal_speed(segment, owners or {}))
        window = CostWindow(len(header.items), max(2, len(self.steps)))
        for step in self.steps:
            window.add(step)
        if window.unsampled():
            raise UsageError(
                f"{window.unsampled()} items of the profile are never sampled; record a step that samples all items"
            )
        self.works = window.works(normal)
        self._prefixes = [[0, *accumulate(work)] for work in self.works]
        costs = window.costs(normal)
        if costs is None:
            raise UsageError(
                "the profile changes between split and full backward passes; replay a profile with one kind"
            )
        self.problem = PartitionProblem(
            chain=chain_of(header, costs),
            slots=worker_slots(header),
            schedule=header.schedule,
            microbatches=header.microbatches,
            link_bandwidth=header.link.bandwidth_bytes_per_s if header.link else None,
            link_latency_ns=header.link.latency_ns if header.link else 0,
        )

    def step_ns(self, index: int, boundaries: Sequence[int]) -> int:
        """The time in ns of step ``index``, counted from 0, under these boundaries.

        The closed form of ``online.regret.step_times`` and not the simulator: the dynamic program needs the time of
        every step under every candidate.
        """
        prefix = self._prefixes[index]
        pairs = enumerate(pairwise(boundaries))
        times = [self.problem.slot(s).time_ns(prefix[b] - prefix[a]) for s, (a, b) in pairs]
        return sum(times) + (self.problem.microbatches - 1) * max(times)

    def initial(self) -> Plan:
        """The plan that the replay starts with: the uniform partition."""
        best = replace(solve(self.problem), boundaries=uniform.boundaries(self.problem))
        proposal = make_proposal(self.problem, best)
        header = self.segment.header
        plan = to_plan(
            proposal,
            run_id=header.run_id,
            balancer="initial",
            base=None,
            read_to_step=0,
            base_step_ns=None,
            reason="the static uniform partition",
        )
        return replace(plan, predicted=None, optimality=None)

    def pause_ns(self, before: Sequence[int], after: Sequence[int]) -> int:
        """The pause in ns of a move from one partition to another, as ``planning.migration`` predicts it."""
        if tuple(before) == tuple(after):
            return 0
        problem = self.problem
        owner = {name: worker for name, worker in zip(problem.chain.names, self._owners(before), strict=True)}
        stages = [
            Stage(stage=at, worker=problem.slots[problem.positions[at]].worker, items=problem.chain.names[begin:end])
            for at, (begin, end) in enumerate(pairwise(after))
        ]
        return migration(problem.chain, owner, stages, problem.link_bandwidth, self.base_pause_ns).pause_ns or 0

    def _owners(self, boundaries: Sequence[int]) -> list[int]:
        """The worker of each item."""
        workers = [self.problem.slots[position].worker for position in self.problem.positions]
        return [workers[at] for at, (begin, end) in enumerate(pairwise(boundaries)) for _ in range(begin, end)]


def run_policy(recorded: RecordedRun, options: WatchOptions) -> PolicyResult:
    """Replay the run under a policy."""
    state = RunState(window_size=options.window)
    state.feed(recorded.segment.header)
    state.base_pause_ns = recorded.base_pause_ns
    base, previous, policy_state = recorded.initial(), None, PolicyState()
    total = pauses = moves = 0
    decided, index = -1, 0
    normal = speeds_of_items(recorded.segment.header, {})
    for record in recorded.segment.records:
        # The replay has workers of the header's speeds.
        if isinstance(record, Event) and record.kind != WORKER_SPEED:
            state.feed(record)
        if not isinstance(record, Step):
            continue
        time = recorded.step_ns(index, base.boundaries)
        measured = rescaled(recorded.steps[index], normal, speeds_of_items(recorded.segment.header, base.owner))
        index += 1
        total += time
        # The policy sees what a trainer would have written, and nothing of the recorded plans.
        state.feed(replace(measured, plan_id=base.plan_id, step_ns=time))
        is_early = decided >= 0 and state.last_step < decided + options.every
        if options.policy == "never" or (is_early and not state.is_first_after_change):
            continue
        decided = state.last_step
        decision = decide(state, base, options, policy_state, previous)
        policy_state = decision.policy_state
        if decision.plan is not None and decision.plan.action == "move":
            pause = decision.plan.migration.pause_ns or 0
            total, pauses, moves = total + pause, pauses + pause, moves + 1
            previous, base, policy_state = base, decision.plan, decision.policy_state.after_move()
            state.feed(_taken(base, state.last_step, pause))
    return PolicyResult(policy=options.policy, total_ns=total, pauses_ns=pauses, moves=moves)


def _taken(plan: Plan, step: int, pause_ns: int) -> Record:
    moved = plan.migration.max_link_bytes
    return PlanResult(
        plan_id=plan.plan_id, step=step, result="applied", pause_ns=pause_ns, bytes=moved, reason="replay"
    )


def _candidates(recorded: RecordedRun) -> tuple[list[tuple[int, ...]], bool]:
    """Partitions to choose from, the uniform one first; and whether these are all partitions."""
    start = tuple(uniform.boundaries(recorded.problem))
    found: dict[tuple[int, ...], None] = {start: None}
    cuts, stages = recorded.problem.chain.cuts, recorded.problem.num_stages
    if math.comb(len(cuts) - 2, stages - 1) < MAX_CANDIDATES:
        found |= {(cuts[0], *inner, cuts[-1]): None for inner in itertools.combinations(cuts[1:-1], stages - 1)}
        return list(found), True
    # Wide ranges first: if there are too many candidates, those that hold for long remain. They are worth their pause.
    problem, count = replace(recorded.problem, current=None), len(recorded.works)
    upto = np.concatenate([np.zeros((1, len(recorded.works[0]))), np.cumsum(recorded.works, axis=0)])
    for width in (count, *(each for each in WIDTHS if each < count)):
        for first in range(0, count, width):
            last = min(first + width, count)
            mean = ((upto[last] - upto[first]) / (last - first)).round().astype(np.int64).tolist()
            found.setdefault(tuple(solve(problem, mean).boundaries))
            if len(found) >= MAX_CANDIDATES:
                return list(found), False
    return list(found), False


def offline_optimum(recorded: RecordedRun) -> PolicyResult:
    """The minimum time over all sequences of candidate partitions, which may change after every step."""
    candidates, is_complete = _candidates(recorded)
    number = range(len(candidates))
    pause = np.array([[recorded.pause_ns(a, b) for b in candidates] for a in candidates], dtype=np.int64)
    spent = np.array([[recorded.step_ns(i, c) for c in candidates] for i in range(len(recorded.works))], dtype=np.int64)
    # The first candidate is that of the start.
    totals, moves = pause[0] + spent[0], (np.arange(len(candidates)) != 0).astype(np.int64)
    for times in spent[1:]:
        ways = totals[:, None] + pause
        # Ties are broken by the index, so the number of moves is the same in every run.
        best = ways.argmin(axis=0)
        moves = moves[best] + (best != np.arange(len(candidates)))
        totals = ways[best, number] + times
    at = int(totals.argmin())
    name = "offline optimum" if is_complete else "best offline"
    return PolicyResult(policy=name, total_ns=int(totals[at]), pauses_ns=None, moves=int(moves[at]))
