"""The balancers: one file each, from a problem to boundaries, and this registry.

To add one, write a function from ``PartitionProblem`` to boundaries in its own file and name it in ``BALANCERS``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from itertools import pairwise

from .._common.errors import UsageError
from . import by_weight, deepspeed, diffusion, uniform
from .exact import Solution, solve
from .problem import PartitionProblem

__all__ = ["BALANCERS", "Solution", "balance", "solve_best", "bottleneck_ns", "certify", "solve"]

BALANCERS: Mapping[str, Callable[[PartitionProblem], tuple[int, ...]]] = {
    "exact": lambda problem: solve_best(problem).boundaries,
    "time": by_weight.balance_time,
    "parameters": by_weight.balance_parameters,
    "uniform": uniform.boundaries,
    "deepspeed": deepspeed.boundaries,
    "deepspeed_param": lambda problem: deepspeed.boundaries(by_weight.with_parameter_costs(problem)),
    "deepspeed_static": uniform.split_units_evenly,
    "diffusion": diffusion.boundaries,
    "diffusion_param": lambda problem: diffusion.boundaries(by_weight.with_parameter_costs(problem)),
}


def bottleneck_ns(problem: PartitionProblem, boundaries: tuple[int, ...]) -> int:
    """The time of the slowest worker in a microbatch, over all its stages."""
    work = problem.chain.work_ns
    times = [0] * len(problem.slots)
    for stage, (begin, end) in enumerate(pairwise(boundaries)):
        times[problem.positions[stage]] += problem.slot(stage).time_ns(sum(work[begin:end]))
    return max(times)


def solve_best(problem: PartitionProblem) -> Solution:
    """What ``exact`` answers: proven with one stage a worker and in a V, else the best found with its bound."""
    if problem.virtual_stages == 1:
        return solve(problem)
    from .interleaved import solve_interleaved  # arrays are loaded only where they are needed

    return solve_interleaved(problem)


def balance(problem: PartitionProblem, balancer: str) -> Solution:
    """The partition of a balancer, with the certificate of the exact solver.

    Raises:
        UsageError: there is no such balancer, or more stages than units.
        InfeasibleError: no partition at all obeys the constraints.
    """
    if balancer not in BALANCERS:
        raise UsageError(f"unknown balancer {balancer!r}; there are {', '.join(BALANCERS)}")
    best = solve_best(problem)
    if balancer == "exact":
        return best
    return certify(problem, BALANCERS[balancer](problem), best)


def certify(problem: PartitionProblem, boundaries: tuple[int, ...], best: Solution) -> Solution:
    """Any partition of the problem, measured against the best one."""
    bottleneck = bottleneck_ns(problem, boundaries)
    met = bottleneck == best.lower_bound_ns
    return replace(best, boundaries=boundaries, bottleneck_ns=bottleneck, optimal=met)
