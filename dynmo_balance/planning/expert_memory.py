"""The memory of an expert plan: fewer copies on ranks that have no room for all of them.

A rank of a pipeline rank has an equal part of the experts of its layers in its measured peak. Owners and copies of a
plan change that (``CopyCosts.rank_bytes``)::

    placements that balance best --full_ranks--> ranks above their memory
          copies that balance least are removed from these ranks
          layers of a worker that is still full: one rank per expert
          still full: UsageError with the bytes
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from .._common.errors import UsageError
from ..partition.experts import ExpertProblem, Ranks, contiguous, loads_of, place, shares_on
from .expert_copies import CopyCosts, FullRank, Placement, WorkerMemory, full_ranks, hosts_of, owned


@dataclass(frozen=True, kw_only=True)
class PlacedLayer:
    """The experts of a layer in a plan.

    Attributes:
        problem: tokens, ranks and slots.
        before: placement now, with the tokens of ``problem``.
        ranks: planned placement.
    """

    problem: ExpertProblem
    before: Ranks
    ranks: Ranks

    @property
    def max_tokens(self) -> int:
        """Tokens of the heaviest rank."""
        return max(loads_of(self.ranks))

    @property
    def placement(self) -> Placement:
        """The ranks of each expert, its owner first: the one that owned it before, if it still has the expert."""
        return owned(self.ranks, _by_tokens(self.before))


@dataclass(frozen=True, kw_only=True)
class ExpertMemory:
    """What limits the copies of a plan.

    Attributes:
        copies: what copies cost.
        workers: the pipeline ranks.
    """

    copies: CopyCosts
    workers: tuple[WorkerMemory, ...]

    def full(self, layers: Mapping[str, PlacedLayer]) -> list[FullRank]:
        """The ranks that would have no room; not those that need no more than the run with its equal parts needs.

        Args:
            layers: by item.
        """
        found = full_ranks(self.workers, {item: layer.placement for item, layer in layers.items()}, self.copies)
        if self.copies.profiled_ranks not in (None, self.copies.ranks):
            return found
        equal = {item: _by_tokens(contiguous(layer.problem)) for item, layer in layers.items()}
        start = full_ranks(self.workers, equal, self.copies)
        least = {(each.worker, each.rank): each.needed_bytes for each in start}
        return [each for each in found if each.needed_bytes > least.get((each.worker, each.rank), 0)]


def _by_tokens(ranks: Ranks) -> Placement:
    """The ranks of each expert, the one with most of its tokens first, as the trainer reads a plan."""
    on: dict[int, dict[int, int]] = {}
    for rank, each in enumerate(ranks):
        for expert, tokens in each:
            on.setdefault(expert, {})[rank] = tokens
    return tuple(tuple(sorted(on[expert], key=lambda rank: (-on[expert][rank], rank))) for expert in sorted(on))


def within_memory(
    layers: Mapping[str, PlacedLayer], memory: ExpertMemory, weight: Mapping[str, int]
) -> tuple[dict[str, PlacedLayer], list[FullRank]]:
    """The layers with the copies that the memory has room for.

    Args:
        layers: by item, as they balance best.
        memory: of the ranks.
        weight: time of each item in a step, in ns; copies that save the least are removed first. 0 is unknown.

    Returns:
        The layers, and the ranks that have no room for all copies.

    Raises:
        UsageError: the experts of a rank exceed its memory without any copy.
    """
    result, full = dict(layers), memory.full(layers)
    items_of = {worker.worker: worker.items for worker in memory.workers}
    for each in full:
        here = [item for item in items_of[each.worker] if item in result]
        _remove_copies(result, here, each, memory.copies, weight)
    for worker in {each.worker for each in memory.full(result)}:
        for item in (item for item in items_of[worker] if item in result):
            problem = result[item].problem
            least = replace(problem, slots=-(-len(problem.tokens) // problem.ranks))
            result[item] = replace(result[item], ranks=place(least, result[item].before).ranks)
        _add_copies(result, worker, [item for item in items_of[worker] if item in result], memory, weight)
    if left := memory.full(result):
        raise UsageError(f"{describe(left[0])} without any copy; use more ranks, or give the memory with --memory")
    return result, full


def describe(rank: FullRank) -> str:
    """What a rank would need, and what it has."""
    return (
        f"rank {rank.rank} of the experts of worker {rank.worker} would need {rank.needed_bytes:,} bytes of"
        f" {rank.memory_bytes:,}"
    )


def _remove_copies(
    layers: dict[str, PlacedLayer], items: Sequence[str], full: FullRank, copies: CopyCosts, weight: Mapping[str, int]
) -> None:
    """Remove copies from a rank until the others fit, those first whose tokens make other ranks heavier the least."""
    excess = full.needed_bytes - full.memory_bytes
    for _, item, expert in sorted(_losses(layers, items, full.rank, weight)):
        if excess <= 0:
            return
        layers[item] = _without(layers[item], full.rank, expert)
        excess -= copies.param_count.get(item, 0) * copies.copy_bytes


def _add_copies(
    layers: dict[str, PlacedLayer], worker: int, items: Sequence[str], memory: ExpertMemory, weight: Mapping[str, int]
) -> None:
    """Add to a worker the copies that save most, one by one, while the memory has room for them.

    Tried are copies of experts of a layer's heaviest rank, on its lightest rank that has a free slot.
    """
    while True:
        found = []
        for item in items:
            layer = layers[item]
            loads, here = loads_of(layer.ranks), [{expert for expert, _ in each} for each in layer.ranks]
            for expert in here[loads.index(max(loads))]:
                room = [each for each in here if expert not in each and len(each) < layer.problem.slots]
                if room:
                    _, on = min((loads[at], at) for at, each in enumerate(here) if each in room)
                    added = [(*each, (expert, 0)) if at == on else each for at, each in enumerate(layer.ranks)]
                    more = replace(layer, ranks=shares_on(layer.problem, tuple(added)))
                    saved = (layer.max_tokens - more.max_tokens) / max(1, layer.max_tokens)
                    found.append((saved * (weight.get(item) or 1), item, more))
        for saved, item, more in sorted(found, key=lambda one: -one[0]):
            if saved <= 0:
                return
            if all(each.worker != worker for each in memory.full(layers | {item: more})):
                layers[item] = more
                break
        else:
            return


def _losses(
    layers: Mapping[str, PlacedLayer], items: Iterable[str], rank: int, weight: Mapping[str, int]
) -> list[tuple[float, str, int]]:
    """How much slower a step is without each copy on ``rank``: time, item, expert."""
    found = []
    for item in items:
        layer = layers[item]
        for expert, on in enumerate(layer.placement):
            if rank in hosts_of(on)[1:]:
                slower = _without(layer, rank, expert).max_tokens - layer.max_tokens
                found.append((slower * (weight.get(item) or 1) / max(1, layer.max_tokens), item, expert))
    return found


def _without(layer: PlacedLayer, rank: int, expert: int) -> PlacedLayer:
    """The layer without the copy of ``expert`` on ``rank``, whose tokens go to the other ranks that have it."""
    fewer = tuple(
        tuple(each for each in placed if at != rank or each[0] != expert) for at, placed in enumerate(layer.ranks)
    )
    return replace(layer, ranks=shares_on(layer.problem, fewer))
