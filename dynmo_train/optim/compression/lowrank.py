"""Low-rank factors of a matrix by one warm-started power iteration (PowerSGD, arXiv:1905.13727, algorithm 1).

Shapes in names: N rows and D columns of the matrix, R rank of the factors. Factors are stored with R first: products
then run along the rows of the matrix, which is up to five times as fast at small ranks (measured).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from ...parallel.seeding import stable_seed

# Smallest pivot of the Gram matrix with a unit diagonal at which its rows are independent in float32.
SMALLEST_PIVOT = 1e-6
# Factors are float32 in every precision; bytes per element.
FACTOR_BYTES = 4


@dataclass(frozen=True, kw_only=True)
class FactorShape:
    """Sizes of a matrix ``[N, D]`` and of its float32 factors ``[R, N]`` and ``[R, D]``."""

    rows: int
    columns: int
    rank: int

    @classmethod
    def of(cls, shape: torch.Size | tuple[int, ...], rank: int) -> FactorShape:
        """Return the shape for a tensor ``[..., D]``, all other dimensions flattened to N.

        Example: ``[8, 1024, 1920]`` at rank 12 is 8192 x 1920: 121,344 numbers instead of 15,728,640.

        Args:
            shape: Shape of the tensor.
            rank: Rank of the factors; reduced to N or D where these are smaller.
        """
        columns = shape[-1]
        rows = 1
        for size in shape[:-1]:
            rows *= size
        return cls(rows=rows, columns=columns, rank=min(rank, rows, columns))

    @property
    def numel(self) -> int:
        """Number of elements of both factors."""
        return (self.rows + self.columns) * self.rank

    @property
    def num_bytes(self) -> int:
        """Bytes of both factors."""
        return self.numel * FACTOR_BYTES

    def is_smaller(self, element_bytes: int) -> bool:
        """Whether the factors are smaller than the matrix with ``element_bytes`` bytes per element."""
        return self.num_bytes < self.rows * self.columns * element_bytes

    def split(self, flat: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return views of a flat tensor of ``numel`` elements as the two factors ``[R, N]`` and ``[R, D]``."""
        left, right = flat.split([self.rank * self.rows, self.rank * self.columns])
        return left.view(self.rank, self.rows), right.view(self.rank, self.columns)


def allocate_factors(
    shapes: Sequence[FactorShape], device: torch.device
) -> tuple[torch.Tensor, torch.Tensor, list[tuple[torch.Tensor, torch.Tensor]]]:
    """Allocate the factors of several matrices, so that each kind travels in one collective.

    Args:
        shapes: Shapes of the matrices.
        device: Device of the factors.

    Returns:
        All first factors in one flat float32 tensor, all second ones in another, and for each matrix its ``[R, N]``
        and ``[R, D]`` views of them.
    """
    lefts = torch.empty(sum(shape.rank * shape.rows for shape in shapes), device=device)
    rights = torch.empty(sum(shape.rank * shape.columns for shape in shapes), device=device)
    views, left, right = [], 0, 0
    for shape in shapes:
        ends = left + shape.rank * shape.rows, right + shape.rank * shape.columns
        views.append((lefts[left : ends[0]].view(shape.rank, -1), rights[right : ends[1]].view(shape.rank, -1)))
        left, right = ends
    return lefts, rights, views


def initial_factor(shape: FactorShape, device: torch.device, *names: int | str) -> torch.Tensor:
    """Return the start of the first iteration: normal numbers ``[R, D]``, float32, seeded by ``names`` alone."""
    generator = torch.Generator().manual_seed(stable_seed(*names))
    return torch.randn(shape.rank, shape.columns, generator=generator).to(device)


def orthonormalize(rows_RN: torch.Tensor) -> None:
    """Orthonormalize the rows of a matrix in place; their span is unchanged.

    Uses the Cholesky factor of the Gram matrix in float64. That is accurate up to a condition number of a million and
    twice as fast as Householder's QR for large N (measured); QR takes over above.

    Args:
        rows_RN: float32, ``[R, N]``. A matrix with values that are not finite is left alone.
    """
    # A Gram matrix squares the condition number, which float32 could not represent.
    wide = rows_RN.double()
    gram = wide @ wide.T
    scale = gram.diagonal().rsqrt()
    lower, info = torch.linalg.cholesky_ex(gram * scale[:, None] * scale)
    # One synchronization with the device: -1 is a breakdown, NaN a value that is not finite.
    pivot = float(torch.where(info == 0, lower.diagonal().min(), -1.0))
    if pivot > SMALLEST_PIVOT:
        inverse = torch.linalg.solve_triangular(lower, torch.diag(scale), upper=False)
        rows_RN.copy_(inverse @ wide)
    elif bool(gram.isfinite().all()):
        rows_RN.copy_(torch.linalg.qr(rows_RN.T)[0].T)


def factorize(matrix_ND: torch.Tensor, start_RD: torch.Tensor, left_RN: torch.Tensor, right_RD: torch.Tensor) -> None:
    """Run one power iteration: ``P = orthonormalize(M Q)``, then ``Q = M^T P``.

    Args:
        matrix_ND: M, float32, ``[N, D]``.
        start_RD: Previous Q, transposed, ``[R, D]``: the warm start.
        left_RN: Receives P, transposed, ``[R, N]``.
        right_RD: Receives the new Q, transposed, ``[R, D]``; may be ``start_RD`` itself.
    """
    torch.mm(start_RD, matrix_ND.T, out=left_RN)
    orthonormalize(left_RN)
    torch.mm(left_RN, matrix_ND, out=right_RD)


def reconstruct(left_RN: torch.Tensor, right_RD: torch.Tensor, out_ND: torch.Tensor) -> None:
    """Write ``P Q^T`` to ``out_ND``.

    Args:
        left_RN: P, transposed, float32 ``[R, N]``.
        right_RD: Q, transposed, float32 ``[R, D]``.
        out_ND: Receives the product, ``[N, D]`` of any float dtype.
    """
    if out_ND.dtype == left_RN.dtype:
        torch.mm(left_RN.T, right_RD, out=out_ND)
    else:
        out_ND.copy_(left_RN.T @ right_RD)


def subtract_product(
    matrix_ND: torch.Tensor, left_RN: torch.Tensor, right_RD: torch.Tensor, share: float = 1.0
) -> None:
    """Subtract ``share * P Q^T`` from a matrix in place, which leaves the compression error.

    Args:
        matrix_ND: float32, ``[N, D]``.
        left_RN: P, transposed, float32 ``[R, N]``.
        right_RD: Q, transposed, float32 ``[R, D]``.
        share: Factor of the product; one over the number of replicas that share the error.
    """
    matrix_ND.addmm_(left_RN.T, right_RD, alpha=-share)
