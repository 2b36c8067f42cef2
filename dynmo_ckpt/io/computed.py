"""Arrays that are computed from stored ones while they are read: dequantized weights, weights with a merged adapter.

A :class:`ComputedArray` stands where a stored array would, so that views, copy plans and conversions need not know of
it. The reader (:mod:`.reading`) computes whole rows, a chunk of bounded size at a time::

    Reader.read(array, byte range) -> rows of the range -> array.compute(files, begin, end) -> bytes
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from .errors import CorruptError, short_name
from .safetensors import DTYPE_BYTES, StoredArray

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from .reading import SourceFiles

# Rows are computed in groups of this number: the packed formats have up to 32 elements in a group of words.
ROW_GROUP = 32
CHUNK_BYTES = 2 << 20
# The computation has the operands of a chunk and its result in float32 at the same time.
BUFFERS_PER_CHUNK = 8


class RowComputation(Protocol):
    """Computes rows of an array; hashable, because arrays are keys."""

    def __call__(self, files: SourceFiles, begin: int, end: int) -> NDArray[np.unsignedinteger]:
        """The bits of the rows ``[begin, end)``, counted over all dimensions but the last: ``[end - begin, columns]``.

        ``begin`` is a multiple of ``ROW_GROUP``.
        """


@dataclass(frozen=True, kw_only=True)
class ComputedArray(StoredArray):
    """An array whose bytes are computed; ``path`` and ``key`` are those of its main input, for messages.

    Attributes:
        inputs: the arrays from which it is computed; their files are opened for it.
        compute: computes rows.
    """

    inputs: tuple[StoredArray, ...]
    compute: RowComputation

    @property
    def rows(self) -> int:
        """Number of rows: the product of all dimensions but the last."""
        return math.prod(self.shape[:-1])

    @property
    def chunk_rows(self) -> int:
        """Number of rows that are computed at a time, a multiple of ``ROW_GROUP``."""
        row_bytes = max(1, self.shape[-1] * DTYPE_BYTES[self.dtype])
        return max(1, CHUNK_BYTES // row_bytes // ROW_GROUP) * ROW_GROUP

    def chunk(self, files: SourceFiles, first_row: int) -> NDArray[np.uint8]:
        """The bytes of the chunk that begins at a row; the files of ``inputs`` must be open.

        Args:
            files: the open files.
            first_row: a multiple of ``chunk_rows``.

        Raises:
            CorruptError: the computation gave an array of another size, or an input ends early.
        """
        end = min(self.rows, first_row + self.chunk_rows)
        words = self.compute(files, first_row, end)
        payload = words.reshape(-1).view("u1")
        expected = (end - first_row) * self.shape[-1] * DTYPE_BYTES[self.dtype]
        if payload.size != expected:
            raise CorruptError(f"{self.path}: {short_name(self.key)}: computed {payload.size} bytes, not {expected}")
        return payload


def stored_inputs(array: StoredArray) -> Iterator[StoredArray]:
    """The arrays in files that are read for ``array``: itself, or the inputs of a computed one, at any depth."""
    if not isinstance(array, ComputedArray):
        yield array
        return
    for each in array.inputs:
        yield from stored_inputs(each)
