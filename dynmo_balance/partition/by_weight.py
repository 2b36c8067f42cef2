"""Balance measured time, or the number of parameters, and nothing else.

Both balancers use the exact solver on their own weights, and ignore memory limits and worker speeds. That is the
difference from ``exact``, and it makes them comparable with the balancers of other frameworks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from ..costs.cost_window import SPEED_UNIT
from .exact import solve
from .problem import PartitionProblem


def _unconstrained(problem: PartitionProblem) -> PartitionProblem:
    """The problem on workers of equal speed without memory limits."""
    slots = tuple(replace(slot, speed_ppm=SPEED_UNIT, memory_bytes=None) for slot in problem.slots)
    return replace(problem, slots=slots)


def _boundaries(problem: PartitionProblem, weights: Sequence[int] | None) -> tuple[int, ...]:
    return solve(_unconstrained(problem), weights).boundaries


def balance_time(problem: PartitionProblem) -> tuple[int, ...]:
    """The boundaries that balance forward plus backward time."""
    return _boundaries(problem, None)


def balance_parameters(problem: PartitionProblem) -> tuple[int, ...]:
    """The boundaries that balance parameter counts."""
    return _boundaries(problem, [item.param_count for item in problem.chain.items])


def with_parameter_costs(problem: PartitionProblem) -> PartitionProblem:
    """The problem with parameter counts in place of times, on workers of equal speed without memory limits."""
    # All of a count stands as forward time, so that every balancer that adds up times works on it unchanged.
    counts = tuple(item.param_count for item in problem.chain.items)
    zeros = (0,) * len(counts)
    costs = replace(problem.chain.costs, forward_ns=counts, backward_input_ns=zeros, backward_weight_ns=zeros)
    return replace(_unconstrained(problem), chain=replace(problem.chain, costs=costs))
