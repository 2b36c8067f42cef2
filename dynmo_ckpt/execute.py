"""Carries out a copy plan with bounded memory: the one place where bytes of tensors are written.

Output files are preallocated, every tensor's checksum is taken on the way, and tensors are independent of each other,
so that a few threads share them.
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
from .panels import panels


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


def execute(directory: Path, files: Sequence[Writable], *, jobs: int, tick: Tick) -> dict[str, Written]:
    """Write ``files`` into ``directory``, flushed to disk.

    Args:
        directory: an existing directory, usually a staging one.
        files: the plan.
        jobs: threads; memory grows with them, by at most twice ``TRANSPOSE_PANEL_BYTES`` each.
        tick: told of every megabyte written.

    Raises:
        CorruptError: a source whose bytes do not have its checksum, or ends early.
        StorageError: the system refused.
    """
    try:
        with ExitStack() as stack:
            inputs = stack.enter_context(open_sources(sources(t for file in files for t in file.tensors)))
            for file in files:
                (directory / file.name).parent.mkdir(parents=True, exist_ok=True)
            outputs = [stack.enter_context(open(directory / file.name, "wb")).fileno() for file in files]
            pool = stack.enter_context(ThreadPoolExecutor(max_workers=jobs))
            queue = [job for file, output in zip(files, outputs, strict=True) for job in _jobs(file, output)]
            readers: SimpleQueue[Reader] = SimpleQueue()
            for _ in range(jobs):
                readers.put(Reader(inputs))

            def run(job: _Job) -> int:
                reader = readers.get()
                try:
                    return _write_tensor(job, reader)
                finally:
                    readers.put(reader)
                    tick(job.tensor.content.num_bytes / 1e6, job.tensor.key)

            left = iter(list(pool.map(run, queue)))
            checksums = [[next(left) for _ in file.tensors] for file in files]
            return dict(zip((file.name for file in files), pool.map(_finish, files, outputs, checksums), strict=True))
    except OSError as error:
        raise StorageError(f"{directory}: {error.strerror or error}; nothing was put in place") from error


def _jobs(file: Writable, descriptor: int) -> list[_Job]:
    """Preallocate a file, and list its tensors with their places."""
    os.posix_fallocate(descriptor, 0, file.num_bytes)
    pairs = zip(file.tensors, file.offsets, strict=True)
    return [_Job(tensor=tensor, descriptor=descriptor, offset=offset) for tensor, offset in pairs]


def _finish(file: Writable, descriptor: int, checksums: Sequence[int]) -> Written:
    """Write what stands around the tensors, flush, and put the file's checksum together."""
    parts = []
    for offset, payload in file.other_bytes(checksums):
        _write_all(descriptor, payload, offset)
        parts.append((offset, len(payload), zlib.crc32(payload)))
    os.fsync(descriptor)
    for tensor, offset, checksum in zip(file.tensors, file.offsets, checksums, strict=True):
        parts.append((offset, tensor.content.num_bytes, checksum))
    total = 0
    for _, size, checksum in sorted(parts):
        total = combine(total, checksum, size)
    named = {tensor.key: checksum for tensor, checksum in zip(file.tensors, checksums, strict=True)}
    return Written(num_bytes=file.num_bytes, crc32=total, tensors=named)


def _write_tensor(job: _Job, reader: Reader) -> int:
    """Write one tensor; returns its checksum."""
    tensor, at, checksum = job.tensor, job.offset, 0
    expected = expected_crc32(tensor)
    reader.check = expected is None
    for panel in panels(tensor, reader):
        payload = panel.reshape(-1).view(np.uint8).data
        checksum = zlib.crc32(payload, checksum)
        _write_all(job.descriptor, payload, at)
        at += len(payload)
    reader.finish()
    if expected is not None and checksum != expected:
        places = ", ".join(f"{piece.view.array.path}: {piece.view.array.key}" for piece in tensor.content.pieces)
        raise CorruptError(altered(places, checksum, expected))
    return checksum


def _write_all(descriptor: int, payload: bytes | memoryview, offset: int) -> None:
    view = memoryview(payload)
    while view:
        done = os.pwrite(descriptor, view, offset)
        view, offset = view[done:], offset + done
