"""From the gradients of a backward to those of an update: ties added, pruned entries zeroed, the global norm clipped.

Norms are reduced per finest item and summed in list order, tied gradients added in list order, so that neither depends
on which worker holds what.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence

import torch
import torch.distributed as dist

from ..models.layer_list import masks_of
from ..models.sharding import needs_whole_stream
from ..parallel.fsdp import row_parts
from ..parallel.process_groups import World, sum_over, sum_over_pipeline
from .item_store import ItemStore


def item_of(parameter_name: str, item_names: Sequence[str]) -> str:
    """The item that a parameter belongs to: the longest item name that the parameter's name extends."""
    return max((name for name in item_names if parameter_name.startswith(name + ".")), key=len)


def tied_groups(ties: Mapping[str, str]) -> dict[str, list[str]]:
    """The parameters that share a value, by their owner: the owner first, then its copies, in list order."""
    groups: dict[str, list[str]] = {}
    for copy_name, owner_name in ties.items():
        groups.setdefault(owner_name, [owner_name]).append(copy_name)
    return groups


def add_tied_gradients(
    store: ItemStore,
    ties: Mapping[str, str],
    owners: Mapping[str, int],
    world: World,
    done: Collection[str] = (),
) -> None:
    """Give all copies of each tied weight the sum of their gradients, in list order; a frozen copy adds nothing.

    Args:
        ties: parameter that is a copy -> parameter that owns the value.
        owners: item -> the worker that holds it.
        done: parameters that are added already.
    """
    here = {name: parameter for _, name, parameter in store.parameters()}
    for members in tied_groups(ties).values():
        if members[0] in done:
            continue
        places = {name: owners[item_of(name, list(owners))] for name in members}
        mine = [name for name in members if places[name] == world.pipeline_rank]
        if not mine:
            continue
        gradients = {name: here[name].grad for name in mine}
        gradients |= _swap(gradients, here[mine[0]], places, world)
        total: torch.Tensor | None = None
        for name in members:
            total = _sum(total, gradients[name])
        for name in mine:
            shares = store.is_shared(name)
            here[name].grad = None if total is None or shares else total if name == mine[0] else total.clone()


def _sum(first: torch.Tensor | None, second: torch.Tensor | None) -> torch.Tensor | None:
    """The sum, in place of the first one: what it was is needed no more."""
    if first is None or second is None:
        return second if first is None else first
    return first.add_(second)


def _swap(
    own: Mapping[str, torch.Tensor | None], like: torch.Tensor, places: Mapping[str, int], world: World
) -> dict[str, torch.Tensor | None]:
    """Exchange gradients that may be absent with the other holders: first whether there is one, then itself."""
    ranks = _ranks_of(places, world)
    peers = sorted(set(ranks.values()))
    there = gradients_there({name: gradient is not None for name, gradient in own.items()}, places, world)
    received = {name: torch.empty_like(like) if there[name] else None for name in ranks}
    sent = [(peer, gradient) for peer in peers for gradient in own.values() if gradient is not None]
    wanted = [(ranks[name], tensor) for name, tensor in received.items() if tensor is not None]
    exchange(sent, wanted, world.groups.pipeline)
    return received


def _ranks_of(places: Mapping[str, int], world: World) -> dict[str, int]:
    """Copy of a tied weight -> torch's global rank of the process that has it, for copies on other pipeline ranks."""
    others = {name: place for name, place in places.items() if place != world.pipeline_rank}
    return {name: world.global_rank(world.peer(place)) for name, place in others.items()}


def gradients_there(own: Mapping[str, bool], places: Mapping[str, int], world: World) -> dict[str, bool]:
    """Which copies of a tied weight have gradients, told among their holders.

    Args:
        own: of the copies that are here.
        places: copy -> the worker that holds it.
    """
    ranks = _ranks_of(places, world)
    flags = [torch.tensor([int(there)], dtype=torch.int64, device=world.device) for there in own.values()]
    theirs = {name: torch.zeros(1, dtype=torch.int64, device=world.device) for name in ranks}
    told = [(peer, flag) for peer in sorted(set(ranks.values())) for flag in flags]
    exchange(told, [(ranks[name], flag) for name, flag in theirs.items()], world.groups.pipeline)
    return {**own, **{name: bool(flag) for name, flag in theirs.items()}}


def exchange(
    sent: Sequence[tuple[int, torch.Tensor]],
    received: Sequence[tuple[int, torch.Tensor]],
    group: dist.ProcessGroup | None,
) -> None:
    """Send tensors to torch's ranks, and receive others from them, all at once; of a pair in the same order."""
    # gloo tells a sender that it may begin over the same stream that the other direction's data take: receives come
    # first, or the two directions of a swap follow one another.
    operations = [dist.P2POp(dist.irecv, tensor, peer, group) for peer, tensor in received]
    operations += [dist.P2POp(dist.isend, tensor.contiguous(), peer, group) for peer, tensor in sent]
    if operations:
        for work in dist.batch_isend_irecv(operations):
            work.wait()


def add_token_gradients(store: ItemStore) -> None:
    """Where the stream is cut along the tokens: add up the gradients of what all ranks of a region hold whole.

    One bucket an item: placement cannot change the sum.
    """
    region = store.region
    if region is None or not region.sequence:
        return
    for item, module in store.modules.items():
        if needs_whole_stream(module):
            continue
        whole = [p for name, p in store.own_parameters(item).items() if store.split_dim(name) is None]
        gradients = [p.grad for p in whole if p.grad is not None]
        if gradients:
            flat = region.total(torch.cat([gradient.reshape(-1) for gradient in gradients]))
            for gradient, part in zip(gradients, flat.split([g.numel() for g in gradients]), strict=True):
                gradient.copy_(part.view_as(gradient))


def zero_pruned_gradients(store: ItemStore) -> None:
    """Zero the gradients of pruned weights, so that neither norm nor moments see them."""
    for item, module in store.modules.items():
        own = store.own_parameters(item)
        for name, layer in masks_of(item, module).items():
            if layer.mask is not None and (gradient := own[name].grad) is not None:
                gradient.mul_(store.local_rows(name, layer.mask))


def gradient_norm(store: ItemStore, item_names: Sequence[str], ties: Mapping[str, str], world: World) -> float:
    """The global L2 norm of all gradients, a tied weight counted once; the same bits on any partition.

    The rows of each replica are squared apart, whether or not it holds them alone: ZeRO gives plain replicas' bits.
    """
    place = {name: index for index, name in enumerate(item_names)}
    # A column for the rows of each replica; then, where experts are dealt out, for those of each process's experts.
    squares = torch.zeros(len(item_names), 2 * world.dims.data, dtype=torch.float64)
    norms: list[torch.Tensor] = []
    places: list[tuple[int, int]] = []
    for item, name, parameter in store.parameters():
        if parameter.grad is not None and name not in ties and store.counts(name):
            parts = _parts_of_norm(store, name, parameter.grad, world)
            norms += [torch.linalg.vector_norm(part) for part in parts.values()]
            places += [(place[item], column) for column in parts]
    if norms:
        stacked = torch.stack(norms).to("cpu", torch.float64).square()
        for (index, column), square in zip(places, stacked.tolist(), strict=True):
            squares[index, column] += square
    # Over the ranks of a region first: the order of its sum must not depend on the pipeline's size.
    squares = sum_over_pipeline(world, sum_over(world.groups.tensor, squares))
    # Each of the others has zero where this one has a figure: the order of these sums does not matter.
    squares = sum_over(world.groups.expert if store.fsdp is None else world.groups.data, squares)
    total = 0.0
    for of_item in squares.tolist():
        total += sum(of_item)
    return math.sqrt(total)


def _parts_of_norm(store: ItemStore, name: str, gradient: torch.Tensor, world: World) -> dict[int, torch.Tensor]:
    """What this process holds of a gradient, by the columns of the norm."""
    dims, apart = world.dims, store.is_expert_local(name)
    size = dims.data // dims.expert if apart else dims.data
    first = dims.data + world.data_rank % dims.expert * size if apart else 0
    if store.fsdp is not None:
        rank, _ = store.fsdp.place(apart=apart)
        return {first + rank: gradient}
    return {first + rank: part for rank, part in enumerate(row_parts(gradient, size))}


def clip_gradients(store: ItemStore, norm: float, limit: float) -> None:
    """Scale all gradients by ``limit / norm`` where the norm is above the limit (0: never)."""
    if limit <= 0 or norm <= limit:
        return
    scale = limit / (norm + 1e-6)
    for _, _, parameter in store.parameters():
        if parameter.grad is not None:
            parameter.grad.mul_(scale)
