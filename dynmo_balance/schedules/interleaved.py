"""Interleaved 1F1B: several stages on a worker, in rounds of microbatches (Narayanan et al. 2021, section 2.2).

The zero-bubble order ZB-H1 (Qi et al. 2023, arXiv 2401.10241, section 3) is built here too, because it differs only
in the warm-up and in where the weight gradients go.
"""

from __future__ import annotations

from .._common.errors import UsageError
from .operations import Kind, Operation, Order


def round_length(workers: int, microbatches: int) -> int:
    """The microbatches of a round; the rounds must come out even."""
    rounds = max(1, microbatches // workers)
    if microbatches % rounds:
        raise UsageError(
            f"{microbatches} microbatches do not come out even in {rounds} rounds for {workers} workers;"
            f" use a multiple of {workers}"
        )
    return microbatches // rounds


def rounds_order(workers: int, virtual_stages: int, microbatches: int, *, warm_up_factor: int, split: bool) -> Order:
    """The 1F1B orders: worker ``p`` warms up with ``(v - 1) * round + warm_up_factor * (P - 1 - p)`` forwards.

    With ``split`` the backward is two operations, and the weight gradient of a microbatch follows ``p`` operations
    behind its input gradient, so that weight gradients fill what would be the bubble.
    """
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
    """Stage and microbatch of a worker's forwards (or backwards) in order: a round through each of its stages."""
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
    """The order of operations of interleaved 1F1B."""
    return rounds_order(workers, virtual_stages, microbatches, warm_up_factor=2, split=False)
