"""Collectives on one tensor that work with the names of torch 2.11 and of torch 2.13, which deprecates the old ones."""

from __future__ import annotations

from contextlib import AbstractContextManager
from types import ModuleType
from typing import Any

import torch
import torch.distributed as dist
from torch.autograd.function import once_differentiable

from .process_groups import World


def all_gather_rows(
    out: torch.Tensor, local: torch.Tensor, group: dist.ProcessGroup | None, names: ModuleType = dist
) -> None:
    """Concatenate the ranks' tensors along the first dimension.

    Args:
        out: Result, ``[size * n, ...]``.
        local: This rank's tensor, ``[n, ...]``.
        group: Process group; None is torch's default group.
        names: Module that has the collectives.
    """
    gather = getattr(names, "all_gather_single", None) or names.all_gather_into_tensor
    gather(out, local, group=group)


def start_gather_rows(out: torch.Tensor, local: torch.Tensor, group: dist.ProcessGroup) -> dist.Work:
    """Start :func:`all_gather_rows`; returns the handle to wait for.

    Args:
        out: Result, ``[size * n, ...]``.
        local: This rank's tensor, ``[n, ...]``.
        group: Process group.
    """
    gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
    work: dist.Work = gather(out, local, group=group, async_op=True)
    return work


def reduce_scatter_rows(
    out: torch.Tensor, local: torch.Tensor, group: dist.ProcessGroup | None, names: ModuleType = dist
) -> None:
    """Sum the ranks' tensors and keep this rank's chunk of the sum along the first dimension.

    Args:
        out: Result, ``[n, ...]``.
        local: This rank's tensor, ``[size * n, ...]``.
        group: Process group; None is torch's default group.
        names: Module that has the collectives.
    """
    scatter = getattr(names, "reduce_scatter_single", None) or names.reduce_scatter_tensor
    scatter(out, local, group=group)


def coalescing(group: dist.ProcessGroup) -> AbstractContextManager[Any]:
    """Return a context whose gathers, or reduce-scatters, are one collective of ``group``."""
    # Private in torch 2.11 to 2.13, whose own FSDP uses it.
    context: AbstractContextManager[Any] = dist._coalescing_manager(group)  # type: ignore[attr-defined]
    return context


def all_gather_samples(out: torch.Tensor, local: torch.Tensor, group: dist.ProcessGroup) -> None:
    """Concatenate the ranks' tensors along the second dimension, without a copy; NCCL does so in one launch.

    Args:
        out: Result, ``[B, size * n, ...]``, contiguous.
        local: This rank's tensor, ``[B, n, ...]``, contiguous.
        group: Process group.
    """
    with coalescing(group):
        for sample in range(len(out)):
            all_gather_rows(out[sample], local[sample], group)


def reduce_scatter_samples(out: torch.Tensor, local: torch.Tensor, group: dist.ProcessGroup) -> None:
    """Sum the ranks' tensors and keep this rank's chunk of the sum along the second dimension, without a copy.

    Args:
        out: Result, ``[B, n, ...]``, contiguous.
        local: This rank's tensor, ``[B, size * n, ...]``, contiguous.
        group: Process group.
    """
    with coalescing(group):
        for sample in range(len(out)):
            reduce_scatter_rows(out[sample], local[sample], group)


class ReplicaGather:
    """Gathers rows over the data-parallel replicas, for losses that compare all samples of a microbatch.

    Args:
        group: Data-parallel ranks.
        rank: Rank of this process in the group.
        size: Number of ranks.
    """

    def __init__(self, group: dist.ProcessGroup, rank: int, size: int) -> None:
        self.group, self.rank, self.size = group, rank, size

    def gather(self, local_BP: torch.Tensor) -> torch.Tensor:
        """Concatenate the rows ``local_BP`` of all replicas in their order: ``[B, P]`` to ``[N, P]``, N = size * B.

        Every replica computes the same from the result, so each already has the gradient of its own rows. It is
        multiplied by the number of replicas, because gradients of replicas are summed and their losses averaged.
        """
        gathered: torch.Tensor = _Gather.apply(local_BP, self)  # type: ignore[no-untyped-call]
        return gathered


def replica_gather(world: World) -> ReplicaGather | None:
    """Return the gather of this process; None with one replica."""
    group = world.groups.data
    return None if group is None else ReplicaGather(group, world.data_rank, world.dims.data)


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, local_BP: torch.Tensor, replicas: ReplicaGather) -> torch.Tensor:
        ctx.replicas = replicas
        local_BP = local_BP.contiguous()
        parts = [torch.empty_like(local_BP) for _ in range(replicas.size)]
        dist.all_gather(parts, local_BP, group=replicas.group)
        return torch.cat(parts)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Any) -> Any:
        replicas = ctx.replicas
        return grads[0].chunk(replicas.size)[replicas.rank] * replicas.size, None
