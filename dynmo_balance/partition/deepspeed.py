"""DeepSpeed's ``partition_balanced``: minimize the difference between the heaviest and the lightest part.

The table over parts and units stores the best difference of each prefix. This measure has no optimal substructure, so
the result minimizes neither the difference nor the bottleneck; the balancer exists for comparison. Weights are forward
plus backward time. The table takes ``stages * units^2`` operations.
"""

from __future__ import annotations

from .by_weight import with_parameter_costs
from .problem import PartitionProblem

_Prefix = tuple[int, int, int, tuple[int, ...]]
"""Of the first units in some parts: difference, heaviest part, lightest part (all in ns), and the cuts."""


def boundaries(problem: PartitionProblem) -> tuple[int, ...]:
    """The boundaries; no part is empty as long as there are enough units."""
    cuts = problem.chain.cuts
    load = problem.chain.prefix_at_cuts(problem.chain.work_ns)
    units, parts = len(cuts) - 1, problem.num_stages
    # With fewer units than parts some part has to be empty, or the table would have no partition at all.
    least = 1 if units >= parts else 0
    best: list[_Prefix | None] = [(0, load[i], load[i], (0, i)) if i >= least else None for i in range(units + 1)]
    for part in range(2, parts + 1):
        following: list[_Prefix | None] = [None] * (units + 1)
        for end in range(part * least, units + 1):
            for begin in range((part - 1) * least, end - least + 1):
                before = best[begin]
                if before is None:
                    continue
                own = load[end] - load[begin]
                heaviest, lightest = max(before[1], own), min(before[2], own)
                known = following[end]
                if known is None or heaviest - lightest < known[0]:
                    following[end] = (heaviest - lightest, heaviest, lightest, (*before[3], end))
        best = following
    found = best[units]
    return tuple(cuts[cut] for cut in found[3]) if found is not None else (0, *([len(problem.chain.items)] * parts))


def boundaries_by_parameters(problem: PartitionProblem) -> tuple[int, ...]:
    """The same with parameter counts as weights."""
    return boundaries(with_parameter_costs(problem))
