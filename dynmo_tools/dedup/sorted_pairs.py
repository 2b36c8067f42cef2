"""External sort of document pairs."""

from __future__ import annotations

import contextlib
import heapq
import itertools
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import numpy.typing as npt

PAIR = np.dtype([("main", "<i8"), ("other", "<i8"), ("jaccard", "<f8")])
MAX_PAIRS_IN_MEMORY = 1 << 20
# Every run has a block in memory while all are merged.
READ_PAIRS = 1 << 12


class SortedPairs(contextlib.AbstractContextManager["SortedPairs"]):
    """Sorts pairs of documents with their Jaccard index, without repeated pairs.

    Args:
        folder: folder of the temporary file.
        max_pairs: maximum number of pairs in memory, 24 bytes each.
    """

    def __init__(self, folder: Path, max_pairs: int = MAX_PAIRS_IN_MEMORY) -> None:
        self._file = tempfile.TemporaryFile(dir=folder)  # noqa: SIM115 - closed by __exit__
        self._rows = np.zeros(max_pairs, dtype=PAIR)
        self._filled = 0
        self._runs: list[tuple[int, int]] = []

    def __exit__(self, *_: object) -> None:
        """Delete the temporary file."""
        self._file.close()

    def add(self, main: int, other: int, jaccard: float) -> None:
        """Add a pair; it may be repeated.

        Args:
            main: number of the earlier document.
            other: number of the later document.
            jaccard: Jaccard index of their shingles, 0 to 1.
        """
        if self._filled == len(self._rows):
            self._flush()
        self._rows[self._filled] = (main, other, jaccard)
        self._filled += 1

    def _flush(self) -> None:
        rows = self._rows[: self._filled]
        rows = rows[np.lexsort((rows["other"], rows["main"]))]
        self._runs.append((self._file.seek(0, os.SEEK_CUR), len(rows)))
        self._file.write(rows.tobytes())
        self._filled = 0

    def _run(self, offset: int, count: int) -> Iterator[tuple[int, int, float]]:
        for begin in range(0, count, READ_PAIRS):
            # pread does not move the file position, so all runs are read in turn from one descriptor.
            size = min(READ_PAIRS, count - begin) * PAIR.itemsize
            yield from np.frombuffer(os.pread(self._file.fileno(), size, offset + begin * PAIR.itemsize), PAIR).tolist()

    def __iter__(self) -> Iterator[tuple[int, int, float]]:
        """Main document, other document, Jaccard index; ascending."""
        self._flush()
        self._file.flush()
        before: tuple[int, int] | None = None
        for main, other, jaccard in heapq.merge(*(self._run(*run) for run in self._runs)):
            # A pair of several buckets occurs several times, with one Jaccard index, because it is exact.
            if (main, other) != before:
                yield main, other, jaccard
            before = main, other

    def blocks(self) -> Iterator[npt.NDArray[np.void]]:
        """The sorted pairs in arrays of ``PAIR``."""
        pairs = iter(self)
        while block := list(itertools.islice(pairs, READ_PAIRS)):
            yield np.array(block, dtype=PAIR)


def read_pairs(path: Path, first: int, last: int) -> Iterator[tuple[int, int, float]]:
    """The pairs of a file of sorted ``PAIR`` rows whose main document is in ``first .. last - 1``."""
    # np.memmap refuses an empty file.
    if not path.stat().st_size:
        return
    rows = np.memmap(path, dtype=PAIR, mode="r")
    begin, end = np.searchsorted(rows["main"], [first, last])
    for at in range(begin, end, READ_PAIRS):
        yield from rows[at : min(at + READ_PAIRS, end)].tolist()
