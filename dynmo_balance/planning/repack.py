"""The fewest workers that keep a stated share of the throughput, and which to release."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from .._common.errors import DynmoError, UsageError
from ..formats.plan import Plan
from ..formats.profile import Header
from ..partition import uniform
from ..partition.problem import InfeasibleError, Problem
from ..partition.registry import best_of
from ..simulation.simulator import predict
from .plan_builder import Proposal, holdings, present, to_plan

EXIT_NO_CHANGE = 4


class NoChangeError(DynmoError):
    """There is nothing to be gained; the command says so and exits 4."""

    exit_code = EXIT_NO_CHANGE


@dataclass(frozen=True, kw_only=True)
class Packing:
    """The answer for one reference: how many workers are enough, and the share of the throughput that they keep."""

    workers: int
    kept: float


@dataclass(frozen=True, kw_only=True)
class Size:
    """The step on a number of workers; None where no partition is feasible, and then why."""

    workers: int
    step_ns: int | None
    refusal: str | None = None


@dataclass(frozen=True, kw_only=True)
class Packings:
    """The steps on every number of workers, and the answers against both references."""

    rows: tuple[Size, ...]
    balanced_step_ns: int
    static_step_ns: int
    balanced: Packing
    static: Packing


def fewest(workers: int, reference_step_ns: int, keep: float, step_ns: Callable[[int], int | None]) -> Packing:
    """The fewest workers whose step takes at most ``reference / keep``.

    Args:
        workers: how many there are now; the answer is at most this.
        reference_step_ns: the step time that the share refers to.
        keep: the share of the reference's throughput to keep, above 0.
        step_ns: the step time on a number of workers, None where no partition is feasible.
    """
    for count in range(1, workers + 1):
        time = step_ns(count)
        if time is not None and time * keep <= reference_step_ns:
            return Packing(workers=count, kept=reference_step_ns / time)
    time = step_ns(workers)
    return Packing(workers=workers, kept=reference_step_ns / time if time else 0.0)


def _staying(problem: Problem, count: int) -> tuple[int, ...]:
    """Which workers stay: those that cannot be released, then the fastest; in the order of the stages."""
    ranked = sorted(range(len(problem.places)), key=lambda at: _rank(problem, at))
    return tuple(sorted(ranked[:count]))


def _rank(problem: Problem, at: int) -> tuple[bool, int, int]:
    place = problem.places[at]
    return place.releasable, -place.speed_ppm, at


def on_fewer(problem: Problem, count: int) -> Problem:
    """The same problem on the ``count`` workers that stay; raises ``UsageError`` if more than that must stay."""
    held = [place for place in problem.places if not place.releasable]
    if count < len(held):
        raise UsageError(f"{len(held)} workers cannot be released, so {count} are too few")
    places = tuple(problem.places[at] for at in _staying(problem, count))
    return replace(problem, places=places, current=None)


def packings(problem: Problem, keep: float) -> Packings:
    """The fewest workers, against the balanced and against the static uniform pipeline on all of them."""
    total = len(problem.places)

    def size(count: int) -> Size:
        try:
            smaller = on_fewer(problem, count)
            return Size(workers=count, step_ns=predict(smaller, best_of(smaller).boundaries).step_ns)
        except (InfeasibleError, UsageError) as error:
            return Size(workers=count, step_ns=None, refusal=str(error))

    rows = tuple(size(count) for count in range(1, total + 1))
    times = {row.workers: row.step_ns for row in rows}
    balanced = predict(problem, best_of(problem).boundaries).step_ns
    static = predict(problem, uniform.boundaries(problem)).step_ns
    return Packings(
        rows=rows,
        balanced_step_ns=balanced,
        static_step_ns=static,
        balanced=fewest(total, balanced, keep, times.__getitem__),
        static=fewest(total, static, keep, times.__getitem__),
    )


def released_plan(
    header: Header,
    problem: Problem,
    base: Plan | None,
    packing: Packing,
    read_to_step: int,
    reference: str,
    base_pause_ns: int | None = None,
) -> tuple[Proposal, Plan]:
    """The plan that puts all items on the workers that stay, and releases the others."""
    smaller = on_fewer(problem, packing.workers)
    if base is not None:
        smaller = replace(smaller, current=holdings(base, smaller.places, smaller.virtual_stages, smaller.schedule))
    proposal = present(
        smaller, best_of(smaller), owner=None if base is None else base.owner, base_pause_ns=base_pause_ns
    )
    staying = {place.worker for place in smaller.places}
    released = [place.worker for place in problem.places if place.worker not in staying]
    plan = to_plan(
        proposal,
        run_id=header.run_id,
        balancer="exact",
        base=base,
        read_to_step=read_to_step,
        base_step_ns=None,
        reason=f"{packing.workers} workers keep {packing.kept:.1%} of the throughput of the {reference} pipeline",
        released=released,
    )
    return proposal, plan
