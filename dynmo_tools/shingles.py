"""Character shingles of a text as numbers, and the Jaccard index of two texts by them."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

U32 = npt.NDArray[np.uint32]
U64 = npt.NDArray[np.uint64]

_MULTIPLIER = 0x9E3779B97F4A7C15  # 2**64 over the golden ratio, odd: multiplying by it is a bijection
_FINISH_1 = 0xBF58476D1CE4E5B9  # Steele, Lea, Flood 2014, SplitMix64
_FINISH_2 = 0x94D049BB133111EB
PACKED_BITS = 12


def code_points(text: str) -> U32:
    """The code points of ``text`` as an array ``[characters]``; lone surrogates are let through."""
    return np.frombuffer(text.encode("utf-32-le", "surrogatepass"), dtype=np.uint32)


def hash_windows(points: U32, length: int) -> U32:
    """A 32-bit hash of each window of ``length`` code points, ``[len(points) - length + 1]``.

    The window's code points enter a polynomial in 64 bits one after the other; SplitMix64's finish spreads it.
    """
    count = len(points) - length + 1
    mixed: U64 = np.zeros(max(count, 0), dtype=np.uint64)
    multiplier = np.uint64(_MULTIPLIER)
    for at in range(length):
        mixed *= multiplier
        mixed += points[at : at + count] if count > 0 else 0
    mixed ^= mixed >> np.uint64(30)
    mixed *= np.uint64(_FINISH_1)
    mixed ^= mixed >> np.uint64(27)
    mixed *= np.uint64(_FINISH_2)
    mixed ^= mixed >> np.uint64(31)
    return mixed.astype(np.uint32)


def hash_whole(points: U32) -> int:
    """A 32-bit hash of a text that is shorter than a shingle: equal texts, and only they by all odds, share it."""
    return int(hash_windows(np.concatenate([np.asarray([len(points)], dtype=np.uint32), points]), len(points) + 1)[0])


def shingle_ids(text: str, length: int) -> U64 | None:
    """The distinct shingles of ``text``, sorted, as numbers that no two share; None beyond 12-bit characters."""
    points = code_points(text)
    if len(points) < length or length * PACKED_BITS > 64 or points.max(initial=0) >= 1 << PACKED_BITS:
        return None
    packed: U64 = np.zeros(len(points) - length + 1, dtype=np.uint64)
    for at in range(length):
        packed <<= np.uint64(PACKED_BITS)
        packed |= points[at : at + len(packed)]
    return np.unique(packed)


def shingle_set(text: str, length: int) -> frozenset[str]:
    """The distinct shingles of ``text`` as strings."""
    return frozenset(text[at : at + length] for at in range(len(text) - length + 1))


def share(common: int, first: int, second: int, divisor: str) -> float:
    """The Jaccard index of two sets of these sizes with ``common`` elements in both.

    Args:
        common: the number of elements in both.
        first: the size of one set.
        second: the size of the other.
        divisor: ``union``, ``min`` or ``max``: which size it is taken of.
    """
    size = {"union": first + second - common, "min": min(first, second), "max": max(first, second)}[divisor]
    return common / size if size else 0.0


def jaccard(first: str, second: str, length: int, divisor: str = "union") -> float:
    """The true Jaccard index of the shingles of two texts; one shorter than a shingle has only equals."""
    if len(first) < length or len(second) < length:
        return 1.0 if first == second else 0.0
    mine, theirs = shingle_ids(first, length), shingle_ids(second, length)
    if mine is not None and theirs is not None:
        common = len(np.intersect1d(mine, theirs, assume_unique=True))
        return share(common, len(mine), len(theirs), divisor)
    a, b = shingle_set(first, length), shingle_set(second, length)
    return share(len(a & b), len(a), len(b), divisor)
