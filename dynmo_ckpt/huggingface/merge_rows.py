"""The arithmetic of a merged adapter, a chunk of rows at a time; in float32, rounded once to the type of the base.

Shapes: R rows and C columns of the merged matrix, r rank.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from ..io.computed import ROW_GROUP
from ..io.reading import SourceFiles, Words
from ..tensors.computed import Floats, floats_of, rounded
from ..tensors.views import Tensor

# Rows that are read at a time for the norms of columns.
_NORM_BYTES = 8 << 20


@dataclass(frozen=True, kw_only=True)
class MergedRows:
    """``base`` ``[R, C]`` + ``scale`` * ``up`` ``[R, r]`` @ ``down`` ``[r, C]``; with ``magnitude`` ``[R]`` as DoRA.

    DoRA (arXiv:2402.09353, equation 5): each row of the sum is divided by its norm and multiplied by its magnitude.
    """

    base: Tensor
    up: Tensor
    down: Tensor
    magnitude: Tensor | None
    scale: float

    def __call__(self, files: SourceFiles, begin: int, end: int) -> Words:
        """Bits of the rows ``begin`` to ``end``: see ``RowComputation``."""
        total = _sum(self, files, begin, end)
        if self.magnitude is not None:
            magnitude = floats_of(files, self.magnitude.narrow(0, begin, end))
            with np.errstate(all="ignore"):  # a row of zeros becomes NaN, as in peft
                total *= (magnitude / np.linalg.norm(total, axis=1))[:, None]
        return rounded(total, self.base.dtype)


@dataclass(frozen=True, kw_only=True)
class MergedColumns:
    """As ``MergedRows`` with ``magnitude`` ``[C]``: DoRA of an embedding, whose outputs are the columns."""

    base: Tensor
    up: Tensor
    down: Tensor
    magnitude: Tensor
    scale: float
    factors: list[Floats] = field(default_factory=list, compare=False, repr=False)

    def __call__(self, files: SourceFiles, begin: int, end: int) -> Words:
        """Bits of the rows ``begin`` to ``end``: see ``RowComputation``."""
        if not self.factors:  # the norms need all rows: they are computed once, in a first pass
            self.factors.append(self._factors(files))
        with np.errstate(all="ignore"):
            return rounded(_sum(self, files, begin, end) * self.factors[0], self.base.dtype)

    def _factors(self, files: SourceFiles) -> Floats:
        rows, columns = self.base.shape
        step = max(1, _NORM_BYTES // (4 * columns) // ROW_GROUP) * ROW_GROUP
        squares = np.zeros(columns, np.float64)
        for begin in range(0, rows, step):
            squares += np.square(_sum(self, files, begin, min(rows, begin + step)), dtype=np.float64).sum(axis=0)
        with np.errstate(all="ignore"):
            return (floats_of(files, self.magnitude) / np.sqrt(squares)).astype(np.float32)


def _sum(merge: MergedRows | MergedColumns, files: SourceFiles, begin: int, end: int) -> Floats:
    up, down = floats_of(files, merge.up.narrow(0, begin, end)), floats_of(files, merge.down)
    base = floats_of(files, merge.base.narrow(0, begin, end))
    with np.errstate(all="ignore"):  # numbers beyond float32 become infinity, as in torch
        total: Floats = base + np.float32(merge.scale) * (up @ down)
    return total


@dataclass(frozen=True, kw_only=True)
class AddedBias:
    """``base`` ``[C]`` + ``scale`` * ``added`` ``[C]``, one row."""

    base: Tensor
    added: Tensor
    scale: float

    def __call__(self, files: SourceFiles, begin: int, end: int) -> Words:
        """Bits of the rows ``begin`` to ``end``: see ``RowComputation``."""
        with np.errstate(all="ignore"):
            total = floats_of(files, self.base) + np.float32(self.scale) * floats_of(files, self.added)
        return rounded(total, self.base.dtype)


@dataclass(frozen=True, kw_only=True)
class ReplacedRows:
    """``base`` ``[R, C]`` with other contents ``rows`` ``[n, C]`` in the rows ``indices``."""

    base: Tensor
    rows: Tensor | None
    indices: tuple[int, ...]
    dtype: str

    def __call__(self, files: SourceFiles, begin: int, end: int) -> Words:
        """Bits of the rows ``begin`` to ``end``: see ``RowComputation``."""
        numbers = floats_of(files, self.base if len(self.base.shape) < 2 else self.base.narrow(0, begin, end))
        for at, row in enumerate(self.indices):
            if self.rows is not None and begin <= row < end:
                numbers[row - begin] = floats_of(files, self.rows.narrow(0, at, at + 1))[0]
        return rounded(numbers, self.dtype)
