"""Carries out a copy plan with bounded memory: the one place where bytes of tensors are written.

Output files are preallocated, every tensor's checksum is taken on the way, and tensors are independent of each other,
so that a few threads share them; only those that are columns of the same source are written in turn by one thread, so
that the source is read once. What is written is read back from the file at once, while the system still holds it;
then its way to the disk is begun, and somewhat later its pages are given up (see :mod:`dynmo_ckpt.io.writeback`).
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
from ..errors import CorruptError, StorageError
from ..io.checks import Part, SourceChecks, altered
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

CACHED_OUTPUT_BYTES = 256 << 20
READ_BACK_BYTES = 1 << 18
READ_BACK_MISMATCH = "the written bytes read back differently; the output was removed"


@dataclass(frozen=True, kw_only=True)
class _Job:
    """A tensor to write at a byte offset of an open file.

    Attributes:
        tensor: what is written.
        descriptor: the open file.
        offset: where the tensor's bytes begin in it.
        path: the file, for messages.
        expected: the checksum that the written bytes must have, where it is known beforehand.
        run: the array, and the offset in it, of which the written bytes are a copy; None where they are regrouped.
        checked: the arrays whose recorded checksums are compared.
    """

    tensor: OutputTensor
    descriptor: int
    offset: int
    path: Path
    expected: int | None
    run: tuple[StoredArray, int] | None
    checked: Sequence[StoredArray]


@dataclass
class _Worker:
    """What one thread keeps: buffers for reading, and the pages that it has under way to the disk."""

    reader: Reader
    checks: SourceChecks
    writeback: Writeback
    verify: bool


def execute(
    directory: Path, files: Sequence[Writable], *, jobs: int, tick: Tick, verify: bool = True
) -> dict[str, WrittenFile]:
    """Write ``files`` into ``directory``, flushed to disk.

    Args:
        directory: an existing directory, usually a staging one.
        files: the plan.
        jobs: threads; memory grows with them, by at most twice ``TRANSPOSE_PANEL_BYTES`` each.
        tick: told of every megabyte written.
        verify: read every byte back from the file and compare its checksum with what was meant.

    Raises:
        CorruptError: a source whose bytes do not have its checksum, or ends early.
        StorageError: the system refused, or gave back other bytes than were written.
    """
    try:
        with ExitStack() as stack:
            inputs = stack.enter_context(open_sources(sources(t for file in files for t in file.tensors)))
            for file in files:
                (directory / file.name).parent.mkdir(parents=True, exist_ok=True)
            outputs = [stack.enter_context(open(directory / file.name, "w+b")).fileno() for file in files]
            pool = stack.enter_context(ThreadPoolExecutor(max_workers=jobs))
            queue = [job for file, output in zip(files, outputs, strict=True) for job in _jobs(file, output, directory)]
            release = sum(file.num_bytes for file in files) > CACHED_OUTPUT_BYTES
            checks = SourceChecks(array for job in queue for array in job.checked)
            workers: SimpleQueue[_Worker] = SimpleQueue()
            for _ in range(jobs):
                workers.put(_Worker(Reader(inputs, checks), checks, Writeback(release), verify))

            def run(group: Sequence[int]) -> list[int]:
                worker = workers.get()
                try:
                    return _write_tensors([queue[number] for number in group], worker)
                finally:
                    workers.put(worker)
                    for number in group:
                        tick(queue[number].tensor.num_bytes / 1e6, queue[number].tensor.key)

            # Large tensors first, so that the threads end together.
            groups = sorted(_groups(queue), key=lambda group: -sum(queue[n].tensor.num_bytes for n in group))
            done = {
                n: c
                for group, sums in zip(groups, pool.map(run, groups), strict=True)
                for n, c in zip(group, sums, strict=True)
            }
            left = iter([done[number] for number in range(len(queue))])
            checksums = [[next(left) for _ in file.tensors] for file in files]
            return dict(zip((file.name for file in files), pool.map(_finish, files, outputs, checksums), strict=True))
    except OSError as error:
        raise StorageError(f"{directory}: {error.strerror or error}; nothing was put in place") from error


def _jobs(file: Writable, descriptor: int, directory: Path) -> list[_Job]:
    """Preallocate a file, and list its tensors with their places."""
    allocate(descriptor, 0, file.num_bytes)
    pairs = zip(file.tensors, file.offsets, strict=True)
    path = directory / file.name
    return [_job(tensor, descriptor, offset, path) for tensor, offset in pairs]


def _job(tensor: OutputTensor, descriptor: int, offset: int, path: Path) -> _Job:
    expected = expected_crc32(tensor)
    return _Job(
        tensor=tensor,
        descriptor=descriptor,
        offset=offset,
        path=path,
        expected=expected,
        run=contiguous_source(tensor) if expected is None else None,
        checked=sources_to_check(tensor) if expected is None else (),
    )


def _groups(queue: Sequence[_Job]) -> list[list[int]]:
    """The jobs' numbers: together those that regroup the same arrays into the same shape, apart all others."""
    groups: dict[object, list[int]] = {}
    for number, job in enumerate(queue):
        together = job.expected is None and job.run is None and len(job.tensor.content.pieces) == 1
        view = job.tensor.content.pieces[0].view if together else None
        key = number if view is None else (view.array, view.shape, view.strides)
        groups.setdefault(key, []).append(number)
    return list(groups.values())


def _finish(file: Writable, descriptor: int, checksums: Sequence[int]) -> WrittenFile:
    """Write what stands around the tensors, flush, and put the file's checksum together."""
    parts = []
    for offset, payload in file.other_bytes(checksums):
        _write_all(descriptor, payload, offset)
        parts.append((offset, len(payload), zlib.crc32(payload)))
    os.fsync(descriptor)
    for tensor, offset, checksum in zip(file.tensors, file.offsets, checksums, strict=True):
        parts.append((offset, tensor.num_bytes, checksum))
    total = 0
    for _, size, checksum in sorted(parts):
        total = combine(total, checksum, size)
    named = {tensor.key: checksum for tensor, checksum in zip(file.tensors, checksums, strict=True)}
    return WrittenFile(num_bytes=file.num_bytes, crc32=total, tensors=named)


class _Writing:
    """One tensor on its way into its file, panel by panel."""

    def __init__(self, job: _Job, worker: _Worker) -> None:
        self.job, self.worker = job, worker
        self.panels = panels(job.tensor, worker.reader)
        self.at, self.meant, self.found = job.offset, 0, 0
        # Where the checksum is known beforehand or compared with the source's, that of the bytes read back suffices.
        self.computes_checksum = not worker.verify or (job.expected is None and job.run is None)

    def step(self) -> bool:
        """Write the next panel; whether there was one."""
        reader = self.worker.reader
        reader.check = self.job.expected is None and self.job.run is None
        panel: Words | None = next(self.panels, None)
        if panel is None:
            return False
        payload = panel.reshape(-1).view(np.uint8).data
        if self.computes_checksum:
            self.meant = zlib.crc32(payload, self.meant)
        _write_all(self.job.descriptor, payload, self.at)
        if self.worker.verify:
            self.found = _read_back(self.job.descriptor, self.at, len(payload), self.found, reader)
        self.worker.writeback.wrote(self.job.descriptor, self.at, len(payload))
        self.at += len(payload)
        return True

    def end(self) -> int:
        """Compare the checksums; that of the tensor."""
        job, reader = self.job, self.worker.reader
        got = self.found if self.worker.verify else self.meant
        if job.run is not None:
            self.worker.checks.passed(job.run[0], Part(job.run[1], job.tensor.num_bytes, got))
        reader.finish(job.checked)
        if job.expected is not None and got != job.expected:
            _refuse_source(job.tensor, job.expected, reader)
        wanted = self.meant if self.computes_checksum else got if job.expected is None else job.expected
        if got != wanted:
            raise StorageError(f"{job.path}: {job.tensor.key}: {READ_BACK_MISMATCH}")
        return wanted


def _write_tensors(jobs: Sequence[_Job], worker: _Worker) -> list[int]:
    """Write tensors, a panel of each in turn; returns their checksums."""
    worker.reader.sharing = len(jobs)
    writing = [_Writing(job, worker) for job in jobs]
    left = writing
    while left:
        left = [one for one in left if one.step()]
    return [one.end() for one in writing]


def _read_back(descriptor: int, begin: int, count: int, checksum: int, reader: Reader) -> int:
    """The checksum so far, continued over ``count`` bytes of the file; a file that ends early gives another."""
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
    """Raise ``CorruptError`` where the source does not have the checksum that was recorded for it."""
    checksum = 0
    for panel in panels(tensor, reader):
        checksum = zlib.crc32(panel.reshape(-1).view(np.uint8).data, checksum)
    if checksum != expected:
        places = ", ".join(f"{piece.view.array.path}: {piece.view.array.key}" for piece in tensor.content.pieces)
        raise CorruptError(altered(places, checksum, expected))


def _write_all(descriptor: int, payload: bytes | memoryview, offset: int) -> None:
    view = memoryview(payload)
    while view:
        done = os.pwrite(descriptor, view, offset)
        view, offset = view[done:], offset + done
