"""Plans pruned linear weights in the bitmask layouts of compressed-tensors, and the configuration that describes them.

The zeros are counted before the plan is made, for sizes and refusals depend on them: the weights are read once more, in
blocks of bounded size. In sparse-24-bitmask vLLM reads the linear layers of a decoder. It computes q_proj, k_proj and
v_proj as one layer, and gate_proj and up_proj too, so these are compressed together or not at all.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from ..io.computed import ROW_GROUP, ComputedArray, RowComputation
from ..io.errors import UnsupportedError, short_names
from ..io.reading import open_sources
from ..io.safetensors import DTYPE_BYTES, StoredArray
from ..maps.name_map import MappedTensor
from ..tensors.computed import arrays_of
from ..tensors.copy_plan import OutputTensor
from ..tensors.views import Tensor, as_tensor
from .bitmask import GROUP, GroupValues, Integers, NonzeroBits, NonzeroValues, PrunedRows, RowOffsets, has_two_of_four

SPARSE_24, UNSTRUCTURED = "sparse-24-bitmask", "sparse-bitmask"
STRUCTURES = {SPARSE_24: "2:4", UNSTRUCTURED: "unstructured"}
# The last release of compressed-tensors and its compressors of these layouts that was read here.
LAYOUT_VERSION = "0.9.4"
FLOATS = ("F32", "F16", "BF16")
# vLLM divides the outputs of a layer by 8, and a byte of the bitmask has 8 inputs.
MULTIPLE = 8
_LINEAR = re.compile(
    r"layers\.\d+\.(.+\.)?(qkv|query|key_value|dense|fc1|fc2|gate|up|query_down|query_up|kv_down|kv_up)\.weight"
)
_FUSED = ({"q_proj", "k_proj", "v_proj"}, {"gate_proj", "up_proj"})


@dataclass(frozen=True, kw_only=True)
class SparseExport:
    """The tensors of a directory with compressed weights.

    Attributes:
        tensors: in the order of the files.
        config: the ``quantization_config``.
        compressed: number of compressed weights.
        dense: number of linear weights that are written dense.
    """

    tensors: tuple[OutputTensor, ...]
    config: Mapping[str, Any]
    compressed: int
    dense: int


def vllm_remark(layout: str, model: Mapping[str, Any]) -> str:
    """Whether vLLM reads a directory, for the report.

    From the loaders of vLLM 0.8.5 to 0.18.1: ``CompressedTensorsConfig.supports_cutlass_24`` accepts one layout, and
    ``CompressedTensorsMoEMethod`` has no method for experts without quantization. vLLM 0.32 refuses sparse layouts.

    Args:
        layout: ``SPARSE_24`` or ``UNSTRUCTURED``.
        model: the ``model`` of a manifest.
    """
    if layout != SPARSE_24:
        return f"does not read {layout}; without --sparse-format it reads the zeros in dense weights"
    if model.get("num_experts"):
        return "does not read sparse models with experts; without --sparse-format it reads the zeros in dense weights"
    return "reads it in releases 0.8 to 0.18, on GPUs of compute capability 9.0; later releases refuse sparse layouts"


@dataclass(frozen=True, kw_only=True)
class _Counted:
    """A linear weight and its zeros; ``begins`` are those of ``RowOffsets``."""

    rows: PrunedRows
    nonzeros: int
    begins: bytes
    fits: bool

    @property
    def elements(self) -> int:
        return math.prod(self.rows.shape)

    @property
    def is_pruned(self) -> bool:
        has_mask = self.rows.mask is not None and self.nonzeros < self.elements
        return has_mask or 2 * self.nonzeros <= self.elements

    @property
    def is_smaller(self) -> bool:
        """Whether sparse-bitmask takes fewer bytes than the dense weight."""
        size, (rows, columns) = DTYPE_BYTES[self.rows.dtype], self.rows.shape
        return self.nonzeros * size + rows * (-(-columns // 8) + 8) + 16 < self.elements * size


def sparse_tensors(
    mapped: Sequence[MappedTensor], tensors: Sequence[OutputTensor], layout: str, model_type: str
) -> SparseExport:
    """Replace the pruned linear weights among ``tensors`` by their compressed parts.

    Args:
        mapped: the tensors under the names of transformers.
        tensors: the same tensors as they would be written dense, in the same order.
        layout: ``SPARSE_24`` or ``UNSTRUCTURED``.
        model_type: of the configuration.

    Raises:
        CorruptError: a file ends early.
        UnsupportedError: no weight can be compressed, a pruned one does not have two of four, or another type.
    """
    if layout == SPARSE_24 and model_type == "gpt2":
        raise UnsupportedError(
            f"--sparse-format {SPARSE_24}: GPT-2's weights are [inputs, outputs], which the layout does not know; use "
            f"{UNSTRUCTURED}, or leave the option out for zeros in dense weights"
        )
    linear = [
        (item.name, output)
        for item, output in zip(mapped, tensors, strict=True)
        if _LINEAR.fullmatch(item.source_name.removeprefix("encoder.").removeprefix("decoder."))
        and len(item.shape) == 2
        and item.name.endswith(".weight")
    ]
    others = sorted({output.dtype for _, output in linear} - set(FLOATS))
    if others:
        raise UnsupportedError(f"--sparse-format {layout}: weights of {', '.join(others)}; choose a type with --dtype")
    counted = {name: _count(_rows(output)) for name, output in linear}
    names = (
        _two_of_four_names(counted) if layout == SPARSE_24 else {n for n, each in counted.items() if each.is_smaller}
    )
    if not names:
        raise UnsupportedError(
            f"--sparse-format {layout}: no linear weight of the model {_LACKING[layout]}; leave the option out"
        )
    result: list[OutputTensor] = []
    for item, output in zip(mapped, tensors, strict=True):
        result += _parts(counted[item.name], layout) if item.name in names else [output]
    zeros = sum(each.elements - each.nonzeros for each in counted.values())
    total = sum(math.prod(item.shape) for item in mapped)
    config = {
        "quant_method": "compressed-tensors",
        "version": LAYOUT_VERSION,
        "sparsity_config": {
            "format": layout,
            "global_sparsity": round(zeros / max(1, total), 6),
            # vLLM matches an ignored name with targets only, so the targets are the names of the layers.
            "targets": [name.removesuffix(".weight") for name, _ in linear if name in names],
            "ignore": [name.removesuffix(".weight") for name, _ in linear if name not in names],
            "registry_requires_subclass": False,
            "sparsity_structure": STRUCTURES[layout],
        },
    }
    return SparseExport(tensors=tuple(result), config=config, compressed=len(names), dense=len(linear) - len(names))


_LACKING = {SPARSE_24: "has two zeros in each group of four inputs", UNSTRUCTURED: "is smaller without its zeros"}


def _two_of_four_names(counted: Mapping[str, _Counted]) -> set[str]:
    """The weights that are written in sparse-24-bitmask."""
    unfit = [name for name, each in counted.items() if each.is_pruned and not each.fits]
    if unfit:
        raise UnsupportedError(
            f"--sparse-format {SPARSE_24}: {len(unfit)} pruned weights have more than two numbers in a group of four "
            f"inputs, or sizes that {MULTIPLE} does not divide: {short_names(unfit)}; use {UNSTRUCTURED}, or leave the "
            "option out for zeros in dense weights"
        )
    fitting = {name for name, each in counted.items() if each.fits}
    return {name for name in fitting if all(other in fitting for other in _fused_with(name) if other in counted)}


def _fused_with(name: str) -> list[str]:
    """The names of the weights that vLLM computes in one layer with ``name``."""
    base, module = name.removesuffix(".weight").rpartition(".")[::2]
    return [f"{base}.{other}.weight" for group in _FUSED if module in group for other in sorted(group)]


def _rows(output: OutputTensor) -> PrunedRows:
    """A weight whose content has a dimension for each axis as rows and columns."""
    mask = None if output.mask is None else output.mask.merge_dims(output.shape)
    content = output.content.merge_dims(output.shape)
    return PrunedRows(name=output.key, content=content, mask=mask, dtype=output.dtype)


def _count(rows: PrunedRows) -> _Counted:
    """Read a weight and count what is not zero."""
    fits = all(size % MULTIPLE == 0 for size in rows.shape)
    counts = [np.zeros(1, np.int64)]
    with open_sources(_inputs(rows)) as files:
        for _, words, is_nonzero in rows.blocks(files, 0, rows.shape[0]):
            fits = fits and has_two_of_four(is_nonzero)
            counts.append(np.add.reduceat(is_nonzero.sum(axis=1), np.arange(0, len(words), ROW_GROUP)))
    begins = np.cumsum(np.concatenate(counts), dtype=np.int64)
    return _Counted(rows=rows, nonzeros=int(begins[-1]), begins=begins.tobytes(), fits=fits)


def _inputs(rows: PrunedRows) -> tuple[StoredArray, ...]:
    return (*arrays_of(rows.content), *(() if rows.mask is None else arrays_of(rows.mask)))


def _parts(counted: _Counted, layout: str) -> list[OutputTensor]:
    """The stored parts of a weight."""
    rows = counted.rows
    high, wide = rows.shape
    sizes = Integers(payload=np.array(rows.shape, np.int64).tobytes())
    if layout == SPARSE_24:
        values, bits = GroupValues(rows=rows, is_bitmask=False), GroupValues(rows=rows, is_bitmask=True)
        return [
            _part(rows, "shape", "I64", (2, 1), sizes),
            _part(rows, "compressed", rows.dtype, (high, wide * 2 // GROUP), values),
            _part(rows, "bitmask", "U8", (high, wide // 8), bits),
        ]
    nonzeros = NonzeroValues(rows=rows, begins=counted.begins)
    offsets = RowOffsets(rows=rows, begins=counted.begins)
    # Rows of one element: a vector would be computed at once.
    return [
        replace(_part(rows, "shape", "I64", (2, 1), sizes), shape=(2,)),
        replace(_part(rows, "compressed", rows.dtype, (counted.nonzeros, 1), nonzeros), shape=(counted.nonzeros,)),
        _part(rows, "bitmask", "U8", (high, -(-wide // 8)), NonzeroBits(rows=rows)),
        replace(_part(rows, "row_offsets", "I64", (high, 1), offsets), shape=(high,)),
    ]


def _part(rows: PrunedRows, part: str, dtype: str, shape: tuple[int, ...], compute: RowComputation) -> OutputTensor:
    key = f"{rows.name.removesuffix('.weight')}.{part}"
    inputs = _inputs(rows)
    path = inputs[0].path if inputs else Path(rows.name)
    array = ComputedArray(path=path, key=key, dtype=dtype, shape=shape, offset=0, inputs=inputs, compute=compute)
    content: Tensor = as_tensor(array)
    return OutputTensor(key=key, shape=shape, content=content)
