"""Carries out a copy plan with bounded memory: reads panels, puts them in order, writes them where they belong.

The one place where bytes of tensors move. Output files are preallocated, every tensor's checksum is taken on the way,
and tensors are independent of each other, so that a few threads share them.
"""

from __future__ import annotations

import math
import os
import zlib
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from itertools import product
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from .console import Tick
from .copyplan import OutputFile, OutputTensor, expected_crc32, sources
from .faults import CorruptError, StorageError
from .io.crc32 import combine
from .io.safetensors import DTYPE_BYTES, StoredArray
from .views import Tensor, View

PANEL_BYTES = 4 << 20
TRANSPOSE_PANEL_BYTES = 32 << 20
_BLOCK = 64
Words = NDArray[np.unsignedinteger]


@dataclass(frozen=True, kw_only=True)
class Written:
    """What was written to a file: its size and checksum, and each tensor's checksum."""

    num_bytes: int
    crc32: int
    tensors: Mapping[str, int]


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


def execute(directory: Path, files: Sequence[OutputFile], *, jobs: int, tick: Tick) -> dict[str, Written]:
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
        return {file.name: _write_file(directory, file, jobs, tick) for file in files}
    except OSError as error:
        raise StorageError(f"{directory}: {error.strerror or error}; nothing was put in place") from error


def _write_file(directory: Path, file: OutputFile, jobs: int, tick: Tick) -> Written:
    header = file.header
    offsets, at = [], len(header)
    for tensor in file.tensors:
        offsets.append(at)
        at += tensor.content.num_bytes
    with ExitStack() as stack:
        inputs = stack.enter_context(open_sources(sources(file.tensors)))
        output = stack.enter_context(open(directory / file.name, "wb")).fileno()
        os.posix_fallocate(output, 0, at)
        _write_all(output, header, 0)
        with ThreadPoolExecutor(max_workers=jobs) as pool:

            def run(job: tuple[OutputTensor, int]) -> int:
                checksum = _write_tensor(output, job[1], job[0], inputs)
                tick(job[0].content.num_bytes / 1e6, job[0].key)
                return checksum

            checksums = list(pool.map(run, zip(file.tensors, offsets, strict=True)))
        os.fsync(output)
    total = zlib.crc32(header)
    for tensor, checksum in zip(file.tensors, checksums, strict=True):
        total = combine(total, checksum, tensor.content.num_bytes)
    named = {tensor.key: checksum for tensor, checksum in zip(file.tensors, checksums, strict=True)}
    return Written(num_bytes=at, crc32=total, tensors=named)


def _write_tensor(output: int, offset: int, tensor: OutputTensor, inputs: SourceFiles) -> int:
    """Write one tensor at ``offset``; returns its checksum."""
    expected = expected_crc32(tensor)
    if expected is None:
        _check_sources(tensor, inputs)
    checksum, at = 0, offset
    for panel in panels(tensor, inputs):
        payload = panel.reshape(-1).view(np.uint8).data
        checksum = zlib.crc32(payload, checksum)
        _write_all(output, payload, at)
        at += len(payload)
    if expected is not None and checksum != expected:
        places = ", ".join(f"{piece.view.array.path}: {piece.view.array.key}" for piece in tensor.content.pieces)
        raise CorruptError(_altered(places, checksum, expected))
    return checksum


def _altered(where: str, found: int, recorded: int) -> str:
    return f"{where}: CRC-32 is {found:08x}, {recorded:08x} was recorded: the bytes were altered"


def _check_sources(tensor: OutputTensor, inputs: SourceFiles) -> None:
    """Compare the stored arrays of a tensor whose output bytes are in another order with their recorded checksums."""
    contents = [content for content in (tensor.content, tensor.mask) if content is not None]
    for array in {piece.view.array: None for content in contents for piece in content.pieces}:
        if array.crc32 is None:
            continue
        found = 0
        for begin in range(0, array.num_bytes, PANEL_BYTES):
            chunk = bytearray(min(PANEL_BYTES, array.num_bytes - begin))
            inputs.read(array, array.offset + begin, memoryview(chunk))
            found = zlib.crc32(chunk, found)
        if found != array.crc32:
            raise CorruptError(_altered(f"{array.path}: {array.key}", found, array.crc32))


def _write_all(descriptor: int, payload: bytes | memoryview, offset: int) -> None:
    view = memoryview(payload)
    while view:
        done = os.pwrite(descriptor, view, offset)
        view, offset = view[done:], offset + done


def panels(tensor: OutputTensor, inputs: SourceFiles) -> Iterator[Words]:
    """The content of ``tensor`` in row-major order, a panel at a time; each panel is valid until the next."""
    content = tensor.content
    itemsize = DTYPE_BYTES[content.dtype]
    shape = content.shape or (1,)
    limit = PANEL_BYTES if _reads_in_order(content) else TRANSPOSE_PANEL_BYTES
    buffer = np.empty(min(limit, max(content.num_bytes, itemsize)) // itemsize, dtype=f"u{itemsize}")
    for box in _boxes(shape, max(1, limit // itemsize)):
        extents = [end - begin for begin, end in box]
        count = math.prod(extents)
        if count > buffer.size:
            buffer = np.empty(count, dtype=buffer.dtype)
        panel = buffer[:count].reshape(extents)
        _fill(panel, content, box, inputs)
        if tensor.mask is not None:
            kept = np.empty(extents, dtype=np.uint8)
            _fill(kept, tensor.mask, box, inputs)
            panel[kept == 0] = 0
        yield panel


def _reads_in_order(content: Tensor) -> bool:
    """Whether the fastest dimension of the output is the fastest of every source."""
    return all(
        next((s for n, s in zip(piece.view.shape[::-1], piece.view.strides[::-1], strict=True) if n > 1), 1) == 1
        for piece in content.pieces
    )


def _boxes(shape: Sequence[int], limit: int) -> Iterator[list[tuple[int, int]]]:
    """Cut a row-major array into boxes of at most ``limit`` elements that follow one another in memory."""
    if 0 in shape:
        return
    dim = next((d for d in range(len(shape)) if math.prod(shape[d + 1 :]) <= limit), len(shape) - 1)
    step = max(1, limit // math.prod(shape[dim + 1 :]))
    rest = [(0, size) for size in shape[dim + 1 :]]
    for outer in product(*(range(size) for size in shape[:dim])):
        for begin in range(0, shape[dim], step):
            yield [*((i, i + 1) for i in outer), (begin, min(begin + step, shape[dim])), *rest]


def _fill(panel: NDArray[np.unsignedinteger], content: Tensor, box: list[tuple[int, int]], inputs: SourceFiles) -> None:
    part = content
    if content.shape:
        for dim, (begin, end) in enumerate(box):
            if (begin, end) != (0, content.shape[dim]):
                part = part.narrow(dim, begin, end)
    if not part.is_covered:
        panel[...] = 0
    for piece in part.pieces:
        spans = tuple(slice(b, b + n) for b, n in zip(piece.begin, piece.view.shape, strict=True))
        _gather(panel[spans] if spans else panel.reshape(()), piece.view, inputs)


def _gather(target: NDArray[np.unsignedinteger], view: View, inputs: SourceFiles) -> None:
    """Read the elements of ``view`` into ``target``, which has its shape."""
    itemsize = target.dtype.itemsize
    span = sum((size - 1) * stride for size, stride in zip(view.shape, view.strides, strict=True)) + 1
    offset = view.array.offset + view.start * itemsize
    if span == target.size and target.flags.c_contiguous and _is_row_major(view):
        inputs.read(view.array, offset, target.reshape(-1).view(np.uint8).data)
        return
    if span <= 2 * target.size:
        scratch = np.empty(span, dtype=target.dtype)
        inputs.read(view.array, offset, scratch.view(np.uint8).data)
        strides = [stride * itemsize for stride in view.strides]
        transposed_copy(target, np.lib.stride_tricks.as_strided(scratch, view.shape, strides, writeable=False))
        return
    order = sorted(range(len(view.shape)), key=lambda dim: -view.strides[dim])
    packed = np.empty([view.shape[dim] for dim in order], dtype=target.dtype)
    _read_runs(packed, [view.strides[dim] for dim in order], view.array, offset, inputs)
    transposed_copy(target, packed.transpose(np.argsort(order)))


def _is_row_major(view: View) -> bool:
    expected = 1
    for size, stride in zip(reversed(view.shape), reversed(view.strides), strict=True):
        if size > 1 and stride != expected:
            return False
        expected *= size
    return True


def _read_runs(packed: Words, strides: list[int], array: StoredArray, offset: int, inputs: SourceFiles) -> None:
    """Read into a packed array whose dimensions go from wide to narrow strides: one read for each contiguous run."""
    dims, run = packed.ndim, 1
    while dims and (strides[dims - 1] == run or packed.shape[dims - 1] == 1):
        dims -= 1
        run *= packed.shape[dims]
    rows = packed.reshape(-1, run)
    itemsize = packed.dtype.itemsize
    for row, at in enumerate(product(*(range(size) for size in packed.shape[:dims]))):
        begin = offset + sum(i * stride for i, stride in zip(at, strides, strict=False)) * itemsize
        inputs.read(array, begin, rows[row].view(np.uint8).data)


def transposed_copy(target: Words, source: Words) -> None:
    """``target[...] = source``, in blocks that stay in the cache where their fastest dimensions differ."""
    if target.ndim < 2 or source.strides[-1] == source.itemsize:
        target[...] = source
        return
    fast = min(range(source.ndim), key=lambda dim: source.strides[dim] if source.shape[dim] > 1 else math.inf)
    if fast == source.ndim - 1:
        target[...] = source
        return
    rows, columns = np.moveaxis(target, fast, 0), np.moveaxis(source, fast, 0)
    for begin in range(0, rows.shape[0], _BLOCK):
        for column in range(0, rows.shape[-1], _BLOCK):
            span = (slice(begin, begin + _BLOCK), ..., slice(column, column + _BLOCK))
            rows[span] = columns[span]
