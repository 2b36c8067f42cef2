"""The schedules by name: one file each with the order of operations of every worker."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import lru_cache
from itertools import pairwise

import numpy as np
import numpy.typing as npt

from .._common.errors import UsageError
from . import dualpipe_v, gpipe, interleaved, one_f_one_b, zero_bubble, zero_bubble_v
from .operations import Kind, Operation, Order, check_operations
from .order_arrays import BACKWARD, FORWARD, WEIGHT, OrderArrays, from_order, to_order

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
    """The order of operations as arrays.

    Args:
        schedule: a key of ``SCHEDULES``.
        workers: number of workers.
        virtual_stages: stages per worker.
        microbatches: of one step.

    Raises:
        UsageError: as in ``build_order``.
    """
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
    return count_in_flight(build_arrays(schedule, workers, virtual_stages, microbatches))


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
    return in_flight_sets_of(build_arrays(schedule, workers, virtual_stages, microbatches))


def in_flight_sets_of(order: OrderArrays) -> InFlightSets:
    """``in_flight_sets`` of an order of operations."""
    stored = _stored(order)
    result = []
    for begin, end in pairwise(order.begins):
        stages, own = np.unique(order.stages[begin:end], return_inverse=True)
        counts = np.cumsum((own[:, None] == np.arange(len(stages))) * stored[begin:end, None], axis=0)
        rest = np.unique(counts[order.kinds[begin:end] == FORWARD], axis=0)
        maximal = []
        # The combination with the largest sum is not exceeded by any; what it exceeds is left out.
        while len(rest):
            maximal.append(tuple(rest[rest.sum(axis=1).argmax()].tolist()))
            rest = rest[(rest > np.array(maximal[-1])).any(axis=1)]
        result.append(tuple(sorted(maximal)))
    return tuple(result)


def _stored(order: OrderArrays) -> npt.NDArray[np.int64]:
    """The change of the microbatches in flight by each operation: +1 at a forward, -1 where activations are freed."""
    is_last = (order.kinds == BACKWARD) | (order.kinds == WEIGHT)
    return np.asarray((order.kinds == FORWARD).astype(np.int64) - is_last)


def count_in_flight(order: OrderArrays) -> tuple[int, ...]:
    """``in_flight`` by counting: +1 at a forward, -1 at a full backward or a weight gradient."""
    # The operations of a stage are on one worker, so that sorting by stage keeps their order.
    at = np.argsort(order.stages, kind="stable")
    counts = np.cumsum(_stored(order)[at])
    begins = np.searchsorted(order.stages[at], np.arange(1 + int(order.stages.max())))
    before = np.where(begins > 0, counts[begins - 1], 0)
    return tuple((np.maximum.reduceat(counts, begins) - before).tolist())
