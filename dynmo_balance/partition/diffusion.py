"""Decentralized diffusion: neighboring stages repeatedly split their common units as evenly as possible.

A round rebalances the stages ``(0, 1), (2, 3), ...`` and then ``(1, 2), (3, 4), ...``; the last round changes
nothing. Items stay in order. Each pair needs only its own loads, but the result is a local equilibrium: neighbors may
differ by one unit, and these differences add up along the pipeline. So the optimum is not always reached; for
indivisible loads no such rule has a bound (Gilbert et al. 2021, arXiv 2105.13194). The search starts from the active
partition, or from the uniform one.
"""

from __future__ import annotations

from bisect import bisect_right

from . import uniform
from .by_weight import with_parameter_costs
from .constraints import Limits, make_limits
from .problem import PartitionProblem

MAX_ROUNDS = 1000
"""Each round that changes a cut makes some pair strictly faster, so the search ends by itself long before this."""


def _split(limits: Limits, left: int, begin: int, end: int) -> int:
    """The cut of ``[begin, end)`` between two neighbors that minimizes the time of the slower one."""
    load = limits.load
    speed = limits.slots[left].speed_ppm
    share = (load[end] - load[begin]) * speed // (speed + limits.slots[left + 1].speed_ppm)
    # The even split by speed lies between two cuts; the slower neighbor is fastest at one of them.
    target = bisect_right(load, load[begin] + share, begin, end + 1)
    least = limits.min_units if end - begin >= 2 * limits.min_units else 0
    choices = [min(max(at, begin + least), end - least) for at in (target - 1, target)]
    return min(choices, key=lambda at: max(limits.time_ns(left, begin, at), limits.time_ns(left + 1, at, end)))


def diffuse(problem: PartitionProblem) -> tuple[tuple[int, ...], int]:
    """The boundaries at the equilibrium, and the number of rounds that led to it."""
    limits = make_limits(problem)
    cuts = _initial_cuts(problem)
    for number in range(MAX_ROUNDS):
        before = list(cuts)
        for parity in (0, 1):
            for left in range(parity, limits.stages - 1, 2):
                begin, end = cuts[left], cuts[left + 2]
                split = _split(limits, left, begin, end)
                old = max(limits.time_ns(left, begin, cuts[left + 1]), limits.time_ns(left + 1, cuts[left + 1], end))
                # An equally good split is not taken: rounds could alternate between two of them until ``MAX_ROUNDS``.
                if max(limits.time_ns(left, begin, split), limits.time_ns(left + 1, split, end)) < old:
                    cuts[left + 1] = split
        if cuts == before:
            return tuple(problem.chain.cuts[cut] for cut in cuts), number
    return tuple(problem.chain.cuts[cut] for cut in cuts), MAX_ROUNDS


def _initial_cuts(problem: PartitionProblem) -> list[int]:
    """Cut indices of the active partition, or of the uniform one where the active one is not contiguous."""
    positions = problem.chain.cuts
    begins = [begin for begin, _ in problem.current or ()]
    if begins and begins == sorted(begins) and begins[0] == 0:
        start = (*begins, positions[-1])
    else:
        start = uniform.boundaries(problem)
    return [max(0, bisect_right(positions, position) - 1) for position in start]


def boundaries(problem: PartitionProblem) -> tuple[int, ...]:
    """The boundaries at the equilibrium."""
    return diffuse(problem)[0]


def boundaries_by_parameters(problem: PartitionProblem) -> tuple[int, ...]:
    """The same with parameter counts in place of times."""
    return boundaries(with_parameter_costs(problem))
