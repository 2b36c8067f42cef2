"""Weights that DynMo's original pruning stores as sparse rows (``values``, ``row_offsets``, ``column_indices``).

Each is written as a dense weight with zeros and as its mask to a scratch directory, a panel of rows at a time. The
directory is removed when the checkpoint that refers to it is released.
"""

from __future__ import annotations

import math
import shutil
import tempfile
import weakref
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..io.errors import CorruptError, UnsupportedError, short_name
from ..io.reading import Reader, open_sources
from ..io.safetensors import DTYPE_BYTES, StoredArray
from ..tensors.copy_plan import OutputTensor, sources
from ..tensors.tiled_copy import panels
from ..tensors.views import Tensor, as_tensor

OFFSETS, COLUMNS, VALUES, ROWS = ".row_offsets", ".column_indices", ".values", ".row_indices"
PANEL_ELEMENTS = 1 << 20
_INTEGERS = {"I64": "i8", "I32": "i4", "I16": "i2"}


class ScratchDirectory:
    """A directory that is removed when the last reference to this object is dropped, or when the program ends."""

    def __init__(self, path: str) -> None:
        self.path = Path(path)
        weakref.finalize(self, shutil.rmtree, path, ignore_errors=True)


@dataclass(frozen=True, kw_only=True)
class DenseTensors:
    """Dense tensors of all tensor-parallel ranks, masks by weight, remarks, and the directory that stores them."""

    tensors: dict[str, list[Tensor]]
    masks: dict[str, Tensor]
    remarks: tuple[str, ...]
    scratch: ScratchDirectory


def densify(path: str, merged: Mapping[str, list[Tensor]]) -> DenseTensors:
    """Replace sparse weights by dense ones.

    Args:
        path: the file, for messages.
        merged: for each canonical name the tensors of all tensor-parallel ranks. A sparse weight ``[rows, columns]``
            is stored as CSR: values ``[nnz]``, column indices ``[nnz]`` and row offsets ``[rows + 1]``.

    Returns:
        All tensors, with dense weights ``[rows, columns]`` in place of sparse ones, and masks of the same shape.

    Raises:
        UnsupportedError: a sparse weight that tensor parallelism splits, or one of unknown width.
        CorruptError: invalid offsets or columns.
    """
    found = [name.removesuffix(OFFSETS) for name in merged if name.endswith(OFFSETS)]
    scratch = ScratchDirectory(tempfile.mkdtemp(prefix="dynmo-ckpt-"))
    tensors = {name: ranks for name, ranks in merged.items() if not name.endswith((OFFSETS, COLUMNS, VALUES, ROWS))}
    masks, nnz, total = {}, 0, 0
    for number, base in enumerate(found):
        source = f"{path}: {short_name(base)}"
        if len(merged[base + OFFSETS]) > 1:
            raise UnsupportedError(f"{source}: sparse rows on several tensor-parallel ranks are not supported")
        parts = [merged.get(base + part, [None])[0] for part in (VALUES, OFFSETS, COLUMNS)]
        values, offsets, columns = parts
        if values is None or offsets is None or columns is None:
            raise CorruptError(f"{source}: has {OFFSETS}; {VALUES} and {COLUMNS} are missing")
        width = _width(source, base, merged)
        where = scratch.path / f"{number}"
        weight, mask = write_dense(source, values, integers(offsets), integers(columns), width, where)
        tensors[base + ".weight"], masks[base + ".weight"] = [weight], mask
        nnz, total = nnz + values.shape[0], total + math.prod(weight.shape)
    remark = f"converted {len(found)} sparse weights to dense ones: sparsity {1 - nnz / max(1, total):.4f}"
    return DenseTensors(tensors=tensors, masks=masks, remarks=(remark,), scratch=scratch)


def _width(source: str, base: str, merged: Mapping[str, list[Tensor]]) -> int:
    """Number of columns of a weight: the hidden size, or the FFN size for the second matrix of an MLP."""
    if not base.endswith(".dense_4h_to_h"):
        words = merged.get("language_model.embedding.word_embeddings.weight")
        if words is None:
            raise UnsupportedError(f"{source}: the width of its sparse rows is unknown: no stage has the embedding")
        return words[0].shape[1]
    first = base.removesuffix("4h_to_h") + "h_to_4h"
    # The columns of the second matrix are the rows of the first.
    offsets, weight = merged.get(first + OFFSETS), merged.get(first + ".weight")
    if offsets is None and weight is None:
        raise UnsupportedError(f"{source}: the width of its sparse rows is unknown: {short_name(first)} is missing")
    return offsets[0].shape[0] - 1 if offsets is not None else (weight or [])[0].shape[0]


def integers(tensor: Tensor) -> NDArray[Any]:
    """``tensor``, offsets or columns of any shape, as a flat array of its integer type.

    Raises:
        CorruptError: its type is not an integer type.
    """
    output = OutputTensor(key="", shape=tensor.shape, content=tensor)
    if tensor.dtype not in _INTEGERS:
        raise CorruptError(f"indices have the type {tensor.dtype}; must be one of {', '.join(_INTEGERS)}")
    with open_sources(sources([output])) as files:
        parts = [panel.reshape(-1).view(_INTEGERS[tensor.dtype]).copy() for panel in panels(output, Reader(files))]
    flat: NDArray[Any] = np.concatenate(parts) if parts else np.empty(0, np.int32)
    return flat


def write_dense(
    what: str, values: Tensor, offsets: NDArray[Any], columns: NDArray[Any], width: int, where: Path
) -> tuple[Tensor, Tensor]:
    """Write the dense weight and its mask, a panel of rows at a time.

    Args:
        what: file and name of the weight, for messages.
        values: the elements that are not pruned, ``[nnz]``.
        offsets: the begin of each row in ``values``, ``[rows + 1]``.
        columns: the column of each element, ``[nnz]``.
        width: number of columns of the weight.
        where: the path of both files, without their suffixes ``.weight`` and ``.mask``.

    Returns:
        The weight ``[rows, width]`` and its mask ``[rows, width]``, true where an element is not pruned.

    Raises:
        CorruptError: invalid offsets or columns.
    """
    rows, count = len(offsets) - 1, values.shape[0]
    bounds: NDArray[np.int64] = offsets.astype(np.int64)
    steps = bounds[1:] - bounds[:-1]
    if rows < 1 or offsets[0] != 0 or (steps < 0).any() or offsets[-1] != count or len(columns) != count:
        raise CorruptError(f"{what}: {len(offsets)} row offsets do not fit {count} values and {len(columns)} columns")
    # Checked in advance: numpy would count a negative index from the end of the row.
    if count and not (int(columns.min()) >= 0 and int(columns.max()) < width):
        raise CorruptError(f"{what}: a column index is {columns.max()}; the matrix has {width} columns")
    itemsize = DTYPE_BYTES[values.dtype]
    stored = _values(values)
    with open(f"{where}.weight", "wb") as weight, open(f"{where}.mask", "wb") as mask:
        buffered: NDArray[Any] = np.empty(0, f"u{itemsize}")
        for begin in range(0, rows, max(1, PANEL_ELEMENTS // width)):
            end = min(rows, begin + max(1, PANEL_ELEMENTS // width))
            low, high = int(offsets[begin]), int(offsets[end])
            # The panels of the values do not end with rows: what is left over begins the next panel of rows.
            while len(buffered) < high - low:
                buffered = np.concatenate([buffered, next(stored)])
            at = np.repeat(np.arange(end - begin), steps[begin:end]), columns[low:high]
            shape = (end - begin, width)
            panel, mask_panel = np.zeros(shape, buffered.dtype), np.zeros(shape, np.uint8)
            panel[at], mask_panel[at] = buffered[: high - low], 1
            # An assignment with equal indices keeps the last value only, so a repeated index leaves too few true
            # elements.
            if int(mask_panel.sum()) != high - low:
                raise CorruptError(f"{what}: a row has a column index twice")
            buffered = buffered[high - low :]
            weight.write(panel.tobytes())
            mask.write(mask_panel.tobytes())
    arrays = [
        StoredArray(path=Path(f"{where}.{kind}"), key=what, dtype=dtype, shape=(rows, width), offset=0)
        for kind, dtype in (("weight", values.dtype), ("mask", "BOOL"))
    ]
    return as_tensor(arrays[0]), as_tensor(arrays[1])


def _values(tensor: Tensor) -> Iterator[NDArray[Any]]:
    output = OutputTensor(key="", shape=tensor.shape, content=tensor)
    with open_sources(sources([output])) as files:
        for panel in panels(output, Reader(files)):
            # The next panel reuses the buffer of this one.
            yield panel.reshape(-1).copy()
