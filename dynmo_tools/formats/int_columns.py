"""Columns of numbers that may be longer than memory: made anew block by block each time they are read."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

BLOCK = 1 << 18

Int64s = npt.NDArray[np.int64]


@dataclass(frozen=True)
class IntColumn:
    """Integers in a fixed order.

    Attributes:
        count: how many there are.
        blocks: gives them from the first on, ``[up to BLOCK]`` at a time; columns that were read from files or made of
            such by ``exclusive_cumsum`` have blocks of the same sizes where they have the same count.
    """

    count: int
    blocks: Callable[[], Iterator[Int64s]]

    def __len__(self) -> int:
        return self.count

    def load(self) -> Int64s:
        """All of them in memory, ``[count]``."""
        return np.concatenate([np.zeros(0, dtype=np.int64), *self.blocks()])

    def tolist(self) -> list[int]:
        """All of them as a list."""
        found: list[int] = self.load().tolist()
        return found

    def total(self) -> int:
        """Their sum."""
        return sum(int(block.sum()) for block in self.blocks())

    def extremes(self) -> tuple[int, int] | None:
        """The smallest and the largest; None where there is none."""
        found = [(int(block.min()), int(block.max())) for block in self.blocks() if len(block)]
        return (min(low for low, _ in found), max(high for _, high in found)) if found else None


def in_memory(values: npt.ArrayLike) -> IntColumn:
    """The numbers of an array."""
    array = np.asarray(values, dtype=np.int64)
    return IntColumn(len(array), lambda: (array[at : at + BLOCK] for at in range(0, len(array), BLOCK)))


def in_file(path: Path, kind: str, count: int, offset: int = 0) -> IntColumn:
    """``count`` numbers of the type ``kind`` that lie from byte ``offset`` on in a file."""
    size = np.dtype(kind).itemsize

    def blocks() -> Iterator[Int64s]:
        for at in range(0, count, BLOCK):
            yield np.fromfile(path, kind, min(BLOCK, count - at), offset=offset + at * size).astype(np.int64)

    return IntColumn(count, blocks)


def map_file(path: Path, kind: str) -> IntColumn:
    """All numbers of a file of the type ``kind``."""
    return in_file(path, kind, path.stat().st_size // np.dtype(kind).itemsize)


def concatenate(columns: Sequence[IntColumn]) -> IntColumn:
    """Columns one behind the other."""
    return IntColumn(sum(map(len, columns)), lambda: (block for column in columns for block in column.blocks()))


def add_scalar(column: IntColumn, by: int) -> IntColumn:
    """Each number and ``by`` together."""
    return IntColumn(column.count, lambda: (block + by for block in column.blocks()))


def drop_first(column: IntColumn) -> IntColumn:
    """All but the first number."""

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
    """The sum of all numbers before each one, times ``scale``."""

    def blocks() -> Iterator[Int64s]:
        before = 0
        for block in column.blocks():
            sums = np.cumsum(block)
            yield (sums - block + before) * scale
            before += int(sums[-1]) if len(sums) else 0

    return IntColumn(column.count, blocks)


def bounds(column: IntColumn) -> IntColumn:
    """The sum of all numbers before each one and, last, of all: ``[count + 1]``, beginning with 0."""

    def blocks() -> Iterator[Int64s]:
        yield np.zeros(1, dtype=np.int64)
        before = 0
        for block in column.blocks():
            sums = np.cumsum(block) + before
            yield sums
            before = int(sums[-1]) if len(sums) else before

    return IntColumn(column.count + 1, blocks)
