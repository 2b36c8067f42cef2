"""Weights that DynMo's pruning stores as sparse rows (``values``, ``row_offsets``, ``column_indices``), made dense.

A dense copy is written to a scratch directory a panel of rows at a time, with the zeros in place, and its mask beside
it; from there on both are tensors like any other. The directory goes when the checkpoint that holds it does.
"""

from __future__ import annotations

import math
import shutil
import tempfile
import weakref
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .copyplan import OutputTensor, sources
from .faults import CorruptError, UnsupportedError
from .io.reading import Reader, open_sources
from .io.safetensors import DTYPE_BYTES, StoredArray
from .panels import panels
from .views import Tensor, whole

OFFSETS, COLUMNS, VALUES, ROWS = ".row_offsets", ".column_indices", ".values", ".row_indices"
PANEL_ELEMENTS = 1 << 20
_INTEGERS = {"I64": "i8", "I32": "i4", "I16": "i2"}


class Scratch:
    """A directory that is removed when nothing refers to this any more, or when the program ends."""

    def __init__(self, path: str) -> None:
        self.path = Path(path)
        weakref.finalize(self, shutil.rmtree, path, ignore_errors=True)


@dataclass(frozen=True, kw_only=True)
class Dense:
    """Tensors of all tensor ranks with nothing sparse left, masks by the name of the weight, and what holds them."""

    tensors: dict[str, list[Tensor]]
    masks: dict[str, Tensor] = field(default_factory=dict)
    remarks: tuple[str, ...] = ()
    scratch: object = None


def densified(path: str, merged: Mapping[str, list[Tensor]]) -> Dense:
    """Replace sparse weights by dense ones.

    Raises:
        UnsupportedError: a sparse weight cut by tensor parallelism, or one whose width is not known.
        CorruptError: offsets or columns that are none.
    """
    found = [name.removesuffix(OFFSETS) for name in merged if name.endswith(OFFSETS)]
    if not found:
        return Dense(tensors=dict(merged))
    scratch = Scratch(tempfile.mkdtemp(prefix="dynmo-ckpt-"))
    tensors = {name: ranks for name, ranks in merged.items() if not name.endswith((OFFSETS, COLUMNS, VALUES, ROWS))}
    masks, kept, total = {}, 0, 0
    for number, base in enumerate(found):
        if len(merged[base + OFFSETS]) > 1:
            raise UnsupportedError(f"{path}: {base}: sparse rows on several tensor ranks are not mapped")
        parts = [merged.get(base + part, [None])[0] for part in (VALUES, OFFSETS, COLUMNS)]
        values, offsets, columns = parts
        if values is None or offsets is None or columns is None:
            raise CorruptError(f"{path}: {base}: has {OFFSETS}, but not {VALUES} and {COLUMNS}")
        width = _width(path, base, merged)
        where = scratch.path / f"{number}"
        weight, mask = _write(f"{path}: {base}", values, _integers(offsets), _integers(columns), width, where)
        tensors[base + ".weight"], masks[base + ".weight"] = [weight], mask
        kept, total = kept + values.shape[0], total + math.prod(weight.shape)
    remark = f"{len(found)} weights of sparse rows made dense: {1 - kept / max(1, total):.4f} of them is zero"
    return Dense(tensors=tensors, masks=masks, remarks=(remark,), scratch=scratch)


def _width(path: str, base: str, merged: Mapping[str, list[Tensor]]) -> int:
    """Columns of a weight: the hidden size, or that of the MLP's inner layer for its second product."""
    if not base.endswith(".dense_4h_to_h"):
        words = merged.get("language_model.embedding.word_embeddings.weight")
        if words is None:
            raise UnsupportedError(f"{path}: {base}: no embedding tells the width of its sparse rows")
        return words[0].shape[1]
    first = base.removesuffix("4h_to_h") + "h_to_4h"
    offsets, weight = merged.get(first + OFFSETS), merged.get(first + ".weight")
    if offsets is None and weight is None:
        raise UnsupportedError(f"{path}: {base}: no {first} tells the width of its sparse rows")
    return offsets[0].shape[0] - 1 if offsets is not None else (weight or [])[0].shape[0]


def _integers(tensor: Tensor) -> NDArray[Any]:
    output = OutputTensor(key="", shape=tensor.shape, content=tensor)
    if tensor.dtype not in _INTEGERS:
        raise CorruptError(f"indices of the type {tensor.dtype}")
    with open_sources(sources([output])) as files:
        parts = [panel.reshape(-1).view(_INTEGERS[tensor.dtype]).copy() for panel in panels(output, Reader(files))]
    flat: NDArray[Any] = np.concatenate(parts) if parts else np.empty(0, np.int32)
    return flat


def _write(
    what: str, values: Tensor, offsets: NDArray[Any], columns: NDArray[Any], width: int, where: Path
) -> tuple[Tensor, Tensor]:
    """Write the dense weight and its mask, a panel of rows at a time."""
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
