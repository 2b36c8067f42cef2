"""A linear layer with a prunable weight, whose product then runs on the nonzeros alone.

The dense weight and its mask are the only state: checkpoints, moves and the optimizer see nothing else. The sparse
formats are derived from them. Which one runs is a pure function of mask and table, so placement changes no bit.

    weight_OI, mask_OI ─▶ SparseTable.form ─┬─ dense   F.linear
                                            ├─ csr, block, 2:4   operands of sparse_products.py, built once a step
                                            └─ structured pruning: a narrower dense product

Shapes in names: N = B*T input rows, O output features, I input features.
"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import nn
from torch.autograd.function import once_differentiable

from ...parallel.tensor_parallel import TensorRegion
from .gated import are_stacked, stacked_rows
from .sparse_formats import BLOCK, CSR, DENSE, SparseTable, block_size, unpruned_lines
from .sparse_products import (
    BlockOperand,
    BlockPattern,
    CsrOperand,
    CsrPattern,
    SemiStructuredOperand,
    SparseOperand,
    TritonBlockOperand,
    block_pattern,
    csr_pattern,
)

StreamEnd = Callable[[torch.Tensor], torch.Tensor]
SAMPLE_DIMS = 3
Product = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
BiasedProduct = Callable[[torch.Tensor, torch.Tensor | None], torch.Tensor]


class _SparseLinear(torch.autograd.Function):
    """``y = x W^T`` and both gradients on the nonzeros of W; the gradient of W is zero at pruned weights."""

    @staticmethod
    def forward(ctx: Any, x_NI: torch.Tensor, weight_OI: torch.Tensor, operand: SparseOperand) -> torch.Tensor:
        ctx.operand = operand
        ctx.save_for_backward(x_NI)
        return operand.product(x_NI)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_NO: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        (x_NI,) = ctx.saved_tensors
        operand: SparseOperand = ctx.operand
        of_input, of_weight, _ = ctx.needs_input_grad
        return *operand.gradients(grad_NO, x_NI, of_input=of_input, of_weight=of_weight), None


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
    return _SPARSE_LAYERS[int(handle)].operand().product(x_NI)


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
    operand = _SPARSE_LAYERS[int(handle)].operand()
    grad_x, grad_weight = operand.gradients(grad_NO, x_NI, of_input=True, of_weight=True)
    return cast("torch.Tensor", grad_x), cast("torch.Tensor", grad_weight)


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


class _Active:
    """What computes dense products now, instead of ``F.linear``: of input and weight, None where it cannot."""

    product: Callable[[torch.Tensor, torch.Tensor], torch.Tensor | None] | None = None


_ACTIVE = _Active()


@contextmanager
def dense_products_by(product: Callable[[torch.Tensor, torch.Tensor], torch.Tensor | None]) -> Iterator[None]:
    """Compute dense products within by another function than ``F.linear``.

    Args:
        product: of input ``[..., I]`` and weight ``[O, I]``; None stands for a product that it leaves to ``F.linear``.
    """
    outer, _ACTIVE.product = _ACTIVE.product, product
    try:
        yield
    finally:
        _ACTIVE.product = outer


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
        self.pattern: CsrPattern | BlockPattern | None = None
        self._operand: SparseOperand | None = None
        self.overlap: TensorRegion | None = None  # whose collectives overlap with the product
        self.float8: Product | None = None  # of input and weight; set by ``float8``
        self.packed: BiasedProduct | None = None  # of input and bias, with the weight; set by ``packed_linear``
        self.adapter: nn.Module | None = None  # adds to the output; set by ``lora``
        self._handle: torch.Tensor | None = None

    @property
    def sparsity(self) -> float:
        """The fraction of pruned weights, 0 to 1."""
        if self.mask is None:
            return 0.0
        return 1.0 - int(self.mask.sum()) / self.mask.numel()

    @property
    def is_dense(self) -> bool:
        """Whether the product is ``F.linear`` with the full weight alone, pruned or not."""
        return self.form == DENSE and self.rows is None and self.columns is None and self.adapter is None

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
        self.pattern = None
        if self.form == CSR:
            self.pattern = csr_pattern(mask_OI)
        elif self.form == BLOCK:
            self.pattern = block_pattern(mask_OI, block_size(mask_OI))

    def weights_changed(self) -> None:
        """Discard what was derived from the weight; call this after each write to it."""
        self._operand = None

    def prepare(self) -> None:
        """Derive what a sparse product reads of the weight, before a compiled graph runs it."""
        if self.form == DENSE:
            return
        if self._handle is None or _SPARSE_LAYERS.get(int(self._handle)) is not self:
            number = next(_NUMBERS)
            self._handle, _SPARSE_LAYERS[number] = torch.tensor(number), self
        self.operand()

    def operand(self) -> SparseOperand:
        """The weight in its sparse format; built once a step, for all microbatches and for recomputation."""
        if self._operand is None:
            self._operand = self._build_operand()
        return self._operand

    def _build_operand(self) -> SparseOperand:
        if isinstance(self.pattern, CsrPattern):
            return CsrOperand(self.weight, self.pattern)
        if isinstance(self.pattern, BlockPattern):
            if self.weight.device.type == "cuda":
                return TritonBlockOperand(self.weight, self.pattern)
            return BlockOperand(self.weight, self.pattern)
        if self.mask is None:
            raise RuntimeError("a weight without a mask has no sparse format")
        return SemiStructuredOperand(self.weight, self.mask)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Apply to the last dimension of ``x``: ``[..., I]`` to ``[..., O]``."""
        if self.overlap is not None and self.can_overlap(x):
            run = self.overlap.leave_product if self.enter is None else self.overlap.enter_product
            y = run(x, self.weight)
            return y if self.bias is None else y + self.bias
        if self.enter is not None:
            x = self.enter(x)
        if self.leave is None:
            return self.product(x)
        # The bias is replicated: added before the sum over ranks, it would count once per rank.
        y = self.leave(self._product(x, None))
        return y if self.bias is None else y + self.bias

    def can_overlap(self, x: torch.Tensor) -> bool:
        """Whether this layer's product with ``x`` ``[..., I]`` overlaps with the collective at its end."""
        is_plain = self.is_dense and self.float8 is None and not torch.compiler.is_compiling()
        return self.overlap is not None and is_plain and x.dim() == SAMPLE_DIMS and x.numel() > 0

    def product(self, x: torch.Tensor) -> torch.Tensor:
        """Apply to the last dimension of ``x``, ``[..., I]`` to ``[..., O]``, without entering or leaving a region."""
        return self._product(x, self.bias)

    def _product(self, x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        y = self._weight_product(x, bias)
        return y if self.adapter is None else y + self.adapter(x)

    def _weight_product(self, x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        if self.packed is not None:
            return self.packed(x, bias)
        if self.rows is not None or self.columns is not None:
            return self._narrow(x, bias)
        # An expert may have no token; the sparse products are not called with empty inputs.
        if not x.numel():
            return F.linear(x, self.weight, bias)
        if self.form == DENSE:
            return self.dense_product(x, self.weight, bias)
        y_NO = self._sparse(x.reshape(-1, x.shape[-1]))
        return (y_NO if bias is None else y_NO + bias).view(*x.shape[:-1], -1).to(x.dtype)

    def dense_product(self, x: torch.Tensor, weight_OI: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        """Multiply with a whole weight, in float8 where this layer does.

        Args:
            x: input, ``[..., I]``, not empty.
            weight_OI: this layer's weight, or that of this one and the next, ``[O, I]``.
            bias: ``[O]``, or None.

        Returns:
            ``[..., O]``.
        """
        if self.float8 is not None:
            y = self.float8(x, weight_OI)
        elif _ACTIVE.product is None or (found := _ACTIVE.product(x, weight_OI)) is None:
            return F.linear(x, weight_OI, bias)
        else:
            y = found
        return y if bias is None else y + bias

    def _narrow(self, x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        weight: torch.Tensor = self.weight
        if self.rows is not None:
            weight, bias = weight[self.rows], None if bias is None else bias[self.rows]
        if self.columns is not None:
            weight = weight[:, self.columns]
        return F.linear(x, weight, bias)

    def _sparse(self, x_NI: torch.Tensor) -> torch.Tensor:
        weight_OI: torch.Tensor = self.weight
        if self.form == CSR:
            # CSR products exist in float32 only; the casts do nothing there.
            x_NI, weight_OI = x_NI.float(), weight_OI.float()
        y_NO: torch.Tensor
        if torch.compiler.is_compiling():
            y_NO = sparse_product(x_NI, weight_OI, self._handle)
        else:
            y_NO = _SparseLinear.apply(x_NI, weight_OI, self.operand())  # type: ignore[no-untyped-call]
        return y_NO


def overlapped_pair(first: PrunableLinear, second: PrunableLinear, x: torch.Tensor) -> torch.Tensor:
    """The products of two column-parallel layers with one gather of their input, which overlaps with them.

    Args:
        first: layer with ``can_overlap(x)``.
        second: the same, of the same shape.
        x: this rank's tokens, ``[B, T / size, I]``.

    Returns:
        Both outputs, concatenated, ``[B, T, 2 * O]``.

    Raises:
        RuntimeError: ``first`` overlaps with no collective.
    """

    def both(one: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
        return stacked_rows(one, other) if are_stacked(one, other) else torch.cat((one, other))

    if first.overlap is None:
        raise RuntimeError("the layer overlaps with no collective")
    y = first.overlap.enter_product(x, both(first.weight, second.weight))
    return y if first.bias is None or second.bias is None else y + both(first.bias, second.bias)
