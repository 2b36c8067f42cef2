"""Verifies candidates: compares the documents of a bucket by the exact Jaccard index of their shingles."""

from __future__ import annotations

import itertools
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from .shingles import U32, U64, Alphabet, jaccard, jaccard_index, num_common
from .union_find import SparseUnionFind

CACHE_BYTES = 256 << 20
# At most 2,016 comparisons. In a larger bucket, a similar document needs no comparison after the first.
ALL_PAIRS = 64
COMPARED_PAIRS = 1 << 20
MAX_DEVIATIONS = 5

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


class SimilarEstimate:
    """Selects documents whose signature allows a Jaccard index of the threshold.

    The share of equal values of two signatures estimates their index with a standard deviation of
    sqrt(J (1 - J) / num_seeds). Five of them below the threshold, one pair in three million is missed.

    Args:
        signature: returns the signature of a document, uint32 ``[num_seeds]``.
        threshold: minimum Jaccard index.
        divisor: its denominator, as in ``shingles.jaccard_index``.
    """

    def __init__(self, signature: Callable[[int], U32], threshold: float, divisor: str) -> None:
        self._signature = signature
        # Bounds of the index of the union, which signatures estimate. The smaller set alone gives no bound.
        self._lowest = {"union": threshold, "max": threshold / (2 - threshold), "min": 0.0}[divisor]
        self._rows = np.zeros((0, 0), dtype=np.uint8)
        self._count = 0

    def add(self, document: int) -> int:
        """Add a document; returns its row."""
        values = _low_bytes(self._signature(document))
        if self._count == len(self._rows):
            grown = np.zeros((max(2 * self._count, ALL_PAIRS), len(values)), dtype=np.uint8)
            if self._count:
                grown[: self._count] = self._rows
            self._rows = grown
        self._rows[self._count] = values
        self._count += 1
        return self._count - 1

    def select(self, document: int, rows: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """The rows that may be similar to a document."""
        values = _low_bytes(self._signature(document))
        needed = len(values) * self._lowest
        needed -= MAX_DEVIATIONS * (needed * (1 - self._lowest)) ** 0.5
        if needed <= 0:
            return rows
        is_likely = np.count_nonzero(self._rows[rows] == values, axis=1) >= needed
        return np.asarray(rows[is_likely])


def _low_bytes(signature: U32) -> npt.NDArray[np.uint8]:
    # A quarter of the memory; different values are equal in their low byte with a probability of 1/256.
    return signature.astype(np.uint8)


def match_to_survivors(
    buckets: Sequence[Sequence[int]],
    similarity: Similarity,
    estimate: SimilarEstimate,
    *,
    threshold: float,
    rounds: int,
) -> Iterator[Pair]:
    """The documents of one component to remove, each with the earliest kept document that is similar to it.

    In document order, a document is kept unless one that is kept and shares a bucket with it is similar: a chain of
    similar documents does not become one group.

    Args:
        buckets: documents of each bucket in ascending order.
        similarity: exact Jaccard index of two documents.
        estimate: selects among many kept documents.
        threshold: minimum Jaccard index.
        rounds: maximum number of kept documents of a bucket that are compared with others; -1 is unlimited.
    """
    places: dict[int, list[int]] = {}
    for number, bucket in enumerate(buckets):
        for document in bucket:
            places.setdefault(document, []).append(number)
    survivors: list[int] = []
    rows_of = [_Rows() for _ in buckets]
    for document in sorted(places):
        numbers = places[document]
        rows = np.unique(np.concatenate([rows_of[number].filled() for number in numbers]))
        if len(rows) > ALL_PAIRS:
            rows = estimate.select(document, rows)
        for row in rows.tolist():
            if (index := similarity(survivors[row], document)) >= threshold:
                yield Pair(main=survivors[row], other=document, jaccard=index)
                break
        else:
            row = estimate.add(document)
            survivors.append(document)
            for number in numbers:
                if rounds < 0 or rows_of[number].count < rounds:
                    rows_of[number].add(row)


class _Rows:
    """The rows of the kept documents of one bucket, ascending."""

    def __init__(self) -> None:
        self._array = np.zeros(4, dtype=np.int64)
        self.count = 0

    def add(self, row: int) -> None:
        if self.count == len(self._array):
            self._array = np.concatenate([self._array, np.zeros_like(self._array)])
        self._array[self.count] = row
        self.count += 1

    def filled(self) -> npt.NDArray[np.int64]:
        return self._array[: self.count]


def _never_connected(_first: int, _second: int) -> bool:
    return False
