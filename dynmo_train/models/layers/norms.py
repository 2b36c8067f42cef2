"""RMSNorm with fewer operations on CPU; elsewhere torch's kernel.

``y = x r w`` with ``r = (mean(x^2) + eps)^-1/2`` (Zhang and Sennrich 2019, arXiv:1910.07467). With ``n = x r``::

    grad w = sum over rows of  grad y * n
    grad x = r (grad y * w - n mean(grad y * w * n))

torch composes the norm of seven operations on CPU, whose backward has 17 and saves ``n`` as well.

Shapes in names: N rows, D width; ``x``, ``r`` and ``n`` have any number of dimensions before D.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.autograd.function import once_differentiable


class _RmsNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight_D: torch.Tensor, eps: float) -> torch.Tensor:
        """``x`` is ``[..., D]``."""
        width = x.shape[-1]
        r = torch.linalg.vector_norm(x, dim=-1, keepdim=True).square_().div_(width).add_(eps).rsqrt_()
        ctx.save_for_backward(x, weight_D, r)
        y: torch.Tensor = (x * r).mul_(weight_D)
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Any) -> Any:
        x, weight_D, r = ctx.saved_tensors
        n = x * r
        of_weight_ND = (grads[0] * n).reshape(-1, x.shape[-1])
        grad_x = grad_weight = None
        if ctx.needs_input_grad[0]:
            mean = (of_weight_ND @ weight_D).view(r.shape).mul_(-1.0 / x.shape[-1])
            grad_x = torch.mul(grads[0], weight_D).addcmul_(n, mean).mul_(r)
        if ctx.needs_input_grad[1]:
            grad_weight = of_weight_ND.sum(0)
        return grad_x, grad_weight, None


def rms_norm(x: torch.Tensor, weight_D: torch.Tensor, eps: float | None) -> torch.Tensor:
    """Normalize ``x`` over its last dimension.

    Args:
        x: ``[..., D]``.
        weight_D: factors ``[D]``.
        eps: added to the mean of the squares; None means that of the dtype.
    """
    own = x.device.type == "cpu" and x.dtype == weight_D.dtype == torch.float32
    if not own or torch.compiler.is_compiling():
        return F.rms_norm(x, (x.shape[-1],), weight_D, eps)
    y: torch.Tensor = _RmsNorm.apply(x, weight_D, torch.finfo(x.dtype).eps if eps is None else eps)  # type: ignore[no-untyped-call]
    return y


class RmsNorm(nn.RMSNorm):
    """``nn.RMSNorm`` over the last dimension."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Normalize ``x`` ``[..., D]``."""
        return rms_norm(x, self.weight, self.eps)


class RmsNorm1p(nn.Module):
    """Gemma's RMSNorm: the factors are ``1 + weight``, so that weight decay draws them to 1 (arXiv:2403.08295).

    Not an ``nn.RMSNorm``, whose fused replacements multiply by the weight itself.

    Args:
        width: size D of the last dimension.
        eps: added to the mean of the squares.
        device: where the weight is created.
    """

    def __init__(self, width: int, *, eps: float, device: torch.device | None = None) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.zeros(width, device=device))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Normalize ``x`` ``[..., D]``."""
        if x.dtype == torch.float32:
            return rms_norm(x, 1.0 + self.weight, self.eps)
        # bfloat16 has no numbers between 1 and 1 + 2^-7.
        return rms_norm(x.float(), 1.0 + self.weight.float(), self.eps).to(x.dtype)


class Multiplied(nn.Module):
    """A constant factor, as that of Granite on the output of each sublayer. No parameters.

    Args:
        factor: the factor.
    """

    def __init__(self, factor: float) -> None:
        super().__init__()
        self.factor = factor

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """``x`` ``[...]`` times the factor."""
        return x * self.factor


def normalize_heads(norm: nn.Module, x_BHTK: torch.Tensor) -> torch.Tensor:
    """Normalize each head, or all heads of a token together, by the length of the norm's weight.

    Args:
        norm: normalization over the last dimension, of K or H * K elements.
        x_BHTK: queries or keys, ``[B, H, T, K]``.
    """
    weight, (_, heads, _, width) = norm.weight, x_BHTK.shape
    if not isinstance(weight, torch.Tensor) or len(weight) == width:
        y_BHTK: torch.Tensor = norm(x_BHTK)
        return y_BHTK
    y_BTR: torch.Tensor = norm(x_BHTK.transpose(1, 2).flatten(2))
    whole_BHTK: torch.Tensor = y_BTR.unflatten(2, (heads, width)).transpose(1, 2)
    return whole_BHTK
