"""From the gradients of a backward to those of an update: ties added, pruned entries zeroed, the global norm clipped.

Norms are reduced per finest item and summed in list order, tied gradients added in list order, so that neither depends
on which worker holds what.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import torch
import torch.distributed as dist

from ..models.items import masks_of
from ..parallel.world import World, gather_over, sum_over, sum_over_pipeline
from ..parallel.zero import row_parts
from .items import HeldItems


def item_of(parameter_name: str, item_names: Sequence[str]) -> str:
    """The item that a parameter belongs to: the longest item name that the parameter's name extends."""
    return max((name for name in item_names if parameter_name.startswith(name + ".")), key=len)


def tied_groups(ties: Mapping[str, str]) -> dict[str, list[str]]:
    """The parameters that share a value, by their owner: the owner first, then its copies, in list order."""
    groups: dict[str, list[str]] = {}
    for copy_name, owner_name in ties.items():
        groups.setdefault(owner_name, [owner_name]).append(copy_name)
    return groups


def add_tied_gradients(held: HeldItems, ties: Mapping[str, str], owners: Mapping[str, int], world: World) -> None:
    """Give all copies of each tied weight the sum of their gradients, in list order; a frozen copy adds nothing.

    Args:
        ties: parameter that is a copy -> parameter that owns the value.
        owners: item -> the worker that holds it.
    """
    here = {name: parameter for _, name, parameter in held.parameters()}
    for members in tied_groups(ties).values():
        places = {name: owners[item_of(name, list(owners))] for name in members}
        mine = [name for name in members if places[name] == world.worker]
        if not mine:
            continue
        gradients = {name: here[name].grad for name in mine}
        gradients |= _swap(gradients, here[mine[0]], places, world)
        total: torch.Tensor | None = None
        for name in members:
            total = _sum(total, gradients[name])
        for name in mine:
            shares = held.is_shared(name)
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
    others = {name: place for name, place in places.items() if place != world.worker}
    ranks = {name: world.started_as(world.peer(place)) for name, place in others.items()}
    peers = sorted(set(ranks.values()))
    flags = {
        name: torch.tensor([0 if gradient is None else 1], dtype=torch.int64, device=world.device)
        for name, gradient in own.items()
    }
    theirs = {name: torch.zeros(1, dtype=torch.int64, device=world.device) for name in others}
    group = world.groups.pipeline
    told = [(peer, flag) for peer in peers for flag in flags.values()]
    _exchange(told, [(ranks[n], t) for n, t in theirs.items()], group)
    received = {name: torch.empty_like(like) if int(theirs[name]) else None for name in others}
    sent = [(peer, gradient) for peer in peers for gradient in own.values() if gradient is not None]
    _exchange(sent, [(ranks[name], tensor) for name, tensor in received.items() if tensor is not None], group)
    return received


def _exchange(
    sent: Sequence[tuple[int, torch.Tensor]],
    received: Sequence[tuple[int, torch.Tensor]],
    group: dist.ProcessGroup | None,
) -> None:
    operations = [dist.P2POp(dist.isend, tensor.contiguous(), peer, group) for peer, tensor in sent]
    operations += [dist.P2POp(dist.irecv, tensor, peer, group) for peer, tensor in received]
    if operations:
        for work in dist.batch_isend_irecv(operations):
            work.wait()


def add_token_gradients(held: HeldItems) -> None:
    """Where the stream is cut along the tokens: add up the gradients of what all ranks of a region hold whole.

    One bucket an item: placement cannot change the sum.
    """
    region = held.region
    if region is None or not region.sequence:
        return
    for item in held.modules:
        whole = [p for name, p in held.own_parameters(item).items() if held.split_dim(name) is None]
        gradients = [p.grad for p in whole if p.grad is not None]
        if gradients:
            flat = region.total(torch.cat([gradient.reshape(-1) for gradient in gradients]))
            for gradient, part in zip(gradients, flat.split([g.numel() for g in gradients]), strict=True):
                gradient.copy_(part.view_as(gradient))


def zero_pruned_gradients(held: HeldItems) -> None:
    """Zero the gradients of pruned weights, so that neither norm nor moments see them."""
    for item, module in held.modules.items():
        own = held.own_parameters(item)
        for name, layer in masks_of(item, module).items():
            if layer.mask is not None and (gradient := own[name].grad) is not None:
                gradient.mul_(held.own_rows(layer.mask))


def gradient_norm(held: HeldItems, item_names: Sequence[str], ties: Mapping[str, str], world: World) -> float:
    """The global L2 norm of all gradients, a tied weight counted once; the same bits on any partition.

    The rows of each replica are squared apart, whether or not it holds them alone: ZeRO gives plain replicas' bits.
    """
    place = {name: index for index, name in enumerate(item_names)}
    replicas = world.dims.data
    squares = torch.zeros(len(item_names), replicas, dtype=torch.float64)
    norms: list[torch.Tensor] = []
    places: list[tuple[int, int]] = []
    for item, name, parameter in held.parameters():
        if parameter.grad is not None and name not in ties and held.counts(name):
            sharded = held.shards is not None
            parts = {world.replica: parameter.grad} if sharded else dict(enumerate(row_parts(parameter.grad, replicas)))
            norms += [torch.linalg.vector_norm(part) for part in parts.values()]
            places += [(place[item], replica) for replica in parts]
    if norms:
        stacked = torch.stack(norms).to("cpu", torch.float64).square()
        for (index, replica), square in zip(places, stacked.tolist(), strict=True):
            squares[index, replica] += square
    # Over the ranks of a region first: the order of its sum must not depend on the pipeline's size.
    squares = sum_over_pipeline(world, sum_over(world.groups.tensor, squares))
    if held.shards is not None:
        squares = sum_over(world.groups.data, squares)
    # Every process of an exchange has counted other parameters; rank after rank, so that the sum has one order.
    squares = torch.cat(gather_over(world.groups.expert, squares), dim=1)
    total = 0.0
    for of_replicas in squares.tolist():
        total += sum(of_replicas)
    return math.sqrt(total)


def clip_gradients(held: HeldItems, norm: float, limit: float) -> None:
    """Scale all gradients by ``limit / norm`` where the norm is above the limit (0: never)."""
    if limit <= 0 or norm <= limit:
        return
    scale = limit / (norm + 1e-6)
    for _, _, parameter in held.parameters():
        if parameter.grad is not None:
            parameter.grad.mul_(scale)
