"""Reads stored arrays: open files, buffers that are used again, and checksums taken in passing."""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from .._common.portable import read_into
from ..errors import CorruptError, StorageError
from .checks import Part, SourceChecks, altered, joined
from .files import open_file
from .safetensors import StoredArray

Words = NDArray[np.unsignedinteger]
_TAIL_BYTES = 1 << 20


@dataclass(frozen=True)
class SourceFiles:
    """Open descriptors by path."""

    descriptors: Mapping[Path, int]

    def read(self, array: StoredArray, offset: int, buffer: memoryview) -> None:
        """Fill ``buffer`` from byte ``offset`` of the array's file; raises ``CorruptError`` where that ends early."""
        done = 0
        while done < len(buffer):
            got = read_into(self.descriptors[array.path], buffer[done:], offset + done)
            if got == 0:
                raise CorruptError(f"{array.path}: {array.key}: the file ends within the tensor")
            done += got


@contextmanager
def open_sources(arrays: Sequence[StoredArray]) -> Iterator[SourceFiles]:
    """Hold open the files of ``arrays``."""
    with ExitStack() as stack:
        opened = {path: stack.enter_context(open_file(path)) for path in dict.fromkeys(a.path for a in arrays)}
        yield SourceFiles({path: handle.fileno() for path, handle in opened.items()})


@dataclass
class Reader:
    """Reads for one thread. Keeps its buffers, because the first touch of fresh memory costs more than a copy.

    With ``check``, the checksum of what is read is taken on the way and noted in ``checks``; :meth:`finish` reads what
    no thread has read of an array, and compares. ``sharing`` is how many tensors are written in turn out of the same
    arrays: then a block that was read for one of them is kept for the next.
    """

    files: SourceFiles
    checks: SourceChecks | None = None
    buffers: dict[str, NDArray[np.uint8]] = field(default_factory=dict)
    passed: dict[StoredArray, Part] = field(default_factory=dict)
    held: tuple[StoredArray, int, int] | None = None
    check: bool = False
    sharing: int = 1

    def buffer(self, purpose: str, count: int, itemsize: int) -> Words:
        """``count`` words of ``itemsize`` bytes, valid until the same purpose is asked for again."""
        held = self.buffers.get(purpose)
        if held is None or held.size < count * itemsize:
            held = np.empty(count * itemsize, dtype=np.uint8)
            self.buffers[purpose] = held
        return held[: count * itemsize].view(f"u{itemsize}")

    def read(self, array: StoredArray, start: int, words: Words) -> None:
        """Fill a contiguous array of words from byte ``start`` of the stored array."""
        payload = words.reshape(-1).view(np.uint8).data
        self.files.read(array, array.offset + start, payload)
        if self.check:
            self._note(array, start, payload)

    def block(self, array: StoredArray, start: int, count: int, itemsize: int) -> Words:
        """``count`` words from byte ``start`` of the stored array, valid until the next block is asked for."""
        words = self.buffer("block", count, itemsize)
        if self.held != (array, start, count):
            self.held = None
            self.read(array, start, words)
            self.held = (array, start, count)
        return words

    def _note(self, array: StoredArray, start: int, payload: memoryview) -> None:
        if self.checks is None or array.crc32 is None:
            return
        part = self.passed.get(array)
        if part is not None and part.end == start:
            self.passed[array] = Part(part.start, part.num_bytes + len(payload), zlib.crc32(payload, part.crc32))
            return
        if part is not None:
            self.checks.passed(array, part)
        self.passed[array] = Part(start, len(payload), zlib.crc32(payload))

    def finish(self, arrays: Iterable[StoredArray]) -> None:
        """A tensor out of ``arrays`` is written; the last tensor of an array has the array's checksum compared.

        Raises:
            CorruptError: an array whose bytes do not have the recorded checksum.
            StorageError: they have it, but what was written out of them was read back otherwise.
        """
        if self.checks is None:
            return
        for array in arrays:
            part = self.passed.pop(array, None)
            parts = self.checks.released(array, [] if part is None else [part])
            if parts is not None:
                self._compare(array, parts)

    def _compare(self, array: StoredArray, parts: Sequence[Part]) -> None:
        found = joined(parts, array.num_bytes, lambda start, end: self._checksum(array, start, end))
        if found == array.crc32:
            return
        again = self._checksum(array, 0, array.num_bytes)
        place = f"{array.path}: {array.key}"
        if again == array.crc32:
            raise StorageError(
                f"what was written from {place}: the written bytes read back differently; the output was removed"
            )
        raise CorruptError(altered(place, again, array.crc32 or 0))

    def _checksum(self, array: StoredArray, start: int, end: int) -> int:
        """The checksum of the bytes ``[start, end)`` of an array."""
        checksum = 0
        while start < end:
            part = self.buffer("tail", min(_TAIL_BYTES, end - start), 1).data
            self.files.read(array, array.offset + start, part)
            checksum = zlib.crc32(part, checksum)
            start += len(part)
        return checksum
