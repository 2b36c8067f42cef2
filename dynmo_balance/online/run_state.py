"""The state of a run, from its profile: header, active plan, cost window, open plan request, results.

The same records always give the same state, so a planner that was killed rebuilds it by reading the profile again.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from ..costs.cost_window import CostWindow
from ..costs.expert_loads import WINDOW, has_tokens
from ..formats.profile import Event, Header, PlanRequest, PlanResult, Record, Step
from ..formats.profile_records import COST_NEUTRAL_EVENTS, WORKER_SPEED, with_speeds
from .regret import WorkTrace

LEARNING_RATE = 0.5
"""Weight of the newest measured pause; ``verify`` repeats this mean, see ``analysis.verify.plan``."""


@dataclass(frozen=True, kw_only=True)
class Measured:
    """A record, and the header with the speeds of the workers when it was measured."""

    step: Step
    header: Header


@dataclass(kw_only=True)
class RunState:
    """The state after the records so far; each header resets everything but ``results`` and ``base_pause_ns``.

    Attributes:
        window_size: number of step records in the cost window.
        header: of the segment, with the last measured speeds of the workers.
        window: the last records, for costs.
        trace: the work of the items in more records, for the policies.
        first_step: the first step; None before it.
        last_step: the last step.
        active_plan_id: the active plan, as last reported by a step or a result; None until then.
        previous: the plan that was active before it.
        requested_step: the step of an open plan request; None if there is none.
        results: result by plan id.
        refusals: number of consecutive plans that were refused or rolled back.
        base_pause_ns: measured pause of moves apart from transfers, smoothed; None before the first move.
        before_move: the last records before the move to the active plan; empty if the model has changed since. Other
            than costs they outlast changes of speeds, which the move may cause itself.
        after_move: the last records since the move.
        first_after: the first records since the move.
        model_changes: number of changes of costs other than by speeds.
        is_after_change: whether the records of the window are those since such a change.
        expected: for each event kind, the step at which the next one is due.
        counted: the last steps with tokens per expert. They do not depend on where the experts are.
    """

    window_size: int
    header: Header | None = None
    window: CostWindow = field(default_factory=lambda: CostWindow(0, 1))
    trace: WorkTrace = field(default_factory=WorkTrace)
    first_step: int | None = None
    last_step: int = 0
    active_plan_id: int | None = None
    previous: int | None = None
    requested_step: int | None = None
    results: dict[int, PlanResult] = field(default_factory=dict)
    refusals: int = 0
    base_pause_ns: int | None = None
    before_move: tuple[Measured, ...] = ()
    after_move: deque[Measured] = field(default_factory=deque)
    first_after: list[Measured] = field(default_factory=list)
    model_changes: int = 0
    is_after_change: bool = False
    expected: dict[str, int | None] = field(default_factory=dict)
    counted: deque[Step] = field(default_factory=lambda: deque(maxlen=WINDOW))

    @property
    def next_event_step(self) -> int | None:
        """The next step at which a cost change is due; None if unknown."""
        due = [step for step in self.expected.values() if step is not None and step > self.last_step]
        return min(due, default=None)

    @property
    def is_first_after_change(self) -> bool:
        """Whether the newest record is the first since a change of the model, after which a decision is due."""
        return self.is_after_change and len(self.window) == 1

    def has_records(self, min_records: int) -> bool:
        """Whether the window has enough records to decide: ``min_records``, or one after a change of the model.

        The old costs are void then, and the next change may come before more records: gradual pruning changes the
        model every few steps.
        """
        return len(self.window) >= (1 if self.is_after_change else min_records)

    def feed(self, record: Record) -> None:
        """Add the next record of the profile."""
        match record:
            case Header():
                self._start(record)
            case Step():
                self._step(record)
            case Event():
                # Costs before the change are void. So is the comparison of the steps before and after a move, but for
                # speeds, at which the records know that they were measured.
                if record.kind == WORKER_SPEED and self.header is not None:
                    self.header = with_speeds(self.header, record)
                if record.kind not in COST_NEUTRAL_EVENTS:
                    self.expected[record.kind] = record.next_expected_step
                    self.window.expire()
                    self.trace.expire()
                    if record.kind != WORKER_SPEED:
                        self.is_after_change = True
                        self.model_changes += 1
                        self.before_move = ()
                        self.after_move.clear()
                        self.first_after.clear()
            case PlanRequest():
                self.requested_step = record.step
            case PlanResult():
                self._result(record)

    def _start(self, header: Header) -> None:
        self.header = header
        self.window = CostWindow(len(header.items), self.window_size)
        self.trace.expire()
        self.last_step, self.active_plan_id, self.previous, self.requested_step = 0, None, None, None
        self.first_step = None
        self.is_after_change = False
        self.before_move, self.after_move, self.first_after = (), deque(maxlen=self.window_size), []
        self.expected = {}
        self.refusals = 0
        self.counted.clear()
        # ``results`` and ``base_pause_ns`` survive: plan numbers continue over segments, and the pause is that of the
        # same cluster.

    def _step(self, step: Step) -> None:
        self.first_step = step.step if self.first_step is None else self.first_step
        self.last_step = step.step
        # A later step shows that the run no longer waits for an answer.
        if self.requested_step is not None and step.step > self.requested_step:
            self.requested_step = None
        self._activate(step.plan_id)
        self.window.add(step)
        self.trace.add(step)
        if self.header is not None:
            measured = Measured(step=step, header=self.header)
            self.after_move.append(measured)
            if len(self.first_after) < self.window_size:
                self.first_after.append(measured)
        if has_tokens(step):
            self.counted.append(step)

    def _activate(self, plan_id: int) -> None:
        if self.active_plan_id != plan_id:
            if self.active_plan_id is not None:
                self.window.renew()
                self.is_after_change = False
                self.before_move = tuple(self.after_move)
                self.after_move.clear()
            self.first_after.clear()
            self.previous, self.active_plan_id = self.active_plan_id, plan_id

    def _result(self, result: PlanResult) -> None:
        self.results[result.plan_id] = result
        # The result shows that the trainer has its answer.
        if self.requested_step is not None and result.step >= self.requested_step:
            self.requested_step = None
        if result.result in ("refused", "rolled_back"):
            self.refusals += 1
        if result.result == "applied":
            self.refusals = 0
            self._activate(result.plan_id)
            self._learn(result)
        elif result.result == "rolled_back" and result.plan_id == self.active_plan_id and self.previous is not None:
            self._activate(self.previous)

    def _learn(self, result: PlanResult) -> None:
        # Transfers are subtracted, because the next move may be of another size; the rest (verify, rebuild the
        # schedule) is the same for each.
        link = self.header.link if self.header is not None else None
        transfer = result.bytes * 1_000_000_000 // link.bandwidth_bytes_per_s if link is not None else 0
        measured = max(0, result.pause_ns - transfer)
        if self.base_pause_ns is None:
            self.base_pause_ns = measured
        else:
            self.base_pause_ns = round((1 - LEARNING_RATE) * self.base_pause_ns + LEARNING_RATE * measured)
