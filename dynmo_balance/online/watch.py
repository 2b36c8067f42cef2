"""The online planner: follows the profile of a run and publishes a plan when it is worth moving.

::

    RUN/profile.jsonl --ProfileFollower.poll--> records --RunState.feed--> costs, active plan, request, results
                                                                              |
    RUN/plans/plan-000000.json ... --_find_base--> base plan                  | _is_due
                 ^                                    |                       v
                 |                                    +-------------->  decision.decide (pure)
                 +------------------ publish (link) ------------------- Decision: plan or None, log line, PolicyState

It reads only ``RUN/profile.jsonl`` and ``RUN/plans``, and writes only ``RUN/plans``. It stores nothing else: a
planner that was killed reads both again, repeats the past decisions of its policy, and makes the same plans. Of a long
profile it reads the newest records only (``MAX_READ_RECORDS``).
Invariants:

* A plan request is always answered, if necessary with a plan that keeps the partition.
* Without a request, no plan is published while one of this segment and base has no result.
* After each refusal the planner waits twice as long.
* Time and policy state of a decision depend on the records alone, not on where a poll ended.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

from .._common.console import print_message
from .._common.errors import DynmoError
from ..formats.plan import SEGMENT_KEY, Plan, header_problems, plan_numbers, plan_path, publish, read_plan
from ..formats.profile import Header, Step
from ..inputs.profile_source import warn_of_units
from .decision import WatchOptions, decide
from .policies import PolicyState
from .profile_follower import ProfileFollower
from .run_state import RunState

MAX_DOUBLINGS = 10
"""After each refused plan the planner waits twice as long, up to 1024 times."""

MAX_REPLAYED_RECORDS = 2_500
"""The newest records of a poll for which past decisions are repeated; each record takes about 1.5 ms.

Scores decay by 0.98 at each decision, so older decisions have little influence. Only a start, or a planner that was
stopped for long, reads more records in one poll. Older records only contribute costs.
"""

FIRST_RETRY_S, MAX_RETRY_S = 0.2, 10.0
"""Seconds until a plan that could not be written is decided again; they double."""

MAX_READ_RECORDS = 2 * MAX_REPLAYED_RECORDS
"""The newest records of a profile that a start reads. All of a long one would take longer than training can wait."""


class Watcher:
    """The shell around ``decide``: polls, keeps time, writes.

    Args:
        run: run directory.
        options: how to decide.
        beat: called before each line that is read and each record that is processed. A start may read a long profile
            and repeat many decisions; a supervisor must not mistake that for a planner that hangs.

    Attributes:
        has_more: whether the last poll left records unread; it has not decided then.
    """

    def __init__(self, run: Path, options: WatchOptions, *, beat: Callable[[], None] = lambda: None) -> None:
        self._profile = run / "profile.jsonl"
        self._plans = run / "plans"
        self._options, self._beat = options, beat
        self._tail = ProfileFollower(self._profile, beat=beat, num_newest=MAX_READ_RECORDS)
        self.state = RunState(window_size=options.window)
        self._base: Plan | None = None
        self._decided_at = -1
        self._last_warning = ""
        self._policy_state = PolicyState()
        self._has_warned_of_units = False
        self._is_overdue = False
        self._failures, self._retry_s = 0, 0.0
        self.has_more = False
        self._published: dict[int, tuple[int | None, object, int]] = {}  # plan id: base, segment and step

    def poll(self, *, decides: bool = False) -> bool:
        """Read new records, and decide if a decision is due.

        Args:
            decides: whether to decide after the last record even if no decision is due.

        Returns:
            whether there was anything new.
        """
        news = self._tail.poll()
        self.has_more = news.has_more
        # Everything that was derived from the former contents is void; the plans on disk are not.
        if news.restarted:
            print_message("the profile was replaced or truncated: starting from scratch")
            self.state = RunState(window_size=self._options.window)
            self._base, self._decided_at, self._is_overdue = None, -1, False
            self._published.clear()
        for problem in news.problems:
            print_message(f"{self._profile}: skipped {problem}")
        overdue, self._is_overdue = self._is_overdue, False
        # A start reads a long profile in batches: what the records of later batches need is as if they were one.
        pending = self._tail.lines_left(MAX_REPLAYED_RECORDS) if news.has_more else 0
        headers = sum(isinstance(record, Header) for record in news.records)
        for left, record in zip(range(len(news.records) - 1, -1, -1), news.records, strict=True):
            self._beat()
            if isinstance(record, Header):
                headers -= 1
                overdue = False
                self._base, self._decided_at, self._policy_state, self._has_warned_of_units = (
                    None,
                    -1,
                    PolicyState(),
                    False,
                )
            elif isinstance(record, Step) and not self._has_warned_of_units:
                self._has_warned_of_units = warn_of_units(self._profile, [record])
            active_plan_id = self.state.active_plan_id
            self.state.feed(record)
            if self.state.active_plan_id != active_plan_id:
                self._policy_state = self._policy_state.after_move()
                overdue = False
            is_replayed = 0 < left + pending <= MAX_REPLAYED_RECORDS
            if is_replayed and not headers and self._is_stateful and self._is_due():  # a header resets the policy state
                overdue = self._decide(publishing=False)
        if news.has_more:
            self._is_overdue = overdue
            return True
        if (news.records or self._waiting_for_base() or self._is_retry_due()) and (
            self._is_due() or (decides and self.state.header is not None)
        ):
            self._decide()
        elif overdue and not self._options.lockstep:
            self._decide_overdue()
        return bool(news.records or news.problems)

    def _decide_overdue(self) -> None:
        """Publish a decision that became due within the records of a poll, with the newest costs.

        Time and policy state remain those of the decision that was due. They depend on the records alone, not on
        where polls ended, so they are the same after a restart.
        """
        decided_at, memory = self._decided_at, self._policy_state
        self._decide()
        self._decided_at, self._policy_state = decided_at, memory

    def _is_retry_due(self) -> bool:
        """Whether the last plan could not be written, and it is time to decide again."""
        return self._failures > 0 and time.monotonic() >= self._retry_s

    def _waiting_for_base(self) -> bool:
        return self.state.requested_step is not None and self._base is None

    def _is_due(self) -> bool:
        state = self.state
        if state.header is None:
            return False
        if state.requested_step is not None:
            return True
        # A trainer that refuses, such as for memory that the planner does not know, will refuse the next plan too.
        pause = self._options.every << min(state.refusals, MAX_DOUBLINGS)
        if self._options.lockstep:
            return False
        # The first record after a change of the model decides at once, unless the trainer refuses plans.
        is_first = state.is_first_after_change and not state.refusals
        if not is_first and self._decided_at >= 0 and state.last_step < self._decided_at + pause:
            return False
        return state.has_records(self._options.min_records)

    @property
    def _is_stateful(self) -> bool:
        """Whether the policy has state over decisions, so that past decisions are repeated after a restart."""
        return self._options.policy in ("regret", "threshold")

    def _decide(self, publishing: bool = True) -> bool:
        """Decide now; returns whether the decision made a plan that was neither published now nor before."""
        base = self._find_base()
        now = max(self.state.last_step, self.state.requested_step or 0)
        # After a restart past decisions are repeated, although the plans of this and of later decisions exist.
        if base is None or self._has_pending_plan(base, now if publishing else now - 1):
            return False
        before = self._decided_at, self._policy_state
        decision = decide(self.state, base, self._options, self._policy_state, self._previous())
        self._decided_at, self._policy_state = self.state.last_step, decision.policy_state
        if not publishing:
            return decision.plan is not None and not self._was_published(base)
        written = ""
        if decision.plan is not None:
            segment = self.state.header.segment if self.state.header is not None else 0
            try:
                plan = publish(self._plans, _with_segment(decision.plan, segment))
            except OSError as error:
                # A full disk must not end the planner: it decides again, with the costs of then.
                self._decided_at, self._policy_state = before
                pause_s = min(MAX_RETRY_S, FIRST_RETRY_S * 2.0 ** min(self._failures, MAX_DOUBLINGS))
                self._failures, self._retry_s = self._failures + 1, time.monotonic() + pause_s
                self._warn_once(f"cannot write a plan to {self._plans}: {error.strerror}; trying again")
                return True
            written = f"; wrote plan {plan.plan_id}"
        self._failures = 0
        print_message(decision.line + written)
        return False

    def _find_base(self) -> Plan | None:
        """The active plan: as the profile reports it, or else the newest initial partition."""
        state = self.state
        if self._base is not None and (state.active_plan_id is None or self._base.plan_id == state.active_plan_id):
            return self._base
        # The trainer alone knows which plan is active. Before its first step only the initial one can be.
        numbers = plan_numbers(self._plans) if state.active_plan_id is None else [state.active_plan_id]
        for number in reversed(numbers):
            try:
                plan = read_plan(plan_path(self._plans, number))
            except DynmoError as error:
                self._warn_once(f"plan {number} is invalid: {error}")
                continue
            if state.active_plan_id is None and plan.balancer != "initial":
                continue
            problems = header_problems(plan, state.header) if state.header is not None else []
            if problems:
                self._warn_once(f"plan {number} does not fit the profile: {problems[0]}")
                continue
            self._base = plan
            return plan
        self._warn_once(f"no active plan in {self._plans} yet")
        return None

    def _previous(self) -> Plan | None:
        """The plan that was active before this one, if it can be read."""
        number = self.state.previous
        if number is None:
            return None
        try:
            return read_plan(plan_path(self._plans, number))
        except DynmoError:
            return None

    def _has_pending_plan(self, base: Plan, last_step: int) -> bool:
        """Whether a plan of this segment and base, made up to ``last_step``, has no result yet."""
        state = self.state
        for number, read_to_step in self._plans_after(base):
            # The result of a plan before the records that a start has read is among those that it has not.
            if number in state.results or (self._tail.has_skipped and read_to_step < (state.first_step or 0)):
                break
            if read_to_step <= last_step and (state.requested_step is None or read_to_step >= state.requested_step):
                return True
        return False

    def _was_published(self, base: Plan) -> bool:
        """Whether a plan of this segment and base was made at this step or later."""
        return any(read_to_step >= self.state.last_step for _, read_to_step in self._plans_after(base))

    def _plans_after(self, base: Plan) -> Iterator[tuple[int, int]]:
        """Number and step of the plans of this segment that are based on the active plan, newest first."""
        segment = self.state.header.segment if self.state.header is not None else 0
        for number in reversed(plan_numbers(self._plans)):
            if number <= base.plan_id:
                break
            if number not in self._published:
                try:
                    plan = read_plan(plan_path(self._plans, number))
                except DynmoError:
                    continue  # not written by the planner; the trainer refuses it
                self._published[number] = (plan.base_plan_id, (plan.extra or {}).get(SEGMENT_KEY), plan.read_to_step)
            base_plan_id, of_segment, read_to_step = self._published[number]
            if base_plan_id == base.plan_id and of_segment == segment:
                yield number, read_to_step

    def _warn_once(self, text: str) -> None:
        # A poll repeats every 50 ms; the same warning each time would fill the log.
        if text != self._last_warning:
            print_message(text)
            self._last_warning = text


def _with_segment(plan: Plan, segment: int) -> Plan:
    return replace(plan, extra={**(plan.extra or {}), SEGMENT_KEY: segment})


class Heartbeat:
    """Lines on a file descriptor, by which a supervisor distinguishes a planner that hangs from an idle one.

    The decision loop writes them, not a separate thread: a loop that hangs must stop writing. A full pipe must not
    block the planner, so the descriptor is non-blocking, and lines are dropped while the pipe is full.
    """

    def __init__(self, descriptor: int, every_s: float) -> None:
        """``descriptor`` is that of a pipe, ``every_s`` the minimum time in s between two lines."""
        os.set_blocking(descriptor, False)
        self._descriptor, self._every_s, self._due = descriptor, every_s, 0.0

    def beat(self) -> None:
        """Write a line if one is due."""
        now = time.monotonic()
        if now < self._due:
            return
        self._due = now + self._every_s
        with contextlib.suppress(OSError):
            os.write(self._descriptor, b"alive\n")


def watch(
    run: Path,
    options: WatchOptions,
    *,
    once: bool,
    poll_s: float,
    parent_pid: int | None,
    heartbeat: Heartbeat | None = None,
) -> None:
    """Watch a run until it is killed, its parent process ends, or, with ``once``, all present records are read.

    Args:
        run: run directory.
        options: how to decide.
        once: whether to read what is present, decide once, and return.
        poll_s: seconds between polls.
        parent_pid: return when this process has ended; None never.
        heartbeat: where to write heartbeats; None writes none.
    """
    watcher = Watcher(run, options, beat=heartbeat.beat) if heartbeat is not None else Watcher(run, options)
    print_message(f"watching {run} | balancer: {options.balancer} | policy: {options.policy}")
    is_child = os.getppid() == parent_pid
    while True:
        news = watcher.poll(decides=once)
        while once and watcher.has_more:
            news = watcher.poll(decides=once)
        if heartbeat is not None:
            heartbeat.beat()
        if once:
            return
        if parent_pid is not None and not _is_alive(parent_pid, is_child):
            print_message(f"process {parent_pid} has ended: exiting")
            return
        # Without a pause after new records: a planner that is behind catches up first.
        if not news:
            time.sleep(poll_s)


def _is_alive(pid: int, is_child: bool) -> bool:
    """Whether the process exists; for a child, whether it still has this parent, which may be an unreaped zombie."""
    if is_child:
        return os.getppid() == pid
    try:
        os.kill(pid, 0)  # signal 0 only checks that the process exists
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True
