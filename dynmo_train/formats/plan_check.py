"""Checks whether a plan can be applied in a run: pure rules, each of which returns every problem."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence

from .._common.document import Problem
from .plan import Plan

Stages = Sequence[Sequence[str]]


def _items(plan: Plan, item_names: Sequence[str], cut_allowed: Collection[str]) -> list[Problem]:
    """Check that each item occurs once and in order, and that stages begin where model and granularity allow a cut."""
    planned = [name for stage in plan.stages for name in stage]
    missing, unknown = Counter(item_names) - Counter(planned), Counter(planned) - Counter(item_names)
    problems = []
    if missing:
        problems.append(Problem("stages", "missing", f"lack {', '.join(missing)}"))
    if unknown:
        problems.append(Problem("stages", "unknown", f"have {', '.join(unknown)}: not items of this run"))
    if not problems and planned != list(item_names):
        at = next(i for i, name in enumerate(item_names) if planned[i] != name)
        problems.append(Problem("stages", "order", f"{planned[at]!r} is where {item_names[at]!r} must be"))
    begins = [(at, stage[0]) for at, stage in enumerate(plan.stages) if stage]
    return problems + [
        Problem(f"stages[{at}].items", "cut", f"a stage may not begin before {name!r} in this run")
        for at, name in begins[1:]
        if name not in cut_allowed
    ]


def _places(plan: Plan, workers: Sequence[int], releasable: Collection[int]) -> list[Problem]:
    """Check that every worker has stages or may be released, and that the first and last stages are not empty."""
    problems = []
    if unknown := sorted(set(plan.stage_workers) - set(workers)):
        problems.append(
            Problem("stages", "worker", f"workers {unknown} are not in this run, which has {list(workers)}")
        )
    if fixed := sorted(set(plan.released_workers) - set(releasable)):
        problems.append(Problem("released_workers", "release", f"workers {fixed} cannot be released from this run"))
    staying = tuple(worker for worker in workers if worker not in plan.released_workers)
    if not problems and plan.workers != staying:
        words = f"are on workers {list(plan.workers)}; must be on {list(staying)}, in this order"
        problems.append(Problem("stages", "worker", words))
    return problems + [
        Problem(f"stages[{at}].items", "empty", "the first and the last stage must have an item")
        for at in sorted({0, len(plan.stages) - 1})
        if not plan.stages[at]
    ]


def _memory(plan: Plan, memory_bytes: Mapping[int, int]) -> list[Problem]:
    """Check that the predicted peak of each worker is within its memory, where both are known."""
    peaks = plan.predicted["peak_memory_bytes"] if plan.predicted else []
    return [
        Problem(
            "predicted.peak_memory_bytes",
            "memory",
            f"worker {worker} has {memory_bytes[worker]:,} bytes, would need {peak:,}",
        )
        for worker, peak in zip(plan.workers, peaks, strict=False)
        if worker in memory_bytes and peak > memory_bytes[worker]
    ]


def validate_plan(
    plan: Plan,
    *,
    run_id: str,
    item_names: Sequence[str],
    cut_allowed: Collection[str],
    workers: Sequence[int],
    active_plan_id: int,
    active_stages: Stages,
    schedule: str,
    virtual_stages_per_worker: int,
    releasable: Collection[int] = (),
    memory_bytes: Mapping[int, int] | None = None,
) -> list[Problem]:
    """Return every reason why a plan cannot be applied now; empty if it can.

    Args:
        plan: The plan.
        run_id: ID of this run.
        item_names: The layer list at the finest granularity.
        cut_allowed: Items before which a stage may begin in this run.
        workers: IDs of the workers, in pipeline order.
        active_plan_id: Number of the active plan; a plan based on another one is ``stale``.
        active_stages: Item names of each stage now.
        schedule: Schedule of this run.
        virtual_stages_per_worker: Stages on each worker of this run.
        releasable: Workers that a plan may release.
        memory_bytes: Worker -> bytes of its memory, where known.
    """
    problems = []
    if plan.run_id != run_id:
        problems.append(Problem("run_id", "run", f"is {plan.run_id!r}; this run is {run_id!r}"))
    if plan.base_plan_id != active_plan_id:
        words = f"is {plan.base_plan_id}; the active plan is {active_plan_id}"
        problems.append(Problem("base_plan_id", "stale", words))
    if plan.schedule != schedule:
        problems.append(Problem("schedule", "schedule", f"is {plan.schedule}; this run has {schedule}"))
    if plan.virtual_stages_per_worker != virtual_stages_per_worker:
        words = f"is {plan.virtual_stages_per_worker}; this run has {virtual_stages_per_worker}"
        problems.append(Problem("virtual_stages_per_worker", "schedule", words))
    problems += _items(plan, item_names, cut_allowed) + _places(plan, workers, releasable)
    problems += _memory(plan, memory_bytes or {})
    if plan.action == "keep" and [list(stage) for stage in plan.stages] != [list(s) for s in active_stages]:
        problems.append(Problem("stages", "keep", "keep must repeat the active stages"))
    return problems
