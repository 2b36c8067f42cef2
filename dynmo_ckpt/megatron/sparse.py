"""Weights that DynMo's pruning stores as sparse rows (``values``, ``row_offsets``, ``column_indices``), made dense.

A dense copy is written to a scratch directory a panel of rows at a time, with the zeros in place, and its mask beside
it; from there on both are tensors like any other. The directory goes when the checkpoint that holds it does.
"""

from __future__ import annotations

import math
import shutil
import tempfile
import weakref
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from ..errors import CorruptError, UnsupportedError
from ..tensors.views import Tensor

OFFSETS, COLUMNS, VALUES, ROWS = ".row_offsets", ".column_indices", ".values", ".row_indices"


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
    from ..tensors.sparse_rows import integers, write_dense  # loads numpy, which most checkpoints' names do not need

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
        weight, mask = write_dense(f"{path}: {base}", values, integers(offsets), integers(columns), width, where)
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
