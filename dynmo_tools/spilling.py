"""What grows with the number of pairs or names, kept on disk: sorted pairs, and the names of documents by number."""

from __future__ import annotations

import contextlib
import hashlib
import heapq
import json
import mmap
import os
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np

from .shingles import U64

PAIR = np.dtype([("main", "<i8"), ("other", "<i8"), ("jaccard", "<f8")])
HELD_PAIRS = 1 << 20
READ_PAIRS = 1 << 12
HELD_OFFSETS = 1 << 16


class SortedPairs(contextlib.AbstractContextManager["SortedPairs"]):
    """Pairs of documents with their Jaccard index, given back once each and in order.

    Args:
        folder: where a file without a name holds what is not in memory.
        held: pairs in memory at most, 24 bytes each.
    """

    def __init__(self, folder: Path, held: int = HELD_PAIRS) -> None:
        self._file = tempfile.TemporaryFile(dir=folder)  # noqa: SIM115 - closed by __exit__
        self._rows = np.zeros(held, dtype=PAIR)
        self._filled = 0
        self._runs: list[tuple[int, int]] = []

    def __exit__(self, *_: object) -> None:
        """Give the disk back."""
        self._file.close()

    def add(self, main: int, other: int, jaccard: float) -> None:
        """Keep a pair; the same one may come again."""
        if self._filled == len(self._rows):
            self._flush()
        self._rows[self._filled] = (main, other, jaccard)
        self._filled += 1

    def _flush(self) -> None:
        rows = self._rows[: self._filled]
        rows = rows[np.lexsort((rows["other"], rows["main"]))]
        self._runs.append((self._file.tell(), len(rows)))
        self._file.write(rows.tobytes())
        self._filled = 0

    def _run(self, offset: int, count: int) -> Iterator[tuple[int, int, float]]:
        for begin in range(0, count, READ_PAIRS):
            size = min(READ_PAIRS, count - begin) * PAIR.itemsize
            yield from np.frombuffer(os.pread(self._file.fileno(), size, offset + begin * PAIR.itemsize), PAIR).tolist()

    def __iter__(self) -> Iterator[tuple[int, int, float]]:
        """Main document, other document, Jaccard index; ascending."""
        self._flush()
        self._file.flush()
        before: tuple[int, int] | None = None
        for main, other, jaccard in heapq.merge(*(self._run(*run) for run in self._runs)):
            if (main, other) != before:
                yield main, other, jaccard
            before = main, other


class NameTable(contextlib.AbstractContextManager["NameTable"]):
    """The names of documents by their number: 8 bytes of memory each, 16 while it is made.

    A document whose name others have too is named by its place, and so is one whose name shares a 64-bit digest.

    Args:
        paths: files of ``[name or null, place]``, one a line, one behind the other.
        count: the number of documents in all.
        folder: where a file without a name holds the lines' offsets.
    """

    def __init__(self, paths: Sequence[Path], count: int, folder: Path) -> None:
        self._offsets = tempfile.TemporaryFile(dir=folder)  # noqa: SIM115 - closed by __exit__
        self._maps = [_map(path) for path in paths]
        self._first = [0]
        digests: U64 = np.zeros(count, dtype=np.uint64)
        waiting: list[int] = []
        number = 0
        for lines in self._maps:
            at = 0
            while at < len(lines):
                end = lines.find(b"\n", at) + 1 or len(lines)
                digests[number] = _digest(json.loads(lines[at:end])[0])
                waiting.append(at)
                if len(waiting) == HELD_OFFSETS:
                    self._write(waiting)
                number, at = number + 1, end
            self._first.append(number)
        self._write(waiting)
        self._offsets.flush()
        self._digests = digests
        ordered = np.sort(digests)
        repeated = np.unique(ordered[1:][ordered[1:] == ordered[:-1]])
        self._repeated = repeated[repeated != 0]

    def __exit__(self, *_: object) -> None:
        """Give the disk back."""
        self._offsets.close()

    def _write(self, offsets: list[int]) -> None:
        self._offsets.write(np.asarray(offsets, dtype=np.int64).tobytes())
        offsets.clear()

    @property
    def num_repeated(self) -> int:
        """How many names several documents have."""
        return len(self._repeated)

    def __getitem__(self, index: int) -> str:
        """The name of a document, which no other has."""
        part = int(np.searchsorted(self._first, index, side="right")) - 1
        at = int.from_bytes(os.pread(self._offsets.fileno(), 8, index * 8), "little")
        lines = self._maps[part]
        end = lines.find(b"\n", at) + 1 or len(lines)
        name, place = json.loads(lines[at:end])
        known = np.searchsorted(self._repeated, self._digests[index])
        own = known == len(self._repeated) or self._repeated[known] != self._digests[index]
        return str(name if name is not None and own else place)


def _digest(name: str | None) -> int:
    """64 bits of a name; 0 where there is none."""
    return 0 if name is None else int.from_bytes(hashlib.blake2b(name.encode(), digest_size=8).digest(), "little") or 1


def _map(path: Path) -> mmap.mmap | bytes:
    with open(path, "rb") as handle:
        return mmap.mmap(handle.fileno(), 0, access=mmap.ACCESS_READ) if handle.seek(0, os.SEEK_END) else b""
