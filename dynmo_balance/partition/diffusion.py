"""Decentralised diffusion: in turn, neighbouring stages split what they hold together as evenly as they can.

Stages ``(0, 1), (2, 3), ...`` and then ``(1, 2), (3, 4), ...`` go on until a round changes nothing. Items stay in
order. Each pair needs to know only itself, but the end is a local equilibrium: neighbours may differ by one unit, and
the differences add up along the pipeline, so the optimum is not always reached (for indivisible loads no such rule is
bounded, Gilbert et al. 2021, arXiv 2105.13194). It starts from the partition in force, or from the uniform one.
"""

from __future__ import annotations

from bisect import bisect_right

from . import uniform
from .constraints import Limits, make_limits
from .problem import PartitionProblem

MAX_ROUNDS = 1000


def _split(limits: Limits, left: int, begin: int, end: int) -> int:
    """Where two neighbours split ``[begin, end)`` so that the slower of them is as fast as can be."""
    load = limits.load
    speed = limits.slots[left].speed_ppm
    share = (load[end] - load[begin]) * speed // (speed + limits.slots[left + 1].speed_ppm)
    target = bisect_right(load, load[begin] + share, begin, end + 1)
    least = limits.min_units if end - begin >= 2 * limits.min_units else 0
    choices = [min(max(at, begin + least), end - least) for at in (target - 1, target)]
    return min(choices, key=lambda at: max(limits.time_ns(left, begin, at), limits.time_ns(left + 1, at, end)))


def rounds(problem: PartitionProblem) -> tuple[tuple[int, ...], int]:
    """The boundaries at the equilibrium, and how many rounds it took to get there."""
    limits = make_limits(problem)
    cuts = list(_start(problem))
    for number in range(MAX_ROUNDS):
        before = list(cuts)
        for parity in (0, 1):
            for left in range(parity, limits.stages - 1, 2):
                begin, end = cuts[left], cuts[left + 2]
                split = _split(limits, left, begin, end)
                old = max(limits.time_ns(left, begin, cuts[left + 1]), limits.time_ns(left + 1, cuts[left + 1], end))
                if max(limits.time_ns(left, begin, split), limits.time_ns(left + 1, split, end)) < old:
                    cuts[left + 1] = split
        if cuts == before:
            return tuple(problem.chain.cuts[cut] for cut in cuts), number
    return tuple(problem.chain.cuts[cut] for cut in cuts), MAX_ROUNDS


def _start(problem: PartitionProblem) -> tuple[int, ...]:
    positions = problem.chain.cuts
    if problem.current is not None:
        begins = [begin for begin, _ in problem.current]
        if begins == sorted(begins) and begins[0] == 0:
            boundaries_now = (*begins, positions[-1])
        else:
            boundaries_now = uniform.boundaries(problem)
    else:
        boundaries_now = uniform.boundaries(problem)
    return tuple(max(0, bisect_right(positions, position) - 1) for position in boundaries_now)


def boundaries(problem: PartitionProblem) -> tuple[int, ...]:
    """The boundaries at the equilibrium."""
    return rounds(problem)[0]
