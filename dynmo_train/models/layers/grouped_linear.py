"""One product for the linear layers of several experts, on rows sorted by expert.

``torch.nn.functional.grouped_mm`` reads the ends of the groups on the device, so that the host does not wait. On CUDA
it computes bfloat16 on devices of compute capability 9 and 10. On CPU it is slower than one product per expert
(``tests/benchmarks/train_experts.md``), and reading the counts there waits for nothing.

Shapes in names: R rows, E experts, O output features, I input features.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch.autograd.function import once_differentiable

from .linear import PrunableLinear

GroupedMM = Callable[..., torch.Tensor]
# torch 2.11 to 2.13 have the first, older ones the second.
GROUPED_MM: GroupedMM | None = getattr(F, "grouped_mm", None) or getattr(torch, "_grouped_mm", None)
ALIGNMENT_BYTES = 16
# On other devices torch's product copies the ends of the groups to the host, and runs one product per group.
FAST_CAPABILITIES = (9, 10)
# The kernel prepares each group in a thread of one block.
MAX_GROUPS = 1024


def is_fast_device(rows: torch.Tensor) -> bool:
    """Whether the grouped product on the device of ``rows`` ``[R, I]`` is a single kernel for their dtype."""
    return (
        rows.device.type == "cuda"
        and torch.version.hip is None
        and rows.dtype == torch.bfloat16
        and torch.cuda.get_device_capability(rows.device)[0] in FAST_CAPABILITIES
    )


def _has_kernel(rows: torch.Tensor, weight_OI: torch.Tensor) -> bool:
    # The kernel requires that strides are multiples of 16 bytes.
    is_aligned = not any(size * rows.element_size() % ALIGNMENT_BYTES for size in weight_OI.shape)
    return GROUPED_MM is not None and is_aligned and len(rows) > 0


def can_group(layers: Sequence[PrunableLinear], rows: torch.Tensor) -> bool:
    """Whether one grouped product computes ``layers``.

    Args:
        layers: the same layer of each expert.
        rows: input rows, ``[R, I]``.
    """
    return (
        _has_kernel(rows, layers[0].weight)
        and len(layers) <= MAX_GROUPS
        and all(layer.is_dense and layer.weight.dtype == rows.dtype for layer in layers)
        and is_fast_device(rows)
    )


def grouped_linear(layers: Sequence[PrunableLinear], x_RI: torch.Tensor, ends_E: torch.Tensor) -> torch.Tensor:
    """Apply each layer to its rows; returns ``[R, O]``, undefined after the last group.

    Args:
        layers: the same layer of each expert.
        x_RI: rows sorted by expert, ``[R, I]``.
        ends_E: int32 end of each expert's rows.
    """
    first = layers[0]
    # The layers are slices of the same tensor-parallel region: one collective for all of them.
    x_RI = x_RI if first.enter is None else first.enter(x_RI)
    y_RO: torch.Tensor = _GroupedProduct.apply(x_RI, ends_E, *(layer.weight for layer in layers))  # type: ignore[no-untyped-call]
    y_RO = y_RO if first.leave is None else first.leave(y_RO)
    biases = [layer.bias for layer in layers if layer.bias is not None]
    if biases:
        y_RO = _GroupedBias.apply(y_RO, ends_E, *biases)  # type: ignore[no-untyped-call]
    return y_RO


def stacked(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """The tensors as one ``[E, ...]``: a view where they are consecutive in one storage, a copy otherwise."""
    first = tensors[0]
    size = first.numel()
    in_order = all(
        tensor.is_contiguous()
        and tensor.untyped_storage().data_ptr() == first.untyped_storage().data_ptr()
        and tensor.storage_offset() == first.storage_offset() + number * size
        for number, tensor in enumerate(tensors)
    )
    if in_order and first.device.type != "meta":
        return first.as_strided((len(tensors), *first.shape), (size, *first.stride()))
    return torch.stack(list(tensors))


def _grouped_mm(left: torch.Tensor, right: torch.Tensor, ends_E: torch.Tensor) -> torch.Tensor:
    if GROUPED_MM is None:
        raise RuntimeError("this torch has no grouped product")
    return GROUPED_MM(left, right, offs=ends_E)


def _sums_over_rows(left: torch.Tensor, right: torch.Tensor, ends_E: torch.Tensor) -> torch.Tensor:
    """For each group the product over its rows: zero for a group without rows.

    Kernels leave the result of such a group undefined on some devices (pytorch/pytorch#172439).
    """
    has_rows_E = torch.diff(ends_E, prepend=ends_E.new_zeros(1)) > 0
    return _grouped_mm(left, right, ends_E).masked_fill_(~has_rows_E[:, None, None], 0.0)


class _GroupedProduct(torch.autograd.Function):
    """``y = x W_e^T`` for the rows of each expert e.

    The stacked weights are not saved for the backward: the copy would be as large as the experts, in every microbatch.
    """

    @staticmethod
    def forward(ctx: Any, x_RI: torch.Tensor, ends_E: torch.Tensor, *weights_OI: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x_RI, ends_E, *weights_OI)
        return _grouped_mm(x_RI.contiguous(), stacked(weights_OI).transpose(1, 2), ends_E)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Any) -> Any:
        x_RI, ends_E, *weights_OI = ctx.saved_tensors
        grad_RO = grads[0].contiguous()
        grad_x = _grouped_mm(grad_RO, stacked(weights_OI), ends_E) if ctx.needs_input_grad[0] else None
        if not any(ctx.needs_input_grad[2:]):
            return grad_x, None, *(None for _ in weights_OI)
        grads_EOI = _sums_over_rows(grad_RO.t(), x_RI.contiguous(), ends_E)
        return grad_x, None, *grads_EOI.unbind(0)


class _GroupedBias(torch.autograd.Function):
    """``y + b_e`` for the rows of each expert e."""

    @staticmethod
    def forward(ctx: Any, y_RO: torch.Tensor, ends_E: torch.Tensor, *biases_O: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(ends_E)
        ctx.experts = len(biases_O)
        position_R = torch.arange(len(y_RO), device=y_RO.device, dtype=ends_E.dtype)
        expert_R = torch.searchsorted(ends_E, position_R, right=True).clamp(max=len(biases_O) - 1)
        return y_RO + stacked(biases_O).index_select(0, expert_R)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Any) -> Any:
        (ends_E,) = ctx.saved_tensors
        grad_RO = grads[0].contiguous()
        if not any(ctx.needs_input_grad[2:]):
            return grad_RO, None, *(None for _ in range(ctx.experts))
        # The sum of a group's rows as a product with ones: an indexed sum has no fixed order on CUDA.
        ones = grad_RO.new_ones(len(grad_RO), ALIGNMENT_BYTES // grad_RO.element_size())
        sums = _sums_over_rows(ones.t(), grad_RO, ends_E)
        return grad_RO, None, *sums[:, 0].unbind(0)


class ActiveRows:
    """Dense products on some entries of a batch, whose number only the device knows: one group of rows.

    The other entries are zero in the result, and have no gradient.

    Args:
        real_BC: bool ``[B, C]``, true for entries to compute.
    """

    def __init__(self, real_BC: torch.Tensor) -> None:
        self._inactive_BC1 = ~real_BC[..., None]
        # Stable: active entries first, in their order.
        self._order_N = torch.argsort((~real_BC).flatten().to(torch.uint8), stable=True)
        self._place_N = torch.argsort(self._order_N)
        self._ends_1 = real_BC.sum(dtype=torch.int32)[None]

    def product(self, x_BCI: torch.Tensor, weight_OI: torch.Tensor) -> torch.Tensor | None:
        """Return ``x W^T``, ``[B, C, O]``; None where the device has no kernel for it, or ``x`` another shape.

        Args:
            x_BCI: input, ``[B, C, I]``.
            weight_OI: weight, ``[O, I]``, of the same dtype.
        """
        if x_BCI.shape[:-1] != self._inactive_BC1.shape[:-1] or x_BCI.dtype != weight_OI.dtype:
            return None
        if not is_fast_device(x_BCI) or not _has_kernel(x_BCI, weight_OI):
            return None
        # Rows after the group are undefined, in the product and in its gradient: both ends are masked.
        x_NI = x_BCI.masked_fill(self._inactive_BC1, 0.0).flatten(0, 1)[self._order_N]
        y_NO: torch.Tensor = _GroupedProduct.apply(x_NI, self._ends_1, weight_OI)  # type: ignore[no-untyped-call]
        y_BCO = y_NO[self._place_N].view(*x_BCI.shape[:-1], -1)
        return y_BCO.masked_fill(self._inactive_BC1, 0.0)
