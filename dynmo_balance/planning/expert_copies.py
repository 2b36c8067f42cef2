"""Copies of experts in plans: their placement, their transfers in each step, and their memory.

A run with slots for copies states them in its profile (``x_expert_copies``). Its plans place an expert on several
ranks: the first one owns it, with gradient and optimizer state; the others get its weights before each step, and send
float64 sums of its gradient back. Tokens of an expert are split evenly over its ranks.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from ..formats.profile import Header
from ..partition.experts import EVEN, ExpertProblem, Ranks, place

Placement = tuple[int | tuple[int, ...], ...]
"""The rank of each expert, or its ranks with its owner first."""
GRADIENT_SUM_BYTES = 8
_GRADIENT_BYTES = 4


@dataclass(frozen=True, kw_only=True)
class CopyCosts:
    """What copies of experts cost a run.

    Attributes:
        ranks: ranks that share the experts of a layer.
        slots: experts and copies of a layer that a rank has room for.
        weight_bytes: of a parameter of a copy, in the compute dtype.
        param_count: parameters of one expert, by item.
        state_bytes: parameters, gradient and optimizer state of one expert on its owner, by item.
        bandwidth: bytes per second between the ranks; None is unlimited.
        profiled_ranks: ranks that shared the experts when the profile was written; None: as ``ranks``.
    """

    ranks: int
    slots: int
    weight_bytes: int
    param_count: Mapping[str, int]
    state_bytes: Mapping[str, int]
    bandwidth: int | None
    profiled_ranks: int | None = None

    @property
    def copy_bytes(self) -> int:
        """Bytes of a parameter of a copy: its weight, and the sum of its gradients."""
        return self.weight_bytes + GRADIENT_SUM_BYTES

    def copies_ns(self, item: str, placement: Placement) -> int:
        """Time in a step, in ns, of the rank that sends and receives most weights and gradients of copies of a layer.

        Args:
            item: the layer's item.
            placement: of its experts.
        """
        if not self.bandwidth:
            return 0
        number = [0] * self.ranks
        for hosts in map(hosts_of, placement):
            number[hosts[0]] += len(hosts) - 1
            for rank in hosts[1:]:
                number[rank] += 1
        size = self.param_count.get(item, 0) * (self.weight_bytes + GRADIENT_SUM_BYTES)
        return max(number) * size * 1_000_000_000 // self.bandwidth

    def rank_bytes(self, placements: Mapping[str, Placement]) -> list[int]:
        """By how many bytes each rank needs more memory than the equal part of each layer that the profile states.

        Gradients of all experts of such a run are float64 sums during the backward.

        Args:
            placements: of the layers on one pipeline rank, by item.
        """
        total = [0] * self.ranks
        for item, placement in placements.items():
            count = self.param_count.get(item, 0)
            equal = len(placement) // (self.profiled_ranks or self.ranks)
            for rank in range(self.ranks):
                owned = sum(hosts_of(on)[0] == rank for on in placement)
                copies = sum(rank in hosts_of(on)[1:] for on in placement)
                total[rank] += (owned - equal) * self.state_bytes.get(item, 0)
                total[rank] += owned * count * (GRADIENT_SUM_BYTES - _GRADIENT_BYTES)
                total[rank] += copies * count * self.copy_bytes
        return total


@dataclass(frozen=True, kw_only=True)
class WorkerMemory:
    """The memory of a pipeline rank.

    Attributes:
        worker: its id.
        items: that it has.
        peak_bytes: peak memory of a device without copies, each rank with an equal part of the experts.
        memory_bytes: memory of a device; None is unlimited.
    """

    worker: int
    items: tuple[str, ...]
    peak_bytes: int
    memory_bytes: int | None


class FullRank(NamedTuple):
    """A rank whose memory its experts and copies would exceed, of those that share the experts of a worker."""

    worker: int
    rank: int
    needed_bytes: int
    memory_bytes: int


def full_ranks(workers: Iterable[WorkerMemory], placed: Mapping[str, Placement], copies: CopyCosts) -> list[FullRank]:
    """The ranks whose memory the experts and copies would exceed.

    Args:
        workers: the pipeline ranks.
        placed: placement of each item with experts.
        copies: what copies cost.
    """
    found = []
    for worker in workers:
        if worker.memory_bytes is None:
            continue
        here = {item: placed[item] for item in worker.items if item in placed}
        for rank, size in enumerate(copies.rank_bytes(here)):
            if worker.peak_bytes + size > worker.memory_bytes:
                found.append(FullRank(worker.worker, rank, worker.peak_bytes + size, worker.memory_bytes))
    return found


def copy_costs(header: Header, bandwidth: int | None) -> CopyCosts | None:
    """What copies cost, from a profile header; None where the run has no slots for copies.

    Args:
        header: of the profile.
        bandwidth: bytes per second between the ranks that share experts; None is unlimited.
    """
    found = header.expert_copies
    if found is None:
        return None
    return CopyCosts(
        ranks=header.expert_parallel_size,
        slots=found.slots,
        weight_bytes=found.weight_bytes,
        param_count=found.param_count,
        state_bytes=state_bytes(header, found.param_count),
        bandwidth=bandwidth,
    )


def state_bytes(header: Header, param_count: Mapping[str, int]) -> dict[str, int]:
    """Parameters, gradient and optimizer state in bytes of one expert on its owner, by item.

    Args:
        header: of the profile.
        param_count: parameters of one expert, by item.
    """
    return {
        item.name: (item.param_bytes + item.gradient_bytes + item.optimizer_bytes)
        * param_count[item.name]
        // max(1, item.param_count)
        for item in header.items
        if item.name in param_count
    }


def hosts_of(placed: int | tuple[int, ...]) -> tuple[int, ...]:
    """The ranks of an expert, its owner first."""
    return (placed,) if isinstance(placed, int) else placed


def loads_on(tokens: Sequence[int], placement: Placement) -> Counter[int]:
    """Tokens of each rank, of the tokens and the ranks of each expert, with even shares."""
    loads: Counter[int] = Counter()
    for count, placed in zip(tokens, placement, strict=True):
        hosts = sorted(hosts_of(placed))
        for at, rank in enumerate(hosts):
            loads[rank] += count * (at + 1) // len(hosts) - count * at // len(hosts)
    return loads


def on_ranks(tokens: Sequence[int], placement: Placement, ranks: int) -> Ranks:
    """A placement as the experts of each rank, with even shares of their tokens.

    Args:
        tokens: of each expert in a step.
        placement: of the experts.
        ranks: number of ranks that share them.
    """
    placed: list[list[tuple[int, int]]] = [[] for _ in range(ranks)]
    for expert, (count, on) in enumerate(zip(tokens, placement, strict=True)):
        hosts = sorted(hosts_of(on))
        for at, rank in enumerate(hosts):
            placed[rank].append((expert, count * (at + 1) // len(hosts) - count * at // len(hosts)))
    return tuple(map(tuple, placed))


def with_copies(item: str, tokens: Sequence[int], before: Placement, costs: CopyCosts, step_ns: int) -> Placement:
    """The placement of a layer with the shortest step: its time by the heaviest rank, and the transfers of copies.

    Args:
        item: the layer's item.
        tokens: of each expert in a step.
        before: placement now.
        costs: of copies.
        step_ns: time of the layer in a step with the placement now.
    """
    now = on_ranks(tokens, before, costs.ranks)
    largest = max(1, max(loads_on(tokens, before).values(), default=1))
    fewest = -(-len(tokens) // costs.ranks)
    has_price = costs.bandwidth and step_ns and costs.param_count.get(item)
    found = []
    for slots in range(costs.slots, fewest - 1, -1) if has_price else (costs.slots,):
        problem = ExpertProblem(tokens=tuple(tokens), ranks=costs.ranks, slots=slots, shares=EVEN)
        found.append(owned(place(problem, now).ranks, before))

    def cost_ns(placement: Placement) -> tuple[int, int]:
        heaviest = max(loads_on(tokens, placement).values(), default=0)
        return step_ns * heaviest // largest + costs.copies_ns(item, placement), heaviest

    return min(found, key=cost_ns)


def owned(ranks: Ranks, before: Placement) -> Placement:
    """The ranks of each expert; an owner that still has its expert remains, else the rank that owns fewest gets it.

    Args:
        ranks: experts of each rank.
        before: placement now.
    """
    hosts: list[list[int]] = [[] for _ in before]
    for rank, experts in enumerate(ranks):
        for expert, _ in experts:
            hosts[expert].append(rank)
    former = [hosts_of(placed)[0] for placed in before]
    number: Counter[int] = Counter(owner for owner, on in zip(former, hosts, strict=True) if owner in on)
    result: list[int | tuple[int, ...]] = []
    for owner, on in zip(former, hosts, strict=True):
        first = owner
        if owner not in on:
            first = min(on, key=lambda rank: (number[rank], rank))
            number[first] += 1
        others = [rank for rank in on if rank != first]
        result.append((first, *others) if others else first)
    return tuple(result)


def without_copies(placement: Placement, rank: int) -> Placement:
    """The placement without copies on ``rank``; what it owns remains."""
    result: list[int | tuple[int, ...]] = []
    for placed in placement:
        first, *others = hosts_of(placed)
        rest = [each for each in others if each != rank]
        result.append((first, *rest) if rest else first)
    return tuple(result)
