"""Pairs of near-duplicates: documents that share a band of their signatures, and truly share their shingles."""

from __future__ import annotations

import itertools
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from .shingles import U64, Alphabet, jaccard, num_common, share

CACHE_BYTES = 256 << 20
ALL_PAIRS = 64
BLOCK_KEYS = 1 << 20
SEEN_PAIRS = 1 << 20


class ShingleCache:
    """The shingles of the texts asked for last, up to a number of bytes."""

    def __init__(self, text_of: Callable[[int], str], length: int, limit_bytes: int = CACHE_BYTES) -> None:
        self._text_of, self._length, self._limit = text_of, length, limit_bytes
        self._kept: OrderedDict[int, U64 | None] = OrderedDict()
        self._bytes = 0
        self._alphabet = Alphabet()

    def _ids(self, index: int) -> U64 | None:
        if index in self._kept:
            self._kept.move_to_end(index)
            return self._kept[index]
        ids = self._alphabet.shingles(self._text_of(index), self._length)
        self._kept[index] = ids
        self._bytes += ids.nbytes if ids is not None else 0
        while self._bytes > self._limit and len(self._kept) > 1:
            _, old = self._kept.popitem(last=False)
            self._bytes -= old.nbytes if old is not None else 0
        return ids

    def jaccard(self, first: int, second: int, divisor: str) -> float:
        """The true Jaccard index of two documents."""
        mine, theirs = self._ids(first), self._ids(second)
        if mine is None or theirs is None:
            return jaccard(self._text_of(first), self._text_of(second), self._length, divisor)
        return share(num_common(mine, theirs), len(mine), len(theirs), divisor)


def sharing(keys: U64) -> npt.NDArray[np.int64]:
    """The documents whose key another one has too, ascending: 9 bytes a document beside the keys while it looks."""
    ordered = np.sort(keys)
    repeated = np.unique(ordered[1:][ordered[1:] == ordered[:-1]])
    del ordered
    if not len(repeated):
        return np.zeros(0, dtype=np.int64)
    found = []
    for begin in range(0, len(keys), BLOCK_KEYS):
        block = keys[begin : begin + BLOCK_KEYS]
        at = np.minimum(np.searchsorted(repeated, block), len(repeated) - 1)
        found.append(np.flatnonzero(repeated[at] == block) + begin)
    return np.concatenate(found)


def buckets(keys: U64) -> Iterator[npt.NDArray[np.int64]]:
    """The documents that share a key with another one, bucket by bucket, each in ascending order."""
    members = sharing(keys)
    order = np.argsort(keys[members], kind="stable")
    ordered, members = keys[members[order]], members[order]
    ends = np.flatnonzero(ordered[1:] != ordered[:-1]) + 1
    bounds = [0, *ends.tolist(), len(members)] if len(members) else []
    for begin, end in itertools.pairwise(bounds):
        yield members[begin:end]


@dataclass(frozen=True, kw_only=True)
class Pair:
    """Two documents, the earlier one first, and the Jaccard index of their shingles."""

    main: int
    other: int
    jaccard: float


def stars(
    bucket: Sequence[int],
    similarity: Callable[[int, int], float],
    threshold: float,
    rounds: int,
    known: Callable[[int, int], bool],
) -> Iterator[Pair]:
    """The similar pairs of a bucket.

    A small bucket is compared pair by pair. In a large one the first document is compared with all others, those found
    similar leave, and the next one becomes the first.

    Args:
        bucket: documents in ascending order.
        similarity: of two documents, 0 to 1.
        threshold: from which a pair is given.
        rounds: how many documents become the first one; -1 is until the bucket is empty.
        known: whether a pair needs no comparison, because it was compared before or is known to belong together.
    """
    if rounds < 0 and len(bucket) <= ALL_PAIRS:
        for main, other in itertools.combinations(bucket, 2):
            if not known(main, other) and (index := similarity(main, other)) >= threshold:
                yield Pair(main=main, other=other, jaccard=index)
        return
    waiting = list(bucket)
    while len(waiting) > 1 and rounds != 0:
        rounds -= 1
        main, *others = waiting
        waiting = []
        for other in others:
            if known(main, other):
                continue
            index = similarity(main, other)
            if index >= threshold:
                yield Pair(main=main, other=other, jaccard=index)
            else:
                waiting.append(other)


class Seen:
    """Pairs that were compared: the second and later time they are known."""

    def __init__(self, count: int) -> None:
        self._count = count
        self._pairs: set[int] = set()

    def __call__(self, first: int, second: int) -> bool:
        """Whether the pair was asked for before; now and then all are forgotten, so that their number is bounded."""
        number = first * self._count + second
        if number in self._pairs:
            return True
        if len(self._pairs) >= SEEN_PAIRS:
            self._pairs.clear()
        self._pairs.add(number)
        return False


def match(
    band_keys: Callable[[int], U64],
    num_bands: int,
    similarity: Callable[[int, int], float],
    known: Callable[[int, int], bool],
    *,
    threshold: float,
    rounds: int = -1,
) -> Iterator[Pair]:
    """Every verified pair that a band brings together and that is not ``known``.

    Args:
        band_keys: the keys ``[documents]`` of a band.
        num_bands: how many bands there are.
        similarity: the true Jaccard index of two documents.
        known: see ``stars``; asked again for each pair, so that it may follow what was found.
        threshold: of the Jaccard index.
        rounds: see ``stars``.
    """
    for band in range(num_bands):
        for members in buckets(band_keys(band)):
            yield from stars(members.tolist(), similarity, threshold, rounds, known)
