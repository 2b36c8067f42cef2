"""Executes a copy plan into an object store: each file is sent from its first byte to its last, in bounded memory.

An object can only be appended to, so here the order of the bytes is that of the file, unlike in :mod:`.execute`::

    file --> other bytes and tensors by offset --> panels --> parts of a multipart upload --> commit --> read back

A zip file has the checksum of a tensor in front of it. For such files the tensors are read twice: first for the
checksums. Files run in parallel, tensors of a file do not.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import ExitStack
from dataclasses import dataclass

import numpy as np

from .._common.console import Tick
from .._common.crc32 import combine
from ..io.checks import CheckedRange, SourceChecks, altered_message
from ..io.errors import CorruptError, StorageError, short_name
from ..io.reading import Reader, SourceFiles, open_sources
from ..io.uploads import RemoteDirectory, stored_crc32
from .copy_plan import (
    OutputTensor,
    Writable,
    WrittenFile,
    contiguous_source,
    expected_crc32,
    sources,
    sources_to_check,
)
from .execute import READ_BACK_MISMATCH
from .tiled_copy import panels

Sink = Callable[[memoryview], None]


@dataclass(frozen=True, kw_only=True)
class _Streams:
    """What the threads share."""

    directory: RemoteDirectory
    inputs: SourceFiles
    checks: SourceChecks
    verify: bool
    tick: Tick


def stream(
    directory: RemoteDirectory, files: Sequence[Writable], *, jobs: int, tick: Tick, verify: bool
) -> dict[str, WrittenFile]:
    """Send ``files`` to an object store.

    Args:
        directory: the new directory.
        files: the plan.
        jobs: number of files that are sent at the same time.
        tick: advances a progress display, in MB.
        verify: read every object back and compare its checksum.

    Returns:
        For each file by name its size and checksums.

    Raises:
        CorruptError: the bytes of a source do not have its recorded checksum, or it was replaced while it was read.
        StorageError: the store refused, the connection was cut, or the objects read back differently.
    """
    tensors = [tensor for file in files for tensor in file.tensors]
    checks = SourceChecks(a for t in tensors if expected_crc32(t) is None for a in sources_to_check(t))
    with ExitStack() as stack:
        inputs = stack.enter_context(open_sources(sources(tensors)))
        shared = _Streams(directory=directory, inputs=inputs, checks=checks, verify=verify, tick=tick)
        pool = stack.enter_context(ThreadPoolExecutor(max_workers=jobs))
        # Otherwise the pool would wait for files of gigabytes before an error or a signal is reported.
        stack.callback(directory.stop.set)
        # The largest files first, so that all threads finish at about the same time.
        ordered = sorted(files, key=lambda file: -file.num_bytes)
        futures = {pool.submit(_send_or_stop, file, shared): file.name for file in ordered}
        for future in as_completed(futures):
            error = future.exception()
            # Files that another one's error stopped are not the cause.
            if error is not None and not isinstance(error, _StoppedError):
                raise error
        return {name: future.result() for future, name in futures.items()}


class _StoppedError(StorageError):
    """The file was not sent, because another one could not be."""


def _send_or_stop(file: Writable, shared: _Streams) -> WrittenFile:
    try:
        return _send_file(file, shared)
    except BaseException:
        shared.directory.stop.set()
        raise


def _send_file(file: Writable, shared: _Streams) -> WrittenFile:
    sums: list[int] = [0] * len(file.tensors)
    # Bytes that depend on the checksums come before the tensors in some formats: then the sources are read twice.
    is_known = file.other_bytes(sums) != file.other_bytes([1] * len(sums))
    if is_known:
        unchecked = Reader(shared.inputs)
        sums = [_checksum(tensor, unchecked, shared) for tensor in file.tensors]
    parts: list[tuple[int, bytes | int]] = [(at, payload) for at, payload in file.other_bytes(sums) if payload]
    # By offset, and a tensor without elements before what begins at the same offset.
    parts += [(at, number) for number, at in enumerate(file.offsets)]
    reader = Reader(shared.inputs, shared.checks)
    total, at = 0, 0
    with shared.directory.upload(file.name, file.num_bytes) as upload:
        for begin, part in sorted(parts, key=lambda each: (each[0], _size(file, each[1]))):
            if begin != at:
                raise StorageError(f"{file.name}: has a gap at byte {at}; write this format to a local directory")
            if isinstance(part, bytes):
                upload.write(part)
                checksum, size = zlib.crc32(part), len(part)
            else:
                tensor = file.tensors[part]
                checksum, size = _send_tensor(tensor, reader, shared, upload.write), tensor.num_bytes
                if is_known and checksum != sums[part]:
                    raise CorruptError(f"{short_name(tensor.key)}: the source was altered while it was read")
                sums[part] = checksum
            total, at = combine(total, checksum, size), begin + size
        if at != file.num_bytes:
            raise StorageError(f"{file.name}: has {at} bytes; {file.num_bytes} were planned")
    if shared.verify and stored_crc32(shared.directory.target / file.name) != (file.num_bytes, total):
        raise StorageError(f"{shared.directory.target / file.name}: {READ_BACK_MISMATCH}")
    named = {tensor.key: checksum for tensor, checksum in zip(file.tensors, sums, strict=True)}
    return WrittenFile(num_bytes=file.num_bytes, crc32=total, tensors=named)


def _size(file: Writable, part: bytes | int) -> int:
    return len(part) if isinstance(part, bytes) else file.tensors[part].num_bytes


def _checksum(tensor: OutputTensor, reader: Reader, shared: _Streams, sink: Sink | None = None) -> int:
    """CRC-32 of the content of a tensor, which is also passed to ``sink``."""
    checksum = 0
    for panel in panels(tensor, reader):
        if shared.directory.stop.is_set():
            raise _StoppedError("stopped, because another file could not be sent")
        payload = panel.reshape(-1).view(np.uint8).data
        checksum = zlib.crc32(payload, checksum)
        if sink is not None:
            sink(payload)
            shared.tick(len(payload) / 1e6, tensor.key)
    return checksum


def _send_tensor(tensor: OutputTensor, reader: Reader, shared: _Streams, sink: Sink) -> int:
    """Send a tensor, and compare the recorded checksums of its sources; returns its CRC-32.

    Raises:
        CorruptError: a source does not have its recorded checksum.
    """
    expected = expected_crc32(tensor)
    source = contiguous_source(tensor) if expected is None else None
    reader.check = expected is None and source is None
    found = _checksum(tensor, reader, shared, sink)
    if expected is not None:
        if found != expected:
            pieces = tensor.content.pieces[:5]
            places = ", ".join(f"{p.view.array.path}: {short_name(p.view.array.key)}" for p in pieces)
            raise CorruptError(altered_message(places, found, expected))
        return found
    if source is not None:
        shared.checks.add(source[0], CheckedRange(source[1], tensor.num_bytes, found))
    reader.finish(sources_to_check(tensor))
    return found
