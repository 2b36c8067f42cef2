"""Low-rank factors of a matrix by one warm-started power iteration (PowerSGD, arXiv:1905.13727, algorithm 1).

Shapes in names: N rows and D columns of the matrix, R its rank here. Factors are kept with their rank first: their
products then run along the rows of the matrix, which measured up to five times as fast at small ranks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from ...parallel.seeding import stable_seed

# Of the Gram matrix with a unit diagonal: below this pivot, the rows are dependent to within float32.
SMALLEST_PIVOT = 1e-6
FACTOR_BYTES = 4


@dataclass(frozen=True, kw_only=True)
class FactorShape:
    """The sizes of a matrix ``[N, D]`` and of its factors ``[R, N]`` and ``[R, D]``; they are float32."""

    rows: int
    columns: int
    rank: int

    @classmethod
    def of(cls, shape: torch.Size | tuple[int, ...], rank: int) -> FactorShape:
        """Of a tensor whose last dimension is the columns, and of ``rank``, or as much as the matrix can have.

        Worked: ``[8, 1024, 1920]`` at rank 12 is 8192 x 1920: 121,344 numbers in place of 15,728,640.
        """
        columns = shape[-1]
        rows = 1
        for size in shape[:-1]:
            rows *= size
        return cls(rows=rows, columns=columns, rank=min(rank, rows, columns))

    @property
    def numbers(self) -> int:
        """Numbers of both factors together."""
        return (self.rows + self.columns) * self.rank

    @property
    def num_bytes(self) -> int:
        """Bytes of both factors together."""
        return self.numbers * FACTOR_BYTES

    def pays(self, element_bytes: int) -> bool:
        """Whether the factors are smaller than the matrix itself."""
        return self.num_bytes < self.rows * self.columns * element_bytes

    def halves(self, flat: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Views of a flat tensor of ``numbers`` as the two factors ``[R, N]`` and ``[R, D]``."""
        left, right = flat.split([self.rank * self.rows, self.rank * self.columns])
        return left.view(self.rank, self.rows), right.view(self.rank, self.columns)


def buckets(
    shapes: Sequence[FactorShape], device: torch.device
) -> tuple[torch.Tensor, torch.Tensor, list[tuple[torch.Tensor, torch.Tensor]]]:
    """Room for the factors of several matrices: all first ones in one flat tensor, all second ones in another.

    Returns:
        Both, and of each matrix its factors as views of them.
    """
    lefts = torch.empty(sum(shape.rank * shape.rows for shape in shapes), device=device)
    rights = torch.empty(sum(shape.rank * shape.columns for shape in shapes), device=device)
    views, left, right = [], 0, 0
    for shape in shapes:
        ends = left + shape.rank * shape.rows, right + shape.rank * shape.columns
        views.append((lefts[left : ends[0]].view(shape.rank, -1), rights[right : ends[1]].view(shape.rank, -1)))
        left, right = ends
    return lefts, rights, views


def first_factor(shape: FactorShape, device: torch.device, *names: int | str) -> torch.Tensor:
    """The factor ``[R, D]`` that the first iteration starts from: normal numbers that depend on ``names`` alone."""
    generator = torch.Generator().manual_seed(stable_seed(*names))
    return torch.randn(shape.rank, shape.columns, generator=generator).to(device)


def orthonormalize(rows_RN: torch.Tensor) -> None:
    """Make the rows of a float32 ``[R, N]`` orthonormal in place; their span stays. Not finite ones are left alone.

    By the Cholesky factor of the Gram matrix, both in float64, which is exact enough up to a condition of a million
    and, for many rows, twice as fast as Householder's method; that takes over beyond it.
    """
    wide = rows_RN.double()
    gram = wide @ wide.T
    scale = gram.diagonal().rsqrt()
    lower, info = torch.linalg.cholesky_ex(gram * scale[:, None] * scale)
    # One look at the device: -1 is a breakdown, NaN what is not finite.
    pivot = float(torch.where(info == 0, lower.diagonal().min(), -1.0))
    if pivot > SMALLEST_PIVOT:
        inverse = torch.linalg.solve_triangular(lower, torch.diag(scale), upper=False)
        rows_RN.copy_(inverse @ wide)
    elif bool(gram.isfinite().all()):
        rows_RN.copy_(torch.linalg.qr(rows_RN.T)[0].T)


def factorize(matrix_ND: torch.Tensor, start_RD: torch.Tensor, left_RN: torch.Tensor, right_RD: torch.Tensor) -> None:
    """One power iteration: ``P = M Q``, its columns made orthonormal, ``Q = M^T P``; written to the two factors.

    Args:
        matrix_ND: float32.
        start_RD: the second factor of the matrix before, which this one is like.
        left_RN: P, transposed.
        right_RD: the new Q, transposed; may be ``start_RD`` itself.
    """
    torch.mm(start_RD, matrix_ND.T, out=left_RN)
    orthonormalize(left_RN)
    torch.mm(left_RN, matrix_ND, out=right_RD)


def reconstruct(left_RN: torch.Tensor, right_RD: torch.Tensor, out_ND: torch.Tensor) -> None:
    """Write ``P Q^T`` to ``out_ND``, of any type."""
    if out_ND.dtype == left_RN.dtype:
        torch.mm(left_RN.T, right_RD, out=out_ND)
    else:
        out_ND.copy_(left_RN.T @ right_RD)


def subtract_product(
    matrix_ND: torch.Tensor, left_RN: torch.Tensor, right_RD: torch.Tensor, share: float = 1.0
) -> None:
    """Take ``share`` of ``P Q^T`` off a float32 matrix, in place: what is left is what the factors do not say."""
    matrix_ND.addmm_(left_RN.T, right_RD, alpha=-share)
