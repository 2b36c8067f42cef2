"""The schedules: one file each that gives the order of operations of every worker, and this registry."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import lru_cache

from .._common.errors import UsageError
from . import gpipe, interleaved, one_f_one_b, zero_bubble, zero_bubble_v
from .operations import Kind, Operation, Order, check_operations

__all__ = [
    "SCHEDULES",
    "InFlightSets",
    "Kind",
    "Operation",
    "Order",
    "check_operations",
    "count_in_flight",
    "in_flight_sets_of",
    "in_flight_sets",
    "in_flight",
    "build_order",
]

InFlightSets = tuple[tuple[tuple[int, ...], ...], ...]
SCHEDULES: Mapping[str, Callable[[int, int, int], Order]] = {
    "gpipe": gpipe.order,
    "1f1b": one_f_one_b.order,
    "interleaved-1f1b": interleaved.order,
    "zero-bubble": zero_bubble.order,
    "zb-v": zero_bubble_v.order,
}


@lru_cache(maxsize=8)
def build_order(schedule: str, workers: int, virtual_stages: int, microbatches: int) -> Order:
    """The order of operations of a schedule by name.

    Raises:
        UsageError: an unknown schedule, or more operations than a command simulates.
    """
    if schedule not in SCHEDULES:
        raise UsageError(f"unknown schedule {schedule!r}; there are {', '.join(SCHEDULES)}")
    # zb-v is laid out for at least 2 P - 1 microbatches before it is cut to those that exist.
    check_operations(
        workers * virtual_stages, max(microbatches, 2 * workers - 1) if schedule == "zb-v" else microbatches
    )
    return SCHEDULES[schedule](workers, virtual_stages, microbatches)


@lru_cache(maxsize=256)
def in_flight(schedule: str, workers: int, virtual_stages: int, microbatches: int) -> tuple[int, ...]:
    """The most microbatches whose activations each stage holds at once.

    With one stage a worker there are closed forms: all of them for GPipe, ``min(M, P - p)`` for 1F1B and
    ``min(M, P)`` on every stage for ZB-H1, which keeps activations until the weight gradient. Otherwise the order of
    operations is counted.
    """
    if virtual_stages == 1 and schedule == "gpipe":
        return (microbatches,) * workers
    if virtual_stages == 1 and schedule in ("1f1b", "interleaved-1f1b"):
        factor = 1 if schedule == "1f1b" else 2
        return tuple(min(microbatches, factor * (workers - 1 - p) + 1) for p in range(workers))
    if virtual_stages == 1 and schedule == "zero-bubble":
        return (min(microbatches, workers),) * workers
    return count_in_flight(build_order(schedule, workers, virtual_stages, microbatches))


@lru_cache(maxsize=32)
def in_flight_sets(schedule: str, workers: int, virtual_stages: int, microbatches: int) -> InFlightSets:
    """Of each worker, the numbers of microbatches in flight on its stages that occur at the same time.

    One tuple of numbers, in the order of the stages, for each moment that no other moment exceeds in every stage.
    """
    return in_flight_sets_of(build_order(schedule, workers, virtual_stages, microbatches))


def in_flight_sets_of(order: Order) -> InFlightSets:
    """The same of an order of operations."""
    result = []
    for operations in order:
        stages = sorted({operation.stage for operation in operations})
        now = dict.fromkeys(stages, 0)
        counts = set()
        for stage, kind, _ in operations:
            if kind is Kind.FORWARD:
                now[stage] += 1
                counts.add(tuple(now[at] for at in stages))
            elif kind is not Kind.BACKWARD_INPUT:
                now[stage] -= 1
        result.append(tuple(sorted(one for one in counts if not _exceeded(one, counts))))
    return tuple(result)


def _exceeded(one: tuple[int, ...], counts: set[tuple[int, ...]]) -> bool:
    return any(other != one and all(a <= b for a, b in zip(one, other, strict=True)) for other in counts)


def count_in_flight(order: Order) -> tuple[int, ...]:
    """The same by counting: +1 at a forward, -1 at a whole backward or a weight gradient."""
    stages = 1 + max(operation.stage for operations in order for operation in operations)
    now, peak = [0] * stages, [0] * stages
    for operations in order:
        for stage, kind, _ in operations:
            if kind is Kind.FORWARD:
                now[stage] += 1
                peak[stage] = max(peak[stage], now[stage])
            elif kind is not Kind.BACKWARD_INPUT:
                now[stage] -= 1
    return tuple(peak)
