"""From the minimum bottleneck to the minimum simulated step: steepest descent over shifted cuts.

With few microbatches the step is more than its bottleneck. Each round takes the best of all partitions with one
cut, or a run of neighboring cuts, shifted; the search ends when none is better. The result is not proven
optimal, and the certificate states that.

Runs of cuts matter: to move work from the first stage to the last, every cut between them has to shift by one. Each of
these shifts alone makes some stage slower, so a search over single cuts would stop before.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from ..partition.exact import Solution
from ..partition.interleaved import Array, make_worker_loads, neighbors
from ..partition.problem import PartitionProblem
from ..simulation.batched import find_shorter

MAX_ROUNDS = 200
RUNS_UP_TO = 40
"""Largest number of stages with runs of cuts shifted together; above it, single cuts only.

A round has about ``stages^2`` partitions with runs, and 6 per cut without.
"""


def minimize_step(problem: PartitionProblem, solution: Solution, max_rounds: int = MAX_ROUNDS) -> Solution:
    """A partition whose simulated step no such shift improves; partitions that do not fit the memory are skipped.

    Args:
        problem: chain, workers and constraints.
        solution: the partition to start from; its lower bound is kept.
        max_rounds: maximum number of shifts; 0 keeps the partition.
    """
    loads = make_worker_loads(problem)
    positions = np.array(problem.chain.cuts, dtype=np.int64)
    cuts = np.searchsorted(positions, np.array(solution.boundaries, dtype=np.int64))
    runs = problem.num_stages <= RUNS_UP_TO
    for _ in range(max_rounds):
        others = neighbors(loads.limits, [int(cut) for cut in cuts], runs=runs)
        others = others[loads.excess_bytes(others) == 0]
        # Only a strictly shorter step is taken, so the search cannot alternate between equal partitions.
        found = find_shorter(problem, positions[cuts].tolist(), positions[others])
        if found is None:
            break
        cuts = others[found[1]]
    return replace(with_new_cuts(problem, solution, cuts), objective="simulated")


def with_new_cuts(problem: PartitionProblem, solution: Solution, cuts: Array | Sequence[int]) -> Solution:
    """The solution with other cuts, and the certificate of these.

    Args:
        problem: the chain and the workers.
        solution: has the lower bound.
        cuts: ``[stages + 1]`` cut indices.
    """
    loads = make_worker_loads(problem)
    bottleneck = int(loads.times(np.array([cuts], dtype=np.int64)).max())
    return replace(
        solution,
        boundaries=tuple(problem.chain.cuts[cut] for cut in cuts),
        bottleneck_ns=bottleneck,
        optimal=bottleneck == solution.lower_bound_ns,
    )
