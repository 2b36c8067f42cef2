"""CRC-32 of joined byte strings from those of the parts, so that a file's checksum needs no second pass over it.

Method: a CRC is a remainder of polynomials over GF(2); appending ``n`` bytes multiplies the first part's by ``x^(8n)``
(Mark Adler, ``crc32_combine`` in zlib). Polynomials are bit-reversed here, as in zlib.
"""

from __future__ import annotations

from functools import lru_cache

_POLYNOMIAL = 0xEDB88320
_ONE = 1 << 31


def _multiply(a: int, b: int) -> int:
    """Product of two bit-reversed polynomials modulo the CRC-32 polynomial."""
    product = 0
    while a:
        if a & _ONE:
            product ^= b
        a = (a << 1) & 0xFFFFFFFF
        b = (b >> 1) ^ (_POLYNOMIAL if b & 1 else 0)
    return product


@lru_cache(maxsize=1024)
def _power(num_bytes: int) -> int:
    """``x^(8 num_bytes)``; few lengths occur in a checkpoint, and each of them often."""
    power, square = _ONE, 1 << 23  # 1 and x^8
    while num_bytes:
        if num_bytes & 1:
            power = _multiply(square, power)
        square = _multiply(square, square)
        num_bytes >>= 1
    return power


def combine(first: int, second: int, second_bytes: int) -> int:
    """The CRC-32 of two concatenated strings, without reading them.

    Args:
        first: CRC-32 of the first string.
        second: CRC-32 of the second string.
        second_bytes: length of the second string in bytes; that of the first does not matter.
    """
    return _multiply(_power(second_bytes), first) ^ second
