"""Names of documents by number, on disk; only names that several documents share are in memory."""

from __future__ import annotations

import bisect
import contextlib
import functools
import hashlib
import itertools
import json
import mmap
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO

import numpy as np

from .._common.document import ESCAPED
from .shingles import U64

# 16 bytes per document instead of its name: names may be URLs of any length.
LINE = np.dtype([("begin", "<i8"), ("digest", "<u8")])
BUFFERED_LINES = 1 << 16
CACHED_NAMES = 1 << 16


def name_line(name: str | None, place: str) -> bytes:
    """The line of one document in a file of names."""
    return json.dumps([name, place]).encode() + b"\n"


def digest_of_name(name: str | None) -> int:
    """A 64-bit digest of a name; 0 for None."""
    if name is None:
        return 0
    encoded = name.encode("utf-8", "surrogatepass")
    # 0 stands for "no name", so it is not the digest of one. Python's hash differs between processes.
    return int.from_bytes(hashlib.blake2b(encoded, digest_size=8).digest(), "little") or 1


class LineIndex:
    """Writes the offset of each line of a file of names, and the digest of its name.

    Args:
        target: receives rows of ``LINE``, 16 bytes per line.
    """

    def __init__(self, target: IO[bytes]) -> None:
        self._target = target
        self._waiting: list[tuple[int, int]] = []
        self._at = 0

    def add(self, name: str | None, size: int) -> None:
        """Add the next line, of ``size`` bytes."""
        self._waiting.append((self._at, digest_of_name(name)))
        self._at += size
        if len(self._waiting) == BUFFERED_LINES:
            self.flush()

    def flush(self) -> None:
        """Write the buffered rows."""
        self._target.write(np.array(self._waiting, dtype=LINE).tobytes())
        self._waiting.clear()


def write_name_index(path: Path, target: IO[bytes]) -> None:
    """Write the ``LINE`` rows of a file of names."""
    index = LineIndex(target)
    with open(path, "rb") as lines:
        for line in lines:
            index.add(json.loads(line)[0], len(line))
    index.flush()


def repeated_digests(paths: Sequence[Path]) -> U64:
    """The digests that several documents share, ascending, uint64; needs 16 bytes of memory per document."""
    count = sum(path.stat().st_size for path in paths) // LINE.itemsize
    digests: U64 = np.zeros(count, dtype=np.uint64)
    at = 0
    for path in paths:
        rows = np.fromfile(path, dtype=LINE)
        digests[at : at + len(rows)] = rows["digest"]
        at += len(rows)
    digests.sort()
    # Equal digests of different names only cost these names their brevity: they are then addressed by location.
    repeated: U64 = np.unique(digests[1:][digests[1:] == digests[:-1]])
    # Without 0, the digest of documents without a name.
    return repeated[np.searchsorted(repeated, np.uint64(1)) :]


@dataclass(frozen=True, kw_only=True)
class NamePart:
    """The names of some documents.

    Attributes:
        names: file with a line ``[name or null, location]`` per document.
        lines: its ``LINE`` rows.
    """

    names: Path
    lines: Path


class NameTable(contextlib.AbstractContextManager["NameTable"]):
    """Unique names of documents by number.

    The name of a document is its location if it has no name, or if another name has the same 64-bit digest.

    Args:
        parts: concatenated in this order.
        repeated: result of ``repeated_digests`` for all parts.
    """

    def __init__(self, parts: Sequence[NamePart], repeated: U64) -> None:
        counts = [part.lines.stat().st_size // LINE.itemsize for part in parts]
        self._first = [0, *itertools.accumulate(counts)]
        self._names = [map_bytes(part.names) for part in parts]
        self._lines = [map_bytes(part.lines) for part in parts]
        self._repeated = repeated
        self.name = functools.lru_cache(CACHED_NAMES)(self._name)

    def __exit__(self, *_: object) -> None:
        """Close the files."""
        for mapped in (*self._names, *self._lines):
            if isinstance(mapped, mmap.mmap):
                mapped.close()

    def _name(self, index: int) -> str:
        """The unique name of a document."""
        part = bisect.bisect_right(self._first, index) - 1
        at = (index - self._first[part]) * LINE.itemsize
        row = self._lines[part][at : at + LINE.itemsize]
        begin, digest = int.from_bytes(row[:8], "little"), int.from_bytes(row[8:], "little")
        names = self._names[part]
        name, place = json.loads(names[begin : names.find(b"\n", begin) + 1 or len(names)])
        found = np.searchsorted(self._repeated, np.uint64(digest))
        own = found == len(self._repeated) or self._repeated[found] != digest
        return str(name if name is not None and own else place)


def map_bytes(path: Path) -> mmap.mmap | bytes:
    """The bytes of a file, mapped; ``b""`` for an empty file, which cannot be mapped."""
    with open(path, "rb") as handle:
        return mmap.mmap(handle.fileno(), 0, access=mmap.ACCESS_READ) if handle.seek(0, os.SEEK_END) else b""


def pair_lines(pairs: Iterator[tuple[int, int, float]], names: NameTable) -> Iterator[tuple[bytes, int]]:
    """Lines ``{main: [{other: J}, ...]}`` of sorted pairs, one per main document, each with its number of pairs."""
    for main, others in itertools.groupby(pairs, key=lambda pair: pair[0]):
        listed = [{names.name(other): round(index, 6)} for _, other, index in others]
        line = json.dumps({names.name(main): listed}, ensure_ascii=False)
        yield line.encode("utf-8", ESCAPED) + b"\n", len(listed)
