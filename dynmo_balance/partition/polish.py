"""From the least bottleneck on to the least simulated step time: steepest descent over shifted cuts.

With few microbatches the step is more than its bottleneck. Each round simulates every partition with one cut shifted by
one unit, takes the best, and ends when none is better. The result is not proven; the certificate says so.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from ..problem import Problem
from ..simulate import predict
from .exact import Solution
from .interleaved import worker_times
from .limits import Limits, make_limits

MAX_ROUNDS = 200
BATCH_FROM = 3000


def _neighbours(limits: Limits, cuts: tuple[int, ...]) -> Iterator[tuple[int, ...]]:
    for at in range(1, limits.stages):
        for shifted in (cuts[at] - 1, cuts[at] + 1):
            if not limits.lowest[at] <= shifted <= limits.highest[at]:
                continue
            if shifted - cuts[at - 1] < limits.min_units or cuts[at + 1] - shifted < limits.min_units:
                continue
            if limits.fits(at - 1, cuts[at - 1], shifted) and limits.fits(at, shifted, cuts[at + 1]):
                yield (*cuts[:at], shifted, *cuts[at + 1 :])


def _step_times(problem: Problem, candidates: list[list[int]]) -> list[int]:
    """The steps of the candidates, all at once where that is worth loading arrays for."""
    operations = 2 * problem.num_stages * problem.microbatches
    if operations * len(candidates) < BATCH_FROM:
        return [predict(problem, candidate).step_ns for candidate in candidates]
    from ..batch import step_times

    return step_times(problem, candidates)


def polish(problem: Problem, solution: Solution) -> Solution:
    """A partition whose simulated step time no single shifted cut improves."""
    limits = make_limits(problem)
    positions = problem.chain.cuts
    index = {position: at for at, position in enumerate(positions)}
    cuts = tuple(index[position] for position in solution.boundaries)

    best = predict(problem, solution.boundaries).step_ns
    for _ in range(MAX_ROUNDS):
        others = list(_neighbours(limits, cuts))
        times = _step_times(problem, [[positions[cut] for cut in other] for other in others])
        found = min(zip(times, others, strict=True), default=(best, cuts))
        if found[0] >= best:
            break
        best, cuts = found
    bottleneck = max(worker_times(limits, cuts, len(problem.places)))
    return replace(
        solution,
        boundaries=tuple(positions[cut] for cut in cuts),
        bottleneck_ns=bottleneck,
        optimal=bottleneck == solution.lower_bound_ns,
    )
