"""Candidates for near-duplicates by locality-sensitive hashing: buckets, and connected components of buckets.

A bucket is a set of documents with equal values in one band. Documents of different components share no band, so
components are verified independently.

Not ``datasketch.MinHashLSH``, whose signatures and bands these are: its index of Python objects is in the memory of one
process, 656 MB and 21 s of processor time for 100,000 documents, where sorted keys take 80 MB and 0.4 s, one band at a
time and beyond a million documents on disk (``tests/benchmarks/prep_results.md``).
"""

from __future__ import annotations

import contextlib
import itertools
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import numpy as np
import numpy.typing as npt

from .shingles import U64
from .union_find import UnionFind

MAX_KEYS_IN_MEMORY = 1 << 20
# Open files of one band; with more documents than 256 Mi, a spill has more keys instead.
MAX_SPILLS = 256
BLOCK_BUCKETS = 1 << 18
# Weights are summed over this number of ranges of components, whose bounds are also those of the verify tasks.
CUT_BINS = 1 << 16

I64 = npt.NDArray[np.int64]
KEYED = np.dtype([("key", "<u8"), ("document", "<i8")])

MEMBERS, SIZES = "members.i64", "sizes.i64"


def repeated(keys: U64, documents: I64) -> tuple[I64, I64]:
    """Find the documents that share a key.

    Args:
        keys: one key per document ``[documents]``, uint64.
        documents: their numbers ``[documents]``, int64, in any order.

    Returns:
        Members of the buckets, ordered by key and number, and the size of each bucket; both int64.
    """
    order = np.argsort(keys)
    ordered = keys[order]
    same = ordered[1:] == ordered[:-1]
    shared = np.zeros(len(keys), dtype=np.bool_)
    shared[1:] |= same
    shared[:-1] |= same
    ordered, members = ordered[shared], documents[order[shared]]
    # argsort is not stable. Sorted by key and number, the members do not depend on the algorithm of numpy.
    members = members[np.lexsort((members, ordered))]
    ends = np.flatnonzero(ordered[1:] != ordered[:-1]) + 1
    bounds = np.concatenate([[0], ends, [len(ordered)]]) if len(ordered) else np.zeros(1, dtype=np.int64)
    return members, np.diff(bounds)


def buckets(
    blocks: Iterable[U64], count: int, folder: Path, max_keys: int = MAX_KEYS_IN_MEMORY
) -> Iterator[tuple[I64, I64]]:
    """The buckets of one band by key, as from ``repeated``, for one range of keys at a time.

    Args:
        blocks: keys of all documents, in consecutive blocks ``[documents]``, uint64.
        count: number of documents.
        folder: folder of temporary files, for more than ``max_keys`` keys.
        max_keys: approximate number of keys that are sorted in memory, about 26 bytes each.

    Yields:
        Members ``[members]`` and sizes ``[buckets]`` of the buckets of one range, int64.
    """
    if count <= max_keys:
        keys: U64 = np.concatenate([np.zeros(0, dtype=np.uint64), *blocks])
        yield repeated(keys, np.arange(count))
        return
    bits = min((count - 1) // max_keys, MAX_SPILLS - 1).bit_length()
    with contextlib.ExitStack() as stack:
        spills = [stack.enter_context(tempfile.TemporaryFile(dir=folder)) for _ in range(1 << bits)]
        begin = 0
        for block in blocks:
            _spill(block, begin, spills, bits)
            begin += len(block)
        for spill in spills:
            spill.seek(0)
            rows = np.frombuffer(spill.read(), dtype=KEYED)
            yield repeated(rows["key"].copy(), rows["document"].copy())


def _spill(keys: U64, begin: int, spills: Sequence[IO[bytes]], bits: int) -> None:
    """Append keys and document numbers to the file of each key's first ``bits`` bits."""
    # Keys are hashes, so ranges of their first bits have about equal sizes, and the files concatenated are ordered by
    # key.
    part = (keys >> np.uint64(64 - bits)).astype(np.int64)
    order = np.argsort(part, kind="stable")
    rows = np.zeros(len(keys), dtype=KEYED)
    rows["key"], rows["document"] = keys[order], order + begin
    ends = np.cumsum(np.bincount(part, minlength=len(spills))).tolist()
    for spill, (first, last) in zip(spills, itertools.pairwise([0, *ends]), strict=True):
        spill.write(rows[first:last].tobytes())


def _map_numbers(path: Path) -> I64:
    """Map a file of int64 numbers."""
    if not path.stat().st_size:
        return np.zeros(0, dtype=np.int64)
    return np.asarray(np.memmap(path, dtype=np.int64, mode="r"))


@dataclass(frozen=True, kw_only=True)
class StoredBuckets:
    """Buckets of some bands on disk.

    Attributes:
        members: file of document numbers, int64.
        sizes: file of bucket sizes, int64.
    """

    members: Path
    sizes: Path

    def blocks(self) -> Iterator[tuple[I64, I64]]:
        """Members and sizes of ``BLOCK_BUCKETS`` buckets at a time."""
        members, sizes = _map_numbers(self.members), _map_numbers(self.sizes)
        at = 0
        for begin in range(0, len(sizes), BLOCK_BUCKETS):
            block = sizes[begin : begin + BLOCK_BUCKETS]
            end = at + int(block.sum())
            yield members[at:end], block
            at = end


def connect(stored: Sequence[StoredBuckets], count: int) -> UnionFind:
    """The connected components of documents that share buckets.

    Args:
        stored: all buckets.
        count: number of documents.

    Returns:
        The flattened components of documents ``0 .. count - 1``.
    """
    # Each member is joined with the first one: a chain or a complete graph would give the same components.
    sets = UnionFind(count)
    for bucket in stored:
        for members, sizes in bucket.blocks():
            firsts = members[np.cumsum(sizes) - sizes]
            sets.union_pairs(np.repeat(firsts, sizes), members)
    sets.flatten()
    return sets


def partition_groups(stored: Sequence[StoredBuckets], roots: npt.NDArray[Any], parts: int) -> list[int]:
    """Divide the component numbers into ranges with about equal numbers of bucket members.

    Args:
        stored: all buckets.
        roots: component of each document ``[documents]``.
        parts: number of ranges.

    Returns:
        Bounds ``[parts + 1]``.
    """
    width = max(-(-len(roots) // CUT_BINS), 1)
    weights = np.zeros(-(-len(roots) // width) + 1, dtype=np.int64)
    for bucket in stored:
        for members, sizes in bucket.blocks():
            groups = roots[members[np.cumsum(sizes) - sizes]] // width
            weights += np.bincount(groups, weights=sizes, minlength=len(weights)).astype(np.int64)
    # Bucket members approximate the work: comparisons depend on similarities, which are not known yet.
    before = np.cumsum(weights)
    targets = before[-1] * np.arange(1, parts) // parts
    cuts = (np.searchsorted(before, targets, side="right") * width).tolist()
    return [0, *cuts, max(len(roots), cuts[-1] if cuts else 0)]


def groups_in_range(
    stored: Sequence[StoredBuckets], roots: npt.NDArray[Any], first: int, last: int
) -> Iterator[list[list[int]]]:
    """The buckets of each component with a number in ``first .. last - 1``, without repeated buckets.

    Args:
        stored: all buckets.
        roots: component of each document ``[documents]``.
        first: first component.
        last: one after the last component.
    """
    found_groups, found_sizes, found_members = (_ArrayList() for _ in range(3))
    for bucket in stored:
        for members, sizes in bucket.blocks():
            groups = roots[members[np.cumsum(sizes) - sizes]]
            mine = (groups >= first) & (groups < last)
            found_groups.add(groups[mine])
            found_sizes.add(sizes[mine])
            found_members.add(members[np.repeat(mine, sizes)])
    groups, sizes, members = found_groups.whole(), found_sizes.whole(), found_members.whole()
    starts = np.cumsum(sizes) - sizes
    order = np.argsort(groups, kind="stable")
    bounds = np.flatnonzero(np.diff(groups[order], prepend=-1, append=-1)).tolist()
    for begin, end in itertools.pairwise(bounds):
        # Similar documents share several bands, which then have the same bucket. A dict keeps the order of the buckets;
        # a set would not.
        distinct: dict[tuple[int, ...], None] = {}
        for at in order[begin:end].tolist():
            distinct[tuple(members[starts[at] : starts[at] + sizes[at]].tolist())] = None
        yield [list(bucket) for bucket in distinct]


class _ArrayList:
    """Arrays to concatenate."""

    def __init__(self) -> None:
        self._parts: list[npt.NDArray[Any]] = [np.zeros(0, dtype=np.int64)]

    def add(self, part: npt.NDArray[Any]) -> None:
        self._parts.append(part)

    def whole(self) -> npt.NDArray[Any]:
        joined = np.concatenate(self._parts)
        self._parts.clear()
        return joined
