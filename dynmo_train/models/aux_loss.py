"""Auxiliary losses of an item, such as a router's load-balancing loss or the loss of an early exit.

They are not sent to the head: the boundary between stages has one static shape. Instead their gradient enters at the
item's output, by an autograd function that is the identity in the forward; their values go to the log.

    forward   x ───────────────▶ x
    backward  grad ────────────▶ grad x;   scale ──▶ grad loss
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch


class _WithLoss(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, loss: torch.Tensor, scale: float) -> torch.Tensor:
        """The identity of ``x``; ``scale`` is the gradient of ``loss``."""
        ctx.scale, ctx.dtype, ctx.device = scale, loss.dtype, loss.device
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        # The gradient of ``loss`` does not depend on the later stages, so it is a constant and nothing is sent for it.
        return grads[0], torch.full((), ctx.scale, dtype=ctx.dtype, device=ctx.device), None


def with_losses(x: torch.Tensor, losses: Iterable[torch.Tensor], scale: float) -> torch.Tensor:
    """The identity of ``x``, whose backward also runs that of ``losses`` times ``scale``.

    Args:
        x: the item's output, ``[...]``, of any shape.
        losses: scalars, already weighted, as they are added to the loss of their microbatch.
        scale: factor on the loss of a microbatch before its backward (loss scale, and the share of the microbatch).

    Returns:
        ``x`` with the same shape and values.
    """
    # A frozen item, or one in evaluation, has losses without a graph; they are only logged.
    for loss in losses:
        if torch.is_grad_enabled() and loss.requires_grad:
            x = _WithLoss.apply(x, loss, scale)  # type: ignore[no-untyped-call]
    return x
