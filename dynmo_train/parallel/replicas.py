"""What one replica computes, seen by all: for losses over the whole batch.

Shapes in names: B samples of a replica, N of all, P width.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch.autograd.function import once_differentiable

from .world import World


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


def gather_of(world: World) -> ReplicaGather | None:
    """That of this process; None where there is one replica."""
    group = world.groups.data
    return None if group is None else ReplicaGather(group, world.replica, world.dims.data)


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
