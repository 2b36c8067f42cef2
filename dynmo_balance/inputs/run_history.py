"""The history of a run: every step, every plan with its result, and the loads of the stages over time."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

from .._common.errors import DynmoError, UsageError
from ..costs.cost_window import CostWindow, speeds_of_items
from ..formats.plan import Plan, header_problems, plan_numbers, plan_path, read_plan
from ..formats.profile import Event, Header, PlanResult, Segment, Step, read_profile
from .profile_source import profile_path


@dataclass(frozen=True, kw_only=True)
class PlanHistory:
    """A plan, its result, and the mean step in ns before and after its boundary; None if there were no steps."""

    plan: Plan
    result: PlanResult | None
    before_ns: int | None
    after_ns: int | None

    @property
    def realized(self) -> float | None:
        """The measured gain of the move, as a share of the step time."""
        if self.before_ns is None or self.after_ns is None or not self.before_ns:
            return None
        return 1 - self.after_ns / self.before_ns


@dataclass(frozen=True, kw_only=True)
class RunHistory:
    """The newest segment with steps, and the plans of the run.

    Attributes:
        header, steps, events: of the segment.
        plan_histories: of all plans but the first.
        loads: for each step and stage the time of a microbatch in ns; empty if an active plan is unknown.
        plans: by plan id.
    """

    header: Header
    steps: tuple[Step, ...]
    events: tuple[Event, ...]
    plan_histories: tuple[PlanHistory, ...]
    loads: tuple[tuple[int, ...], ...]
    plans: Mapping[int, Plan]

    @property
    def moves(self) -> tuple[PlanHistory, ...]:
        """The plans that were applied."""
        return tuple(s for s in self.plan_histories if s.result is not None and s.result.result == "applied")


def read_plans(folder: Path, header: Header) -> dict[int, Plan]:
    """The plans that can be read and fit the header, by plan id."""
    plans = {}
    for number in plan_numbers(folder):
        try:
            plan = read_plan(plan_path(folder, number))
        except DynmoError:
            continue
        if not header_problems(plan, header):
            plans[number] = plan
    return plans


def _mean(steps: Sequence[Step]) -> int | None:
    return sum(step.step_ns for step in steps) // len(steps) if steps else None


def _plan_history(plan: Plan, segment: Segment, window: int) -> PlanHistory:
    results = [r for r in segment.records if isinstance(r, PlanResult) and r.plan_id == plan.plan_id]
    result = results[-1] if results else None
    if result is None or result.result != "applied":
        return PlanHistory(plan=plan, result=result, before_ns=None, after_ns=None)
    before = [step for step in segment.steps if step.step <= result.step and step.plan_id == plan.base_plan_id]
    after = [step for step in segment.steps if step.step > result.step and step.plan_id == plan.plan_id]
    return PlanHistory(plan=plan, result=result, before_ns=_mean(before[-window:]), after_ns=_mean(after[:window]))


def _loads(segment: Segment, plans: Mapping[int, Plan]) -> tuple[tuple[int, ...], ...]:
    window = CostWindow(len(segment.header.items), max(2, len(segment.steps)))
    for step in segment.steps:
        window.add(step)
    if window.unsampled() or any(step.plan_id not in plans for step in segment.steps):
        return ()
    loads = []
    works = window.works(speeds_of_items(segment.header, {}))
    for step, work in zip(segment.steps, works, strict=True):
        loads.append(tuple(sum(work[a:b]) for a, b in pairwise(plans[step.plan_id].boundaries)))
    return tuple(loads)


def read_history(run: Path, window: int = 8) -> RunHistory:
    """Read a run directory.

    Raises:
        UsageError: it has no steps.
    """
    segment = next((s for s in reversed(read_profile(profile_path(run))) if s.steps), None)
    if segment is None:
        raise UsageError(f"{run}: has no step records to report; record at least one step")
    plans = read_plans(run / "plans", segment.header) if run.is_dir() else {}
    return RunHistory(
        header=segment.header,
        steps=segment.steps,
        events=tuple(r for r in segment.records if isinstance(r, Event)),
        plan_histories=tuple(_plan_history(plan, segment, window) for number, plan in plans.items() if number > 0),
        loads=_loads(segment, plans),
        plans=plans,
    )
