"""Groups of duplicates from pairs of them: names on disk, and in memory some bytes for each one mentioned."""

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

from .._common.document import ESCAPED, short_repr
from .._common.errors import UsageError
from ..io.atomic_write import open_atomic
from ..io.codecs import wrap_write
from ..io.digests import DigestBuckets, DigestSet
from ..io.jsonl import read_objects
from .union_find import UnionFind

BUFFERED_NUMBERS = 1 << 16
READ_BYTES = 1 << 20
GROUPS_AT_ONCE = 1 << 14
NUM_NAMES = 1 << 62  # numbers of places begin here


@dataclass(frozen=True, kw_only=True)
class GroupCounts:
    """What ``write_groups`` wrote: groups, the documents in them, and those of the largest."""

    groups: int = 0
    documents: int = 0
    largest: int = 0


class _Numbers:
    """Numbers in a file without a name, 8 bytes each."""

    def __init__(self, file: IO[bytes]) -> None:
        self._file = file
        self._waiting = array("q")

    def add(self, *numbers: int) -> None:
        self._waiting.extend(numbers)
        if len(self._waiting) >= BUFFERED_NUMBERS:
            self.flush()

    def flush(self) -> None:
        """Write what waits."""
        self._file.write(self._waiting.tobytes())
        self._file.flush()
        del self._waiting[:]

    def at(self, index: int, count: int) -> tuple[int, ...]:
        """Some numbers that were flushed."""
        return tuple(array("q", os.pread(self._file.fileno(), 8 * count, 8 * index)))

    def blocks(self) -> Iterator[npt.NDArray[np.int64]]:
        self.flush()
        self._file.seek(0)
        while block := self._file.read(READ_BYTES):
            yield np.frombuffer(block, dtype=np.int64)


class Mentions(contextlib.AbstractContextManager["Mentions"]):
    """The names that pairs mention, each mention numbered, and which ones are joined.

    On disk a mention takes 32 bytes and its name, and a pair 16; in memory 5, and 16 more for the names behind the
    first one of a group.

    Args:
        folder: where files without names hold them.
    """

    def __init__(self, folder: Path) -> None:
        self._open = contextlib.ExitStack()
        self._names, *numbers = (
            self._open.enter_context(tempfile.TemporaryFile(dir=folder))  # noqa: SIM115 - closed by __exit__
            for _ in range(3)
        )
        self._begins, self._joined = map(_Numbers, numbers)
        self._digests = self._open.enter_context(DigestBuckets(folder))
        self._count = self._size = 0

    def __exit__(self, *_: object) -> None:
        """Give the disk back."""
        self._open.close()

    def add(self, name: str) -> int:
        """The number of one more mention."""
        encoded = json.dumps(name, ensure_ascii=False).encode("utf-8", ESCAPED)
        self._digests.add(encoded, self._count)
        self._names.write(encoded)
        self._begins.add(self._size)
        self._size += len(encoded)
        self._count += 1
        return self._count - 1

    def join(self, first: int, second: int) -> None:
        """The names of two mentions belong together."""
        self._joined.add(first, second)

    def _encoded(self, mention: int) -> bytes:
        begin, end = self._begins.at(mention, 2)
        return os.pread(self._names.fileno(), end - begin, begin)

    def groups(self) -> Iterator[list[bytes]]:
        """The groups of two names and more as JSON, groups and names in the order in which they came first."""
        self._names.flush()
        self._begins.add(self._size)
        self._begins.flush()
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
        behind = np.flatnonzero(first_of_name)
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
                f"{pairs}: {short_repr(main)} must be followed by a list of {{other: Jaccard index}}"
            ) from error
        for other in close:
            mentions.join(first, mentions.add(other))


def write_groups(pairs: Path, output: Path, threshold: float) -> GroupCounts:
    """Group a file of pairs into a file of ``{"0": [names]}``, one group a line, its survivor first.

    Groups hold the documents that pairs at ``threshold`` and above connect, in the order in which the pairs name them.

    Args:
        pairs: of ``{main: [{other: J}, ...]}``, earlier documents first.
        output: compressed by its ending.
        threshold: of the Jaccard index.

    Raises:
        UsageError: a pair that does not look like one.
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
    """The names behind the first one of each group: documents to remove.

    A document without a name is addressed by its place, ``FILE@OFFSET``. Another spelling of the file's path, such as
    ``./FILE`` or an absolute one, addresses the same document.

    Args:
        path: the groups.

    Raises:
        UsageError: it is not a file of groups.
    """

    def __init__(self, path: Path) -> None:
        self._names = DigestSet(_removals(path))
        self._places = DigestSet(_resolved_locations(_removals(path)))

    def __len__(self) -> int:
        """The number of names."""
        return len(self._names)

    def find(self, name: str | None, place: str, real_file: str) -> int | None:
        """The number of the group's name that a document has, by which ``num_missing`` counts it; None without one.

        Args:
            name: the document's own name, if it has one.
            place: its place, ``FILE@OFFSET``.
            real_file: the real path of its file.
        """
        for own in (name, place):
            if own is not None and (found := self._names.find(own)) is not None:
                return found
        if not len(self._places):
            return None
        found = self._places.find(f"{real_file}@{place.rpartition('@')[2]}")
        return None if found is None else NUM_NAMES + found

    def num_missing(self, found: Iterable[int]) -> int:
        """How many names are of no document, given the numbers of those that were found."""
        return max(len(self) - len(set(found)), 0)


def read_removal_set(path: Path) -> RemovalSet:
    """The names behind the first one of each group, read once a process."""
    status = path.stat()
    return _read_once(path.resolve(), status.st_size, status.st_mtime_ns)


@functools.lru_cache(maxsize=1)
def _read_once(path: Path, _size: int, _mtime_ns: int) -> RemovalSet:
    return RemovalSet(path)


def _resolved_locations(names: Iterable[str]) -> Iterator[str]:
    """The names that are places, with the real paths of their files."""
    real: dict[str, str] = {}
    for name in names:
        file, _, offset = name.rpartition("@")
        if file and offset.isascii() and offset.isdigit():
            if file not in real:
                real[file] = os.path.realpath(file)
            yield f"{real[file]}@{offset}"


def _removals(path: Path) -> Iterator[str]:
    for entry in read_objects(path):
        for members in entry.values():
            if not isinstance(members, list) or not all(isinstance(name, str) for name in members):
                raise UsageError(f"{path}: each group must be a list of names")
            yield from members[1:]
