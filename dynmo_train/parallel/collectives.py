"""Collectives on one tensor, by the names that torch has for them: 2.13 has new ones, and warns of the old."""

from __future__ import annotations

from types import ModuleType

import torch
import torch.distributed as dist


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
