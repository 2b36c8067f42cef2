"""Data parallelism: sums the gradients of the replicas, in one bucket per item.

Buckets follow the layer list, never the stages, and each is summed in one all-reduce whenever that starts. So neither
the partition nor ``--DDP-impl`` changes a bit.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

import torch
import torch.distributed as dist
from torch import nn

from ..models.sharding import is_of_expert
from ..parallel.process_groups import World
from .expert_replicas import ExpertReplicas
from .item_store import ItemStore


class Reduction(Protocol):
    """A sum of gradients in progress, in one or two collectives."""

    def advance(self) -> None:
        """Wait for the first collective and start the second one, if there is one."""

    def finish(self) -> None:
        """Wait for the last collective and set ``grad`` of the parameters to the sums."""


class Compressor(Protocol):
    """Sums some gradients in compressed form."""

    def start(self, item: str, parameters: Mapping[str, nn.Parameter]) -> tuple[Reduction | None, list[nn.Parameter]]:
        """Start with the gradients of an item; also return the parameters to be summed uncompressed."""


@dataclass(frozen=True, kw_only=True)
class _Bucket:
    """One all-reduce.

    Attributes:
        flat: Gradients of an item, float32 ``[elements]``; ``grad`` of its parameters are views of it.
        sent: What is summed: ``flat``, or a copy in another dtype.
        work: The all-reduce in progress.
    """

    flat: torch.Tensor
    sent: torch.Tensor
    work: dist.Work | None

    def advance(self) -> None:
        """There is one collective."""

    def finish(self) -> None:
        """Wait for the sums."""
        if self.work is not None:
            self.work.wait()
        if self.sent is not self.flat:
            self.flat.copy_(self.sent)


class GradientReducer:
    """Sums the gradients of items over the replicas: each when it is final, or all at the end of a step.

    Args:
        store: Local items.
        world: Processes of the run.
        overlap: Start an item's bucket when its gradients are final, while others are still computed
            (``--DDP-impl torch``); False starts all at the end of the step (``local``).
        compressor: Sums what it can in compressed form.
        dtype: dtype of the sums.
        excluded: Names of parameters that are summed by :func:`add_fused_gradients`.
        experts: Copies of experts, whose gradients come first; None without copies.
    """

    def __init__(
        self,
        store: ItemStore,
        world: World,
        *,
        overlap: bool,
        compressor: Compressor | None = None,
        dtype: torch.dtype = torch.float32,
        excluded: frozenset[str] = frozenset(),
        experts: ExpertReplicas | None = None,
    ) -> None:
        self._experts = experts
        self._compressor, self._excluded = compressor, excluded
        self._store, self._group, self._expert_group = store, world.groups.data, world.groups.expert_data
        self._copies = world.groups.shard_copies, world.groups.expert_shard_copies
        self._overlap, self._dtype = overlap, dtype
        self._started: dict[str, list[Reduction]] = {}

    @property
    def overlaps(self) -> bool:
        """Whether :meth:`item_is_final` has to be called during the backward."""
        return self._overlap and self._group is not None

    def item_is_final(self, item: str) -> None:
        """Start the sums of ``item``, whose gradients no backward of this step changes any more."""
        if item not in self._started:
            self._started[item] = self._start(item)

    def finish(self) -> None:
        """Start what has not started and wait for all; a collective over replicas with the same items."""
        if self._group is None:
            for item in self._store.modules:
                self._store.materialize_grads(item)
            return
        # In list order: all replicas must start their collectives in one order, and the overlap has started some.
        for item in self._store.modules:
            self.item_is_final(item)
        self._store.finish_sharded_reduction()
        if self._store.sharding.fsdp is not None:
            for item in self._store.modules:
                # Hybrid sharding: the rows of the sums of each replica of the shards.
                self._started[item] = self._sum(self._with_gradients(item), *self._copies)
        # All second collectives start before the first of them is awaited, so that they overlap.
        for reductions in self._started.values():
            for reduction in reductions:
                reduction.advance()
        for reductions in self._started.values():
            for reduction in reductions:
                reduction.finish()
        self._started.clear()

    def _start(self, item: str) -> list[Reduction]:
        self._store.materialize_grads(item)
        if self._store.sharding.fsdp is not None:
            self._store.start_sharded_reduction(item)
            return []
        # Before the gradients of the item: those of experts have no ``grad`` until their copies have been added.
        copies = None if self._experts is None else self._experts.reduce(item, self._of_experts)
        parameters = self._with_gradients(item)
        if copies is not None:
            return [copies, *self._sum(parameters, self._group, self._expert_group)]
        if self._compressor is not None and parameters:
            compressed, plain = self._compressor.start(item, parameters)
            return [*([compressed] if compressed is not None else []), *self._all_reduce(plain, self._group)]
        return self._sum(parameters, self._group, self._expert_group)

    def _with_gradients(self, item: str) -> dict[str, nn.Parameter]:
        local = self._store.local_parameters(item).items()
        return {name: p for name, p in local if p.grad is not None and name not in self._excluded}

    def _of_experts(self, parameters: list[nn.Parameter]) -> list[Reduction]:
        return self._all_reduce(parameters, self._expert_group)

    def _sum(
        self,
        parameters: Mapping[str, nn.Parameter],
        group: dist.ProcessGroup | None,
        expert_group: dist.ProcessGroup | None,
    ) -> list[Reduction]:
        """Start the sums of an item over ``group``, of its experts over ``expert_group``."""
        if self._store.sharding.dispatcher is None:
            return self._all_reduce(list(parameters.values()), group)
        # An expert has seen the rows of all replicas of its dispatcher: only replicas of other dispatchers, which have
        # the same expert, have more gradients for it.
        experts = [p for name, p in parameters.items() if is_of_expert(name)]
        shared = [p for name, p in parameters.items() if not is_of_expert(name)]
        return self._all_reduce(shared, group) + self._all_reduce(experts, expert_group)

    def _all_reduce(self, parameters: list[nn.Parameter], group: dist.ProcessGroup | None) -> list[Reduction]:
        if not parameters or group is None:
            return []
        # One buffer per item. An all-reduce may add in an order that depends on an element's offset, so that a buffer
        # that followed the stages would give other bits on another partition.
        flat = torch.cat([p.grad.reshape(-1) for p in parameters if p.grad is not None])
        begin = 0
        # Now, not after the sum: the gradients that were copied are freed at once, so that never more than one item has
        # two of them.
        for parameter in parameters:
            end = begin + parameter.numel()
            parameter.grad = flat[begin:end].view_as(parameter)
            begin = end
        sent = flat if flat.dtype == self._dtype else flat.to(self._dtype)
        return [_Bucket(flat=flat, sent=sent, work=dist.all_reduce(sent, group=group, async_op=True))]
