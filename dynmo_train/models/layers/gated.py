"""Gated activations, and one product for their gate and up: ``activation(x @ gate^T) * (x @ up^T)``.

``gate`` and ``up`` are two parameters with names of their own. :func:`join_gated` lays them out one after the other in
one storage, so that one product reads both without a copy::

    storage   [ gate.weight [F, D] | up.weight [F, D] ]       x [N, D] ─▶ F.linear ─▶ y [N, 2F] = gate | up
                      └── stacked_rows: [2F, D], a view ──┘

The layout must not depend on how an item came to a process, because a wider product may round in another way: the item
store joins each item that it builds or receives. Under FSDP, whose gathered parameters have storages of their own, and
where a weight is narrowed or sparse, there are two products, on any placement.

Shapes in names: N input rows, D model width, F width inside the MLP.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.autograd.function import once_differentiable

_ATEN = torch.ops.aten


def are_stacked(first: torch.Tensor, second: torch.Tensor) -> bool:
    """Whether two contiguous tensors lie one after the other in one storage.

    Args:
        first: ``[F, ...]``.
        second: ``[F, ...]``.
    """
    # The storage and not the address, which fake tensors do not have.
    return (
        first.shape == second.shape
        and first.dtype == second.dtype
        and first.is_contiguous()
        and second.is_contiguous()
        and second.storage_offset() == first.storage_offset() + first.numel()
        and first.untyped_storage()._cdata == second.untyped_storage()._cdata
    )


def stack(first: torch.Tensor, second: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """Copy two tensors of one shape into one storage.

    Args:
        first: ``[F, ...]``.
        second: ``[F, ...]``.
        dtype: of the copies.

    Returns:
        The copies, for which :func:`are_stacked` is true.
    """
    whole = first.new_empty((2, *first.shape), dtype=dtype)
    # Not ``unbind``, whose views refuse writes in place.
    return whole[0].copy_(first), whole[1].copy_(second)


class _StackedRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, first: torch.Tensor, second: torch.Tensor) -> torch.Tensor:
        return first.detach().as_strided((2 * first.shape[0], *first.shape[1:]), first.stride())

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Any) -> Any:
        rows = grads[0].shape[0] // 2
        return grads[0][:rows], grads[0][rows:]


def stacked_rows(first: torch.Tensor, second: torch.Tensor) -> torch.Tensor:
    """View two tensors, for which :func:`are_stacked` is true, as one.

    Args:
        first: ``[F, ...]``.
        second: ``[F, ...]``.

    Returns:
        ``[2F, ...]``; its gradient goes to both.
    """
    stacked: torch.Tensor = _StackedRows.apply(first, second)  # type: ignore[no-untyped-call]
    return stacked


def join_gated(gate: nn.Module, up: nn.Module) -> None:
    """Lay out weights, and biases, of ``gate`` and ``up`` one after the other; the parameters remain the same objects.

    Args:
        gate: Linear layer with ``weight`` ``[F, D]`` and ``bias`` ``[F]`` or None.
        up: The same.
    """
    for name, first in gate.named_parameters(recurse=False):
        second = up.get_parameter(name)
        if first.shape == second.shape and not are_stacked(first, second):
            first.data, second.data = stack(first.detach(), second.detach(), first.dtype)


def _silu_backward(grad: torch.Tensor, gate: torch.Tensor, out: torch.Tensor) -> None:
    _ATEN.silu_backward.grad_input(grad, gate, grad_input=out)


def _gelu_tanh(x: torch.Tensor) -> torch.Tensor:
    return F.gelu(x, approximate="tanh")


def _gelu_tanh_backward(grad: torch.Tensor, gate: torch.Tensor, out: torch.Tensor) -> None:
    _ATEN.gelu_backward.grad_input(grad, gate, approximate="tanh", grad_input=out)


# Activation, and what writes its input's gradient from that of its output.
Backward = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], None]
GATED: dict[str, tuple[Callable[[torch.Tensor], torch.Tensor], Backward]] = {
    "swiglu": (F.silu, _silu_backward),
    "geglu": (_gelu_tanh, _gelu_tanh_backward),
}


@dataclass(frozen=True)
class ClampedSwiglu:
    """``(u + offset) g sigmoid(alpha g)`` of the gate ``g`` up to ``limit`` and ``u`` within ``-limit`` and ``limit``.

    GPT-OSS's activation (transformers' ``GptOssExperts``); with an infinite limit the ``quick_geglu`` of Megatron-LM.
    """

    alpha: float = 1.702
    limit: float = 7.0
    offset: float = 1.0

    def __call__(self, gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
        """The activation of ``gate`` and ``up``, of one shape."""
        gate, up = gate.clamp(max=self.limit), up.clamp(-self.limit, self.limit)
        return (up + self.offset) * (gate * torch.sigmoid(gate * self.alpha))

    def gradients(self, grad: torch.Tensor, gate: torch.Tensor, up: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Gradients of ``gate`` and ``up`` from ``grad``, that of the result; all of one shape."""
        low, inner = gate.clamp(max=self.limit), up.clamp(-self.limit, self.limit)
        share = torch.sigmoid(low * self.alpha)
        of_up = (grad * low * share).masked_fill_((up < -self.limit) | (up > self.limit), 0.0)
        of_gate = grad * (inner + self.offset) * share * (1 + self.alpha * low * (1 - share))
        return of_gate.masked_fill_(gate > self.limit, 0.0), of_up


Activation = str | ClampedSwiglu


def is_gated(activation: Activation) -> bool:
    """Whether an activation is of two inputs, gate and up."""
    return isinstance(activation, ClampedSwiglu) or activation in GATED


class _Gated(torch.autograd.Function):
    """Saves gate and up alone; autograd would save the activation of the gate too."""

    @staticmethod
    def forward(ctx: Any, gate: torch.Tensor, up: torch.Tensor | None, activation: Activation) -> torch.Tensor:
        """``gate`` is ``[..., F]``, or without ``up`` both halves, ``[..., 2F]``."""
        ctx.activation = activation
        ctx.save_for_backward(gate, up)
        gate, up = _halves(gate, up)
        return activation(gate, up) if isinstance(activation, ClampedSwiglu) else GATED[activation][0](gate).mul_(up)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Any) -> Any:
        whole, other = ctx.saved_tensors
        gate, up = _halves(whole, other)
        if isinstance(ctx.activation, ClampedSwiglu):
            both = ctx.activation.gradients(grads[0], gate, up)
            return (torch.cat(both, dim=-1), None, None) if other is None else (*both, None)
        activate, backward = GATED[ctx.activation]
        into = torch.empty_like(whole)
        grad_up_whole = None if other is None else torch.empty_like(other)
        grad_gate, grad_up = _halves(into, grad_up_whole)
        torch.mul(grads[0], activate(gate), out=grad_up)
        backward(grads[0] * up, gate, grad_gate)
        return into, grad_up_whole, None


def _halves(whole: torch.Tensor, other: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
    if other is not None:
        return whole, other
    first, second = whole.chunk(2, dim=-1)
    return first, second


def gated_activation(gate: torch.Tensor, up: torch.Tensor | None, activation: Activation) -> torch.Tensor:
    """``activation(gate) * up`` (Shazeer 2020, arXiv:2002.05202).

    Args:
        gate: ``[..., F]``; without ``up`` gate and up concatenated, ``[..., 2F]``.
        up: ``[..., F]`` or None.
        activation: a key of ``GATED``, or a ``ClampedSwiglu``.

    Returns:
        ``[..., F]``.
    """
    if torch.compiler.is_compiling():
        # A compiler fuses these operations, and decides what to recompute.
        gate, up = _halves(gate, up)
        return activation(gate, up) if isinstance(activation, ClampedSwiglu) else GATED[activation][0](gate) * up
    result: torch.Tensor = _Gated.apply(gate, up, activation)  # type: ignore[no-untyped-call]
    return result
