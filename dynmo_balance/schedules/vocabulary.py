"""Orders of operations with the passes S and T of an output layer that is split into shards on all workers.

The trainer places the passes by the same function (``_common/vocabulary_order.py``), so that a simulated step has the
order of a real one.
"""

from __future__ import annotations

from functools import lru_cache

from .._common import vocabulary_order
from .operations import Kind, Operation, Order
from .registry import build_order


@lru_cache(maxsize=64)
def with_shards(order: Order) -> Order:
    """Place S and T of every microbatch between the operations of each worker.

    Raises:
        UsageError: the order cannot run.
    """
    num_stages = 1 + max(operation.stage for operations in order for operation in operations)
    plain = [[vocabulary_order.Operation(one.stage, one.kind.value, one.microbatch) for one in row] for row in order]
    first = [min(operation.stage for operation in operations) for operations in order]
    return tuple(
        tuple(Operation(first[at] if one.stage < 0 else one.stage, Kind(one.kind), one.microbatch) for one in row)
        for at, row in enumerate(vocabulary_order.with_shard_passes(plain, num_stages))
    )


def sharded_order(schedule: str, workers: int, virtual_stages: int, microbatches: int) -> Order:
    """The order of operations of a schedule, with S and T; 1F1B runs one more forward ahead.

    Args:
        schedule: a key of ``SCHEDULES``.
        workers: number of workers.
        virtual_stages: stages per worker.
        microbatches: of one step.

    Raises:
        UsageError: the schedule is unknown, or there are more operations than a command simulates.
    """
    order = build_order(schedule, workers, virtual_stages, microbatches)
    if schedule == "1f1b" and virtual_stages == 1:
        ahead = vocabulary_order.one_f_one_b_order(workers, microbatches)
        order = tuple(tuple(Operation(one.stage, Kind(one.kind), one.microbatch) for one in row) for row in ahead)
    return with_shards(order)


def peak_pending(order: Order) -> tuple[int, ...]:
    """For each worker the maximum number of microbatches between their S and their T."""
    peaks = []
    for operations in order:
        pending = peak = 0
        for _, kind, _ in operations:
            pending += (kind is Kind.SHARD_FORWARD) - (kind is Kind.SHARD_WEIGHT)
            peak = max(peak, pending)
        peaks.append(peak)
    return tuple(peaks)
