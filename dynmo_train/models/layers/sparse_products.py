"""Products of a pruned weight on its nonzeros alone: ``x W^T``, the gradient of x, and the gradient of W.

An operand is what a format reads of one weight. It is built once after each change of the weight and serves all
microbatches until the next one::

    format   device   x W^T                          gradient of x                  gradient of W
    csr      any      CSR of W                       CSR of W^T                     sampled product
    block    CPU      one GEMM per block row         one GEMM per block column      one GEMM per block row
    block    CUDA     BSR of W (Triton)              BSR of W^T (Triton)            sampled product (Triton)
    2:4      CUDA     semi-structured W              semi-structured W^T where      dense, then masked
                                                     the mask is transposable

The gradient of W is dense storage with zeros at pruned weights, as the optimizer and the norm expect it.

Shapes in names: N input rows, O output features, I input features, S block size.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
import torch.nn.functional as F

from .sparse_formats import is_semi_structured


class SparseOperand(Protocol):
    """What a format reads of a weight ``[O, I]``, and its three products."""

    def product(self, x_NI: torch.Tensor) -> torch.Tensor:
        """``x W^T``, ``[N, O]``, contiguous.

        Args:
            x_NI: input rows, ``[N, I]``, in the dtype of the operand.
        """

    def gradients(
        self, grad_NO: torch.Tensor, x_NI: torch.Tensor, *, of_input: bool, of_weight: bool
    ) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        """The gradients of x ``[N, I]`` and of W ``[O, I]``; the latter is zero at pruned weights.

        Args:
            grad_NO: gradient of the product, ``[N, O]``.
            x_NI: input rows of the product, ``[N, I]``.
            of_input: whether the first is needed; it is None otherwise.
            of_weight: whether the second is needed; it is None otherwise.
        """


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


class CsrOperand:
    """CSR of a weight and of its transpose, in float32, the only narrow type that has these products.

    Dense operands are copied to tokens-last layout: MKL's product is up to 1.7 times faster on it, and the copy takes
    a twentieth of that.

    Args:
        weight_OI: ``[O, I]``.
        pattern: positions of its nonzeros.
    """

    def __init__(self, weight_OI: torch.Tensor, pattern: CsrPattern) -> None:
        self.pattern = pattern
        self.values = weight_OI.detach().reshape(-1)[pattern.flat].float()
        self.weight = self._csr(self.values)
        self._transposed: torch.Tensor | None = None

    def _csr(self, values: torch.Tensor) -> torch.Tensor:
        pattern = self.pattern
        return torch.sparse_csr_tensor(
            pattern.rows, pattern.columns, values, pattern.shape, check_invariants=False, requires_grad=False
        )

    def product(self, x_NI: torch.Tensor) -> torch.Tensor:
        """``x W^T``, ``[N, O]``, of ``x_NI`` ``[N, I]``, float32."""
        # Copied back to row-major: the following operations lose more time on a transposed layout.
        return (self.weight @ x_NI.t().contiguous()).t().contiguous()

    def gradients(
        self, grad_NO: torch.Tensor, x_NI: torch.Tensor, *, of_input: bool, of_weight: bool
    ) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        """As :meth:`SparseOperand.gradients`, from ``grad_NO`` ``[N, O]`` and ``x_NI`` ``[N, I]``."""
        grad_ON = grad_NO.t().contiguous()
        grad_x = (self._transpose() @ grad_ON).t().contiguous() if of_input else None
        return grad_x, self._weight_gradient(grad_ON, x_NI) if of_weight else None

    def _transpose(self) -> torch.Tensor:
        # Only in a backward pass: evaluation does not need it.
        if self._transposed is None:
            pattern = self.pattern
            self._transposed = torch.sparse_csr_tensor(
                pattern.rows_t,
                pattern.columns_t,
                self.values[pattern.order_t],
                pattern.shape[::-1],
                check_invariants=False,
            )
        return self._transposed

    def _weight_gradient(self, grad_ON: torch.Tensor, x_NI: torch.Tensor) -> torch.Tensor:
        # Only the nonzeros of the product are computed.
        positions = self._csr(torch.zeros_like(self.values))
        sampled = torch.sparse.sampled_addmm(positions, grad_ON, x_NI.contiguous(), beta=0.0)
        outputs, inputs = self.pattern.shape
        grad_weight = self.values.new_zeros(outputs * inputs)
        return grad_weight.index_copy_(0, self.pattern.flat, sampled.values()).view(outputs, inputs)


@dataclass(frozen=True)
class BlockPattern:
    """The unpruned blocks of a weight ``[O, I]``.

    Attributes:
        size: S.
        columns: for each block row the numbers of its unpruned blocks, int64.
        rows: for each block column the numbers of its unpruned blocks, int64.
    """

    size: int
    columns: tuple[torch.Tensor, ...]
    rows: tuple[torch.Tensor, ...]


def block_pattern(mask_OI: torch.Tensor, size: int) -> BlockPattern:
    """Build the pattern of a mask of whole blocks.

    Args:
        mask_OI: bool ``[O, I]``, true where a weight is kept; multiples of ``size``.
        size: rows and columns of a block.
    """
    blocks = mask_OI[::size, ::size]
    return BlockPattern(
        size=size,
        columns=tuple(row.nonzero()[:, 0] for row in blocks),
        rows=tuple(column.nonzero()[:, 0] for column in blocks.t()),
    )


class BlockOperand:
    """Blocks of a weight, packed by block row and by block column, for one GEMM each.

    At blocks of 32 and sparsity 0.8 this takes 0.35 of the dense time, torch's BSR product 1.0 (one thread of a
    CPU with AVX-512); torch has no gradient for BSR.

    Args:
        weight_OI: ``[O, I]``.
        pattern: of its mask.
    """

    def __init__(self, weight_OI: torch.Tensor, pattern: BlockPattern) -> None:
        self.pattern, self.shape, size = pattern, weight_OI.shape, pattern.size
        self._blocks = weight_OI.detach().view(self.shape[0] // size, size, self.shape[1] // size, size)
        self._packed = [
            self._blocks[row, :, columns].reshape(size, -1).t() for row, columns in enumerate(pattern.columns)
        ]
        self._packed_t: list[torch.Tensor] | None = None

    def _products(
        self, x: torch.Tensor, numbers: Sequence[torch.Tensor], packed: Sequence[torch.Tensor], width: int
    ) -> torch.Tensor:
        """For each line of blocks the product of the input blocks ``numbers`` and the ``packed`` ones, ``[N, width]``.

        Args:
            x: ``[N, I]``, or ``[N, O]`` for the transpose.
            numbers: for each line the blocks of ``x`` to read.
            packed: for each line the weights, ``[blocks x S, S]``.
            width: columns of the result.
        """
        size = self.pattern.size
        x_NBS = x.reshape(len(x), -1, size)
        result = x.new_empty(len(x), width)
        for line, (chosen, weight) in enumerate(zip(numbers, packed, strict=True)):
            out = result[:, line * size : (line + 1) * size]
            if len(chosen):
                torch.mm(x_NBS.index_select(1, chosen).view(len(x), -1), weight, out=out)
            else:
                out.zero_()
        return result

    def product(self, x_NI: torch.Tensor) -> torch.Tensor:
        """``x W^T``, ``[N, O]``, of ``x_NI`` ``[N, I]``."""
        return self._products(x_NI, self.pattern.columns, self._packed, self.shape[0])

    def gradients(
        self, grad_NO: torch.Tensor, x_NI: torch.Tensor, *, of_input: bool, of_weight: bool
    ) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        """As :meth:`SparseOperand.gradients`, from ``grad_NO`` ``[N, O]`` and ``x_NI`` ``[N, I]``."""
        grad_x = self._input_gradient(grad_NO) if of_input else None
        return grad_x, self._weight_gradient(grad_NO, x_NI) if of_weight else None

    def _input_gradient(self, grad_NO: torch.Tensor) -> torch.Tensor:
        # Only in a backward pass: evaluation does not need it.
        if self._packed_t is None:
            size = self.pattern.size
            self._packed_t = [
                self._blocks[rows, :, column].reshape(-1, size) for column, rows in enumerate(self.pattern.rows)
            ]
        return self._products(grad_NO, self.pattern.rows, self._packed_t, self.shape[1])

    def _weight_gradient(self, grad_NO: torch.Tensor, x_NI: torch.Tensor) -> torch.Tensor:
        size, rows = self.pattern.size, len(x_NI)
        grad_ON = grad_NO.t().contiguous()
        x_NBS = x_NI.reshape(rows, -1, size)
        grad_weight = torch.zeros_like(self._blocks, memory_format=torch.contiguous_format)
        for row, columns in enumerate(self.pattern.columns):
            if len(columns):
                chosen = x_NBS.index_select(1, columns).view(rows, -1)
                of_row = torch.mm(grad_ON[row * size : (row + 1) * size], chosen)
                grad_weight[row].index_copy_(1, columns, of_row.view(size, -1, size))
        return grad_weight.view(self.shape)


class TritonBlockOperand:
    """BSR of a weight and of its transpose on CUDA, for the Triton kernels of torch.

    Args:
        weight_OI: ``[O, I]``.
        pattern: of its mask.
    """

    def __init__(self, weight_OI: torch.Tensor, pattern: BlockPattern) -> None:
        self.pattern, self.size, self.shape = pattern, pattern.size, weight_OI.shape
        self._dense = weight_OI.detach()
        self.weight = self._bsr(self._dense, pattern.columns)
        self._transposed: torch.Tensor | None = None

    def _bsr(self, weight: torch.Tensor, columns: Sequence[torch.Tensor]) -> torch.Tensor:
        # Not ``to_sparse_bsr``, which drops blocks that happen to be zero: their gradients would be lost.
        size = self.size
        blocks = weight.view(weight.shape[0] // size, size, -1, size).transpose(1, 2)
        counts = torch.tensor([0, *(len(each) for each in columns)], device=weight.device)
        values = [blocks[row, chosen] for row, chosen in enumerate(columns)]
        return torch.sparse_bsr_tensor(
            counts.cumsum(0), torch.cat(list(columns)), torch.cat(values), weight.shape, check_invariants=False
        )

    def _product(self, bsr: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        """``x`` times the transpose of ``bsr``, ``[N, rows]``."""
        from torch.sparse._triton_ops import bsr_dense_addmm

        # The kernel reads whole tiles of tokens.
        padded = F.pad(x, (0, 0, 0, -len(x) % self.size))
        y = x.new_empty(bsr.shape[0], len(padded))
        bsr_dense_addmm(y, bsr, padded.t(), beta=0, out=y)
        return y.t()[: len(x)].contiguous()

    def product(self, x_NI: torch.Tensor) -> torch.Tensor:
        """``x W^T``, ``[N, O]``, of ``x_NI`` ``[N, I]``."""
        return self._product(self.weight, x_NI)

    def gradients(
        self, grad_NO: torch.Tensor, x_NI: torch.Tensor, *, of_input: bool, of_weight: bool
    ) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        """As :meth:`SparseOperand.gradients`, from ``grad_NO`` ``[N, O]`` and ``x_NI`` ``[N, I]``."""
        grad_x = None
        if of_input:
            if self._transposed is None:
                self._transposed = self._bsr(self._dense.t().contiguous(), self.pattern.rows)
            grad_x = self._product(self._transposed, grad_NO)
        return grad_x, self._weight_gradient(grad_NO, x_NI) if of_weight else None

    def _weight_gradient(self, grad_NO: torch.Tensor, x_NI: torch.Tensor) -> torch.Tensor:
        from torch.sparse._triton_ops import sampled_addmm

        sampled = sampled_addmm(self.weight, grad_NO.t().contiguous(), x_NI.contiguous(), beta=0.0)
        grad_weight: torch.Tensor = sampled.to_dense()
        return grad_weight


class SemiStructuredOperand:
    """2:4 compression of a weight on CUDA, and of its transpose where the mask is transposable.

    Args:
        weight_OI: ``[O, I]``, in a 16-bit type.
        mask_OI: bool ``[O, I]``, true where a weight is kept.
    """

    def __init__(self, weight_OI: torch.Tensor, mask_OI: torch.Tensor) -> None:
        self.mask, self.dense, self.weight = mask_OI, weight_OI.detach(), _semi_structured(weight_OI.detach())
        self._is_transposable = is_semi_structured(mask_OI.t())
        self._transposed: torch.Tensor | None = None

    def product(self, x_NI: torch.Tensor) -> torch.Tensor:
        """``x W^T``, ``[N, O]``, of ``x_NI`` ``[N, I]``."""
        return (self.weight @ x_NI.t()).t().contiguous()

    def gradients(
        self, grad_NO: torch.Tensor, x_NI: torch.Tensor, *, of_input: bool, of_weight: bool
    ) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        """As :meth:`SparseOperand.gradients`, from ``grad_NO`` ``[N, O]`` and ``x_NI`` ``[N, I]``."""
        grad_x = None
        if of_input and self._is_transposable:
            if self._transposed is None:
                self._transposed = _semi_structured(self.dense.t().contiguous())
            grad_x = (self._transposed @ grad_NO.t()).t().contiguous()
        elif of_input:
            grad_x = grad_NO @ self.dense
        return grad_x, (grad_NO.t() @ x_NI) * self.mask if of_weight else None


def _semi_structured(weight: torch.Tensor) -> torch.Tensor:
    from torch.sparse import to_sparse_semi_structured

    semi: torch.Tensor = to_sparse_semi_structured(weight)
    return semi
