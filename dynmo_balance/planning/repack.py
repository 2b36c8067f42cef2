"""Repacking: the fewest workers that keep a given share of the throughput, and which ones to release."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from .._common.errors import DynmoError, UsageError
from ..formats.plan import Plan
from ..formats.profile import Header
from ..partition import uniform
from ..partition.balance import solve_best
from ..partition.problem import InfeasibleError, PartitionProblem
from ..simulation.simulator import predict
from .plan_builder import Proposal, current_spans, make_proposal, to_plan

EXIT_NO_CHANGE = 4


class NoChangeError(DynmoError):
    """No worker can be released; exit code 4."""

    exit_code = EXIT_NO_CHANGE


@dataclass(frozen=True, kw_only=True)
class Packing:
    """The answer for one reference pipeline.

    Attributes:
        workers: the number of workers that are enough.
        throughput_fraction: the share of the reference's throughput on these workers.
    """

    workers: int
    throughput_fraction: float


@dataclass(frozen=True, kw_only=True)
class RepackRow:
    """The step in ns on a number of workers; None if no partition is feasible, with the reason."""

    workers: int
    step_ns: int | None
    refusal: str | None = None


@dataclass(frozen=True, kw_only=True)
class RepackTable:
    """The steps on every number of workers, and the answers for both reference pipelines."""

    rows: tuple[RepackRow, ...]
    balanced_step_ns: int
    static_step_ns: int
    balanced: Packing
    static: Packing


def fewest_workers(workers: int, reference_step_ns: int, keep: float, step_ns: Callable[[int], int | None]) -> Packing:
    """The fewest workers whose step takes at most ``reference_step_ns / keep``.

    Args:
        workers: the current number of workers; the answer is at most this.
        reference_step_ns: the step of the reference pipeline.
        keep: the share of the reference's throughput to keep, above 0.
        step_ns: the step on a number of workers, None if no partition is feasible.
    """
    # Not by bisection: the step need not fall with the number of workers. The schedule may refuse a number, and a
    # longer pipeline has a longer warm-up.
    for count in range(1, workers + 1):
        time = step_ns(count)
        if time is not None and time * keep <= reference_step_ns:
            return Packing(workers=count, throughput_fraction=reference_step_ns / time)
    time = step_ns(workers)
    return Packing(workers=workers, throughput_fraction=reference_step_ns / time if time else 0.0)


def _remaining(problem: PartitionProblem, count: int) -> tuple[int, ...]:
    """The workers that remain, in the order of the stages: those that cannot be released, then the fastest."""
    ranked = sorted(range(len(problem.slots)), key=lambda at: _rank(problem, at))
    return tuple(sorted(ranked[:count]))


def _rank(problem: PartitionProblem, at: int) -> tuple[bool, int, int]:
    slot = problem.slots[at]
    return slot.releasable, -slot.speed_ppm, at


def with_workers(problem: PartitionProblem, count: int) -> PartitionProblem:
    """The same problem on the ``count`` workers that remain.

    Raises:
        UsageError: more workers cannot be released.
    """
    fixed = [slot for slot in problem.slots if not slot.releasable]
    if count < len(fixed):
        raise UsageError(f"{count} workers: {len(fixed)} workers cannot be released; keep at least {len(fixed)}")
    slots = tuple(problem.slots[at] for at in _remaining(problem, count))
    # The current spans belong to the stages of the former number of workers.
    return replace(problem, slots=slots, current=None)


def repack_table(problem: PartitionProblem, keep: float) -> RepackTable:
    """The fewest workers, compared with the balanced and with the static uniform pipeline on all of them.

    Both, because the answer depends on the reference: a static pipeline wastes time that a balanced one on fewer
    workers regains, while against a balanced one few workers can be released.

    Args:
        problem: on all workers.
        keep: share of the reference's throughput to keep, above 0.
    """
    total = len(problem.slots)

    def size(count: int) -> RepackRow:
        """The step on ``count`` workers, or why there is none; a refused number does not end the search."""
        try:
            smaller = with_workers(problem, count)
            return RepackRow(workers=count, step_ns=predict(smaller, solve_best(smaller).boundaries).step_ns)
        except (InfeasibleError, UsageError) as error:
            return RepackRow(workers=count, step_ns=None, refusal=str(error))

    rows = tuple(size(count) for count in range(1, total + 1))
    times = {row.workers: row.step_ns for row in rows}
    balanced = predict(problem, solve_best(problem).boundaries).step_ns
    static = predict(problem, uniform.boundaries(problem)).step_ns
    return RepackTable(
        rows=rows,
        balanced_step_ns=balanced,
        static_step_ns=static,
        balanced=fewest_workers(total, balanced, keep, times.__getitem__),
        static=fewest_workers(total, static, keep, times.__getitem__),
    )


def make_release_plan(
    header: Header,
    problem: PartitionProblem,
    base: Plan | None,
    packing: Packing,
    read_to_step: int,
    reference: str,
    base_pause_ns: int | None = None,
) -> tuple[Proposal, Plan]:
    """The plan that moves all items to the remaining workers and releases the others.

    Args:
        header: of the profile.
        problem: on all active workers.
        base: the active plan; None if there is none.
        packing: the number of remaining workers.
        read_to_step: the last step of the profile that was read.
        reference: name of the pipeline that the throughput is compared with, for the reason of the plan.
        base_pause_ns: pause in ns of a migration apart from transfers, if measured.

    Raises:
        UsageError: more workers cannot be released.
        InfeasibleError: no partition on the remaining workers satisfies the constraints.
    """
    smaller = with_workers(problem, packing.workers)
    if base is not None:
        smaller = replace(smaller, current=current_spans(base, smaller.slots, smaller.virtual_stages, smaller.schedule))
    proposal = make_proposal(
        smaller, solve_best(smaller), owner=None if base is None else base.owner, base_pause_ns=base_pause_ns
    )
    remaining = {slot.worker for slot in smaller.slots}
    released = [slot.worker for slot in problem.slots if slot.worker not in remaining]
    plan = to_plan(
        proposal,
        run_id=header.run_id,
        balancer="exact",
        base=base,
        read_to_step=read_to_step,
        base_step_ns=None,
        reason=f"{packing.workers} worker{' keeps' if packing.workers == 1 else 's keep'}"
        f" {packing.throughput_fraction:.1%} of the throughput of the {reference} pipeline",
        released=released,
    )
    return proposal, plan
