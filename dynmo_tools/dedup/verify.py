"""Pairs of near-duplicates: documents that share a band of their signatures, and truly share their shingles."""

from __future__ import annotations

import itertools
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

from .shingles import U64, Alphabet, jaccard, jaccard_index, num_common
from .union_find import SparseUnionFind

CACHE_BYTES = 256 << 20
ALL_PAIRS = 64
COMPARED_PAIRS = 1 << 20

Similarity = Callable[[int, int], float]


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
        return jaccard_index(num_common(mine, theirs), len(mine), len(theirs), divisor)


@dataclass(frozen=True, kw_only=True)
class Pair:
    """Two documents, the earlier one first, and the Jaccard index of their shingles."""

    main: int
    other: int
    jaccard: float


def match_bucket(
    bucket: Sequence[int],
    similarity: Similarity,
    threshold: float,
    rounds: int,
    is_connected: Callable[[int, int], bool],
) -> Iterator[Pair]:
    """The similar pairs of a bucket.

    A small bucket is compared pair by pair. In a large one the first document is compared with all others, those found
    similar leave, and the next one becomes the first.

    Args:
        bucket: documents in ascending order.
        similarity: of two documents, 0 to 1.
        threshold: from which a pair is given.
        rounds: how many documents become the first one; -1 is until the bucket is empty.
        is_connected: whether a pair needs no comparison, because both are known to belong together.
    """
    if rounds < 0 and len(bucket) <= ALL_PAIRS:
        for main, other in itertools.combinations(bucket, 2):
            if not is_connected(main, other) and (index := similarity(main, other)) >= threshold:
                yield Pair(main=main, other=other, jaccard=index)
        return
    waiting = list(bucket)
    while len(waiting) > 1 and rounds != 0:
        rounds -= 1
        main, *others = waiting
        waiting = []
        for other in others:
            if is_connected(main, other):
                continue
            index = similarity(main, other)
            if index >= threshold:
                yield Pair(main=main, other=other, jaccard=index)
            else:
                waiting.append(other)


class SimilarityCache:
    """A similarity that remembers the pairs it was asked for; now and then all are forgotten, to bound their number."""

    def __init__(self, similarity: Similarity) -> None:
        self._similarity = similarity
        self._known: dict[tuple[int, int], float] = {}

    def __call__(self, first: int, second: int) -> float:
        """The similarity of two documents."""
        pair = (first, second)
        if (found := self._known.get(pair)) is None:
            if len(self._known) >= COMPARED_PAIRS:
                self._known.clear()
            found = self._known[pair] = self._similarity(first, second)
        return found


def match_group(
    buckets: Iterable[Sequence[int]], similarity: Similarity, *, threshold: float, rounds: int = -1, all_pairs: bool
) -> Iterator[Pair]:
    """The verified pairs of buckets that hang together; one that several buckets hold may be given several times.

    Args:
        buckets: each with its documents in ascending order.
        similarity: the true Jaccard index of two documents, which is asked for once a pair as a rule.
        threshold: of the Jaccard index.
        rounds: see ``match_bucket``.
        all_pairs: give the pairs that other pairs connect already, too.
    """
    compared = SimilarityCache(similarity)
    sets = SparseUnionFind()
    for bucket in buckets:
        if all_pairs:
            yield from match_bucket(bucket, compared, threshold, rounds, _never_connected)
            continue
        if len({sets.find(document) for document in bucket}) == 1:
            continue
        for pair in match_bucket(bucket, compared, threshold, rounds, sets.is_connected):
            sets.join(pair.main, pair.other)
            yield pair


def _never_connected(_first: int, _second: int) -> bool:
    return False
