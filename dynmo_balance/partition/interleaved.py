"""Several stages on a worker: balance the sums of the workers, not the stages.

With ``v`` stages a worker the loads are sums of ``v`` runs of the chain, so the chain's exact solver does not apply. It
starts from the exact partition into ``P v`` stages and shifts single cuts and pairs of cuts, by one to three units, as
long as the slowest worker, or then the sum of squares, falls. A heuristic: the certificate is against work over workers
and the heaviest unit.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise

from ..problem import Problem
from .limits import Limits, make_limits

SHIFTS = (-1, 1, -2, 2, -3, 3)
MAX_ROUNDS = 500


def worker_times(limits: Limits, cuts: Sequence[int], workers: int) -> list[int]:
    """The time of each worker in a microbatch, over all its stages."""
    times = [0] * workers
    for stage, (begin, end) in enumerate(pairwise(cuts)):
        times[stage % workers] += limits.time_ns(stage, begin, end)
    return times


def _worth(times: Sequence[int]) -> tuple[int, int]:
    return max(times), sum(time * time for time in times)


def _neighbours(limits: Limits, cuts: list[int]) -> Iterator[list[int]]:
    """All partitions with one cut, or two neighbouring ones, shifted."""
    for count in (1, 2):
        for at in range(1, len(cuts) - count):
            for shift in SHIFTS:
                other = [*cuts[:at], *(cut + shift for cut in cuts[at : at + count]), *cuts[at + count :]]
                inside = all(limits.lowest[p] <= other[p] <= limits.highest[p] for p in range(at, at + count))
                if inside and all(b - a >= limits.min_units for a, b in pairwise(other[at - 1 : at + count + 1])):
                    yield other


def improve(problem: Problem, boundaries: Sequence[int]) -> tuple[int, ...]:
    """Boundaries whose slowest worker no such shift makes faster."""
    limits = make_limits(problem)
    workers = len(problem.places)
    index = {position: at for at, position in enumerate(problem.chain.cuts)}
    cuts = [index[boundary] for boundary in boundaries]
    best = _worth(worker_times(limits, cuts, workers))
    for _ in range(MAX_ROUNDS):
        worth, found = min(
            ((_worth(worker_times(limits, c, workers)), c) for c in _neighbours(limits, cuts)), default=(best, cuts)
        )
        if worth >= best:
            break
        best, cuts = worth, found
    return tuple(problem.chain.cuts[cut] for cut in cuts)
