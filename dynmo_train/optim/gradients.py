"""From the gradients of a backward to those of an update: the steps between the replicas' sums and the optimizer.

In this order, once per step::

    GradientReducer          sum over the replicas (grad_reducer.py, compression/powersgd.py)
    add_partial_gradients    sum what tensor ranks have unsliced and computed for their own tokens or heads
    add_tied_gradients       sum over the copies of a tied weight (or compression/tied_embeddings.py)
    zero_pruned_gradients    masked entries
    unscale                  divide by the loss scale (precision.py)
    ItemSquares              sums of squares by item, for the global L2 norm
    clip_divisor             scales to the maximum norm, within the optimizer's kernel

Norms are summed per finest item and then in list order, and tied gradients are added in list order: neither depends on
the partition, which keeps the bits of a run that moves layers. Norm, unscaling and clipping are batched over all local
parameters: a handful of kernels, whatever the number of replicas is. None of them waits for the device.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Mapping, Sequence

import torch
import torch.distributed as dist

from ..models.layer_list import is_of_heads, masks_of
from ..models.lora import is_adapter
from ..models.sharding import expert_of, needs_whole_stream
from ..parallel.process_groups import World
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
    presence: TiedPresence,
    done: Collection[str] = (),
) -> None:
    """Set ``grad`` of all copies of each tied weight to the sum of their gradients, added in list order.

    Args:
        store: Local items. A frozen copy has no gradient and adds nothing.
        ties: Parameter that is a copy -> parameter that owns the value.
        owners: Item -> its pipeline rank.
        world: Processes of the run.
        presence: Which copies have a gradient.
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
        gradients |= _swap(gradients, here[local[0]], ranks, world, presence)
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
    local: Mapping[str, torch.Tensor | None],
    like: torch.Tensor,
    ranks: Mapping[str, int],
    world: World,
    presence: TiedPresence,
) -> dict[str, torch.Tensor | None]:
    """Exchange gradients, which may be absent, with the other pipeline ranks that have a copy."""
    peers = _global_ranks(ranks, world)
    present = presence.of({name: gradient is not None for name, gradient in local.items()}, ranks, world)
    received = {name: torch.empty_like(like) if present[name] else None for name in peers}
    sent = [(peer, grad) for peer in sorted(set(peers.values())) for grad in local.values() if grad is not None]
    exchange(sent, [(peers[n], tensor) for n, tensor in received.items() if tensor is not None], world.groups.pipeline)
    return received


def _global_ranks(ranks: Mapping[str, int], world: World) -> dict[str, int]:
    """Return the global rank of the process that has each copy of a tied weight on other pipeline ranks."""
    others = {name: rank for name, rank in ranks.items() if rank != world.pipeline_rank}
    return {name: world.global_rank(world.peer(rank)) for name, rank in others.items()}


class TiedPresence:
    """Which copies of tied weights have gradients: exchanged once, because reading the answer waits for the device.

    The answer depends only on the partition and on the frozen prefix of the layer list, equal on all ranks.
    """

    def __init__(self) -> None:
        self._known: dict[tuple[str, ...], dict[str, bool]] = {}
        self._valid_for: object = None

    def keep_for(self, state: object) -> None:
        """Forget what is known unless it was found with this partition and these frozen items."""
        if state != self._valid_for:
            self._known.clear()
            self._valid_for = state

    def of(self, local: Mapping[str, bool], ranks: Mapping[str, int], world: World) -> dict[str, bool]:
        """Return whether each copy has a gradient; arguments as for :func:`exchange_presence`.

        Raises:
            RuntimeError: ``local`` is not what the last steps had.
        """
        names = tuple(ranks)
        if names not in self._known:
            self._known[names] = exchange_presence(local, ranks, world)
        known = self._known[names]
        if any(known[name] != present for name, present in local.items()):
            raise RuntimeError(f"gradients of tied weights {local} are not those of the steps before: {known}")
        return known


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


def add_partial_gradients(store: ItemStore) -> None:
    """Sum the gradients of parameters that tensor-parallel ranks have unsliced, of which each computed a part.

    Norms of queries and keys saw the rank's own heads, and the whole matrix of an adapter the rank's part of the other
    one; with sequence parallelism all saw its own tokens. One bucket per item, so that the partition cannot change the
    sum.
    """
    region = store.sharding.region
    if region is None:
        return
    for item, module in store.modules.items():
        # These run on the gathered tokens, identically on all ranks: their gradients are complete.
        is_whole = not region.sequence or needs_whole_stream(module)
        gradients = [
            parameter.grad
            for name, parameter in store.local_parameters(item).items()
            if parameter.grad is not None
            and store.sharding.split_dim(name) is None
            and (not is_whole or is_of_heads(name) or is_adapter(name))
        ]
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


class ItemSquares:
    """Sums of squares of the gradients by item, on the device; the same bits for an item wherever it is.

    The number of kernels does not depend on the number of parameters, items or processes, and nothing waits for the
    device.

    Args:
        item_names: All items, in list order.
        ties: Parameter that is a copy -> parameter that owns the value, which is counted once.
        experts: Item -> number of its experts, where replicas have different ones.
    """

    # Tensors per row: the length of a row must not depend on which items are local, because a sum may add in another
    # order for another length. Zeros fill the row and add nothing.
    ROW = 1024
    # At least the tensors of an expert: weights and biases of up to three layers.
    EXPERT_ROW = 8

    def __init__(
        self, item_names: Sequence[str], ties: Mapping[str, str], experts: Mapping[str, int] | None = None
    ) -> None:
        self._index_of = {name: index for index, name in enumerate(item_names)}
        self._ties = ties
        self._counted: tuple[str, ...] = ()
        self._places = torch.empty(0, dtype=torch.int64)
        self._rows = 0
        self._first_expert: dict[str, int] = {}
        self._num_experts = 0
        for item, count in (experts or {}).items():
            self._first_expert[item] = self._num_experts
            self._num_experts += count

    @property
    def length(self) -> int:
        """Number of items and sharded experts."""
        return len(self._index_of) + self._num_experts

    def __call__(self, store: ItemStore) -> torch.Tensor:
        """Return float64 ``[items + experts]`` on the device of ``store``; 0 for those that are not local.

        Experts that replicas share are counted one by one, not with their items: their sum over the ranks then has one
        order, wherever they are.
        """
        counted = [
            (item, name, parameter.grad)
            for item, name, parameter in store.parameters()
            if parameter.grad is not None and name not in self._ties and store.sharding.is_counted(name)
        ]
        items = len(self._index_of)
        if not counted:
            return torch.zeros(self.length, dtype=torch.float64, device=store.device)
        names = tuple(name for _, name, _ in counted)
        # The places change with the local items and the frozen ones only: copying them to the device takes time.
        if names != self._counted:
            self._counted = names
            self._place([(item, name) for item, name, _ in counted], store.device)
        norms = torch.stack(torch._foreach_norm([gradient for _, _, gradient in counted])).double()
        of_items = self._rows * items * self.ROW
        length = of_items + self._num_experts * self.EXPERT_ROW
        squares = torch.zeros(length, dtype=torch.float64, device=store.device)
        squares.index_copy_(0, self._places, norms.square_())
        of_all = squares[:of_items] if self._num_experts else squares
        rows = of_all.view(self._rows, items, self.ROW).sum(-1)
        total = rows[0]
        # One by one: the number of rows may differ between ranks, and zeros added in order change nothing.
        for row in rows[1:]:
            total = total + row
        if not self._num_experts:
            return total
        return torch.cat([total, squares[of_items:].view(self._num_experts, self.EXPERT_ROW).sum(-1)])

    def _place(self, counted: Sequence[tuple[str, str]], device: torch.device) -> None:
        numbers = [expert_of(name) if item in self._first_expert else None for item, name in counted]
        whole = Counter(item for (item, _), number in zip(counted, numbers, strict=True) if number is None)
        self._rows = 1 + (max(whole.values(), default=1) - 1) // self.ROW
        counts: Counter[tuple[str, int | None]] = Counter()
        places = []
        for (item, _), number in zip(counted, numbers, strict=True):
            row, column = divmod(counts[item, number], self.ROW)
            counts[item, number] += 1
            if number is None:
                places.append((row * len(self._index_of) + self._index_of[item]) * self.ROW + column)
            else:
                first = self._rows * len(self._index_of) * self.ROW
                places.append(first + (self._first_expert[item] + number) * self.EXPERT_ROW + column)
        self._places = torch.tensor(places, dtype=torch.int64).to(device, non_blocking=True)


def clip_divisor(norm: torch.Tensor, max_norm: float) -> torch.Tensor | None:
    """Return the number by which clipping divides every gradient, at least 1; None without clipping.

    Args:
        norm: Global L2 norm, a float64 scalar on the device.
        max_norm: Largest norm; 0 never clips.

    Returns:
        A float32 scalar on the device: ``(norm + 1e-6) / max_norm``, as in Megatron, where the norm is larger.
    """
    if max_norm <= 0:
        return None
    divisor = (norm + 1e-6) / max_norm
    return torch.where(norm > max_norm, divisor, 1.0).float()


def drop_gradients(store: ItemStore, names: Collection[str]) -> None:
    """Drop the gradients of parameters, by global name, that receive no update."""
    for _, name, parameter in store.parameters() if names else ():
        if name in names:
            parameter.grad = None


def largest_weight(store: ItemStore) -> float:
    """Return the largest absolute value of the local parameters, NaN where one is NaN; waits for the device."""
    return _largest([parameter.detach() for _, _, parameter in store.parameters()])


def is_state_finite(store: ItemStore) -> bool:
    """Whether the local parameters and moments are finite; waits for the device."""
    moments = [each for _, name, _ in store.parameters() for each in store.optimizers.moments(name).values()]
    return math.isfinite(largest_weight(store)) and math.isfinite(_largest(moments))


def _largest(tensors: Sequence[torch.Tensor]) -> float:
    norms = [torch.linalg.vector_norm(each, math.inf) for each in tensors if each.numel()]
    return float(torch.stack(norms).max()) if norms else 0.0
