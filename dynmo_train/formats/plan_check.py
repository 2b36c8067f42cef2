"""Whether a plan fits the run: pure rules, each of which names every fault that it finds."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence

from .._common.document import Problem
from .plan import Plan

Stages = Sequence[Sequence[str]]


def _items(plan: Plan, item_names: Sequence[str], cut_allowed: Collection[str]) -> list[Problem]:
    """Each item once and in order; no stage begins where the model or the granularity forbids a cut."""
    planned = [name for stage in plan.stages for name in stage]
    missing, unknown = Counter(item_names) - Counter(planned), Counter(planned) - Counter(item_names)
    problems = []
    if missing:
        problems.append(Problem("stages", "missing", f"do not hold {', '.join(missing)}"))
    if unknown:
        problems.append(Problem("stages", "unknown", f"hold {', '.join(unknown)}: not items of this run"))
    if not problems and planned != list(item_names):
        at = next(i for i, name in enumerate(item_names) if planned[i] != name)
        problems.append(Problem("stages", "order", f"{planned[at]!r} stands where {item_names[at]!r} belongs"))
    begins = [(at, stage[0]) for at, stage in enumerate(plan.stages) if stage]
    return problems + [
        Problem(f"stages[{at}].items", "cut", f"a stage may not begin before {name!r} in this run")
        for at, name in begins[1:]
        if name not in cut_allowed
    ]


def _places(plan: Plan, workers: Sequence[int], releasable: Collection[int]) -> list[Problem]:
    """Every worker of the run holds stages or is released, each where it may be; the ends are not empty."""
    problems = []
    if lost := sorted(set(plan.stage_workers) - set(workers)):
        problems.append(Problem("stages", "worker", f"workers {lost} are not in this run, which has {list(workers)}"))
    if kept := sorted(set(plan.released_workers) - set(releasable)):
        problems.append(Problem("released_workers", "release", f"workers {kept} cannot be released from this run"))
    staying = tuple(worker for worker in workers if worker not in plan.released_workers)
    if not problems and plan.workers != staying:
        words = f"are on workers {list(plan.workers)}; must be on {list(staying)}, in this order"
        problems.append(Problem("stages", "worker", words))
    return problems + [
        Problem(f"stages[{at}].items", "empty", "the first and the last stage hold an item")
        for at in sorted({0, len(plan.stages) - 1})
        if not plan.stages[at]
    ]


def _memory(plan: Plan, memory_bytes: Mapping[int, int]) -> list[Problem]:
    """The predicted peak of each worker is within what it has, where both are known."""
    peaks = plan.predicted["peak_memory_bytes"] if plan.predicted else []
    return [
        Problem(
            "predicted.peak_memory_bytes", "memory", f"worker {worker} has {memory_bytes[worker]}, would need {peak}"
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
    """Every reason for which a plan cannot be taken now; empty if it can.

    Args:
        plan: as read.
        run_id: of this run.
        item_names: the layer list at the finest granularity.
        cut_allowed: items before which a stage may begin in this run.
        workers: ids of the living workers, in pipeline order.
        active_plan_id: number of the plan that the stages are from; a plan on another base is ``stale``.
        active_stages: the items of each stage now.
        schedule: of this run; it does not change within a segment.
        virtual_stages_per_worker: of this run.
        releasable: workers that a plan may release.
        memory_bytes: worker to its memory, where known.
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
        problems.append(Problem("stages", "keep", "keep must repeat the stages in force"))
    return problems
