"""Data parallelism: the gradients of the replicas are added, one bucket an item.

Buckets follow the layer list, never the stages, and a bucket is added in one collective whichever way it is started: so
neither the partition nor ``--DDP-impl`` changes a bit.
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
from .item_store import ItemStore


class Adding(Protocol):
    """Gradients that are being added in two goes, or in one."""

    def advance(self) -> None:
        """Wait for the first go, and begin the second one."""

    def finish(self) -> None:
        """Wait for the end; the parameters have the sum then."""


class Compressor(Protocol):
    """Adds some gradients in its own way."""

    def start(self, item: str, parameters: Mapping[str, nn.Parameter]) -> tuple[Adding | None, list[nn.Parameter]]:
        """Begin with the gradients of an item; also the parameters that are to be added as they are."""


@dataclass(frozen=True, kw_only=True)
class _Bucket:
    parameters: list[nn.Parameter]
    flat: torch.Tensor
    work: dist.Work | None

    def advance(self) -> None:
        """There is one go."""

    def finish(self) -> None:
        """Wait, and give the parameters their parts of the sum."""
        if self.work is not None:
            self.work.wait()
        begin = 0
        for parameter in self.parameters:
            end = begin + parameter.numel()
            parameter.grad = self.flat[begin:end].view_as(parameter)
            begin = end


class GradientReducer:
    """Adds the gradients of items over the replicas: each as soon as it is final, or all at the end of a step.

    Args:
        overlap: start an item's bucket when its gradients are final, while others are still being computed
            (``--DDP-impl torch``); else at the end of the step (``local``).
        compressor: adds what it can in its own way.
        elsewhere: names of parameters that somebody else adds.
    """

    def __init__(
        self,
        store: ItemStore,
        world: World,
        *,
        overlap: bool,
        compressor: Compressor | None = None,
        elsewhere: frozenset[str] = frozenset(),
    ) -> None:
        self._compressor, self._elsewhere = compressor, elsewhere
        self._store, self._group, self._expert_group = store, world.groups.data, world.groups.expert_data
        self._overlap = overlap
        self._started: dict[str, list[Adding]] = {}

    @property
    def overlaps(self) -> bool:
        """Whether anybody has to tell when an item is final."""
        return self._overlap and self._group is not None

    def item_is_final(self, item: str) -> None:
        """Start adding the gradients of ``item``: no backward of this step will touch them any more."""
        if item not in self._started:
            self._started[item] = self._start(item)

    def finish(self) -> None:
        """Add what is not being added yet, and wait for all; every replica calls this with the same items held."""
        if self._group is None:
            for item in self._store.modules:
                self._store.materialize_grads(item)
            return
        for item in self._store.modules:
            self.item_is_final(item)
        for buckets in self._started.values():
            for bucket in buckets:
                bucket.advance()
        for buckets in self._started.values():
            for bucket in buckets:
                bucket.finish()
        self._started.clear()

    def _start(self, item: str) -> list[Adding]:
        self._store.materialize_grads(item)
        if self._store.fsdp is not None:
            self._store.reduce(item)
            return []
        own = {name: p for name, p in self._store.own_parameters(item).items() if p.grad is not None}
        own = {name: p for name, p in own.items() if name not in self._elsewhere}
        if self._compressor is not None and own:
            packed, plain = self._compressor.start(item, own)
            return [*([packed] if packed is not None else []), *_add(plain, self._group)]
        if self._store.dispatcher is None:
            return _add(list(own.values()), self._group)
        # Rows of all replicas of an exchange have reached its experts: only other exchanges hold more gradients.
        apart = [p for name, p in own.items() if is_of_expert(name)]
        shared = [p for name, p in own.items() if not is_of_expert(name)]
        return _add(shared, self._group) + _add(apart, self._expert_group)


def _add(parameters: list[nn.Parameter], group: dist.ProcessGroup | None) -> list[Adding]:
    if not parameters or group is None:
        return []
    flat = torch.cat([p.grad.reshape(-1) for p in parameters if p.grad is not None])
    work = dist.all_reduce(flat, group=group, async_op=True)
    return [_Bucket(parameters=parameters, flat=flat, work=work)]
