"""Produces the content of a planned tensor in row-major order, a panel of bounded size at a time.

How a panel is read depends on the strides of its views::

    contiguous in the file            one read into the panel
    a window that is mostly dense     one block read, then a strided copy (transpositions, columns of a row)
    scattered runs                    one read per contiguous run, packed by decreasing stride, then a strided copy

Strided copies between arrays whose fastest dimensions differ run in blocks that fit the cache.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from itertools import product
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..io.computed import BUFFERS_PER_CHUNK, CHUNK_BYTES, ComputedArray
from ..io.errors import UnsupportedError, short_name
from ..io.reading import Reader, Words
from ..io.safetensors import DTYPE_BYTES, StoredArray
from .copy_plan import OutputTensor
from .views import Tensor, View

PANEL_BYTES = 1 << 20
TRANSPOSE_PANEL_BYTES = 32 << 20
BLOCK_PANELS = 8
# A block of a transposition: rows of one cache line each (measured for 2 and 4 bytes, on 1536 to 7680 rows).
_ROWS = 1024
_LINE_BYTES = 64
# Matrices of this number of elements and more are transposed one by one: together they would not fit the cache.
_SEPARATE_ELEMENTS = 1 << 14
_NUMBERS = {"F64": "f8", "F32": "f4", "F16": "f2"}
# Bits of the exponent of the types whose range is smaller than that of float32.
_EXPONENTS = {"F16": 0x7C00, "BF16": 0x7F80}


def panels(tensor: OutputTensor, reader: Reader) -> Iterator[Words]:
    """Yield the content of ``tensor`` in row-major order as panels of raw words.

    A panel is valid until the next one is requested, because both use the same buffer.

    Raises:
        UnsupportedError: a number is beyond the range of the type to write.
    """
    content = tensor.content
    itemsize = DTYPE_BYTES[content.dtype]
    shape = content.shape or (1,)
    limit = PANEL_BYTES // max(1, reader.sharing // 2) if _reads_in_order(content) else TRANSPOSE_PANEL_BYTES
    for box in _boxes(shape, max(1, limit // itemsize)):
        extents = [end - begin for begin, end in box]
        panel = reader.buffer("panel", math.prod(extents), itemsize).reshape(extents)
        _fill(panel, content, box, reader)
        if tensor.mask is not None:
            mask = reader.buffer("mask", math.prod(extents), 1).reshape(extents)
            _fill(mask, tensor.mask, box, reader)
            panel[mask == 0] = 0
        if tensor.cast is None:
            yield panel
            continue
        found = cast(panel, content.dtype, tensor.cast)
        if tensor.cast in _EXPONENTS:
            _check_range(tensor.key, panel, content.dtype, found, tensor.cast)
        yield found


def _check_range(key: str, panel: Words, source: str, found: Words, target: str) -> None:
    """Compare the infinities after a cast with those before it."""
    exponent = _EXPONENTS[target]
    # All bits of the exponent are set in infinity and NaN alone, which weights hardly ever have.
    beyond = (found & exponent) == exponent
    if beyond.any() and np.isfinite(cast(panel, source, "F64").view(np.float64)[beyond]).any():
        wider = "bf16" if target == "F16" else "fp32"
        raise UnsupportedError(f"{short_name(key)}: has numbers beyond the range of {target}; use --dtype {wider}")


def buffer_bytes(tensor: OutputTensor) -> int:
    """Upper bound of the buffers of one thread for a tensor, in bytes: panel, block, mask and cast."""
    limit = PANEL_BYTES if _reads_in_order(tensor.content) else TRANSPOSE_PANEL_BYTES
    times = 2 + (0 if tensor.mask is None else 1) + (0 if tensor.cast is None else 4)
    is_computed = any(isinstance(piece.view.array, ComputedArray) for piece in tensor.content.pieces)
    computed = BUFFERS_PER_CHUNK * CHUNK_BYTES if is_computed else 0
    return computed + BLOCK_PANELS * PANEL_BYTES + times * min(limit, tensor.content.num_bytes)


def cast(words: Words, source: str, target: str) -> Words:
    """Convert raw words between floating-point types, rounding to nearest even.

    Args:
        words: unsigned integers with the bits of the numbers; any shape.
        source: type of ``words``, as in safetensors.
        target: type of the result, as in safetensors.
    """
    is_bf16 = source == "BF16"
    # A number beyond the range of the target becomes infinity, which ``panels`` refuses; numpy would warn.
    with np.errstate(over="ignore"):
        numbers = (words.astype(np.uint32) << 16).view(np.float32) if is_bf16 else words.view(_NUMBERS[source])
        if target != "BF16":
            return numbers.astype(_NUMBERS[target]).view(f"u{DTYPE_BYTES[target]}")
        # Round to nearest even: add just under half of the last kept bit, and one more if this bit is odd. The sum
        # could turn a NaN into infinity, so a NaN keeps its upper bits and becomes quiet. F64 is rounded twice, through
        # float32.
        wide = numbers.astype(np.float32).view(np.uint32)
        rounded = wide + 0x7FFF + ((wide >> 16) & 1)
        rounded = np.where(np.isnan(wide.view(np.float32)), wide | 0x400000, rounded)
        narrow: Words = (rounded >> 16).astype(np.uint16)
        return narrow


def _reads_in_order(content: Tensor) -> bool:
    """Whether the fastest dimension of the output is the fastest one of every source."""
    return all(
        next((s for n, s in zip(piece.view.shape[::-1], piece.view.strides[::-1], strict=True) if n > 1), 1) == 1
        for piece in content.pieces
    )


def _boxes(shape: Sequence[int], limit: int) -> Iterator[list[tuple[int, int]]]:
    """Split a row-major array into boxes of at most ``limit`` elements, each contiguous, in memory order."""
    if 0 in shape:
        return
    dim = next((d for d in range(len(shape)) if math.prod(shape[d + 1 :]) <= limit), len(shape) - 1)
    step = max(1, limit // math.prod(shape[dim + 1 :]))
    rest = [(0, size) for size in shape[dim + 1 :]]
    for outer in product(*(range(size) for size in shape[:dim])):
        for begin in range(0, shape[dim], step):
            yield [*((i, i + 1) for i in outer), (begin, min(begin + step, shape[dim])), *rest]


def _fill(panel: NDArray[np.unsignedinteger], content: Tensor, box: list[tuple[int, int]], reader: Reader) -> None:
    part = content
    if content.shape:
        for dim, (begin, end) in enumerate(box):
            if (begin, end) != (0, content.shape[dim]):
                part = part.narrow(dim, begin, end)
    if not part.is_covered:
        panel[...] = 0
    for piece in part.pieces:
        spans = tuple(slice(b, b + n) for b, n in zip(piece.begin, piece.view.shape, strict=True))
        _gather(panel[spans] if spans else panel.reshape(()), piece.view, reader)


def _gather(target: NDArray[np.unsignedinteger], view: View, reader: Reader) -> None:
    """Read the elements of ``view`` into ``target``, which has the same shape."""
    itemsize = target.dtype.itemsize
    span = sum((size - 1) * stride for size, stride in zip(view.shape, view.strides, strict=True)) + 1
    begin = view.start * itemsize
    # Contiguous on both sides: the bytes are read directly into the panel, without a copy.
    if span == target.size and target.flags.c_contiguous and _is_row_major(view):
        reader.read(view.array, begin, target)
        return
    strides = [stride * itemsize for stride in view.strides]
    low, high = _whole_rows(view, span)
    # One read of the window is worth it if at least half of it is used, here or by the tensors that are written in turn
    # from the same array.
    if high - low <= max(2, reader.sharing) * target.size:
        block = reader.block(view.array, low * itemsize, high - low, itemsize)[view.start - low :]
        transposed_copy(target, np.lib.stride_tricks.as_strided(block, view.shape, strides, writeable=False))
        return
    order = sorted(range(len(view.shape)), key=lambda dim: -view.strides[dim])
    packed = reader.buffer("scratch", target.size, itemsize).reshape([view.shape[dim] for dim in order])
    _read_runs(packed, [view.strides[dim] for dim in order], view.array, begin, reader)
    transposed_copy(target, packed.transpose(np.argsort(order)))


def _whole_rows(view: View, span: int) -> tuple[int, int]:
    """First and last element of a window in its array, extended to complete rows where it is a range of columns.

    So the windows of other tensor-parallel ranks on the same rows read the same block, which is cached.
    """
    row, low, high = max(view.strides, default=0), view.start, view.start + span
    if not view.strides or view.strides[0] != row or view.strides[-1] != 1 or view.shape[0] < 2:
        return low, high
    total = view.array.num_bytes // DTYPE_BYTES[view.array.dtype]
    low -= low % row
    return low, min(total, low + view.shape[0] * row) if high <= low + view.shape[0] * row else high


def _is_row_major(view: View) -> bool:
    expected = 1
    for size, stride in zip(reversed(view.shape), reversed(view.strides), strict=True):
        if size > 1 and stride != expected:
            return False
        expected *= size
    return True


def _read_runs(packed: Words, strides: list[int], array: StoredArray, begin: int, reader: Reader) -> None:
    """Read into a packed array whose dimensions have decreasing strides: one read for each contiguous run."""
    dims, run = packed.ndim, 1
    while dims and (strides[dims - 1] == run or packed.shape[dims - 1] == 1):
        dims -= 1
        run *= packed.shape[dims]
    rows = packed.reshape(-1, run)
    itemsize = packed.dtype.itemsize
    for row, at in enumerate(product(*(range(size) for size in packed.shape[:dims]))):
        start = begin + sum(i * stride for i, stride in zip(at, strides, strict=False)) * itemsize
        reader.read(array, start, rows[row])


def transposed_copy(target: Words, source: Words) -> None:
    """``target[...] = source``, in blocks that fit the cache where the fastest dimensions differ."""
    if target.ndim < 2 or source.strides[-1] == source.itemsize:
        target[...] = source
        return
    fast = min(range(source.ndim), key=lambda dim: source.strides[dim] if source.shape[dim] > 1 else math.inf)
    if fast == source.ndim - 1:
        target[...] = source
        return
    rows, columns = np.moveaxis(target, fast, 0), np.moveaxis(source, fast, 0)
    width = max(1, _LINE_BYTES // source.itemsize) * max(1, _ROWS // max(1, rows.shape[0]))
    middles: Iterator[tuple[Any, ...]] = iter([(...,)])
    if rows.shape[0] * rows.shape[-1] >= _SEPARATE_ELEMENTS:
        middles = product(*(range(size) for size in rows.shape[1:-1]))
    for middle in middles:
        for begin in range(0, rows.shape[0], _ROWS):
            for column in range(0, rows.shape[-1], width):
                span = (slice(begin, begin + _ROWS), *middle, slice(column, column + width))
                rows[span] = columns[span]
