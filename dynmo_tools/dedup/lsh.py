"""Candidates for near-duplicates: buckets of documents that share a band, and groups of buckets that hang together.

Two documents of different groups share no band, so groups are verified apart from each other, in any order and place.
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
MAX_SPILLS = 256
BLOCK_BUCKETS = 1 << 18
CUT_BINS = 1 << 16

I64 = npt.NDArray[np.int64]
KEYED = np.dtype([("key", "<u8"), ("document", "<i8")])

MEMBERS, SIZES = "members.i64", "sizes.i64"


def repeated(keys: U64, documents: I64) -> tuple[I64, I64]:
    """The documents that share a key with another one, bucket behind bucket, and the sizes of the buckets.

    Args:
        keys: one a document.
        documents: their numbers, in any order.

    Returns:
        The members, by key and then ascending; how many of them each bucket has.
    """
    order = np.argsort(keys)
    ordered = keys[order]
    same = ordered[1:] == ordered[:-1]
    shared = np.zeros(len(keys), dtype=np.bool_)
    shared[1:] |= same
    shared[:-1] |= same
    ordered, members = ordered[shared], documents[order[shared]]
    members = members[np.lexsort((members, ordered))]
    ends = np.flatnonzero(ordered[1:] != ordered[:-1]) + 1
    bounds = np.concatenate([[0], ends, [len(ordered)]]) if len(ordered) else np.zeros(1, dtype=np.int64)
    return members, np.diff(bounds)


def buckets(
    blocks: Iterable[U64], count: int, folder: Path, held: int = MAX_KEYS_IN_MEMORY
) -> Iterator[tuple[I64, I64]]:
    """The buckets of one band, by key, as ``repeated`` gives them, a share of the keys at a time.

    Args:
        blocks: the keys of all documents, one block behind the other.
        count: the number of documents.
        folder: where files without names hold the keys if they are more than ``held``.
        held: about how many keys are sorted at once, some 26 bytes each.
    """
    if count <= held:
        keys: U64 = np.concatenate([np.zeros(0, dtype=np.uint64), *blocks])
        yield repeated(keys, np.arange(count))
        return
    bits = min((count - 1) // held, MAX_SPILLS - 1).bit_length()
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
    """Append keys and numbers of documents to the file of the keys' first ``bits`` bits."""
    part = (keys >> np.uint64(64 - bits)).astype(np.int64)
    order = np.argsort(part, kind="stable")
    rows = np.zeros(len(keys), dtype=KEYED)
    rows["key"], rows["document"] = keys[order], order + begin
    ends = np.cumsum(np.bincount(part, minlength=len(spills))).tolist()
    for spill, (first, last) in zip(spills, itertools.pairwise([0, *ends]), strict=True):
        spill.write(rows[first:last].tobytes())


def _map_numbers(path: Path) -> I64:
    """A file of numbers as an array that is read when it is used."""
    if not path.stat().st_size:
        return np.zeros(0, dtype=np.int64)
    return np.asarray(np.memmap(path, dtype=np.int64, mode="r"))


@dataclass(frozen=True, kw_only=True)
class StoredBuckets:
    """The buckets of some bands on disk, in two files of numbers."""

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
    """The groups of documents that buckets bring together, directly or by way of others."""
    sets = UnionFind(count)
    for bucket in stored:
        for members, sizes in bucket.blocks():
            firsts = members[np.cumsum(sizes) - sizes]
            sets.union_pairs(np.repeat(firsts, sizes), members)
    sets.flatten()
    return sets


def partition_groups(stored: Sequence[StoredBuckets], roots: npt.NDArray[Any], parts: int) -> list[int]:
    """Bounds ``[parts + 1]`` between the numbers of the groups, with about as many members of buckets in each part.

    Args:
        stored: all buckets.
        roots: of each document the number of its group, ``[documents]``.
        parts: how many.
    """
    width = max(-(-len(roots) // CUT_BINS), 1)
    weights = np.zeros(-(-len(roots) // width) + 1, dtype=np.int64)
    for bucket in stored:
        for members, sizes in bucket.blocks():
            groups = roots[members[np.cumsum(sizes) - sizes]] // width
            weights += np.bincount(groups, weights=sizes, minlength=len(weights)).astype(np.int64)
    before = np.cumsum(weights)
    wanted = before[-1] * np.arange(1, parts) // parts
    cuts = (np.searchsorted(before, wanted, side="right") * width).tolist()
    return [0, *cuts, max(len(roots), cuts[-1] if cuts else 0)]


def groups_in_range(
    stored: Sequence[StoredBuckets], roots: npt.NDArray[Any], first: int, last: int
) -> Iterator[list[list[int]]]:
    """The buckets of each group whose number is in ``first .. last - 1``, group by group, in the order of ``stored``.

    Of buckets with the same members, the first is given.
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
        distinct: dict[tuple[int, ...], None] = {}
        for at in order[begin:end].tolist():
            distinct[tuple(members[starts[at] : starts[at] + sizes[at]].tolist())] = None
        yield [list(bucket) for bucket in distinct]


class _ArrayList:
    """Arrays that become one."""

    def __init__(self) -> None:
        self._parts: list[npt.NDArray[Any]] = [np.zeros(0, dtype=np.int64)]

    def add(self, part: npt.NDArray[Any]) -> None:
        self._parts.append(part)

    def whole(self) -> npt.NDArray[Any]:
        joined = np.concatenate(self._parts)
        self._parts.clear()
        return joined
