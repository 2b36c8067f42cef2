"""Interleaved 1F1B: several stages per worker, in rounds of microbatches (Narayanan et al. 2021, section 2.2).

The zero-bubble order ZB-H1 (Qi et al. 2023, arXiv 2401.10241, section 3) is built here too. It differs only in the
warm-up and in the position of the weight gradients.
"""

from __future__ import annotations

from .._common.errors import UsageError
from .operations import Kind, Operation, Order


def round_length(workers: int, microbatches: int) -> int:
    """The number of microbatches of a round.

    Args:
        workers: number of workers, ``P``.
        microbatches: of one step, ``M``.

    Raises:
        UsageError: the microbatches do not divide into equal rounds.
    """
    # torch's rule. Megatron's rounds have ``P`` microbatches by default and require a multiple of ``P``; for such
    # numbers the two agree.
    rounds = max(1, microbatches // workers)
    if microbatches % rounds:
        raise UsageError(
            f"{microbatches} microbatches do not divide into {rounds} equal rounds on {workers} workers;"
            f" use a multiple of {workers}"
        )
    return microbatches // rounds


def rounds_order(workers: int, virtual_stages: int, microbatches: int, *, warm_up_factor: int, split: bool) -> Order:
    """The 1F1B orders.

    Worker ``p`` of ``P`` warms up with ``(v - 1) * round + warm_up_factor * (P - 1 - p)`` forward operations. With
    ``split`` the backward pass is two operations. The weight gradient of a microbatch follows its input gradient by
    ``p`` operations, so that weight gradients fill the bubble.

    Args:
        workers: ``P``.
        virtual_stages: ``v``, stages per worker.
        microbatches: of one step.
        warm_up_factor: 1 or 2.
        split: whether the backward pass is split.

    Raises:
        UsageError: the microbatches do not divide into equal rounds.
    """
    # With one stage per worker a round has no effect on the order, so any number of microbatches is permitted.
    length = microbatches if virtual_stages == 1 else round_length(workers, microbatches)
    result = []
    for worker in range(workers):
        total = virtual_stages * microbatches
        warm_up = min(total, (virtual_stages - 1) * length + warm_up_factor * (workers - 1 - worker))
        forward = _round_trip(worker, workers, virtual_stages, length, total, backward=False)
        backward = _round_trip(worker, workers, virtual_stages, length, total, backward=True)
        operations = [Operation(s, Kind.FORWARD, m) for s, m in forward[:warm_up]]
        kind = Kind.BACKWARD_INPUT if split else Kind.BACKWARD
        for index, (stage, microbatch) in enumerate(backward):
            if warm_up + index < total:
                operations.append(Operation(forward[warm_up + index][0], Kind.FORWARD, forward[warm_up + index][1]))
            operations.append(Operation(stage, kind, microbatch))
            # Delayed by ``p``: with its warm-up of ``P - 1 - p``, every worker then has ``P`` microbatches in flight,
            # the number of the first worker under 1F1B (Qi et al., section 3). A longer delay would need more memory.
            if split and index >= worker:
                operations.append(Operation(*_weight(backward[index - worker])))
        if split:
            operations.extend(Operation(*_weight(at)) for at in backward[max(0, total - worker) :])
        result.append(tuple(operations))
    return tuple(result)


def _weight(at: tuple[int, int]) -> tuple[int, Kind, int]:
    return at[0], Kind.BACKWARD_WEIGHT, at[1]


def _round_trip(
    worker: int, workers: int, virtual_stages: int, length: int, total: int, *, backward: bool
) -> list[tuple[int, int]]:
    """Stage and microbatch of a worker's forward (or backward) operations in order, round by round."""
    done = [0] * virtual_stages
    result = []
    for index in range(total):
        lap = (index // length) % virtual_stages
        if backward:
            lap = virtual_stages - 1 - lap
        result.append((lap * workers + worker, done[lap]))
        done[lap] += 1
    return result


def order(workers: int, virtual_stages: int, microbatches: int) -> Order:
    """The order of operations of interleaved 1F1B.

    Args:
        workers: ``P``.
        virtual_stages: ``v``, stages per worker.
        microbatches: of one step.

    Raises:
        UsageError: the microbatches do not divide into equal rounds.
    """
    # Two per hop to the last worker, as in Megatron and torch: a microbatch takes one operation per hop to get there,
    # and its gradient one to return. Forward passes of the worker's other stages fill both.
    return rounds_order(workers, virtual_stages, microbatches, warm_up_factor=2, split=False)
