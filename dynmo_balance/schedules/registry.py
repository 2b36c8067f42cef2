"""The schedules by name: one file each with the order of operations of every worker."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import lru_cache

from .._common.errors import UsageError
from . import dualpipe_v, gpipe, interleaved, one_f_one_b, zero_bubble, zero_bubble_v
from .operations import Kind, Operation, Order, check_operations
from .order_arrays import OrderArrays, from_order, to_order

__all__ = [
    "SCHEDULES",
    "InFlightSets",
    "Kind",
    "Operation",
    "Order",
    "OrderArrays",
    "check_operations",
    "build_arrays",
    "from_order",
    "count_in_flight",
    "in_flight_sets_of",
    "in_flight_sets",
    "in_flight",
    "build_order",
]

InFlightSets = tuple[tuple[tuple[int, ...], ...], ...]
"""Per worker, combinations of microbatches in flight; each has one number per stage of the worker."""
SCHEDULES: Mapping[str, Callable[[int, int, int], Order | OrderArrays]] = {
    "gpipe": gpipe.arrays,
    "1f1b": one_f_one_b.arrays,
    "interleaved-1f1b": interleaved.arrays,
    "zero-bubble": zero_bubble.arrays,
    "zb-v": zero_bubble_v.order,
    "dualpipe-v": dualpipe_v.order,
}


@lru_cache(maxsize=8)
def build_order(schedule: str, workers: int, virtual_stages: int, microbatches: int) -> Order:
    """The order of operations of a schedule.

    Args:
        schedule: a key of ``SCHEDULES``.
        workers: number of workers.
        virtual_stages: stages per worker.
        microbatches: of one step.

    Raises:
        UsageError: the schedule is unknown, or there are more operations than a command simulates.
    """
    built = _build(schedule, workers, virtual_stages, microbatches)
    return to_order(built) if isinstance(built, OrderArrays) else built


@lru_cache(maxsize=8)
def build_arrays(schedule: str, workers: int, virtual_stages: int, microbatches: int) -> OrderArrays:
    """``build_order`` as arrays."""
    built = _build(schedule, workers, virtual_stages, microbatches)
    return built if isinstance(built, OrderArrays) else from_order(built)


def _build(schedule: str, workers: int, virtual_stages: int, microbatches: int) -> Order | OrderArrays:
    if schedule not in SCHEDULES:
        raise UsageError(f"unknown schedule {schedule!r}; choose one of {', '.join(SCHEDULES)}")
    # zb-v is built for at least 2 P - 1 microbatches, and then reduced to those that exist.
    check_operations(
        workers * virtual_stages, max(microbatches, 2 * workers - 1) if schedule == "zb-v" else microbatches
    )
    return SCHEDULES[schedule](workers, virtual_stages, microbatches)


@lru_cache(maxsize=256)
def in_flight(schedule: str, workers: int, virtual_stages: int, microbatches: int) -> tuple[int, ...]:
    """The maximum number of microbatches in flight on each stage.

    With one stage per worker there are closed forms: all microbatches for GPipe, ``min(M, P - p)`` for 1F1B, and
    ``min(M, P)`` on every stage for ZB-H1, which stores activations until the weight gradient. Otherwise the order of
    operations is counted.

    Args:
        schedule: a key of ``SCHEDULES``.
        workers: number of workers, ``P``.
        virtual_stages: stages per worker.
        microbatches: of one step, ``M``.
    """
    # An order of operations takes 20 to 40 us per forward, a closed form none; a test compares the two.
    if virtual_stages == 1 and schedule == "gpipe":
        return (microbatches,) * workers
    if virtual_stages == 1 and schedule in ("1f1b", "interleaved-1f1b"):
        factor = 1 if schedule == "1f1b" else 2
        return tuple(min(microbatches, factor * (workers - 1 - p) + 1) for p in range(workers))
    if virtual_stages == 1 and schedule == "zero-bubble":
        # Worker ``p`` warms up with ``P - 1 - p`` microbatches like 1F1B, and delays ``p`` weight gradients.
        return (min(microbatches, workers),) * workers
    return count_in_flight(build_order(schedule, workers, virtual_stages, microbatches))


@lru_cache(maxsize=32)
def in_flight_sets(schedule: str, workers: int, virtual_stages: int, microbatches: int) -> InFlightSets:
    """For each worker, the combinations of microbatches in flight on its stages that occur at the same time.

    The stages of a worker reach their maxima at different times, so the sum of the maxima (``in_flight``) is above the
    memory that the worker needs. Combinations that another one exceeds in every stage are left out, because they never
    need the most memory.

    Args:
        schedule: a key of ``SCHEDULES``.
        workers: number of workers.
        virtual_stages: stages per worker.
        microbatches: of one step.
    """
    return in_flight_sets_of(build_order(schedule, workers, virtual_stages, microbatches))


def in_flight_sets_of(order: Order) -> InFlightSets:
    """``in_flight_sets`` of an order of operations."""
    result = []
    for operations in order:
        stages = sorted({operation.stage for operation in operations})
        now = dict.fromkeys(stages, 0)
        counts = set()
        for stage, kind, _ in operations:
            if kind is Kind.FORWARD:
                now[stage] += 1
                counts.add(tuple(now[at] for at in stages))
            elif kind in (Kind.BACKWARD, Kind.BACKWARD_WEIGHT):
                now[stage] -= 1
        result.append(tuple(sorted(one for one in counts if not _exceeded(one, counts))))
    return tuple(result)


def _exceeded(one: tuple[int, ...], counts: set[tuple[int, ...]]) -> bool:
    return any(other != one and all(a <= b for a, b in zip(one, other, strict=True)) for other in counts)


def count_in_flight(order: Order) -> tuple[int, ...]:
    """``in_flight`` by counting: +1 at a forward, -1 at a full backward or a weight gradient."""
    stages = 1 + max(operation.stage for operations in order for operation in operations)
    now, peak = [0] * stages, [0] * stages
    for operations in order:
        for stage, kind, _ in operations:
            if kind is Kind.FORWARD:
                now[stage] += 1
                peak[stage] = max(peak[stage], now[stage])
            elif kind in (Kind.BACKWARD, Kind.BACKWARD_WEIGHT):
                now[stage] -= 1
    return tuple(peak)
