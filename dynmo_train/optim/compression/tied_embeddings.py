"""Fused embedding synchronization (Optimus-CC, arXiv:2301.09830, section 6).

One exchange sums a tied weight's gradients over the replicas and over its copies: a reduce-scatter and an all-gather
among all processes that have a copy.

    each process         sends every other one its piece of the table, and sums the pieces that it receives
    then                 sends its sum to every other one

That is ``2 (n - 1) / n`` of the table for n processes, against one all-reduce over the replicas and one swap between
the copies. The order of the sum is fixed: replicas of the first copy, replicas of the second one, then the copies. With
two replicas the bits are those of the two separate steps; with more, those of an all-reduce in replica order.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import torch

from ...parallel.process_groups import World
from ..gradients import TiedPresence, exchange, item_of, set_tied_gradients, tied_groups
from ..item_store import ItemStore


def fused_parameters(store: ItemStore, ties: Mapping[str, str], world: World) -> frozenset[str]:
    """Return the tied parameters that are summed this way; none with one replica or with ZeRO.

    With sequence parallelism, a parameter that tensor ranks have unsliced needs their sum in between and is excluded.
    """
    sharding = store.sharding
    # One replica has a swap only, which is already minimal. ZeRO reduces to rows, of which no rank has a full table.
    if world.dims.data == 1 or sharding.fsdp is not None:
        return frozenset()
    sequence = sharding.region is not None and sharding.region.sequence
    names = {name for group in tied_groups(ties).values() for name in group}
    return frozenset(name for name in names if not sequence or sharding.split_dim(name) is not None)


def add_fused_gradients(
    store: ItemStore,
    ties: Mapping[str, str],
    owners: Mapping[str, int],
    world: World,
    presence: TiedPresence,
    fused: frozenset[str],
) -> None:
    """Set ``grad`` of all copies of the ``fused`` weights, on all replicas, to the sum of their gradients.

    Args:
        store: Local items.
        ties: Parameter that is a copy -> parameter that owns the value.
        owners: Item -> its pipeline rank.
        world: Processes of the run.
        presence: Which copies have a gradient.
        fused: Result of :func:`fused_parameters`.
    """
    here = {name: parameter for _, name, parameter in store.parameters()}
    for members in tied_groups(ties).values():
        if members[0] not in fused:
            continue
        ranks = {name: owners[item_of(name, list(owners))] for name in members}
        local = [name for name in members if ranks[name] == world.pipeline_rank]
        if not local:
            continue
        present = presence.of({name: here[name].grad is not None for name in local}, ranks, world)
        adding = [name for name in members if present[name]]
        like = here[local[0]]
        total = _fused_sum({n: here[n].grad for n in local}, adding, ranks, like, world) if adding else None
        set_tied_gradients(store, here, local, total)


def _fused_sum(
    local: Mapping[str, torch.Tensor | None],
    adding: Sequence[str],
    pipeline_ranks: Mapping[str, int],
    like: torch.Tensor,
    world: World,
) -> torch.Tensor:
    """Return the sum of the gradients of the copies ``adding`` over all replicas, at each process that has a copy."""
    dims, tensor_rank = world.dims, world.tensor_rank
    positions = sorted(set(pipeline_ranks.values()))
    ranks = [dims.rank_of(pipeline=p, data=d, tensor=tensor_rank) for p in positions for d in range(dims.data)]
    # Each process sums one range of the elements, so that no process receives all gradients.
    pieces = dict(zip(ranks, _even_ranges(like.numel(), len(ranks)), strict=True))
    begin, end = pieces[world.rank]
    flats = {name: tensor.reshape(-1) for name, tensor in local.items() if tensor is not None}
    parts: dict[tuple[str, int], torch.Tensor] = {}
    sent, received = [], []
    for position in positions:
        names = [name for name in adding if pipeline_ranks[name] == position]
        for replica in range(dims.data):
            rank = dims.rank_of(pipeline=position, data=replica, tensor=tensor_rank)
            for name in names:
                if rank == world.rank:
                    parts[name, replica] = flats[name][begin:end]
                else:
                    parts[name, replica] = like.new_empty(end - begin)
                    received.append((rank, parts[name, replica]))
    for rank, (first, last) in pieces.items():
        if rank != world.rank:
            sent += [(rank, flats[name][first:last]) for name in adding if name in flats]
    # Over all processes: these replicas on several pipeline ranks have no group of their own.
    exchange(_nonempty(sent, world), _nonempty(received, world), world.groups.world)
    total = torch.empty(like.numel(), dtype=like.dtype, device=like.device)
    total[begin:end] = _ordered_sum([_ordered_sum([parts[n, d] for d in range(dims.data)]) for n in adding])
    others = [rank for rank in ranks if rank != world.rank]
    scattered = [(rank, total[begin:end]) for rank in others]
    gathered = [(rank, total[slice(*pieces[rank])]) for rank in others]
    exchange(_nonempty(scattered, world), _nonempty(gathered, world), world.groups.world)
    return total.view_as(like)


def _even_ranges(size: int, count: int) -> list[tuple[int, int]]:
    return [(at * size // count, (at + 1) * size // count) for at in range(count)]


def _nonempty(pairs: Iterable[tuple[int, torch.Tensor]], world: World) -> list[tuple[int, torch.Tensor]]:
    """Return the pairs with global ranks, without empty pieces, which neither side sends nor receives."""
    return [(world.global_rank(rank), tensor) for rank, tensor in pairs if tensor.numel()]


# Not ``torch.stack(parts).sum(0)``, which may add in another order: float addition is not associative.
def _ordered_sum(parts: Sequence[torch.Tensor]) -> torch.Tensor:
    total = parts[0]
    for part in parts[1:]:
        total = total + part
    return total
