"""Bitmask layouts of compressed-tensors: the rows of pruned weights, computed while they are read or written.

=================  ======================================  =====================================================
part               sparse-24-bitmask                       sparse-bitmask
=================  ======================================  =====================================================
NAME.shape         I64 ``[2, 1]``: rows, columns           I64 ``[2]``
NAME.compressed    ``[R, C / 2]``: two of each four        ``[N]``: the numbers that are not zero
NAME.bitmask       U8 ``[R, C / 8]``, lowest bit first     U8 ``[R, ceil(C / 8)]``
NAME.row_offsets                                           I64 ``[R]``: begin of each row in ``compressed``
=================  ======================================  =====================================================

A group of four with fewer than two numbers stores zeros, so that all rows of ``compressed`` have the same length.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ..io.computed import CHUNK_BYTES, ROW_GROUP
from ..io.errors import CorruptError, short_name
from ..io.reading import SourceFiles, Words
from ..io.safetensors import DTYPE_BYTES
from ..tensors.computed import bits_of
from ..tensors.tiled_copy import cast
from ..tensors.views import Tensor

Bools = NDArray[np.bool_]
Counts = NDArray[np.int64]
GROUP = 4
GROUP_NUMBERS = 2


def has_two_of_four(is_nonzero: Bools) -> bool:
    """Whether each group of four columns of ``[N, C]`` has at most two numbers; C is a multiple of four."""
    return bool((is_nonzero.reshape(-1, GROUP).sum(axis=1, dtype=np.uint8) <= GROUP_NUMBERS).all())


def two_of_four(is_nonzero: Bools) -> Bools:
    """The two stored elements of each group of four columns of ``[N, C]``: its numbers, then its first zeros."""
    groups = is_nonzero.reshape(-1, GROUP)
    missing = GROUP_NUMBERS - groups.sum(axis=1, dtype=np.int8, keepdims=True)
    filled = ~groups & (np.cumsum(~groups, axis=1, dtype=np.int8) <= missing)
    stored: Bools = (groups | filled).reshape(is_nonzero.shape)
    return stored


@dataclass(frozen=True, kw_only=True)
class PrunedRows:
    """The rows of a weight ``[R, C]`` as they are written: zero where ``mask`` is false, in the type ``dtype``."""

    name: str
    content: Tensor
    mask: Tensor | None
    dtype: str

    @property
    def shape(self) -> tuple[int, int]:
        """Rows and columns."""
        return self.content.shape[0], self.content.shape[1]

    def blocks(self, files: SourceFiles, begin: int, end: int) -> Iterator[tuple[int, Words, Bools]]:
        """Blocks of bounded size of the rows ``begin`` to ``end``: first row, bits, and which of them are not zero.

        Args:
            files: the open files.
            begin: the first row, a multiple of ``ROW_GROUP``.
            end: the row after the last one.
        """
        row_bytes = self.shape[1] * max(DTYPE_BYTES[self.content.dtype], DTYPE_BYTES[self.dtype])
        step = max(1, CHUNK_BYTES // max(1, row_bytes) // ROW_GROUP) * ROW_GROUP
        for first in range(begin, end, step):
            last = min(end, first + step)
            words = bits_of(files, self.content.narrow(0, first, last))
            if self.mask is not None:
                words[bits_of(files, self.mask.narrow(0, first, last)) == 0] = 0
            if self.content.dtype != self.dtype:
                words = cast(words, self.content.dtype, self.dtype)
            # Without the sign: a negative zero is zero.
            yield first, words, (words << 1) != 0

    def changed(self) -> CorruptError:
        """The error of zeros that moved after the output was planned."""
        return CorruptError(f"{short_name(self.name)}: its zeros changed while it was converted; convert it again")


@dataclass(frozen=True, kw_only=True)
class GroupValues:
    """``compressed`` of sparse-24-bitmask, or its ``bitmask``."""

    rows: PrunedRows
    is_bitmask: bool

    def __call__(self, files: SourceFiles, begin: int, end: int) -> Words:
        """Bits of the rows ``begin`` to ``end``: see ``RowComputation``.

        Raises:
            CorruptError: the weight no longer has two of four.
        """
        parts = []
        for _, words, is_nonzero in self.rows.blocks(files, begin, end):
            if not has_two_of_four(is_nonzero):
                raise self.rows.changed()
            stored = two_of_four(is_nonzero)
            parts.append(_packed(stored) if self.is_bitmask else words[stored].reshape(len(words), -1))
        return np.concatenate(parts)


@dataclass(frozen=True, kw_only=True)
class NonzeroBits:
    """``bitmask`` of sparse-bitmask."""

    rows: PrunedRows

    def __call__(self, files: SourceFiles, begin: int, end: int) -> Words:
        """Bits of the rows ``begin`` to ``end``: see ``RowComputation``."""
        return np.concatenate([_packed(is_nonzero) for _, _, is_nonzero in self.rows.blocks(files, begin, end)])


@dataclass(frozen=True, kw_only=True)
class NonzeroValues:
    """``compressed`` of sparse-bitmask as rows of one element; ``begins``: see ``RowOffsets``."""

    rows: PrunedRows
    begins: bytes

    def __call__(self, files: SourceFiles, begin: int, end: int) -> Words:
        """Bits of the elements ``begin`` to ``end``: see ``RowComputation``.

        Raises:
            CorruptError: the weight no longer has the number of zeros that was counted.
        """
        begins = np.frombuffer(self.begins, np.int64)
        first = int(np.searchsorted(begins, begin, side="right")) - 1
        last = int(np.searchsorted(begins, end, side="left"))
        total = self.rows.shape[0]
        parts = []
        for row, words, is_nonzero in self.rows.blocks(files, first * ROW_GROUP, min(total, last * ROW_GROUP)):
            at = int(begins[row // ROW_GROUP])
            values = words[is_nonzero]
            if at + values.size != begins[-(-(row + len(words)) // ROW_GROUP)]:
                raise self.rows.changed()
            parts.append(values[max(0, begin - at) : max(0, end - at)])
        return np.concatenate(parts)


@dataclass(frozen=True, kw_only=True)
class RowOffsets:
    """``row_offsets`` of sparse-bitmask.

    ``begins`` are int64: the number of elements before each group of ``ROW_GROUP`` rows, and the number of all. They
    are for groups, because those of all rows of a large model would not fit the memory of a conversion.
    """

    rows: PrunedRows
    begins: bytes

    def __call__(self, files: SourceFiles, begin: int, end: int) -> Words:
        """Bits of the rows ``begin`` to ``end``: see ``RowComputation``."""
        counts = np.concatenate([nonzero.sum(axis=1) for _, _, nonzero in self.rows.blocks(files, begin, end)])
        at = np.frombuffer(self.begins, np.int64)[begin // ROW_GROUP]
        offsets: Words = (at + np.cumsum(counts) - counts).astype(np.int64).view(np.uint64)
        return offsets


@dataclass(frozen=True, kw_only=True)
class Integers:
    """64-bit integers in memory: ``shape``."""

    payload: bytes

    def __call__(self, files: SourceFiles, begin: int, end: int) -> Words:
        """Bits of the integers ``begin`` to ``end``: see ``RowComputation``."""
        return np.frombuffer(self.payload, np.uint64)[begin:end].copy()


@dataclass(frozen=True, kw_only=True)
class BitmaskRows:
    """The weight ``[R, columns]`` of the parts of a file; ``offsets`` is None for sparse-24-bitmask."""

    name: str
    compressed: Tensor
    bitmask: Tensor
    offsets: Tensor | None
    columns: int

    def __call__(self, files: SourceFiles, begin: int, end: int) -> Words:
        """Bits of the rows ``begin`` to ``end``: see ``RowComputation``.

        Raises:
            CorruptError: the parts contradict each other.
        """
        bits = np.unpackbits(bits_of(files, self.bitmask.narrow(0, begin, end)), axis=1, bitorder="little")
        if bits[:, self.columns :].any():
            raise CorruptError(f"{short_name(self.name)}.bitmask: has bits beyond its {self.columns} columns")
        stored = bits[:, : self.columns].view(np.bool_)
        if self.offsets is None:
            if (stored.reshape(-1, GROUP).sum(axis=1, dtype=np.uint8) != GROUP_NUMBERS).any():
                raise CorruptError(f"{short_name(self.name)}.bitmask: a group of four must have two bits")
            values = bits_of(files, self.compressed.narrow(0, begin, end))
        else:
            first, last = self._span(files, self.offsets, stored, begin)
            values = bits_of(files, self.compressed.narrow(0, first, last))
        rows = np.zeros(stored.shape, values.dtype)
        rows[stored] = values.reshape(-1)
        return rows

    def _span(self, files: SourceFiles, offsets: Tensor, stored: Bools, begin: int) -> tuple[int, int]:
        """Begin and end in ``compressed`` of the rows from ``begin``, whose offsets must be those of their bits."""
        end, total = begin + len(stored), self.compressed.shape[0]
        found = bits_of(files, offsets.narrow(0, begin, min(end + 1, offsets.shape[0]))).view(np.int64)
        if end == offsets.shape[0]:
            found = np.append(found, total)
        # The range first: differences of hostile offsets could overflow.
        is_valid = int(found.min()) >= 0 and int(found.max()) <= total and (begin > 0 or found[0] == 0)
        if not is_valid or (np.diff(found) != stored.sum(axis=1)).any():
            raise CorruptError(f"{short_name(self.name)}.row_offsets: do not match the bits of the bitmask")
        return int(found[0]), int(found[-1])


def _packed(bits: Bools) -> Words:
    packed: Words = np.packbits(bits, axis=1, bitorder="little")
    return packed
