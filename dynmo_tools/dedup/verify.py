"""Verifies candidates: compares the documents of a bucket by the exact Jaccard index of their shingles."""

from __future__ import annotations

import itertools
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

from .shingles import U64, Alphabet, jaccard, jaccard_index, num_common
from .union_find import SparseUnionFind

CACHE_BYTES = 256 << 20
# At most 2,016 comparisons. In a larger bucket, a similar document needs no comparison after the first.
ALL_PAIRS = 64
COMPARED_PAIRS = 1 << 20

Similarity = Callable[[int, int], float]


class ShingleCache:
    """Shingles of recently compared texts, up to a number of bytes.

    Args:
        text_of: returns the text of a document.
        length: characters per shingle.
        limit_bytes: maximum bytes of the cache.
    """

    def __init__(self, text_of: Callable[[int], str], length: int, limit_bytes: int = CACHE_BYTES) -> None:
        self._text_of, self._length, self._limit = text_of, length, limit_bytes
        self._cached: OrderedDict[int, U64 | None] = OrderedDict()
        self._bytes = 0
        self._alphabet = Alphabet()

    def _ids(self, index: int) -> U64 | None:
        if index in self._cached:
            self._cached.move_to_end(index)
            return self._cached[index]
        ids = self._alphabet.shingles(self._text_of(index), self._length)
        self._cached[index] = ids
        self._bytes += ids.nbytes if ids is not None else 0
        # The last entry stays: it is the one that the caller needs, however large it is.
        while self._bytes > self._limit and len(self._cached) > 1:
            _, old = self._cached.popitem(last=False)
            self._bytes -= old.nbytes if old is not None else 0
        return ids

    def jaccard(self, first: int, second: int, divisor: str) -> float:
        """The exact Jaccard index of two documents.

        Args:
            first: number of one document.
            second: number of the other document.
            divisor: as in ``shingles.jaccard_index``.
        """
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
    """The similar pairs of one bucket.

    A small bucket is compared pair by pair. In a large one, the first document is compared with all others, similar
    ones are removed, and the next one becomes the first.

    Args:
        bucket: documents in ascending order.
        similarity: similarity of two documents, 0 to 1.
        threshold: minimum similarity of a pair.
        rounds: maximum number of first documents; -1 is unlimited.
        is_connected: whether a pair is known to be in one group and needs no comparison.
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
    """Caches similarities; it is cleared at ``COMPARED_PAIRS`` entries."""

    def __init__(self, similarity: Similarity) -> None:
        self._similarity = similarity
        self.known: dict[tuple[int, int], float] = {}

    def __call__(self, first: int, second: int) -> float:
        """The similarity of two documents, ``first`` and ``second`` by number; known ones are not computed again."""
        pair = (first, second)
        if (found := self.known.get(pair)) is None:
            if len(self.known) >= COMPARED_PAIRS:
                self.known.clear()
            found = self.known[pair] = self._similarity(first, second)
        return found


def match_group(
    buckets: Iterable[Sequence[int]], similarity: Similarity, *, threshold: float, rounds: int = -1, all_pairs: bool
) -> Iterator[Pair]:
    """The verified pairs of the buckets of one component; a pair of several buckets may occur several times.

    Args:
        buckets: documents of each bucket in ascending order.
        similarity: exact Jaccard index of two documents.
        threshold: minimum Jaccard index.
        rounds: see ``match_bucket``.
        all_pairs: also return pairs that other pairs connect already.
    """
    # Similar documents share several bands: the same pair returns in several buckets.
    compared = SimilarityCache(similarity)
    sets = SparseUnionFind()
    for bucket in buckets:
        if all_pairs:
            yield from match_bucket(bucket, compared, threshold, rounds, _never_connected)
            continue
        # All documents of the bucket are already in one group: no comparison changes the result.
        if len({sets.find(document) for document in bucket}) == 1:
            continue
        for pair in match_bucket(bucket, compared, threshold, rounds, sets.is_connected):
            sets.join(pair.main, pair.other)
            yield pair


def _never_connected(_first: int, _second: int) -> bool:
    return False
