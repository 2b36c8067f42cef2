"""The algorithm of DeepSeek's EPLB, written from its description, as the opponent of our expert placement.

Replicate: each spare slot goes to the expert with the most tokens per replica. Pack: the heaviest slot first, to the
lightest rank that has a free slot. Hierarchical: groups of experts are packed onto nodes, and each node is balanced by
itself. https://github.com/deepseek-ai/EPLB (README).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence


def packed(weights: Sequence[float], bins: int) -> list[list[int]]:
    """Indices of each bin, the same number in each."""
    room = len(weights) // bins
    contents: list[list[int]] = [[] for _ in range(bins)]
    loads = [0.0] * bins
    for index in sorted(range(len(weights)), key=lambda i: -weights[i]):
        lightest = min((b for b in range(bins) if len(contents[b]) < room), key=lambda b: loads[b])
        contents[lightest].append(index)
        loads[lightest] += weights[index]
    return contents


def replicated(weights: Sequence[float], slots: int) -> list[int]:
    """The expert of each slot."""
    counts = [1] * len(weights)
    for _ in range(slots - len(weights)):
        hottest = max(range(len(weights)), key=lambda e: weights[e] / counts[e])
        counts[hottest] += 1
    return [expert for expert, count in enumerate(counts) for _ in range(count)]


def eplb(tokens: Sequence[int], slots: int, groups: int, nodes: int, ranks: int) -> list[list[int]]:
    """The experts of each rank; an expert occurs once per replica.

    Args:
        tokens: Of each expert.
        slots: Of all ranks together.
        groups: Groups of neighboring experts; one group is the global policy.
        nodes: Nodes that the ranks are on.
        ranks: Number of ranks.
    """
    if groups % nodes:
        groups = nodes = 1
    per_group = len(tokens) // groups
    sums = [sum(tokens[g * per_group : (g + 1) * per_group]) for g in range(groups)]
    placed = []
    for groups_here in packed(sums, nodes):
        experts = [e for g in groups_here for e in range(g * per_group, (g + 1) * per_group)]
        weights = [tokens[e] for e in experts]
        of_slot = replicated(weights, slots // nodes)
        counts = Counter(of_slot)
        parts = [weights[e] / counts[e] for e in of_slot]
        placed += [[experts[of_slot[slot]] for slot in rank] for rank in packed(parts, ranks // nodes)]
    return placed


def eplb_load(tokens: Sequence[int], placed: Sequence[Sequence[int]]) -> int:
    """Tokens of the heaviest rank: each expert's tokens in equal whole parts, the lower ranks first."""
    counts = Counter(expert for each in placed for expert in each)
    passed: Counter[int] = Counter()
    loads = []
    for each in placed:
        load = 0
        for expert in each:
            at, count = passed[expert], counts[expert]
            load += tokens[expert] * (at + 1) // count - tokens[expert] * at // count
            passed[expert] += 1
        loads.append(load)
    return max(loads)
