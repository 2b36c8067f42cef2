"""Collectives on one tensor, by the names that torch has for them: 2.13 has new ones, and warns of the old."""

from __future__ import annotations

from types import ModuleType
from typing import Any

import torch
import torch.distributed as dist
from torch.autograd.function import once_differentiable

from .process_groups import World


def gather_parts(
    whole: torch.Tensor, own: torch.Tensor, group: dist.ProcessGroup | None, names: ModuleType = dist
) -> None:
    """Fill ``whole`` with the ranks' ``own`` tensors, one behind the other along the first dimension."""
    gather = getattr(names, "all_gather_single", None) or names.all_gather_into_tensor
    gather(whole, own, group=group)


def scatter_sum(
    own: torch.Tensor, whole: torch.Tensor, group: dist.ProcessGroup | None, names: ModuleType = dist
) -> None:
    """Fill ``own`` with this rank's part, along the first dimension, of the sum of the ranks' ``whole`` tensors."""
    scatter = getattr(names, "reduce_scatter_single", None) or names.reduce_scatter_tensor
    scatter(own, whole, group=group)


class ReplicaGather:
    """The processes that hold the same items of other replicas, as one of them sees it."""

    def __init__(self, group: dist.ProcessGroup, rank: int, size: int) -> None:
        self.group, self.rank, self.size = group, rank, size

    def gather(self, own_BP: torch.Tensor) -> torch.Tensor:
        """The rows of all replicas in their order, ``[N, P]``.

        Every replica computes the same of the result, so the gradient of the mean over the replicas' losses comes to
        each one's rows as often as there are replicas: no second exchange is needed.
        """
        gathered: torch.Tensor = _Gather.apply(own_BP, self)  # type: ignore[no-untyped-call]
        return gathered


def replica_gather(world: World) -> ReplicaGather | None:
    """That of this process; None where there is one replica."""
    group = world.groups.data
    return None if group is None else ReplicaGather(group, world.data_rank, world.dims.data)


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, own_BP: torch.Tensor, replicas: ReplicaGather) -> torch.Tensor:
        ctx.replicas = replicas
        own_BP = own_BP.contiguous()
        parts = [torch.empty_like(own_BP) for _ in range(replicas.size)]
        dist.all_gather(parts, own_BP, group=replicas.group)
        return torch.cat(parts)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Any) -> Any:
        replicas = ctx.replicas
        return grads[0].chunk(replicas.size)[replicas.rank] * replicas.size, None
