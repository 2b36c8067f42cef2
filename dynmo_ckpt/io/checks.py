"""Checksums of stored arrays out of those of their parts, so that no byte of a source is read only to be checked."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from threading import Lock
from typing import NamedTuple

from .._common.crc32 import combine
from .safetensors import StoredArray


class Part(NamedTuple):
    """Bytes of a stored array that somebody has read, and their checksum."""

    start: int
    num_bytes: int
    crc32: int

    @property
    def end(self) -> int:
        """The byte behind the last."""
        return self.start + self.num_bytes


class SourceChecks:
    """The parts of arrays that any thread has read, and how many tensors are still to be written out of each array."""

    def __init__(self, uses: Iterable[StoredArray]) -> None:
        self._lock = Lock()
        self._left = Counter(uses)
        self._parts: dict[StoredArray, list[Part]] = {}

    def passed(self, array: StoredArray, part: Part) -> None:
        """Note a part that was read."""
        with self._lock:
            self._parts.setdefault(array, []).append(part)

    def released(self, array: StoredArray, parts: Sequence[Part]) -> list[Part] | None:
        """Note that a tensor is written, and its last parts; the array's parts where no tensor is left, else None."""
        with self._lock:
            self._parts.setdefault(array, []).extend(parts)
            self._left[array] -= 1
            return None if self._left[array] else self._parts.pop(array)


def joined(parts: Iterable[Part], num_bytes: int, missing: Callable[[int, int], int]) -> int:
    """The checksum of an array of ``num_bytes``; ``missing(start, end)`` gives that of bytes in no part."""
    checksum, at = 0, 0
    for part in sorted(parts):
        if part.start < at:
            continue  # read twice
        if part.start > at:
            checksum = combine(checksum, missing(at, part.start), part.start - at)
        checksum = combine(checksum, part.crc32, part.num_bytes)
        at = part.end
    return combine(checksum, missing(at, num_bytes), num_bytes - at) if at < num_bytes else checksum


def altered(where: str, found: int, recorded: int) -> str:
    """The message for bytes that are not what was recorded."""
    return f"{where}: CRC-32 is {found:08x}, {recorded:08x} was recorded: the bytes were altered"
