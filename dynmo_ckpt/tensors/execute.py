"""Executes a copy plan in bounded memory: the only place that writes the bytes of tensors.

::

    Writable files --> _Job per tensor --> groups --> a few threads, the largest group first
                                                        |
    per tensor:   panels() --> pwrite --> read back --> CRC-32 --> writeback (pages to disk, cache dropped)
                    ^                                     |
              source files                 compared with the source's recorded CRC-32
                                                          |
    per file:     other_bytes(checksums), fsync, CRC-32 of the file from those of its parts --> WrittenFile

Invariants and decisions:

* Files are preallocated and offsets are known, so tensors are independent and threads need no order. The exception is
  tensors that are columns of the same stored array (tensor parallelism along dimension 1): one thread writes them in
  turn, panel by panel, so that the array is read once and not once per rank.
* No byte is read only for a checksum. A CRC-32 of a whole is combined from those of its parts (:mod:`.copy_plan`).
* A panel is read back immediately after it is written, while the page cache has it: a faulty copy or ``pwrite`` is
  found at no cost of disk reads.
* Memory is the buffers of each thread; it does not grow with the model.
"""

from __future__ import annotations

import os
import zlib
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from queue import SimpleQueue

import numpy as np

from .._common.console import Tick
from .._common.crc32 import combine
from .._common.portable import allocate, read_into
from ..io.checks import CheckedRange, SourceChecks, altered_message
from ..io.errors import CorruptError, StorageError, short_name
from ..io.reading import Reader, Words, open_sources
from ..io.safetensors import StoredArray
from ..io.writeback import Writeback
from .copy_plan import (
    OutputTensor,
    Writable,
    WrittenFile,
    contiguous_source,
    expected_crc32,
    sources,
    sources_to_check,
)
from .tiled_copy import panels

# An output up to this size stays in the page cache.
CACHED_OUTPUT_BYTES = 256 << 20
READ_BACK_BYTES = 1 << 18
READ_BACK_MISMATCH = "the written bytes read back differently; no output was kept"


@dataclass(frozen=True, kw_only=True)
class _Job:
    """A tensor to write at a byte offset of an open file.

    Attributes:
        tensor: the tensor.
        descriptor: of the open file.
        offset: byte offset of the tensor in the file.
        path: of the file, for messages.
        expected: the CRC-32 that the written bytes must have, where it is known in advance.
        source: the array and byte offset of which the written bytes are a copy; None where they are reordered.
        checked: the arrays whose recorded checksums are compared.
    """

    tensor: OutputTensor
    descriptor: int
    offset: int
    path: Path
    expected: int | None
    source: tuple[StoredArray, int] | None
    checked: Sequence[StoredArray]


@dataclass
class _Worker:
    """State of one thread: read buffers, and the pages that it has started to write to disk."""

    reader: Reader
    checks: SourceChecks
    writeback: Writeback
    verify: bool


def execute(
    directory: Path, files: Sequence[Writable], *, jobs: int, tick: Tick, verify: bool = True
) -> dict[str, WrittenFile]:
    """Write ``files`` into ``directory`` and flush them to disk.

    Args:
        directory: an existing directory, usually a staging directory.
        files: the plan.
        jobs: number of threads; each needs at most twice ``TRANSPOSE_PANEL_BYTES`` of memory.
        tick: advances a progress display, in MB.
        verify: read every byte back and compare its checksum.

    Returns:
        For each file by name its size and checksums.

    Raises:
        CorruptError: the bytes of a source do not have its recorded checksum, or the file ends early.
        StorageError: the system refused to write, or the written bytes read back differently.
    """
    try:
        with ExitStack() as stack:
            inputs = stack.enter_context(open_sources(sources(t for file in files for t in file.tensors)))
            for file in files:
                (directory / file.name).parent.mkdir(parents=True, exist_ok=True)
            # "w+b": the written bytes are read back through the same descriptor.
            outputs = [stack.enter_context(open(directory / file.name, "w+b")).fileno() for file in files]
            pool = stack.enter_context(ThreadPoolExecutor(max_workers=jobs))
            queue = [job for file, output in zip(files, outputs, strict=True) for job in _jobs(file, output, directory)]
            release = sum(file.num_bytes for file in files) > CACHED_OUTPUT_BYTES
            checks = SourceChecks(array for job in queue for array in job.checked)
            # A set of buffers for each thread, not for each tensor: memory stays bounded, and pages are reused.
            workers: SimpleQueue[_Worker] = SimpleQueue()
            for _ in range(jobs):
                workers.put(_Worker(Reader(inputs, checks), checks, Writeback(release), verify))

            def write_group(group: Sequence[int]) -> list[int]:
                worker = workers.get()
                try:
                    return _write_tensors([queue[number] for number in group], worker)
                finally:
                    workers.put(worker)
                    for number in group:
                        tick(queue[number].tensor.num_bytes / 1e6, queue[number].tensor.key)

            # The largest groups first, so that all threads finish at about the same time.
            groups = sorted(_groups(queue), key=lambda group: -sum(queue[n].tensor.num_bytes for n in group))
            done = {
                n: c
                for group, sums in zip(groups, pool.map(write_group, groups), strict=True)
                for n, c in zip(group, sums, strict=True)
            }
            ordered = iter([done[number] for number in range(len(queue))])
            checksums = [[next(ordered) for _ in file.tensors] for file in files]
            return dict(zip((file.name for file in files), pool.map(_finish, files, outputs, checksums), strict=True))
    except OSError as error:
        raise StorageError(f"{directory}: {error.strerror or error}; no output was kept") from error


def _jobs(file: Writable, descriptor: int, directory: Path) -> list[_Job]:
    """Preallocate a file, and list its tensors with their offsets."""
    if file.num_bytes:  # posix_fallocate refuses a length of 0
        allocate(descriptor, 0, file.num_bytes)
    pairs = zip(file.tensors, file.offsets, strict=True)
    path = directory / file.name
    return [_job(tensor, descriptor, offset, path) for tensor, offset in pairs]


def _job(tensor: OutputTensor, descriptor: int, offset: int, path: Path) -> _Job:
    # A known CRC-32 of the output is combined from those of its sources, so these need no check of their own.
    expected = expected_crc32(tensor)
    return _Job(
        tensor=tensor,
        descriptor=descriptor,
        offset=offset,
        path=path,
        expected=expected,
        source=contiguous_source(tensor) if expected is None else None,
        checked=sources_to_check(tensor) if expected is None else (),
    )


def _groups(queue: Sequence[_Job]) -> list[list[int]]:
    """Group the numbers of jobs: those that read the same array with the same strides share a group."""
    groups: dict[object, list[int]] = {}
    for number, job in enumerate(queue):
        is_shared = job.expected is None and job.source is None and len(job.tensor.content.pieces) == 1
        view = job.tensor.content.pieces[0].view if is_shared else None
        key = number if view is None else (view.array, view.shape, view.strides)
        groups.setdefault(key, []).append(number)
    return list(groups.values())


def _finish(file: Writable, descriptor: int, checksums: Sequence[int]) -> WrittenFile:
    """Write the bytes around the tensors, flush, and combine the checksum of the file."""
    parts = []
    for offset, payload in file.other_bytes(checksums):
        _write_all(descriptor, payload, offset)
        parts.append((offset, len(payload), zlib.crc32(payload)))
    os.fsync(descriptor)
    for tensor, offset, checksum in zip(file.tensors, file.offsets, checksums, strict=True):
        parts.append((offset, tensor.num_bytes, checksum))
    total = 0
    # A combined CRC-32 depends on the order, so the parts are combined in the order of their bytes.
    for _, size, checksum in sorted(parts):
        total = combine(total, checksum, size)
    named = {tensor.key: checksum for tensor, checksum in zip(file.tensors, checksums, strict=True)}
    return WrittenFile(num_bytes=file.num_bytes, crc32=total, tensors=named)


class _TensorWriter:
    """Writes one tensor panel by panel."""

    def __init__(self, job: _Job, worker: _Worker) -> None:
        self.job, self.worker = job, worker
        self.panels = panels(job.tensor, worker.reader)
        self.at, self.sent_crc, self.read_crc = job.offset, 0, 0
        # Where another checksum is known or compared with the source's, that of the bytes read back is enough.
        self.computes_checksum = not worker.verify or (job.expected is None and job.source is None)

    def step(self) -> bool:
        """Write the next panel; returns whether there was one."""
        reader = self.worker.reader
        # The tensors of a group share the reader, so each sets its own mode before it reads.
        reader.check = self.job.expected is None and self.job.source is None
        panel: Words | None = next(self.panels, None)
        if panel is None:
            return False
        payload = panel.reshape(-1).view(np.uint8)
        if self.computes_checksum:
            self.sent_crc = zlib.crc32(payload.data, self.sent_crc)
        _write_all(self.job.descriptor, payload.data, self.at)
        if self.worker.verify:
            self._read_back(payload)
        self.worker.writeback.add(self.job.descriptor, self.at, payload.size)
        self.at += payload.size
        return True

    def _read_back(self, payload: Words) -> None:
        """Read back what was written last: compared with ``payload``, or added to the checksum of the file."""
        begin, descriptor, reader = self.at, self.job.descriptor, self.worker.reader
        if not self.computes_checksum:
            self.read_crc = _read_back_crc32(descriptor, begin, payload.size, self.read_crc, reader)
        elif not _reads_back_equal(descriptor, begin, payload, reader):
            raise StorageError(self._mismatch())

    def _mismatch(self) -> str:
        return f"{self.job.path}: {short_name(self.job.tensor.key)}: {READ_BACK_MISMATCH}"

    def end(self) -> int:
        """Compare the checksums; returns that of the tensor.

        Raises:
            CorruptError: the source does not have its recorded checksum.
            StorageError: the written bytes read back differently.
        """
        job, reader = self.job, self.worker.reader
        got = self.sent_crc if self.computes_checksum else self.read_crc
        if job.source is not None:
            self.worker.checks.add(job.source[0], CheckedRange(job.source[1], job.tensor.num_bytes, got))
        reader.finish(job.checked)
        if job.expected is not None and got != job.expected:
            # The source is read again, to distinguish an altered source from a faulty copy.
            _refuse_source(job.tensor, job.expected, reader)
            raise StorageError(self._mismatch())
        return got


def _write_tensors(jobs: Sequence[_Job], worker: _Worker) -> list[int]:
    """Write tensors, a panel of each in turn; returns their CRC-32s."""
    worker.reader.sharing = len(jobs)
    writers = [_TensorWriter(job, worker) for job in jobs]
    active = writers
    while active:
        active = [writer for writer in active if writer.step()]
    return [writer.end() for writer in writers]


def _reads_back_equal(descriptor: int, begin: int, payload: Words, reader: Reader) -> bool:
    """Whether the file has the bytes of ``payload``; numpy compares three times as fast as zlib computes a CRC-32."""
    done = 0
    while done < payload.size:
        part = reader.buffer("back", min(READ_BACK_BYTES, payload.size - done), 1)
        got = read_into(descriptor, part.data, begin + done)
        word = f"u{8 if got % 8 == 0 else 1}"
        if not got or not np.array_equal(part[:got].view(word), payload[done : done + got].view(word)):
            return False
        done += got
    return True


def _read_back_crc32(descriptor: int, begin: int, count: int, checksum: int, reader: Reader) -> int:
    """``checksum`` continued over ``count`` bytes of the file; a file that ends early gives another value."""
    end = begin + count
    while begin < end:
        part = reader.buffer("back", min(READ_BACK_BYTES, end - begin), 1).data
        got = read_into(descriptor, part, begin)
        if not got:
            return ~checksum
        checksum = zlib.crc32(part[:got], checksum)
        begin += got
    return checksum


def _refuse_source(tensor: OutputTensor, expected: int, reader: Reader) -> None:
    """Raise ``CorruptError`` where the bytes of the source do not have its recorded checksum."""
    checksum = 0
    for panel in panels(tensor, reader):
        checksum = zlib.crc32(panel.reshape(-1).view(np.uint8).data, checksum)
    if checksum != expected:
        places = ", ".join(f"{p.view.array.path}: {short_name(p.view.array.key)}" for p in tensor.content.pieces[:5])
        raise CorruptError(altered_message(places, checksum, expected))


def _write_all(descriptor: int, payload: bytes | memoryview, offset: int) -> None:
    view = memoryview(payload)
    while view:
        # pwrite may write fewer bytes than requested.
        done = os.pwrite(descriptor, view, offset)
        view, offset = view[done:], offset + done
