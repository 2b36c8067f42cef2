"""Groups of duplicates from pairs: names are on disk, memory holds a few bytes per mention of a name."""

from __future__ import annotations

import contextlib
import functools
import itertools
import json
import os
import tempfile
from array import array
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO

import numpy as np
import numpy.typing as npt

from .._common.document import (
    ESCAPED,
    is_count,
    short_repr,
)
from .._common.errors import UsageError
from ..io.atomic_write import open_atomic
from ..io.codecs import wrap_write
from ..io.digests import DigestBuckets, DigestSet
from ..io.jsonl import read_objects
from .union_find import UnionFind

BUFFERED_NUMBERS = 1 << 16
READ_BYTES = 1 << 20
GROUPS_AT_ONCE = 1 << 14
# The first number of a location. Numbers of names are below it, so both kinds have distinct numbers in one set.
NUM_NAMES = 1 << 62


@dataclass(frozen=True, kw_only=True)
class GroupCounts:
    """Counts of ``write_groups``.

    Attributes:
        groups: number of groups.
        documents: number of documents in groups.
        largest: documents of the largest group.
    """

    groups: int = 0
    documents: int = 0
    largest: int = 0


class _Int64File:
    """A temporary file of int64 numbers."""

    def __init__(self, file: IO[bytes]) -> None:
        self._file = file
        self._waiting = array("q")

    def add(self, *numbers: int) -> None:
        self._waiting.extend(numbers)
        if len(self._waiting) >= BUFFERED_NUMBERS:
            self.flush()

    def flush(self) -> None:
        """Write the buffered numbers."""
        self._file.write(self._waiting.tobytes())
        self._file.flush()
        del self._waiting[:]

    def at(self, index: int, count: int) -> tuple[int, ...]:
        """Numbers ``index`` to ``index + count``, which must be flushed."""
        return tuple(array("q", os.pread(self._file.fileno(), 8 * count, 8 * index)))

    def blocks(self) -> Iterator[npt.NDArray[np.int64]]:
        self.flush()
        self._file.seek(0)
        while block := self._file.read(READ_BYTES):
            yield np.frombuffer(block, dtype=np.int64)


class Mentions(contextlib.AbstractContextManager["Mentions"]):
    """All mentions of names in pairs, numbered, and the pairs that connect them.

    A mention takes 32 bytes of disk and its name, a pair takes 16. Memory holds 5 bytes per mention, and 16 more for
    each name after the first of a group.

    Args:
        folder: folder of temporary files.
    """

    def __init__(self, folder: Path) -> None:
        self._open = contextlib.ExitStack()
        self._names, *numbers = (
            self._open.enter_context(tempfile.TemporaryFile(dir=folder))  # noqa: SIM115 - closed by __exit__
            for _ in range(3)
        )
        self._begins, self._joined = map(_Int64File, numbers)
        self._digests = self._open.enter_context(DigestBuckets(folder))
        self._count = self._size = 0

    def __exit__(self, *_: object) -> None:
        """Delete the temporary files."""
        self._open.close()

    def add(self, name: str) -> int:
        """Add a mention; returns its number."""
        encoded = json.dumps(name, ensure_ascii=False).encode("utf-8", ESCAPED)
        self._digests.add(encoded, self._count)
        self._names.write(encoded)
        self._begins.add(self._size)
        self._size += len(encoded)
        self._count += 1
        return self._count - 1

    def join(self, first: int, second: int) -> None:
        """Connect the names of the mentions with the numbers ``first`` and ``second``."""
        self._joined.add(first, second)

    def _encoded(self, mention: int) -> bytes:
        begin, end = self._begins.at(mention, 2)
        return os.pread(self._names.fileno(), end - begin, begin)

    def groups(self) -> Iterator[list[bytes]]:
        """Groups of at least two names, JSON-encoded, ordered by their first mentions."""
        self._names.flush()
        self._begins.add(self._size)
        self._begins.flush()
        # Two kinds of connection: mentions of one name, and mentions of one pair.
        sets = UnionFind(self._count)
        first_of_name = np.ones(self._count, dtype=np.bool_)
        for numbers, firsts in self._digests.duplicates():
            first_of_name[numbers] = False
            sets.union_pairs(firsts.astype(np.int64), numbers.astype(np.int64))
        for block in self._joined.blocks():
            sets.union_pairs(block[0::2], block[1::2])
        sets.flatten()
        parents = sets.parents
        first_of_name &= parents != np.arange(self._count, dtype=parents.dtype)
        # The root of a group is its smallest mention, so it is the first of its name and leads the group.
        behind = np.flatnonzero(first_of_name)
        # Stable: within a group, the names stay in the order of their first mentions.
        behind = behind[np.argsort(parents[behind], kind="stable")]
        roots = parents[behind]
        starts = np.flatnonzero(np.diff(roots, prepend=-1))
        for at in range(0, len(starts), GROUPS_AT_ONCE):
            bounds = [*starts[at : at + GROUPS_AT_ONCE + 1].tolist()]
            if at + GROUPS_AT_ONCE >= len(starts):
                bounds.append(len(behind))
            for begin, end in itertools.pairwise(bounds):
                members = [int(roots[begin]), *behind[begin:end].tolist()]
                yield [self._encoded(member) for member in members]


def _mention(pairs: Path, threshold: float, mentions: Mentions) -> None:
    for main, others in itertools.chain.from_iterable(entry.items() for entry in read_objects(pairs)):
        first = mentions.add(main)
        try:
            close = [other for each in others for other, index in each.items() if float(index) >= threshold]
        except (AttributeError, TypeError, ValueError) as error:
            raise UsageError(
                f"{pairs}: the value of {short_repr(main)} must be a list of {{other: Jaccard index}}"
            ) from error
        for other in close:
            mentions.join(first, mentions.add(other))


def write_groups(pairs: Path, output: Path, threshold: float) -> GroupCounts:
    """Group a file of pairs into a file of ``{"0": [names]}``, one group per line, survivor first.

    A group contains the documents that pairs of at least ``threshold`` connect, in the order of the pairs.

    Args:
        pairs: lines ``{main: [{other: J}, ...]}``, earlier documents first.
        output: compressed by its extension.
        threshold: minimum Jaccard index of a pair.

    Raises:
        UsageError: a pair has another form.
    """
    number = documents = largest = 0
    with open_atomic(output) as target, Mentions(output.parent) as mentions:
        _mention(pairs, threshold, mentions)
        writer = wrap_write(target, output.suffix)
        for number, members in enumerate(mentions.groups(), 1):
            writer.write(b'{"%d": [%s]}\n' % (number - 1, b", ".join(members)))
            documents, largest = documents + len(members), max(largest, len(members))
        if writer is not target:
            writer.close()
    return GroupCounts(groups=number, documents=documents, largest=largest)


class RemovalSet:
    """Names to remove: all of each group except the first.

    A document without a name is addressed by its location ``FILE@OFFSET``. Different spellings of a path, such as
    ``./FILE`` or an absolute one, address the same document.

    Args:
        path: file of groups.

    Raises:
        UsageError: it is not a file of groups.
    """

    def __init__(self, path: Path) -> None:
        self._names = DigestSet(_removals(path))
        self._places = DigestSet(_resolved_locations(_removals(path)))

    def __len__(self) -> int:
        """Number of names."""
        return len(self._names)

    def find(self, name: str | None, place: str, real_file: str) -> int | None:
        """The number of the name that addresses a document, for ``num_missing``; None if no name does.

        Args:
            name: name of the document, if any.
            place: location ``FILE@OFFSET``.
            real_file: real path of its file.
        """
        for own in (name, place):
            if own is not None and (found := self._names.find(own)) is not None:
                return found
        if not len(self._places):
            return None
        found = self._places.find(f"{real_file}@{place.rpartition('@')[2]}")
        return None if found is None else NUM_NAMES + found

    def num_missing(self, found: Iterable[int]) -> int:
        """The number of names that address no document, given the numbers of those found."""
        return max(len(self) - len(set(found)), 0)


def read_removal_set(path: Path) -> RemovalSet:
    """The names to remove; the file is read once per process."""
    status = path.stat()
    return _read_once(path.resolve(), status.st_size, status.st_mtime_ns)


@functools.lru_cache(maxsize=1)
def _read_once(path: Path, _size: int, _mtime_ns: int) -> RemovalSet:
    return RemovalSet(path)


def _resolved_locations(names: Iterable[str]) -> Iterator[str]:
    """The names that are locations, with the real paths of their files."""
    real: dict[str, str] = {}
    for name in names:
        file, _, offset = name.rpartition("@")
        if file and is_count(offset):
            if file not in real:
                real[file] = os.path.realpath(file)
            yield f"{real[file]}@{offset}"


def _removals(path: Path) -> Iterator[str]:
    for entry in read_objects(path):
        for members in entry.values():
            if not isinstance(members, list) or not all(isinstance(name, str) for name in members):
                raise UsageError(f"{path}: each group must be a list of names")
            yield from members[1:]
