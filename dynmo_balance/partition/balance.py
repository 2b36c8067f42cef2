"""Run a balancer and certify its partition: how far its bottleneck is from the lower bound."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

from .exact import Solution, solve
from .problem import PartitionProblem
from .registry import run_balancer


def bottleneck_ns(problem: PartitionProblem, boundaries: tuple[int, ...]) -> int:
    """The time in ns that the slowest worker takes for one microbatch, over all its stages."""
    work = problem.chain.work_ns
    times = [0] * len(problem.slots)
    for stage, (begin, end) in enumerate(pairwise(boundaries)):
        times[problem.positions[stage]] += problem.slot(stage).time_ns(sum(work[begin:end]))
    return max(times)


def solve_best(problem: PartitionProblem) -> Solution:
    """The solution of ``exact``: optimal with one stage per worker and in a V, otherwise the best found with its bound.

    Raises:
        UsageError: the problem has more stages than units.
        InfeasibleError: no partition satisfies the constraints.
    """
    if problem.virtual_stages == 1:
        return solve(problem)
    from .interleaved import solve_interleaved  # loads numpy, which one stage per worker does not need

    return solve_interleaved(problem)


def exact_boundaries(problem: PartitionProblem) -> tuple[int, ...]:
    """The balancer ``exact``."""
    return solve_best(problem).boundaries


def balance(problem: PartitionProblem, balancer: str) -> Solution:
    """The partition of a balancer, with the certificate of the exact solver.

    Args:
        problem: the chain, the workers and the constraints.
        balancer: name of a balancer, see ``registry``.

    Raises:
        UsageError: there is no such balancer, or the problem has more stages than units.
        InfeasibleError: no partition satisfies the constraints.
    """
    best = solve_best(problem)
    if balancer == "exact":
        return best
    return certify(problem, run_balancer(problem, balancer), best)


def certify(problem: PartitionProblem, boundaries: tuple[int, ...], best: Solution) -> Solution:
    """Any partition of the problem, measured against the lower bound of the best one.

    Args:
        problem: the chain and the workers.
        boundaries: ``[stages + 1]`` item positions.
        best: the solution of ``solve_best`` for this problem.
    """
    # Reaching the bound proves optimality for any partition, whichever balancer found it.
    bottleneck = bottleneck_ns(problem, boundaries)
    return replace(best, boundaries=boundaries, bottleneck_ns=bottleneck, optimal=bottleneck == best.lower_bound_ns)
