"""What DeepSpeed's ``partition_balanced`` does: least difference between the heaviest and the lightest part.

It fills a table over parts and items with the best (heaviest minus lightest) of the prefix, which has no optimal
substructure, so the answer is best neither by that measure nor by the bottleneck; it is here to be compared with.
Weights are forward plus backward time. The table costs ``stages * units^2``.
"""

from __future__ import annotations

from .problem import PartitionProblem


def boundaries(problem: PartitionProblem) -> tuple[int, ...]:
    """The boundaries; parts may not be empty as long as there are units enough."""
    cuts = problem.chain.cuts
    load = problem.chain.prefix_at_cuts(problem.chain.work_ns)
    units, parts = len(cuts) - 1, problem.num_stages
    least = 1 if units >= parts else 0
    # best[i] is (difference, heaviest, lightest, cuts) of the first i units in the parts so far
    best: list[tuple[int, int, int, tuple[int, ...]] | None] = [
        (0, load[i], load[i], (0, i)) if i >= least else None for i in range(units + 1)
    ]
    for part in range(2, parts + 1):
        following: list[tuple[int, int, int, tuple[int, ...]] | None] = [None] * (units + 1)
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
