"""Data parallelism: the gradients of the replicas are added, one bucket an item.

Buckets follow the layer list, never the stages, and a bucket is added in one collective whichever way it is started: so
neither the partition nor ``--DDP-impl`` changes a bit.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import nn

from .world import World


@dataclass(frozen=True, kw_only=True)
class _Bucket:
    parameters: list[nn.Parameter]
    flat: torch.Tensor
    work: dist.Work | None


class GradientReducer:
    """Adds the gradients of items over the replicas: each as soon as it is final, or all at the end of a step.

    Args:
        overlap: start an item's bucket when its gradients are final, while others are still being computed
            (``--DDP-impl torch``); else at the end of the step (``local``).
    """

    def __init__(self, world: World, *, overlap: bool) -> None:
        self._group, self._overlap = world.groups.data, overlap
        self._started: dict[str, list[_Bucket]] = {}

    @property
    def overlaps(self) -> bool:
        """Whether anybody has to tell when an item is final."""
        return self._overlap and self._group is not None

    def item_is_final(self, item: str, parameters: Sequence[nn.Parameter]) -> None:
        """Start adding the gradients of ``item``: no backward of this step will touch them any more."""
        if self.overlaps and item not in self._started:
            self._start(item, parameters)

    def finish(self, items: Sequence[tuple[str, Sequence[nn.Parameter]]]) -> None:
        """Add what is not being added yet, and wait for all; every replica calls this with the same items.

        Args:
            items: names and parameters of all held items, in list order.
        """
        if self._group is None:
            return
        for item, parameters in items:
            if item not in self._started:
                self._start(item, parameters)
        for buckets in self._started.values():
            for bucket in buckets:
                _finish(bucket)
        self._started.clear()

    def _start(self, item: str, parameters: Sequence[nn.Parameter]) -> None:
        with_gradient = [parameter for parameter in parameters if parameter.grad is not None]
        self._started[item] = []
        if with_gradient:
            flat = torch.cat([p.grad.reshape(-1) for p in with_gradient if p.grad is not None])
            work = dist.all_reduce(flat, group=self._group, async_op=True)
            self._started[item].append(_Bucket(parameters=with_gradient, flat=flat, work=work))


def _finish(bucket: _Bucket) -> None:
    if bucket.work is not None:
        bucket.work.wait()
    begin = 0
    for parameter in bucket.parameters:
        end = begin + parameter.numel()
        parameter.grad = bucket.flat[begin:end].view_as(parameter)
        begin = end
