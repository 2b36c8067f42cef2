"""CRC-32 of stored arrays, combined from those of their parts, so that no byte is read only for a checksum."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from threading import Lock
from typing import NamedTuple

from .._common.crc32 import combine
from .safetensors import StoredArray


class CheckedRange(NamedTuple):
    """A range of bytes of a stored array that was read, and its CRC-32."""

    start: int
    num_bytes: int
    crc32: int

    @property
    def end(self) -> int:
        """The offset after the last byte."""
        return self.start + self.num_bytes


class SourceChecks:
    """Parts of arrays that threads have read, and the number of tensors still to be written from each array."""

    def __init__(self, uses: Iterable[StoredArray]) -> None:
        self._lock = Lock()
        self._pending = Counter(uses)
        self._parts: dict[StoredArray, list[CheckedRange]] = {}

    def add(self, array: StoredArray, part: CheckedRange) -> None:
        """Record a part that was read."""
        with self._lock:
            self._parts.setdefault(array, []).append(part)

    def release(self, array: StoredArray, parts: Sequence[CheckedRange]) -> list[CheckedRange] | None:
        """Record that a tensor is written, and its last parts; returns all parts after the last tensor, else None."""
        with self._lock:
            self._parts.setdefault(array, []).extend(parts)
            self._pending[array] -= 1
            return None if self._pending[array] else self._parts.pop(array)


def combine_parts(parts: Iterable[CheckedRange], num_bytes: int, missing: Callable[[int, int], int]) -> int:
    """CRC-32 of an array of ``num_bytes`` bytes; ``missing(start, end)`` returns that of bytes in no part."""
    checksum, at = 0, 0
    for part in sorted(parts):
        if part.start < at:
            continue  # another thread read it too
        if part.start > at:
            checksum = combine(checksum, missing(at, part.start), part.start - at)
        checksum = combine(checksum, part.crc32, part.num_bytes)
        at = part.end
    return combine(checksum, missing(at, num_bytes), num_bytes - at) if at < num_bytes else checksum


def altered_message(where: str, found: int, recorded: int) -> str:
    """The message for bytes whose CRC-32 is ``found`` where ``recorded`` is expected; ``where``: file and tensor."""
    return f"{where}: CRC-32 is {found:08x}, expected {recorded:08x}: the bytes were altered"
