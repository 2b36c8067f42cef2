"""Asynchronous tensor parallelism: products that overlap with the collectives of sequence parallelism.

torch's fused operators cut an all-gather and the product behind it, or a product and the reduce-scatter behind it, into
one part per rank: while a part is multiplied, the next one is copied between the GPUs over symmetric memory. Both
directions of a layer have such a pair (Korthikanti et al. 2022, arXiv:2205.05198, figure 6)::

                       forward                       backward
    column-parallel    all-gather, product           product, reduce-scatter;   weight: gradient^T @ gathered input
    row-parallel       product, reduce-scatter       all-gather, product;       weight: gathered gradient^T @ input

Sums over ranks are in the order of the ranks. On devices without these kernels the same operations run one after
another, for tests.

Shapes in names: B samples, T tokens, I input features, O output features, both of this rank's slice.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch.autograd.function import once_differentiable

from .process_groups import World, all_agree

TOKENS_DIM = 1
PROBE_ELEMENTS = 1024


def _gather_product(x: torch.Tensor, weight: torch.Tensor, group: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """The tokens of all ranks ``[B, T, ...]``, and their product with ``weight``."""
    if x.device.type == "cuda":
        import torch.distributed._symmetric_memory  # registers the operators

        whole, [product] = torch.ops.symm_mem.fused_all_gather_matmul(x, [weight], TOKENS_DIM, group)
    else:
        from torch.distributed._symmetric_memory import _fused_all_gather_matmul_fallback

        whole, [product] = _fused_all_gather_matmul_fallback(x, [weight], TOKENS_DIM, group)
    return whole, product


def _product_scatter(x: torch.Tensor, weight: torch.Tensor, group: Any) -> torch.Tensor:
    """This rank's tokens of the ranks' summed products of ``x`` and ``weight``."""
    if x.device.type == "cuda":
        import torch.distributed._symmetric_memory  # registers the operators

        scattered: torch.Tensor = torch.ops.symm_mem.fused_matmul_reduce_scatter(x, weight, "sum", TOKENS_DIM, group)
    else:
        from torch.distributed._symmetric_memory import _fused_matmul_reduce_scatter_fallback

        scattered = _fused_matmul_reduce_scatter_fallback(x, weight, "sum", TOKENS_DIM, group)
    return scattered


def _weight_gradient(grad: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    return grad.flatten(0, -2).t() @ x.flatten(0, -2)


class _GatherProduct(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight_OI: torch.Tensor, group: Any) -> torch.Tensor:
        x_BTI, y_BTO = _gather_product(x, weight_OI.t(), group)
        ctx.save_for_backward(x_BTI, weight_OI)
        ctx.group = group
        return y_BTO.contiguous()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Any) -> Any:
        x_BTI, weight_OI = ctx.saved_tensors
        grad_BTO = grads[0].contiguous()
        grad_x = _product_scatter(grad_BTO, weight_OI, ctx.group) if ctx.needs_input_grad[0] else None
        return grad_x, _weight_gradient(grad_BTO, x_BTI) if ctx.needs_input_grad[1] else None, None


class _ProductScatter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_BTI: torch.Tensor, weight_OI: torch.Tensor, group: Any) -> torch.Tensor:
        ctx.save_for_backward(x_BTI, weight_OI)
        ctx.group = group
        return _product_scatter(x_BTI.contiguous(), weight_OI.t(), group)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Any) -> Any:
        x_BTI, weight_OI = ctx.saved_tensors
        grad_BTO, grad_x = _gather_product(grads[0].contiguous(), weight_OI, ctx.group)
        grad_weight = _weight_gradient(grad_BTO, x_BTI) if ctx.needs_input_grad[1] else None
        return grad_x.contiguous() if ctx.needs_input_grad[0] else None, grad_weight, None


def gather_product(x: torch.Tensor, weight_OI: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """Gather tokens and multiply, the two overlapped.

    Args:
        x: this rank's tokens, ``[B, T / size, I]``.
        weight_OI: slice of a column-parallel weight, ``[O, I]``.
        group: tensor-parallel ranks.

    Returns:
        ``[B, T, O]``.
    """
    y: torch.Tensor = _GatherProduct.apply(x, weight_OI, group.group_name)  # type: ignore[no-untyped-call]
    return y


def product_scatter(x_BTI: torch.Tensor, weight_OI: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """Multiply, and sum the ranks' products for this rank's tokens, the two overlapped.

    Args:
        x_BTI: input of this rank's slice, all tokens, ``[B, T, I]``.
        weight_OI: slice of a row-parallel weight, ``[O, I]``.
        group: tensor-parallel ranks.

    Returns:
        ``[B, T / size, O]``.
    """
    y: torch.Tensor = _ProductScatter.apply(x_BTI, weight_OI, group.group_name)  # type: ignore[no-untyped-call]
    return y


def symmetric_memory_obstacle(world: World) -> str | None:
    """Why the tensor-parallel ranks have no symmetric memory on some rank of the run; None if they have it.

    Every rank calls this.
    """
    obstacle = _local_obstacle(world)
    if all_agree(world, obstacle is None):
        return None
    return obstacle or "another rank has none"


def _local_obstacle(world: World) -> str | None:
    group = world.groups.tensor
    if group is None:
        return "there is one tensor-parallel rank"
    if world.device.type != "cuda":
        return f"this process runs on {world.device.type}"
    try:
        import torch.distributed._symmetric_memory as symmetric_memory

        probe = symmetric_memory.empty(PROBE_ELEMENTS, device=world.device)
        symmetric_memory.rendezvous(probe, group.group_name)
    except (ImportError, AttributeError, RuntimeError) as error:
        return str(error).partition("\n")[0]
    return None
