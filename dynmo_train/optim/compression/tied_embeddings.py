"""Fused embedding synchronisation (Optimus-CC, arXiv:2301.09830, section 6).

One exchange adds a tied weight's gradients over the replicas and over its copies.

Every process that holds a copy adds up its own piece of the table, then gives the sum to the others: ``2 (n - 1) / n``
of the table for n processes, against one all-reduce over the replicas and one swap between the copies. The order of the
sum is fixed, replicas of the first copy, replicas of the second one, then the copies: with two replicas the bits are
those of the two steps, with more those of an all-reduce in the order of the replicas.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import torch

from ...parallel.process_groups import World
from ..gradients import exchange, gradients_there, item_of, tied_groups
from ..item_store import ItemStore


def fused_parameters(store: ItemStore, ties: Mapping[str, str], world: World) -> frozenset[str]:
    """The tied parameters that are added so; none where there is one replica.

    What tensor-parallel ranks hold whole while the tokens are cut has to be added over them in between.
    """
    if world.dims.data == 1 or store.fsdp is not None:
        return frozenset()
    cut = store.region is not None and store.region.sequence
    groups = tied_groups(ties).values()
    return frozenset(name for group in groups for name in group if not cut or store.split_dim(name) is not None)


def add_fused_gradients(
    store: ItemStore, ties: Mapping[str, str], owners: Mapping[str, int], world: World, fused: frozenset[str]
) -> None:
    """Give all copies of the ``fused`` weights, on all replicas, the sum of their gradients.

    Args:
        ties: parameter that is a copy -> parameter that owns the value.
        owners: item -> the worker that holds it.
    """
    here = {name: parameter for _, name, parameter in store.parameters()}
    for members in tied_groups(ties).values():
        if members[0] not in fused:
            continue
        places = {name: owners[item_of(name, list(owners))] for name in members}
        mine = [name for name in members if places[name] == world.pipeline_rank]
        if not mine:
            continue
        there = gradients_there({name: here[name].grad is not None for name in mine}, places, world)
        giving = [name for name in members if there[name]]
        like = here[mine[0]]
        total = _summed({n: here[n].grad for n in mine}, giving, places, like, world) if giving else None
        for name in mine:
            shares = store.is_shared(name)
            here[name].grad = None if total is None or shares else total if name == mine[0] else total.clone()


def _summed(
    own: Mapping[str, torch.Tensor | None],
    giving: Sequence[str],
    places: Mapping[str, int],
    like: torch.Tensor,
    world: World,
) -> torch.Tensor:
    """The sum of the gradients of ``giving`` over all replicas, whole at each of them."""
    dims, shard = world.dims, world.tensor_rank
    workers = sorted({places[name] for name in places})
    ranks = [dims.rank_of(pipeline=w, data=d, tensor=shard) for w in workers for d in range(dims.data)]
    pieces = dict(zip(ranks, _ends(like.numel(), len(ranks)), strict=True))
    begin, end = pieces[world.rank]
    flats = {name: tensor.reshape(-1) for name, tensor in own.items() if tensor is not None}
    parts: dict[tuple[str, int], torch.Tensor] = {}
    sent, received = [], []
    for worker in workers:
        names = [name for name in giving if places[name] == worker]
        for replica in range(dims.data):
            rank = dims.rank_of(pipeline=worker, data=replica, tensor=shard)
            for name in names:
                if rank == world.rank:
                    parts[name, replica] = flats[name][begin:end]
                else:
                    parts[name, replica] = like.new_empty(end - begin)
                    received.append((rank, parts[name, replica]))
    for rank, (first, last) in pieces.items():
        if rank != world.rank:
            sent += [(rank, flats[name][first:last]) for name in giving if name in flats]
    exchange(_some(sent, world), _some(received, world), world.groups.world)
    total = torch.empty(like.numel(), dtype=like.dtype, device=like.device)
    total[begin:end] = _in_order([_in_order([parts[n, d] for d in range(dims.data)]) for n in giving])
    others = [rank for rank in ranks if rank != world.rank]
    spread = [(rank, total[begin:end]) for rank in others]
    gathered = [(rank, total[slice(*pieces[rank])]) for rank in others]
    exchange(_some(spread, world), _some(gathered, world), world.groups.world)
    return total.view_as(like)


def _ends(size: int, count: int) -> list[tuple[int, int]]:
    return [(at * size // count, (at + 1) * size // count) for at in range(count)]


def _some(pairs: Iterable[tuple[int, torch.Tensor]], world: World) -> list[tuple[int, torch.Tensor]]:
    """The same with torch's ranks; nothing is sent for an empty piece."""
    return [(world.global_rank(rank), tensor) for rank, tensor in pairs if tensor.numel()]


def _in_order(parts: Sequence[torch.Tensor]) -> torch.Tensor:
    total = parts[0]
    for part in parts[1:]:
        total = total + part
    return total
