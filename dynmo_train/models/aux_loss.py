"""Losses that are born inside an item, such as a router's auxiliary loss or that of an early exit.

They cannot travel to the head as values: the boundary between stages has one static shape. Their gradient enters where
they are born, by one function that returns its input and adds the scaled gradient; their values go to the log.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch


class _WithLoss(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, loss: torch.Tensor, scale: float) -> torch.Tensor:
        ctx.scale, ctx.dtype, ctx.device = scale, loss.dtype, loss.device
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return grads[0], torch.full((), ctx.scale, dtype=ctx.dtype, device=ctx.device), None


def with_losses(x: torch.Tensor, losses: Iterable[torch.Tensor], scale: float) -> torch.Tensor:
    """``x`` itself, whose backward also adds the gradients of ``losses`` times ``scale``.

    Args:
        losses: scalars, weighted already, as they are added to the loss of their microbatch.
        scale: what the loss of a microbatch is multiplied with before its backward.
    """
    for loss in losses:
        if torch.is_grad_enabled() and loss.requires_grad:
            x = _WithLoss.apply(x, loss, scale)  # type: ignore[no-untyped-call]
    return x
