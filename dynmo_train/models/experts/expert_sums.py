"""Products of an expert's chunks, and sums of their weight gradients that do not depend on the order of addition.

A chunk may be computed on any rank that has the expert, so that its weight gradient may be added to others in any
order. Each summand is rounded to a multiple of a fixed unit, and added in float64. Multiples of the unit below 2^53
units add up exactly, so that every order gives the same bits (as in Demmel and Nguyen 2013, "Fast reproducible
floating-point summation", with one bin)::

    chunk: dW = dY^T X  --round to 2^-44 x loss scale-->  + float64 sum  --end of the step-->  float32 gradient

The unit is small: 2^-44 is 6e-14, and the eps of Adam 1e-8. Sums up to 512 are exact; a larger one is rounded as any
float64 sum is.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch.autograd.function import once_differentiable

# float64 numbers between 256 and 512 are multiples of 2^-44: adding and subtracting this rounds to them.
_SHIFT = 384.0
# Where a slice of rows begins must not choose another kernel of the matrix product.
_ALIGNMENT_BYTES = 64


class ExpertSums:
    """The weight gradients of the experts that a rank computes rows of, by ``(expert, parameter)``.

    Attributes:
        scale: Loss scale of the step, by which all gradients are multiplied.
        is_due: Whether a forward of this step will have a backward, on this rank or another.
    """

    def __init__(self) -> None:
        self.scale, self.is_due = 1.0, False
        self._totals: dict[tuple[int, str], torch.Tensor] = {}

    def add(self, expert: int, name: str, gradient: torch.Tensor) -> None:
        """Add the gradient of a chunk, of any dtype and in the shape of the parameter, to the sum of the parameter."""
        shift = _SHIFT * self.scale
        rounded = gradient.to(torch.float64).add_(shift).sub_(shift)
        self.add_rounded(expert, name, rounded)

    def add_rounded(self, expert: int, name: str, total: torch.Tensor) -> None:
        """Add ``total``, a sum of another rank, float64 in the shape of the parameter; it is used up."""
        found = self._totals.get((expert, name))
        if found is None:
            self._totals[expert, name] = total
        else:
            found.add_(total)

    def take(self, expert: int, name: str, like: torch.Tensor) -> torch.Tensor:
        """Remove and return a sum, float64 in the shape of ``like``; zeros where the expert had no rows."""
        found = self._totals.pop((expert, name), None)
        return like.new_zeros(like.shape, dtype=torch.float64) if found is None else found


def chunk_linear(
    x_RI: torch.Tensor,
    weight_OI: torch.Tensor,
    bias_O: torch.Tensor | None,
    sums: ExpertSums,
    expert: int,
    layer: str,
) -> torch.Tensor:
    """Apply a linear layer of an expert to a chunk; the weight gradients go to ``sums`` only.

    Args:
        x_RI: rows of the chunk, ``[R, I]``.
        weight_OI: weight, ``[O, I]``.
        bias_O: bias, ``[O]``, or None.
        sums: sums of weight gradients.
        expert: number of the expert.
        layer: name of the layer in the expert.

    Returns:
        ``[R, O]``.
    """
    bias = None if bias_O is None else bias_O.detach()
    y_RO: torch.Tensor = _ChunkLinear.apply(x_RI, weight_OI.detach(), bias, sums, expert, layer)  # type: ignore[no-untyped-call]
    return y_RO


def chunk_bias(y_RO: torch.Tensor, bias_O: torch.Tensor, sums: ExpertSums, expert: int, layer: str) -> torch.Tensor:
    """Add a bias to the results of a chunk; its gradient goes to ``sums`` only.

    Args:
        y_RO: results of the chunk, ``[R, O]``.
        bias_O: bias, ``[O]``.
        sums: sums of weight gradients.
        expert: number of the expert.
        layer: name of the linear layer in the expert.
    """
    done: torch.Tensor = _ChunkBias.apply(y_RO, bias_O.detach(), sums, expert, layer)  # type: ignore[no-untyped-call]
    return done


def _aligned(rows: torch.Tensor) -> torch.Tensor:
    rows = rows.contiguous()
    return rows if rows.data_ptr() % _ALIGNMENT_BYTES == 0 else rows.clone()


class _ChunkLinear(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x_RI: torch.Tensor, weight_OI: torch.Tensor, bias_O: torch.Tensor | None, *to: Any
    ) -> torch.Tensor:
        x_RI = _aligned(x_RI)
        ctx.save_for_backward(x_RI, weight_OI)
        ctx.to, ctx.has_bias = to, bias_O is not None
        return F.linear(x_RI, weight_OI, bias_O)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Any) -> Any:
        x_RI, weight_OI = ctx.saved_tensors
        sums, expert, layer = ctx.to
        grad_RO = _aligned(grads[0])
        sums.add(expert, f"{layer}.weight", grad_RO.t() @ x_RI)
        if ctx.has_bias:
            sums.add(expert, f"{layer}.bias", grad_RO.sum(0))
        return grad_RO @ weight_OI, None, None, None, None, None


class _ChunkBias(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, y_RO: torch.Tensor, bias_O: torch.Tensor, *to: Any) -> torch.Tensor:
        ctx.to = to
        return y_RO + bias_O

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Any) -> Any:
        sums, expert, layer = ctx.to
        sums.add(expert, f"{layer}.bias", _aligned(grads[0]).sum(0))
        return grads[0], None, None, None, None
