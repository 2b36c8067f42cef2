"""Sparse rows as a dense weight and its mask, written to files a panel of rows at a time."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..errors import CorruptError
from ..io.reading import Reader, open_sources
from ..io.safetensors import DTYPE_BYTES, StoredArray
from .copy_plan import OutputTensor, sources
from .tiled_copy import panels
from .views import Tensor, whole

PANEL_ELEMENTS = 1 << 20
_INTEGERS = {"I64": "i8", "I32": "i4", "I16": "i2"}


def integers(tensor: Tensor) -> NDArray[Any]:
    """A tensor of offsets or columns; raises ``CorruptError`` where its type is none of integers."""
    output = OutputTensor(key="", shape=tensor.shape, content=tensor)
    if tensor.dtype not in _INTEGERS:
        raise CorruptError(f"indices of the type {tensor.dtype}")
    with open_sources(sources([output])) as files:
        parts = [panel.reshape(-1).view(_INTEGERS[tensor.dtype]).copy() for panel in panels(output, Reader(files))]
    flat: NDArray[Any] = np.concatenate(parts) if parts else np.empty(0, np.int32)
    return flat


def write_dense(
    what: str, values: Tensor, offsets: NDArray[Any], columns: NDArray[Any], width: int, where: Path
) -> tuple[Tensor, Tensor]:
    """Write the dense weight and its mask, a panel of rows at a time.

    Args:
        what: the weight's name, for messages.
        values: the kept elements ``[kept]``.
        offsets: where each row begins in them ``[rows + 1]``.
        columns: the column of each ``[kept]``.
        width: columns of the weight.
        where: the path of both files, which end in ``.weight`` and ``.mask``.

    Raises:
        CorruptError: offsets or columns that are none.
    """
    rows, count = len(offsets) - 1, values.shape[0]
    bounds: NDArray[np.int64] = offsets.astype(np.int64)
    steps = bounds[1:] - bounds[:-1]
    if rows < 1 or offsets[0] != 0 or (steps < 0).any() or offsets[-1] != count or len(columns) != count:
        raise CorruptError(f"{what}: {len(offsets)} row offsets for {count} values and {len(columns)} columns")
    if count and not (int(columns.min()) >= 0 and int(columns.max()) < width):
        raise CorruptError(f"{what}: columns reach {columns.max()}, the matrix has {width}")
    itemsize = DTYPE_BYTES[values.dtype]
    stored = _values(values)
    with open(f"{where}.weight", "wb") as weight, open(f"{where}.mask", "wb") as mask:
        held: NDArray[Any] = np.empty(0, f"u{itemsize}")
        for begin in range(0, rows, max(1, PANEL_ELEMENTS // width)):
            end = min(rows, begin + max(1, PANEL_ELEMENTS // width))
            low, high = int(offsets[begin]), int(offsets[end])
            while len(held) < high - low:
                held = np.concatenate([held, next(stored)])
            at = np.repeat(np.arange(end - begin), steps[begin:end]), columns[low:high]
            panel, kept = np.zeros((end - begin, width), held.dtype), np.zeros((end - begin, width), np.uint8)
            panel[at], kept[at] = held[: high - low], 1
            if int(kept.sum()) != high - low:
                raise CorruptError(f"{what}: a row names a column twice")
            held = held[high - low :]
            weight.write(panel.tobytes())
            mask.write(kept.tobytes())
    shape = (rows, width)
    arrays = [
        StoredArray(path=Path(f"{where}.{kind}"), key=what, dtype=dtype, shape=shape, offset=0)
        for kind, dtype in (("weight", values.dtype), ("mask", "BOOL"))
    ]
    return whole(arrays[0]), whole(arrays[1])


def _values(tensor: Tensor) -> Iterator[NDArray[Any]]:
    output = OutputTensor(key="", shape=tensor.shape, content=tensor)
    with open_sources(sources([output])) as files:
        for panel in panels(output, Reader(files)):
            yield panel.reshape(-1).copy()
