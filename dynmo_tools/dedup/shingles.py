"""Character shingles as integers, and the Jaccard index of two texts."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

U32 = npt.NDArray[np.uint32]
U64 = npt.NDArray[np.uint64]

_MULTIPLIER = 0x9E3779B97F4A7C15  # 2**64 / golden ratio; odd, so multiplication is a bijection
_FINISH_1 = 0xBF58476D1CE4E5B9  # Steele, Lea, Flood 2014, SplitMix64
_FINISH_2 = 0x94D049BB133111EB
# Five characters, the default shingle, fit into one uint64. 4,095 distinct characters suffice for alphabets, but not
# for all of Chinese: a pair is then numbered alone, or compared as strings.
PACKED_BITS = 12
# Characters of a text whose shingles are sorted at a time: a temporary array has 8 bytes for each.
PART_CHARACTERS = 1 << 20


def code_points(text: str) -> U32:
    """The code points of ``text``, ``[characters]``, uint32; lone surrogates are allowed."""
    return np.frombuffer(text.encode("utf-32-le", "surrogatepass"), dtype=np.uint32)


def hash_windows(points: U32, length: int) -> U32:
    """A 32-bit hash of each window of ``length`` code points.

    A polynomial in 64 bits over the code points, mixed by the finalizer of SplitMix64.

    Args:
        points: code points, uint32.
        length: code points per window.

    Returns:
        Hashes ``[len(points) - length + 1]``, uint32.
    """
    count = len(points) - length + 1
    mixed: U64 = np.zeros(max(count, 0), dtype=np.uint64)
    # uint64 arithmetic wraps around: the polynomial is one modulo 2^64.
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
    """A 32-bit hash of ``points`` ``[characters]``, a text shorter than a shingle; its length is hashed too."""
    return int(hash_windows(np.concatenate([np.asarray([len(points)], dtype=np.uint32), points]), len(points) + 1)[0])


def pack(numbers: npt.NDArray[np.integer[Any]], length: int) -> U64:
    """The distinct windows of neighboring numbers, sorted, each packed into one uint64.

    Args:
        numbers: ``[count]`` of any integer type, each below 4096.
        length: numbers per window; at most 5, because each takes 12 of the 64 bits.

    Returns:
        ``[distinct windows]``, uint64.
    """
    return _distinct(_windows(numbers.astype(np.uint64), length))


def _distinct(packed: U64) -> U64:
    """The distinct numbers, sorted; sorts ``packed``."""
    packed.sort()
    first = np.ones(len(packed), dtype=np.bool_)
    np.not_equal(packed[1:], packed[:-1], out=first[1:])
    return packed[first]


def _windows(numbers: U64, length: int) -> U64:
    """The windows in text order, built from two halves, and a last number for odd lengths."""
    if length == 1:
        return numbers
    half = length // 2
    halves = _windows(numbers, half)
    packed = halves[:-half] << np.uint64(half * PACKED_BITS)
    packed |= halves[half:]
    if length % 2:
        packed = packed[:-1] << np.uint64(PACKED_BITS)
        packed |= numbers[length - 1 :]
    return packed


class Alphabet:
    """Assigns 12-bit numbers to characters on their first occurrence, so that shingles of many texts are comparable."""

    def __init__(self) -> None:
        self._numbers = np.zeros(0x110000, dtype=np.uint16)
        self._count = 0

    def shingles(self, text: str, length: int) -> U64 | None:
        """The distinct shingles of a text, as numbers of this alphabet.

        Args:
            text: the text.
            length: characters per shingle.

        Returns:
            Shingles ``[distinct shingles]``, sorted, uint64; None if the text is shorter than a shingle, a shingle
            needs more than 64 bits, or no numbers are left.
        """
        if len(text) < length or length * PACKED_BITS > 64:
            return None
        parts = []
        for begin in range(0, len(text) - length + 1, PART_CHARACTERS):
            numbers = self._numbers_of(code_points(text[begin : begin + PART_CHARACTERS + length - 1]))
            if numbers is None:
                return None
            parts.append(pack(numbers, length))
        return parts[0] if len(parts) == 1 else _distinct(np.concatenate(parts))

    def _numbers_of(self, points: U32) -> npt.NDArray[np.uint16] | None:
        numbers = self._numbers[points]
        if not numbers.all():
            new = np.unique(points[numbers == 0])
            # 0 stands for a character without a number, so 4095 numbers are available.
            if self._count + len(new) >= 1 << PACKED_BITS:
                return None
            self._numbers[new] = np.arange(self._count + 1, self._count + 1 + len(new))
            self._count += len(new)
            numbers = self._numbers[points]
        return numbers


def shingle_set(text: str, length: int) -> frozenset[str]:
    """The distinct shingles of ``text`` as strings of ``length`` characters."""
    return frozenset(text[at : at + length] for at in range(len(text) - length + 1))


def jaccard_index(common: int, first: int, second: int, divisor: str) -> float:
    """The Jaccard index of two sets.

    Args:
        common: number of common elements.
        first: size of one set.
        second: size of the other set.
        divisor: denominator: ``union``, ``min`` or ``max`` of the sizes.
    """
    size = {"union": first + second - common, "min": min(first, second), "max": max(first, second)}[divisor]
    return common / size if size else 0.0


def num_common(first: U64, second: U64) -> int:
    """The number of common elements of ``first`` and ``second``, sorted arrays of distinct numbers ``[numbers]``."""
    if len(first) == len(second) and np.array_equal(first, second):
        return len(first)
    both = np.concatenate([first, second])
    both.sort(kind="stable")  # merges the two runs
    return int(np.count_nonzero(both[1:] == both[:-1]))


def jaccard(first: str, second: str, length: int, divisor: str = "union") -> float:
    """The exact Jaccard index of the shingles of two texts; a text shorter than a shingle only matches an equal one.

    Args:
        first: one text.
        second: the other text.
        length: characters per shingle.
        divisor: as in ``jaccard_index``.
    """
    if len(first) < length or len(second) < length:
        return 1.0 if first == second else 0.0
    alphabet = Alphabet()
    mine, theirs = alphabet.shingles(first, length), alphabet.shingles(second, length)
    if mine is not None and theirs is not None:
        return jaccard_index(num_common(mine, theirs), len(mine), len(theirs), divisor)
    a, b = shingle_set(first, length), shingle_set(second, length)
    return jaccard_index(len(a & b), len(a), len(b), divisor)
