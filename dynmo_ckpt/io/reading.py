"""Reads stored arrays: open files, buffers that are used again, and checksums taken in passing."""

from __future__ import annotations

import os
import zlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from ..faults import CorruptError
from .safetensors import StoredArray

Words = NDArray[np.unsignedinteger]
_TAIL_BYTES = 2 << 20


@dataclass(frozen=True)
class SourceFiles:
    """Open descriptors by path."""

    descriptors: Mapping[Path, int]

    def read(self, array: StoredArray, offset: int, buffer: memoryview) -> None:
        """Fill ``buffer`` from byte ``offset`` of the array's file; raises ``CorruptError`` where that ends early."""
        done = 0
        while done < len(buffer):
            got = os.preadv(self.descriptors[array.path], [buffer[done:]], offset + done)
            if got == 0:
                raise CorruptError(f"{array.path}: {array.key}: the file ends within the tensor")
            done += got


@contextmanager
def open_sources(arrays: Sequence[StoredArray]) -> Iterator[SourceFiles]:
    """Hold open the files of ``arrays``."""
    with ExitStack() as stack:
        opened = {path: stack.enter_context(open(path, "rb")) for path in dict.fromkeys(a.path for a in arrays)}
        yield SourceFiles({path: handle.fileno() for path, handle in opened.items()})


@dataclass
class _Passed:
    """How far an array was read from its beginning without a gap, and the checksum of that part."""

    num_bytes: int = 0
    crc32: int = 0


@dataclass
class Reader:
    """Reads for one thread. Keeps its buffers, because the first touch of fresh memory costs more than a copy.

    With ``check``, the checksum of what is read in order is taken on the way; :meth:`finish` reads what is left of each
    array and compares.
    """

    files: SourceFiles
    buffers: dict[str, NDArray[np.uint8]] = field(default_factory=dict)
    passed: dict[StoredArray, _Passed] = field(default_factory=dict)
    check: bool = False

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
        if not self.check or array.crc32 is None:
            return
        passed = self.passed.setdefault(array, _Passed())
        if start == passed.num_bytes:
            passed.crc32 = zlib.crc32(payload, passed.crc32)
            passed.num_bytes += len(payload)

    def finish(self) -> None:
        """Compare the checksums of all arrays read since the last call.

        Raises:
            CorruptError: an array whose bytes do not have the recorded checksum.
        """
        for array, passed in list(self.passed.items()):
            while passed.num_bytes < array.num_bytes:
                count = min(_TAIL_BYTES, array.num_bytes - passed.num_bytes)
                self.read(array, passed.num_bytes, self.buffer("tail", count, 1))
            if passed.crc32 != array.crc32:
                raise CorruptError(altered(f"{array.path}: {array.key}", passed.crc32, array.crc32 or 0))
        self.passed.clear()


def altered(where: str, found: int, recorded: int) -> str:
    """The message for bytes that are not what was recorded."""
    return f"{where}: CRC-32 is {found:08x}, {recorded:08x} was recorded: the bytes were altered"
