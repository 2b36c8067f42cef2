"""Columns of integers that may be larger than memory: generated block by block whenever they are read."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

# 2 MiB of int64. The join of binarize holds a few blocks at a time, whatever the number of documents is.
BLOCK = 1 << 18

Int64s = npt.NDArray[np.int64]


@dataclass(frozen=True)
class IntColumn:
    """A sequence of int64 numbers.

    Attributes:
        count: number of elements.
        blocks: returns blocks ``[up to BLOCK]`` in order. Columns of files, and ``exclusive_cumsum`` of these, have
            blocks of equal sizes if they have equal counts.
    """

    count: int
    blocks: Callable[[], Iterator[Int64s]]

    def __len__(self) -> int:
        return self.count

    def load(self) -> Int64s:
        """All elements in memory ``[count]``, int64."""
        return np.concatenate([np.zeros(0, dtype=np.int64), *self.blocks()])

    def tolist(self) -> list[int]:
        """All elements as a list."""
        found: list[int] = self.load().tolist()
        return found

    def total(self) -> int:
        """Sum of all elements."""
        return sum(int(block.sum()) for block in self.blocks())

    def extremes(self) -> tuple[int, int] | None:
        """Minimum and maximum; None for an empty column."""
        found = [(int(block.min()), int(block.max())) for block in self.blocks() if len(block)]
        return (min(low for low, _ in found), max(high for _, high in found)) if found else None


def in_memory(values: npt.ArrayLike) -> IntColumn:
    """A column of ``values`` ``[count]``, which are converted to int64."""
    array = np.asarray(values, dtype=np.int64)
    return IntColumn(len(array), lambda: (array[at : at + BLOCK] for at in range(0, len(array), BLOCK)))


def in_file(path: Path, kind: str, count: int, offset: int = 0) -> IntColumn:
    """``count`` numbers of data type ``kind`` at byte ``offset`` of a file."""
    # Read, not mapped: a column is read once from begin to end, and mapped pages would count as memory of the process.
    size = np.dtype(kind).itemsize

    def blocks() -> Iterator[Int64s]:
        for at in range(0, count, BLOCK):
            yield np.fromfile(path, kind, min(BLOCK, count - at), offset=offset + at * size).astype(np.int64)

    return IntColumn(count, blocks)


def map_file(path: Path, kind: str) -> IntColumn:
    """All numbers of a file of data type ``kind``."""
    return in_file(path, kind, path.stat().st_size // np.dtype(kind).itemsize)


def concatenate(columns: Sequence[IntColumn]) -> IntColumn:
    """Concatenate columns."""
    return IntColumn(sum(map(len, columns)), lambda: (block for column in columns for block in column.blocks()))


def add_scalar(column: IntColumn, by: int) -> IntColumn:
    """Add ``by`` to each element."""
    return IntColumn(column.count, lambda: (block + by for block in column.blocks()))


def drop_first(column: IntColumn) -> IntColumn:
    """All elements except the first."""

    def blocks() -> Iterator[Int64s]:
        source = iter(column.blocks())
        yield next(source, np.zeros(0, dtype=np.int64))[1:]
        yield from source

    return IntColumn(max(column.count - 1, 0), blocks)


def arange(count: int) -> IntColumn:
    """``0, 1, ..., count - 1``."""
    return IntColumn(
        count, lambda: (np.arange(at, min(at + BLOCK, count), dtype=np.int64) for at in range(0, count, BLOCK))
    )


def exclusive_cumsum(column: IntColumn, scale: int = 1) -> IntColumn:
    """The sum of the elements before each one, times ``scale``."""

    # int64: the sum over all sequences exceeds int32 in any large dataset, even where each length fits.
    def blocks() -> Iterator[Int64s]:
        before = 0
        for block in column.blocks():
            sums = np.cumsum(block)
            yield (sums - block + before) * scale
            before += int(sums[-1]) if len(sums) else 0

    return IntColumn(column.count, blocks)


def bounds(column: IntColumn) -> IntColumn:
    """The sum of the elements before each one, and the total: ``[count + 1]``, starting with 0."""

    def blocks() -> Iterator[Int64s]:
        # The 0 is a block of its own, so the blocks of this column are not those of ``column``.
        yield np.zeros(1, dtype=np.int64)
        before = 0
        for block in column.blocks():
            sums = np.cumsum(block) + before
            yield sums
            before = int(sums[-1]) if len(sums) else before

    return IntColumn(column.count + 1, blocks)
