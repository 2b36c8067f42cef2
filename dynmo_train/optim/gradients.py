"""From the gradients of a backward to those of an update: the steps between the replicas' sums and the optimizer.

In this order, once per step::

    GradientReducer          sum over the replicas (grad_reducer.py, compression/powersgd.py)
    add_token_gradients      sequence parallelism: sum what every tensor rank has unsliced
    add_tied_gradients       sum over the copies of a tied weight (or compression/tied_embeddings.py)
    zero_pruned_gradients    masked entries
    unscale                  divide by the loss scale (precision.py)
    gradient_norm            global L2 norm
    clip_gradients           scale by max_norm / norm

Norms are summed per finest item and then in list order, and tied gradients are added in list order: neither depends on
the partition, which keeps the bits of a run that moves layers. Norm, unscaling and clipping are batched over all local
parameters: a handful of kernels, whatever the number of replicas is.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence

import torch
import torch.distributed as dist

from ..models.layer_list import masks_of
from ..models.sharding import needs_whole_stream
from ..parallel.process_groups import World, sum_over, sum_over_pipeline
from .item_store import ItemStore


def item_of(parameter_name: str, item_names: Sequence[str]) -> str:
    """Return the item of a parameter: the longest item name that the parameter's name extends."""
    return max((name for name in item_names if parameter_name.startswith(name + ".")), key=len)


def tied_groups(ties: Mapping[str, str]) -> dict[str, list[str]]:
    """Return the parameters that share a value by their owner: the owner first, then its copies, in list order."""
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
    """Set ``grad`` of all copies of each tied weight to the sum of their gradients, added in list order.

    Args:
        store: Local items. A frozen copy has no gradient and adds nothing.
        ties: Parameter that is a copy -> parameter that owns the value.
        owners: Item -> its pipeline rank.
        world: Processes of the run.
        done: Owners whose gradients are already added.
    """
    here = {name: parameter for _, name, parameter in store.parameters()}
    for members in tied_groups(ties).values():
        if members[0] in done:
            continue
        ranks = {name: owners[item_of(name, list(owners))] for name in members}
        local = [name for name in members if ranks[name] == world.pipeline_rank]
        if not local:
            continue
        gradients = {name: here[name].grad for name in local}
        gradients |= _swap(gradients, here[local[0]], ranks, world)
        total: torch.Tensor | None = None
        # Every rank adds in the order of the layer list, whichever of the summands it has received: float addition is
        # not associative.
        for name in members:
            total = _sum(total, gradients[name])
        set_tied_gradients(store, here, local, total)


def set_tied_gradients(
    store: ItemStore, parameters: Mapping[str, torch.Tensor], local: Sequence[str], total: torch.Tensor | None
) -> None:
    """Set ``grad`` of the local copies of a tied weight to the total; an alias has none, its owner is updated.

    Args:
        store: Local items.
        parameters: Global name -> local parameter.
        local: Names of the local copies.
        total: Sum of the gradients, in the shape of each copy; None where no copy has a gradient.
    """
    for name in local:
        if total is None or store.optimizers.is_alias(name):
            parameters[name].grad = None
        else:
            # Copies: clipping scales each ``grad`` in place, and would scale a shared one twice.
            parameters[name].grad = total if name == local[0] else total.clone()


def _sum(first: torch.Tensor | None, second: torch.Tensor | None) -> torch.Tensor | None:
    """Return the sum, in place of ``first``, which is not needed any more."""
    if first is None or second is None:
        return second if first is None else first
    return first.add_(second)


def _swap(
    local: Mapping[str, torch.Tensor | None], like: torch.Tensor, ranks: Mapping[str, int], world: World
) -> dict[str, torch.Tensor | None]:
    """Exchange gradients, which may be absent, with the other pipeline ranks that have a copy."""
    peers = _global_ranks(ranks, world)
    present = exchange_presence({name: gradient is not None for name, gradient in local.items()}, ranks, world)
    received = {name: torch.empty_like(like) if present[name] else None for name in peers}
    sent = [(peer, grad) for peer in sorted(set(peers.values())) for grad in local.values() if grad is not None]
    exchange(sent, [(peers[n], tensor) for n, tensor in received.items() if tensor is not None], world.groups.pipeline)
    return received


def _global_ranks(ranks: Mapping[str, int], world: World) -> dict[str, int]:
    """Return the global rank of the process that has each copy of a tied weight on other pipeline ranks."""
    others = {name: rank for name, rank in ranks.items() if rank != world.pipeline_rank}
    return {name: world.global_rank(world.peer(rank)) for name, rank in others.items()}


def exchange_presence(local: Mapping[str, bool], ranks: Mapping[str, int], world: World) -> dict[str, bool]:
    """Return which copies of a tied weight have gradients, exchanged among their pipeline ranks.

    Args:
        local: Local copy -> whether it has a gradient.
        ranks: Copy -> its pipeline rank.
        world: Processes of the run.
    """
    peers = _global_ranks(ranks, world)
    # Peers must know before the exchange whether to expect a gradient: a frozen copy has none.
    flags = [torch.tensor([int(present)], dtype=torch.int64, device=world.device) for present in local.values()]
    theirs = {name: torch.zeros(1, dtype=torch.int64, device=world.device) for name in peers}
    sent = [(peer, flag) for peer in sorted(set(peers.values())) for flag in flags]
    exchange(sent, [(peers[name], flag) for name, flag in theirs.items()], world.groups.pipeline)
    return {**local, **{name: bool(flag) for name, flag in theirs.items()}}


def exchange(
    sent: Sequence[tuple[int, torch.Tensor]],
    received: Sequence[tuple[int, torch.Tensor]],
    group: dist.ProcessGroup | None,
) -> None:
    """Send and receive tensors concurrently; both sides of a pair list theirs in the same order.

    Args:
        sent: (global rank, tensor) to send, of any shape.
        received: (global rank, tensor) to receive into, contiguous, in the shape and dtype that the other side sends.
        group: Process group of all ranks.
    """
    # gloo announces that a receive is ready over the stream that carries the other direction's data. Receives are
    # posted first; otherwise the two directions of a swap run one after the other.
    operations = [dist.P2POp(dist.irecv, tensor, peer, group) for peer, tensor in received]
    operations += [dist.P2POp(dist.isend, tensor.contiguous(), peer, group) for peer, tensor in sent]
    if operations:
        for work in dist.batch_isend_irecv(operations):
            work.wait()


def add_token_gradients(store: ItemStore) -> None:
    """With sequence parallelism: sum the gradients of parameters that all tensor-parallel ranks have unsliced.

    Each rank saw its own tokens only. One bucket per item, so that the partition cannot change the sum.
    """
    region = store.sharding.region
    if region is None or not region.sequence:
        return
    for item, module in store.modules.items():
        # These run on the gathered tokens, identically on all ranks: their gradients are complete.
        if needs_whole_stream(module):
            continue
        local = store.local_parameters(item).items()
        gradients = [p.grad for name, p in local if store.sharding.split_dim(name) is None and p.grad is not None]
        if gradients:
            flat = region.all_reduce(torch.cat([gradient.reshape(-1) for gradient in gradients]))
            for gradient, part in zip(gradients, flat.split([g.numel() for g in gradients]), strict=True):
                gradient.copy_(part.view_as(gradient))


def zero_pruned_gradients(store: ItemStore) -> None:
    """Zero the gradients of pruned weights, so that they enter neither the norm nor the moments."""
    for item, module in store.modules.items():
        parameters = store.local_parameters(item)
        for name, layer in masks_of(item, module).items():
            if layer.mask is not None and (gradient := parameters[name].grad) is not None:
                gradient.mul_(store.sharding.local_rows(name, layer.mask))


def gradient_norm(store: ItemStore, item_names: Sequence[str], ties: Mapping[str, str], world: World) -> float:
    """Return the global L2 norm of all gradients, a tied weight counted once; the same bits on any partition.

    The number of kernels depends on the number of local parameters only: one batched norm of all of them, and one copy
    of the results to the host.

    Args:
        store: Local items.
        item_names: All items, in list order.
        ties: Parameter that is a copy -> parameter that owns the value.
        world: Processes of the run.
    """
    index_of = {name: index for index, name in enumerate(item_names)}
    counted = [
        (index_of[item], parameter.grad)
        for item, name, parameter in store.parameters()
        if parameter.grad is not None and name not in ties and store.sharding.is_counted(name)
    ]
    squares = [0.0] * len(item_names)
    if counted:
        # The norm of a tensor does not depend on the list that it is in, so each item adds the same numbers wherever it
        # is. One copy for all norms: reading each one would wait for the device for every parameter.
        norms = torch.stack(torch._foreach_norm([gradient for _, gradient in counted]))
        for (index, _), norm in zip(counted, norms.tolist(), strict=True):
            squares[index] += norm * norm
    sums = torch.tensor(squares, dtype=torch.float64)
    # Over the tensor ranks first: the order of that sum must not depend on the size of the pipeline. Over the pipeline
    # all ranks but one add zero to each item. The length is that of the list, so an all-reduce adds in one order.
    sums = sum_over_pipeline(world, sum_over(world.groups.tensor, sums))
    sums = sum_over(world.groups.expert if store.sharding.fsdp is None else world.groups.data, sums)
    # Exactly rounded: a tensor's sum may add in another order for another length, Python's own in another version.
    return math.sqrt(math.fsum(sums.tolist()))


def clip_gradients(store: ItemStore, norm: float, max_norm: float) -> None:
    """Scale all gradients by ``max_norm / norm`` where the norm is above ``max_norm``; 0 never clips."""
    if max_norm <= 0 or norm <= max_norm:
        return
    # 1e-6 as in torch.nn.utils.clip_grad_norm_ and Megatron.
    scale = max_norm / (norm + 1e-6)
    gradients = [parameter.grad for _, _, parameter in store.parameters() if parameter.grad is not None]
    if gradients:
        torch._foreach_mul_(gradients, scale)
