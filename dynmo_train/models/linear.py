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

import itertools
import weakref
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
        shape: O and I.
    """

    rows: torch.Tensor
    columns: torch.Tensor
    flat: torch.Tensor
    rows_t: torch.Tensor
    columns_t: torch.Tensor
    order_t: torch.Tensor
    shape: tuple[int, int]


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
        shape=(mask_OI.shape[0], mask_OI.shape[1]),
    )


class _CsrLinear(torch.autograd.Function):
    """``y = x W^T`` and both gradients on the nonzeros of W; the gradient of W is zero at pruned weights."""

    @staticmethod
    def forward(
        ctx: Any, x_NI: torch.Tensor, weight_OI: torch.Tensor, values: torch.Tensor, pattern: CsrPattern
    ) -> torch.Tensor:
        ctx.pattern = pattern
        ctx.save_for_backward(x_NI, values)
        # Copied to row-major: the following operations lose more time on a transposed layout than the copy takes.
        return (_csr_weight(values, pattern) @ x_NI.t()).t().contiguous()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_NO: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        x_NI, values = ctx.saved_tensors
        pattern: CsrPattern = ctx.pattern
        grad_x = _csr_input_gradient(grad_NO, values, pattern) if ctx.needs_input_grad[0] else None
        grad_weight = _csr_weight_gradient(grad_NO, x_NI, values, pattern) if ctx.needs_input_grad[1] else None
        return grad_x, grad_weight, None, None


def _csr_weight(values: torch.Tensor, pattern: CsrPattern) -> torch.Tensor:
    return torch.sparse_csr_tensor(
        pattern.rows, pattern.columns, values, pattern.shape, check_invariants=False, requires_grad=False
    )


def _csr_input_gradient(grad_NO: torch.Tensor, values: torch.Tensor, pattern: CsrPattern) -> torch.Tensor:
    transposed = torch.sparse_csr_tensor(
        pattern.rows_t, pattern.columns_t, values[pattern.order_t], pattern.shape[::-1], check_invariants=False
    )
    return (transposed @ grad_NO.t()).t().contiguous()


def _csr_weight_gradient(
    grad_NO: torch.Tensor, x_NI: torch.Tensor, values: torch.Tensor, pattern: CsrPattern
) -> torch.Tensor:
    # Only the nonzeros of the product are computed; the gradient is dense, as the optimizer expects it.
    places = _csr_weight(torch.zeros_like(values), pattern)
    sampled = torch.sparse.sampled_addmm(places, grad_NO.t().contiguous(), x_NI.contiguous(), beta=0.0)
    outputs, inputs = pattern.shape
    grad_weight = torch.zeros(outputs * inputs, dtype=values.dtype, device=values.device)
    grad_weight[pattern.flat] = sampled.values()
    return grad_weight.view(outputs, inputs)


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


# Layers by the number in their ``handle``: operations in a compiled graph have tensors as arguments, not layers.
_SPARSE_LAYERS: weakref.WeakValueDictionary[int, PrunableLinear] = weakref.WeakValueDictionary()
_NUMBERS = itertools.count()


@torch.library.custom_op("dynmo_train::sparse_product", mutates_args=())
def sparse_product(x_NI: torch.Tensor, weight_OI: torch.Tensor, handle: torch.Tensor) -> torch.Tensor:
    """The product of a layer in a sparse format within a compiled graph, ``[N, O]``.

    Args:
        x_NI: input rows, ``[N, I]``; float32 for CSR.
        weight_OI: weight, ``[O, I]``, of which the layer has the nonzeros.
        handle: int64 scalar on the CPU, number of the layer.
    """
    layer = _SPARSE_LAYERS[int(handle)]
    return (layer.sparse_weight() @ x_NI.t()).t().contiguous()


@sparse_product.register_fake
def _(x_NI: torch.Tensor, weight_OI: torch.Tensor, handle: torch.Tensor) -> torch.Tensor:
    return x_NI.new_empty((x_NI.shape[0], weight_OI.shape[0]))


@torch.library.custom_op("dynmo_train::sparse_gradients", mutates_args=())
def sparse_gradients(
    grad_NO: torch.Tensor, x_NI: torch.Tensor, weight_OI: torch.Tensor, handle: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """The gradients of :func:`sparse_product`: ``[N, I]`` and ``[O, I]``, zero at pruned weights.

    Args:
        grad_NO: gradient of the result, ``[N, O]``.
        x_NI: input rows, ``[N, I]``.
        weight_OI: weight, ``[O, I]``.
        handle: int64 scalar on the CPU, number of the layer.
    """
    layer = _SPARSE_LAYERS[int(handle)]
    if layer.pattern is None or layer.values is None:
        mask = torch.ones_like(weight_OI) if layer.mask is None else layer.mask
        return grad_NO @ weight_OI, (grad_NO.t() @ x_NI) * mask
    pattern, values = layer.pattern, layer.values
    return _csr_input_gradient(grad_NO, values, pattern), _csr_weight_gradient(grad_NO, x_NI, values, pattern)


@sparse_gradients.register_fake
def _(
    grad_NO: torch.Tensor, x_NI: torch.Tensor, weight_OI: torch.Tensor, handle: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.empty_like(x_NI), torch.empty_like(weight_OI)


def _save_operands(ctx: Any, inputs: tuple[torch.Tensor, ...], output: torch.Tensor) -> None:
    ctx.save_for_backward(*inputs)


def _sparse_backward(ctx: Any, grad_NO: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
    return *sparse_gradients(grad_NO, *ctx.saved_tensors), None


sparse_product.register_autograd(_sparse_backward, setup_context=_save_operands)


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
        self.values: torch.Tensor | None = None
        self._sparse: torch.Tensor | None = None
        self._handle: torch.Tensor | None = None

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
            for lines in (self.rows, self.columns):
                if lines is not None:
                    # A compiled graph is then one for any number of remaining lines.
                    torch._dynamo.maybe_mark_dynamic(lines, 0)
            return
        self.form = table.form(mask_OI, self.weight.device.type)
        self.pattern = csr_pattern(mask_OI) if self.form == CSR else None

    def weights_changed(self) -> None:
        """Discard what was derived from the weight; call this after each write to it."""
        self.values = self._sparse = None

    def prepare(self) -> None:
        """Derive what a sparse product reads of the weight, before a compiled graph runs it."""
        if self.pattern is None and self.form not in (BLOCK, SEMI_STRUCTURED):
            return
        if self._handle is None or _SPARSE_LAYERS.get(int(self._handle)) is not self:
            number = next(_NUMBERS)
            self._handle, _SPARSE_LAYERS[number] = torch.tensor(number), self
        self.sparse_weight()

    def sparse_weight(self) -> torch.Tensor:
        """The weight ``[O, I]`` in its sparse format; its values are copied once after each change of the weight."""
        if self.pattern is not None:
            return _csr_weight(self._csr_values(self.pattern), self.pattern)
        if self._sparse is None:
            self._sparse = sparse_copy(self.weight.detach(), self.form)
        return self._sparse

    def _csr_values(self, pattern: CsrPattern) -> torch.Tensor:
        # Gathered once a step, for all microbatches and for recomputation; ``weights_changed`` discards it.
        if self.values is None:
            self.values = self.weight.detach().view(-1)[pattern.flat].float()
        return self.values

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
            x_NI = x.reshape(-1, x.shape[-1])
            if torch.compiler.is_compiling():
                y_NO = sparse_product(x_NI, self.weight, self._handle)
            else:
                y_NO = _MaskedLinear.apply(x_NI, self.weight, self.sparse_weight(), self.mask)  # type: ignore[no-untyped-call]
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
        # CSR products exist in float32 only; the casts do nothing there.
        y_NO: torch.Tensor
        if torch.compiler.is_compiling():
            y_NO = sparse_product(x_NI.float(), self.weight.float(), self._handle)
        else:
            y_NO = _CsrLinear.apply(  # type: ignore[no-untyped-call]
                x_NI.float(), self.weight.float(), self._csr_values(pattern), pattern
            )
        return y_NO
