"""A linear layer with a prunable weight, whose product then runs on the nonzeros alone.

The dense weight and its mask are the only state: checkpoints, moves and the optimizer see nothing else. The sparse
formats are derived from them. Which one runs is a pure function of mask and table, so placement changes no bit.

    weight_OI, mask_OI ─▶ SparseTable.form ─┬─ dense   F.linear
                                            ├─ csr     values at CsrPattern, gathered once a step
                                            ├─ block   BSR, 32 x 32 (CUDA)
                                            ├─ 2:4     semi-structured (CUDA, 16 bit)
                                            └─ structured pruning: a narrower dense product

Shapes in names: N = B*T input rows, O output features, I input features.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.autograd.function import once_differentiable

from .sparse_formats import BLOCK, BLOCK_SIZE, CSR, DENSE, SEMI_STRUCTURED, SparseTable, unpruned_lines

StreamEnd = Callable[[torch.Tensor], torch.Tensor]


@dataclass(frozen=True)
class CsrPattern:
    """Positions of the nonzeros of a weight ``[O, I]``, for products with it and with its transpose.

    Attributes:
        rows: row pointers of the weight, int32 ``[O + 1]``.
        columns: column of each nonzero, int32 ``[nnz]``.
        flat: position of each nonzero in the flattened weight, int64 ``[nnz]``.
        rows_t: row pointers of the transpose, int32 ``[I + 1]``.
        columns_t: column of each nonzero of the transpose, int32 ``[nnz]``.
        order_t: position in ``flat`` of each nonzero of the transpose, int64 ``[nnz]``.
    """

    rows: torch.Tensor
    columns: torch.Tensor
    flat: torch.Tensor
    rows_t: torch.Tensor
    columns_t: torch.Tensor
    order_t: torch.Tensor


def csr_pattern(mask_OI: torch.Tensor) -> CsrPattern:
    """Build the pattern of a mask ``mask_OI``, bool ``[O, I]``, true where a weight is kept."""
    # ``nonzero`` lists rows in order. A stable sort by column keeps rows ascending: CSR of the transpose wants that.
    row, column = mask_OI.nonzero(as_tuple=True)
    order_t = torch.argsort(column, stable=True)

    def pointers(counts: torch.Tensor) -> torch.Tensor:
        return F.pad(counts.cumsum(0), (1, 0)).to(torch.int32)

    return CsrPattern(
        rows=pointers(mask_OI.sum(1)),
        columns=column.to(torch.int32),
        flat=row * mask_OI.shape[1] + column,
        rows_t=pointers(mask_OI.sum(0)),
        columns_t=row[order_t].to(torch.int32),
        order_t=order_t,
    )


class _CsrLinear(torch.autograd.Function):
    """``y = x W^T`` and both gradients on the nonzeros of W; the gradient of W is zero at pruned weights."""

    @staticmethod
    def forward(
        ctx: Any, x_NI: torch.Tensor, weight_OI: torch.Tensor, values: torch.Tensor, pattern: CsrPattern
    ) -> torch.Tensor:
        ctx.pattern, ctx.shape = pattern, weight_OI.shape
        ctx.save_for_backward(x_NI, values)
        csr = torch.sparse_csr_tensor(
            pattern.rows, pattern.columns, values, weight_OI.shape, check_invariants=False, requires_grad=False
        )
        # Copied to row-major: the following operations lose more time on a transposed layout than the copy takes.
        return (csr @ x_NI.t()).t().contiguous()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_NO: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        x_NI, values = ctx.saved_tensors
        pattern: CsrPattern = ctx.pattern
        outputs, inputs = ctx.shape
        grad_x = grad_weight = None
        grad_ON = grad_NO.t()
        if ctx.needs_input_grad[0]:
            transposed = torch.sparse_csr_tensor(
                pattern.rows_t, pattern.columns_t, values[pattern.order_t], (inputs, outputs), check_invariants=False
            )
            grad_x = (transposed @ grad_ON).t().contiguous()
        if ctx.needs_input_grad[1]:
            # Only the nonzeros of the product are computed; the gradient is dense, as the optimizer expects it.
            places = torch.sparse_csr_tensor(
                pattern.rows, pattern.columns, torch.zeros_like(values), ctx.shape, check_invariants=False
            )
            sampled = torch.sparse.sampled_addmm(places, grad_ON.contiguous(), x_NI.contiguous(), beta=0.0)
            grad_weight = torch.zeros(outputs * inputs, dtype=values.dtype, device=values.device)
            grad_weight[pattern.flat] = sampled.values()
            grad_weight = grad_weight.view(outputs, inputs)
        return grad_x, grad_weight, None, None


class _MaskedLinear(torch.autograd.Function):
    """``y = x W^T`` with a sparse W, dense products for both gradients; the one of W is zero at pruned weights."""

    @staticmethod
    def forward(
        ctx: Any, x_NI: torch.Tensor, weight_OI: torch.Tensor, sparse_OI: torch.Tensor, mask_OI: torch.Tensor
    ) -> torch.Tensor:
        ctx.save_for_backward(x_NI, weight_OI, mask_OI)
        return (sparse_OI @ x_NI.t()).t().contiguous()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_NO: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        x_NI, weight_OI, mask_OI = ctx.saved_tensors
        grad_x = grad_NO @ weight_OI if ctx.needs_input_grad[0] else None
        grad_weight = (grad_NO.t() @ x_NI) * mask_OI if ctx.needs_input_grad[1] else None
        return grad_x, grad_weight, None, None


def sparse_copy(weight_OI: torch.Tensor, form: str) -> torch.Tensor:
    """The weight ``weight_OI`` ``[O, I]`` in the format ``block`` (BSR) or ``2:4`` (CUDA, 16-bit types)."""
    if form == BLOCK:
        return weight_OI.to_sparse_bsr((BLOCK_SIZE, BLOCK_SIZE))
    from torch.sparse import to_sparse_semi_structured

    semi: torch.Tensor = to_sparse_semi_structured(weight_OI)
    return semi


class PrunableLinear(nn.Module):
    """``y = x W^T + b`` with W ``[O, I]``; pruned weights stay zero, and the product may run in a sparse format.

    Where whole rows and columns are pruned, the layer computes the remaining features only.

    Under tensor parallelism W is one rank's slice. ``enter`` gathers the input where the output features are sharded;
    ``leave`` sums the ranks' products, before the bias, where the input features are. Both are None otherwise.

    Args:
        inputs: I.
        outputs: O.
        device: where the parameters are created.
        bias: whether the layer has a bias.
    """

    mask: torch.Tensor | None
    bias: nn.Parameter | None

    def __init__(self, inputs: int, outputs: int, device: torch.device, *, bias: bool = True) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(outputs, inputs, device=device))
        self.bias = nn.Parameter(torch.zeros(outputs, device=device)) if bias else None
        self.outputs = outputs
        # Not persistent: the item store saves masks with their items, under the name of the weight.
        self.register_buffer("mask", None, persistent=False)
        self.form = DENSE
        self.rows: torch.Tensor | None = None
        self.columns: torch.Tensor | None = None
        self.enter: StreamEnd | None = None
        self.leave: StreamEnd | None = None
        self.pattern: CsrPattern | None = None
        self._values: torch.Tensor | None = None
        self._sparse: torch.Tensor | None = None

    @property
    def sparsity(self) -> float:
        """The fraction of pruned weights, 0 to 1."""
        if self.mask is None:
            return 0.0
        return 1.0 - int(self.mask.sum()) / self.mask.numel()

    @property
    def is_dense(self) -> bool:
        """Whether the product is ``F.linear`` with the full weight, pruned or not."""
        return self.form == DENSE and self.rows is None and self.columns is None

    def set_mask(self, mask_OI: torch.Tensor, table: SparseTable) -> None:
        """Set the mask and choose the format of the product.

        The item store has zeroed the weight already: with FSDP it has the rows of it that this module does not.

        Args:
            mask_OI: bool ``[O, I]``, true for weights that remain.
            table: thresholds of the sparse formats.
        """
        self.mask = mask_OI
        self.weights_changed()
        if table.structured:
            self.rows, self.columns = unpruned_lines(mask_OI)
            return
        self.form = table.form(mask_OI, self.weight.device.type)
        self.pattern = csr_pattern(mask_OI) if self.form == CSR else None

    def weights_changed(self) -> None:
        """Discard what was derived from the weight; call this after each write to it."""
        self._values = self._sparse = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Apply to the last dimension of ``x``: ``[..., I]`` to ``[..., O]``."""
        if self.enter is not None:
            x = self.enter(x)
        if self.leave is None:
            return self.product(x)
        # The bias is replicated: added before the sum over ranks, it would count once per rank.
        y = self.leave(self._product(x, None))
        return y if self.bias is None else y + self.bias

    def product(self, x: torch.Tensor) -> torch.Tensor:
        """Apply to the last dimension of ``x``, ``[..., I]`` to ``[..., O]``, without entering or leaving a region."""
        return self._product(x, self.bias)

    def _product(self, x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        if self.rows is not None or self.columns is not None:
            return self._narrow(x, bias)
        # An expert may have no token; the sparse products are not called with empty inputs.
        if not x.numel():
            return F.linear(x, self.weight, bias)
        if self.pattern is not None:
            y_NO = self._csr(x.reshape(-1, x.shape[-1]), self.pattern)
        elif self.form in (BLOCK, SEMI_STRUCTURED) and self.mask is not None:
            if self._sparse is None:
                self._sparse = sparse_copy(self.weight.detach(), self.form)
            x_NI = x.reshape(-1, x.shape[-1])
            y_NO = _MaskedLinear.apply(x_NI, self.weight, self._sparse, self.mask)  # type: ignore[no-untyped-call]
        else:
            return F.linear(x, self.weight, bias)
        return (y_NO if bias is None else y_NO + bias).view(*x.shape[:-1], -1).to(x.dtype)

    def _narrow(self, x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        weight: torch.Tensor = self.weight
        if self.rows is not None:
            weight, bias = weight[self.rows], None if bias is None else bias[self.rows]
        if self.columns is not None:
            weight = weight[:, self.columns]
        return F.linear(x, weight, bias)

    def _csr(self, x_NI: torch.Tensor, pattern: CsrPattern) -> torch.Tensor:
        # Gathered once a step, for all microbatches and for recomputation; ``weights_changed`` discards it.
        if self._values is None:
            self._values = self.weight.detach().view(-1)[pattern.flat].float()
        # CSR products exist in float32 only; the casts do nothing there.
        y_NO: torch.Tensor = _CsrLinear.apply(  # type: ignore[no-untyped-call]
            x_NI.float(), self.weight.float(), self._values, pattern
        )
        return y_NO
