"""Balance by something else than the constrained work: by measured time alone, or by the number of parameters.

Both use the exact solver on their own weights and look neither at memory nor at worker speeds; that is what sets them
apart from ``exact``, and what makes them comparable with the balancers of other frameworks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from ..costs.cost_window import SPEED_UNIT
from .exact import solve
from .problem import PartitionProblem


def _free(problem: PartitionProblem) -> PartitionProblem:
    slots = tuple(replace(slot, speed_ppm=SPEED_UNIT, memory_bytes=None) for slot in problem.slots)
    return replace(problem, slots=slots)


def _boundaries(problem: PartitionProblem, weights: Sequence[int] | None) -> tuple[int, ...]:
    return solve(_free(problem), weights).boundaries


def balance_time(problem: PartitionProblem) -> tuple[int, ...]:
    """The boundaries that balance forward plus backward time."""
    return _boundaries(problem, None)


def balance_parameters(problem: PartitionProblem) -> tuple[int, ...]:
    """The boundaries that balance parameter counts."""
    return _boundaries(problem, [item.param_count for item in problem.chain.items])


def with_parameter_costs(problem: PartitionProblem) -> PartitionProblem:
    """The problem as a balancer sees it that takes parameter counts for time, and workers for equal."""
    counts = tuple(item.param_count for item in problem.chain.items)
    none = (0,) * len(counts)
    costs = replace(problem.chain.costs, forward_ns=counts, backward_input_ns=none, backward_weight_ns=none)
    return replace(_free(problem), chain=replace(problem.chain, costs=costs))
