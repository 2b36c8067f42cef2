"""From the gradients of a backward to those of an update: ties added, pruned entries zeroed, the global norm clipped.

Norms are reduced per finest item and summed in list order, tied gradients added in list order, so that neither depends
on which worker holds what.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import torch
import torch.distributed as dist
from torch import nn

from ..models.items import masks_of, parameters_of
from ..parallel.world import World, sum_over, sum_over_pipeline
from .items import HeldItems


def item_of(parameter_name: str, item_names: Sequence[str]) -> str:
    """The item that a parameter belongs to: the longest item name that the parameter's name extends."""
    return max((name for name in item_names if parameter_name.startswith(name + ".")), key=len)


def add_tied_gradients(held: HeldItems, ties: Mapping[str, str], owners: Mapping[str, int], world: World) -> None:
    """Give both copies of each tied weight the sum of their gradients, owner's first; a frozen copy adds nothing.

    Args:
        ties: parameter that is a copy -> parameter that owns the value.
        owners: item -> the worker that holds it.
    """
    here = {name: parameter for _, name, parameter in held.parameters()}
    for copy_name, owner_name in ties.items():
        places = {name: owners[item_of(name, list(owners))] for name in (owner_name, copy_name)}
        if world.worker not in places.values():
            continue
        if places[owner_name] == places[copy_name]:
            total = _sum(here[owner_name].grad, here[copy_name].grad)
            for name in (owner_name, copy_name):
                here[name].grad = None if total is None else total.clone()
            continue
        mine, other = (owner_name, copy_name) if world.worker == places[owner_name] else (copy_name, owner_name)
        own = here[mine].grad
        received = _swap(own, here[mine], world.peer(places[other]), world)
        first, second = (own, received) if mine == owner_name else (received, own)
        here[mine].grad = _sum(first, second)


def _sum(first: torch.Tensor | None, second: torch.Tensor | None) -> torch.Tensor | None:
    if first is None or second is None:
        return second if first is None else first
    return first + second


def _swap(own: torch.Tensor | None, like: torch.Tensor, peer: int, world: World) -> torch.Tensor | None:
    """Exchange a gradient that may be absent with ``peer``: first whether there is one, then itself."""
    flags = torch.tensor([0 if own is None else 1, 0], dtype=torch.int64, device=world.device)
    theirs = torch.zeros(1, dtype=torch.int64, device=world.device)
    _exchange([flags[:1]], [theirs], peer)
    received = torch.empty_like(like) if int(theirs) else None
    _exchange([] if own is None else [own], [] if received is None else [received], peer)
    return received


def _exchange(sent: Sequence[torch.Tensor], received: Sequence[torch.Tensor], peer: int) -> None:
    operations = [dist.P2POp(dist.isend, tensor.contiguous(), peer) for tensor in sent]
    operations += [dist.P2POp(dist.irecv, tensor, peer) for tensor in received]
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
    for item, module in held.modules.items():
        whole = [p for name, p in parameters_of(item, module).items() if held.split_dim(name) is None]
        gradients = [p.grad for p in whole if p.grad is not None]
        if gradients:
            flat = region.total(torch.cat([gradient.reshape(-1) for gradient in gradients]))
            for gradient, part in zip(gradients, flat.split([g.numel() for g in gradients]), strict=True):
                gradient.copy_(part.view_as(gradient))


def zero_pruned_gradients(modules: Mapping[str, nn.Module]) -> None:
    """Zero the gradients of pruned weights, so that neither norm nor moments see them."""
    for item, module in modules.items():
        for layer in masks_of(item, module).values():
            if layer.mask is not None and layer.weight.grad is not None:
                layer.weight.grad.mul_(layer.mask)


def gradient_norm(held: HeldItems, item_names: Sequence[str], ties: Mapping[str, str], world: World) -> float:
    """The global L2 norm of all gradients, a tied weight counted once; the same bits on any partition."""
    place = {name: index for index, name in enumerate(item_names)}
    squares = torch.zeros(len(item_names), dtype=torch.float64)
    norms: list[torch.Tensor] = []
    indices: list[int] = []
    for item, name, parameter in held.parameters():
        if parameter.grad is not None and name not in ties and held.counts(name):
            norms.append(torch.linalg.vector_norm(parameter.grad))
            indices.append(place[item])
    if norms:
        stacked = torch.stack(norms).to("cpu", torch.float64).square()
        for index, square in zip(indices, stacked.tolist(), strict=True):
            squares[index] += square
    total = 0.0
    # Over the ranks of a region first: the order of its sum must not depend on the pipeline's size.
    squares = sum_over_pipeline(world, sum_over(world.groups.tensor, squares))
    for square in squares.tolist():
        total += square
    return math.sqrt(total)


def clip_gradients(held: HeldItems, norm: float, limit: float) -> None:
    """Scale all gradients by ``limit / norm`` where the norm is above the limit (0: never)."""
    if limit <= 0 or norm <= limit:
        return
    scale = limit / (norm + 1e-6)
    for _, _, parameter in held.parameters():
        if parameter.grad is not None:
            parameter.grad.mul_(scale)
