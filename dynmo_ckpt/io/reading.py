"""Reads stored arrays: open files, reused buffers, and checksums that are computed while reading."""

from __future__ import annotations

import threading
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from .._common.portable import read_into
from .checks import CheckedRange, SourceChecks, altered_message, combine_parts
from .computed import ComputedArray, stored_inputs
from .errors import CorruptError, StorageError, short_name
from .files import open_file
from .remote import RemoteFile, RemotePath
from .safetensors import StoredArray

Words = NDArray[np.unsignedinteger]
_TAIL_BYTES = 1 << 20


@dataclass(frozen=True)
class SourceFiles:
    """Open files by path: the descriptor of a local file, or an object of a store."""

    opened: Mapping[Path, int | RemoteFile]

    def read(self, array: StoredArray, offset: int, buffer: memoryview) -> None:
        """Fill a buffer from the file of an array.

        Args:
            array: the array; its file must be open.
            offset: from the begin of the file, in bytes.
            buffer: the bytes to fill.

        Raises:
            CorruptError: the file ends before ``buffer`` is full.
            StorageError: an object store cannot be reached.
        """
        done, file = 0, self.opened[array.path]
        while done < len(buffer):
            if isinstance(file, int):
                got = read_into(file, buffer[done:], offset + done)
            else:
                got = file.fill(buffer[done:], offset + done, array.offset + array.num_bytes)
            if got == 0:
                raise CorruptError(f"{array.path}: {short_name(array.key)}: the file ends within the tensor")
            done += got


@contextmanager
def open_sources(arrays: Sequence[StoredArray]) -> Iterator[SourceFiles]:
    """Keep the files of ``arrays`` open, and those from which computed arrays are computed.

    Raises:
        CorruptError: a file is missing, or an object of a store was replaced before the block ended.
        StorageError: an object store cannot be reached or denies access.
    """
    paths = dict.fromkeys(stored.path for array in arrays for stored in stored_inputs(array))
    windows = threading.local()
    with ExitStack() as stack:
        opened = {
            path: RemoteFile(path, windows)
            if isinstance(path, RemotePath)
            else stack.enter_context(open_file(path)).fileno()
            for path in paths
        }
        yield SourceFiles(opened)
        # A range is of the object as it is now: without this, an output could be of two versions.
        for file in opened.values():
            if isinstance(file, RemoteFile):
                file.check_unchanged()


@dataclass
class Reader:
    """Reads for one thread. It reuses its buffers, because the page faults of fresh memory cost more than a copy.

    Attributes:
        files: the open files.
        checks: collects the checksums of all threads; None: checksums are not compared.
        buffers: by purpose.
        open_parts: for each array the part that is being read.
        cached: the array, byte offset and word count of the last block.
        chunk: the array, first row and bytes of the last computed chunk.
        check: compute checksums of what is read.
        sharing: number of tensors that are written in turn from the same arrays. A block that is read for one of them
            is reused for the next.
    """

    files: SourceFiles
    checks: SourceChecks | None = None
    buffers: dict[str, NDArray[np.uint8]] = field(default_factory=dict)
    open_parts: dict[StoredArray, CheckedRange] = field(default_factory=dict)
    cached: tuple[StoredArray, int, int] | None = None
    chunk: tuple[ComputedArray, int, NDArray[np.uint8]] | None = None
    check: bool = False
    sharing: int = 1

    def buffer(self, purpose: str, count: int, itemsize: int) -> Words:
        """An array of ``count`` words, each ``itemsize`` bytes, valid until the next call with the same purpose."""
        memory = self.buffers.get(purpose)
        if memory is None or memory.size < count * itemsize:
            memory = np.empty(count * itemsize, dtype=np.uint8)
            self.buffers[purpose] = memory
        return memory[: count * itemsize].view(f"u{itemsize}")

    def read(self, array: StoredArray, start: int, words: Words) -> None:
        """Fill ``words``, a contiguous array of any shape, from byte ``start`` of the stored ``array``."""
        payload = words.reshape(-1).view(np.uint8).data
        if isinstance(array, ComputedArray):
            self._compute(array, start, payload)
            return
        self.files.read(array, array.offset + start, payload)
        if self.check:
            self._record(array, start, payload)

    def block(self, array: StoredArray, start: int, count: int, itemsize: int) -> Words:
        """Part of a stored array, valid until the next call.

        Args:
            array: the array; its file must be open.
            start: offset in the array, in bytes.
            count: number of words.
            itemsize: size of each word, in bytes.
        """
        words = self.buffer("block", count, itemsize)
        if self.cached != (array, start, count):
            # Until the read succeeds: after an error, a partly filled buffer must not count as the block.
            self.cached = None
            self.read(array, start, words)
            self.cached = (array, start, count)
        return words

    def _compute(self, array: ComputedArray, start: int, buffer: memoryview) -> None:
        """Fill ``buffer`` from byte ``start`` of a computed array; the last chunk is kept for the next read."""
        row_bytes = array.num_bytes // max(1, array.rows)
        done = 0
        while done < len(buffer):
            row = (start + done) // row_bytes
            first = row - row % array.chunk_rows
            if self.chunk is None or self.chunk[:2] != (array, first):
                self.chunk = None  # two chunks at a time would double the memory
                self.chunk = (array, first, array.chunk(self.files, first))
            part = self.chunk[2][start + done - first * row_bytes :][: len(buffer) - done]
            buffer[done : done + part.size] = part.data
            done += part.size

    def _record(self, array: StoredArray, start: int, payload: memoryview) -> None:
        if self.checks is None or array.crc32 is None:
            return
        part = self.open_parts.get(array)
        # A CRC-32 continues over consecutive bytes only; a gap begins a new part, and the parts are combined at the
        # end.
        if part is not None and part.end == start:
            self.open_parts[array] = CheckedRange(
                part.start, part.num_bytes + len(payload), zlib.crc32(payload, part.crc32)
            )
            return
        if part is not None:
            self.checks.add(array, part)
        self.open_parts[array] = CheckedRange(start, len(payload), zlib.crc32(payload))

    def finish(self, arrays: Iterable[StoredArray]) -> None:
        """Record that a tensor from ``arrays`` is written; after the last tensor of an array, compare its checksum.

        Raises:
            CorruptError: the bytes of an array do not have its recorded checksum.
            StorageError: they do, but what was written from them read back differently.
        """
        if self.checks is None:
            return
        for array in arrays:
            part = self.open_parts.pop(array, None)
            parts = self.checks.release(array, [] if part is None else [part])
            if parts is not None:
                self._compare(array, parts)

    def _compare(self, array: StoredArray, parts: Sequence[CheckedRange]) -> None:
        found = combine_parts(parts, array.num_bytes, lambda start, end: self._checksum(array, start, end))
        if found == array.crc32:
            return
        # Read again: only that shows whether the source was altered or the copy is faulty.
        again = self._checksum(array, 0, array.num_bytes)
        place = f"{array.path}: {short_name(array.key)}"
        if again == array.crc32:
            raise StorageError(f"copy of {place}: the written bytes read back differently; no output was kept")
        raise CorruptError(altered_message(place, again, array.crc32 or 0))

    def _checksum(self, array: StoredArray, start: int, end: int) -> int:
        """CRC-32 of the bytes ``[start, end)`` of an array."""
        checksum = 0
        while start < end:
            part = self.buffer("tail", min(_TAIL_BYTES, end - start), 1).data
            self.files.read(array, array.offset + start, part)
            checksum = zlib.crc32(part, checksum)
            start += len(part)
        return checksum
