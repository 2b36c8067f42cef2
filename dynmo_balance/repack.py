"""The fewest workers that keep a stated share of the throughput."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Packing:
    """The answer for one reference: how many workers are enough, and the share of the throughput that they keep."""

    workers: int
    kept: float


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
