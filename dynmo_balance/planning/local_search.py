"""From the least bottleneck on to the least simulated step time: steepest descent over shifted cuts.

With few microbatches the step is more than its bottleneck. Each round simulates every partition with a cut, or a run of
neighbouring cuts, shifted, takes the best, and ends when none is better. The result is not proven; the certificate says
so.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from ..partition.exact import Solution
from ..partition.interleaved import Array, make_worker_loads, neighbors
from ..partition.problem import PartitionProblem
from ..simulation.batched import step_times

MAX_ROUNDS = 200
RUNS_UP_TO = 40
"""Runs of cuts are shifted together up to so many stages; beyond, single cuts only."""


def minimize_step(problem: PartitionProblem, solution: Solution, max_rounds: int = MAX_ROUNDS) -> Solution:
    """A partition whose simulated step time no such shift improves; what does not fit the memory is not tried."""
    loads = make_worker_loads(problem)
    positions = np.array(problem.chain.cuts, dtype=np.int64)
    cuts = np.searchsorted(positions, np.array(solution.boundaries, dtype=np.int64))
    runs = problem.num_stages <= RUNS_UP_TO
    best = step_times(problem, positions[cuts][None, :])[0]
    for _ in range(max_rounds):
        others = neighbors(loads.limits, [int(cut) for cut in cuts], runs=runs)
        others = others[loads.excess_bytes(others) == 0]
        times = step_times(problem, positions[others]) if len(others) else []
        found = min(times, default=best)
        if found >= best:
            break
        best, cuts = found, others[times.index(found)]
    return replace(with_new_cuts(problem, solution, cuts), objective="simulated")


def with_new_cuts(problem: PartitionProblem, solution: Solution, cuts: Array | Sequence[int]) -> Solution:
    """The solution with other cuts, and what its certificate then says."""
    loads = make_worker_loads(problem)
    bottleneck = int(loads.times(np.array([cuts], dtype=np.int64)).max())
    return replace(
        solution,
        boundaries=tuple(problem.chain.cuts[cut] for cut in cuts),
        bottleneck_ns=bottleneck,
        optimal=bottleneck == solution.lower_bound_ns,
    )
