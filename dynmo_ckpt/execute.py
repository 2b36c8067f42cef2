"""Carries out a copy plan with bounded memory: the one place where bytes of tensors are written.

Output files are preallocated, every tensor's checksum is taken on the way, and tensors are independent of each other,
so that a few threads share them. What is written is read back from the file at once, while the system still holds it;
then its way to the disk is begun, and somewhat later its pages are given up (see :mod:`dynmo_ckpt.io.writeback`).
"""

from __future__ import annotations

import os
import zlib
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from queue import SimpleQueue

import numpy as np

from .console import Tick
from .copyplan import OutputTensor, Writable, expected_crc32, sources
from .faults import CorruptError, StorageError
from .io.crc32 import combine
from .io.reading import Reader, altered, open_sources
from .io.writeback import Writeback
from .panels import panels

KEPT_BYTES = 256 << 20
READ_BACK_BYTES = 1 << 18


@dataclass(frozen=True, kw_only=True)
class Written:
    """What was written to a file: its size and checksum, and each tensor's checksum."""

    num_bytes: int
    crc32: int
    tensors: Mapping[str, int]


@dataclass(frozen=True, kw_only=True)
class _Job:
    """A tensor to write at a byte offset of an open file."""

    tensor: OutputTensor
    descriptor: int
    offset: int
    path: Path


@dataclass
class _Worker:
    """What one thread keeps: buffers for reading, and the pages that it has under way to the disk."""

    reader: Reader
    writeback: Writeback
    verify: bool


def execute(
    directory: Path, files: Sequence[Writable], *, jobs: int, tick: Tick, verify: bool = True
) -> dict[str, Written]:
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
            release = sum(file.num_bytes for file in files) > KEPT_BYTES
            workers: SimpleQueue[_Worker] = SimpleQueue()
            for _ in range(jobs):
                workers.put(_Worker(reader=Reader(inputs), writeback=Writeback(release=release), verify=verify))

            def run(number: int) -> int:
                job, worker = queue[number], workers.get()
                try:
                    return _write_tensor(job, worker)
                finally:
                    workers.put(worker)
                    tick(job.tensor.num_bytes / 1e6, job.tensor.key)

            # Large tensors first, so that the threads end together.
            order = sorted(range(len(queue)), key=lambda number: -queue[number].tensor.num_bytes)
            done = dict(zip(order, pool.map(run, order), strict=True))
            left = iter([done[number] for number in range(len(queue))])
            checksums = [[next(left) for _ in file.tensors] for file in files]
            return dict(zip((file.name for file in files), pool.map(_finish, files, outputs, checksums), strict=True))
    except OSError as error:
        raise StorageError(f"{directory}: {error.strerror or error}; nothing was put in place") from error


def _jobs(file: Writable, descriptor: int, directory: Path) -> list[_Job]:
    """Preallocate a file, and list its tensors with their places."""
    os.posix_fallocate(descriptor, 0, file.num_bytes)
    pairs = zip(file.tensors, file.offsets, strict=True)
    path = directory / file.name
    return [_Job(tensor=tensor, descriptor=descriptor, offset=offset, path=path) for tensor, offset in pairs]


def _finish(file: Writable, descriptor: int, checksums: Sequence[int]) -> Written:
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
    return Written(num_bytes=file.num_bytes, crc32=total, tensors=named)


def _write_tensor(job: _Job, worker: _Worker) -> int:
    """Write one tensor; returns its checksum.

    Where the checksum is known beforehand, that of the bytes read back suffices; else both are taken.
    """
    tensor, at, meant, found = job.tensor, job.offset, 0, 0
    reader = worker.reader
    expected = expected_crc32(tensor)
    reader.check = expected is None
    for panel in panels(tensor, reader):
        payload = panel.reshape(-1).view(np.uint8).data
        if expected is None or not worker.verify:
            meant = zlib.crc32(payload, meant)
        _write_all(job.descriptor, payload, at)
        if worker.verify:
            found = _read_back(job.descriptor, at, len(payload), found, reader)
        worker.writeback.wrote(job.descriptor, at, len(payload))
        at += len(payload)
    reader.finish()
    if expected is not None and (found if worker.verify else meant) != expected:
        _refuse_source(tensor, expected, reader)
    meant = meant if expected is None else expected
    if worker.verify and found != meant:
        raise StorageError(f"{job.path}: {tensor.key}: read back otherwise than written; nothing was put in place")
    return meant


def _read_back(descriptor: int, begin: int, count: int, checksum: int, reader: Reader) -> int:
    """The checksum so far, continued over ``count`` bytes of the file; a file that ends early gives another."""
    end = begin + count
    while begin < end:
        part = reader.buffer("back", min(READ_BACK_BYTES, end - begin), 1).data
        got = os.preadv(descriptor, [part], begin)
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
