"""GGUF, the files of llama.cpp: written in F32, F16, BF16, Q8_0 or MXFP4, with the tokenizer; not read.

Names and keys come from the ``gguf`` package; the tensors are copied as in every other format, in bounded memory::

    gguf_models     which model of llama.cpp computes this one, its keys, and what is refused
    gguf_tensors    names and layouts of llama.cpp
    gguf_types      numbers that are computed: blocks of Q8_0 and MXFP4, norms as 1 + w
    gguf_tokenizer  tokens, merges and the rules that split text

Vectors, biases and routers stay in float32, and rows that blocks do not divide in float16. MXFP4 is for experts; other
matrices keep their type.
"""

from __future__ import annotations

import math
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..formats.choices import WriteOptions
from ..huggingface.models import architecture_of_model
from ..huggingface.tokenizer import tokenizer_folder
from ..io.errors import UnsupportedError
from ..maps.name_map import MappedTensor, layout_of, load_map, to_foreign
from ..native.checkpoint import NativeCheckpoint
from ..tensors.copy_plan import ExportPlan, OutputTensor, shard_by_size
from .gguf_models import add_model, arch_of, differences
from .gguf_package import gguf_package
from .registry import CheckpointFormat

if TYPE_CHECKING:
    from ..io.computed import RowComputation

FILE = "model.gguf"
ALIGNMENT = 32
QUANTIZATION_VERSION = 2
# Types of the file and of its matrices: ggml's number, and general.file_type.
FILE_TYPES = {"F32": 0, "F16": 1, "Q8_0": 7, "BF16": 32, "MXFP4": 38}
TENSOR_TYPES = {"F32": 0, "F16": 1, "Q8_0": 8, "BF16": 30, "MXFP4": 39}
BLOCK = 32  # values of a row that share a scale in Q8_0 and MXFP4
BLOCK_BYTES = {"Q8_0": 34, "MXFP4": 17}
# numpy's types by which the gguf package knows a shape of elements, or of bytes where the type has blocks.
_WIDTHS = {"F32": "f4", "F16": "f2", "BF16": "u2", "Q8_0": "u1", "MXFP4": "u1"}


@dataclass(frozen=True, kw_only=True)
class GgufFile:
    """A GGUF file to write.

    Attributes:
        name: path relative to the new directory.
        arch: architecture of llama.cpp.
        keys: adds the keys to a ``GGUFWriter``.
        tensors: in the order of their bytes.
        types: of each tensor, a key of ``TENSOR_TYPES``.
    """

    name: str
    arch: str
    keys: Callable[[Any], None]
    tensors: tuple[OutputTensor, ...]
    types: tuple[str, ...]

    @cached_property
    def header(self) -> bytes:
        """The bytes before the first tensor, as the ``gguf`` package writes them."""
        gguf = gguf_package()
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / FILE
            writer = gguf.GGUFWriter(path, self.arch)
            self.keys(writer)
            for tensor, kind in zip(self.tensors, self.types, strict=True):
                raw = gguf.GGMLQuantizationType(TENSOR_TYPES[kind])
                writer.add_tensor_info(tensor.key, tensor.shape, _dtype(_WIDTHS[kind]), tensor.num_bytes, raw)
            writer.write_header_to_file()
            writer.write_kv_data_to_file()
            writer.write_ti_data_to_file()
            writer.close()
            found = path.read_bytes()
        return found + bytes(-len(found) % ALIGNMENT)

    @property
    def offsets(self) -> list[int]:
        """The byte offset of each tensor."""
        return self._ends()[:-1]

    def _ends(self) -> list[int]:
        """The offset of each tensor, and the end of the file; each is aligned."""
        found = [len(self.header)]
        for tensor in self.tensors:
            end = found[-1] + tensor.num_bytes
            found.append(end + -end % ALIGNMENT)
        return found

    @property
    def num_bytes(self) -> int:
        """Size of the file in bytes."""
        return self._ends()[-1]

    @property
    def index(self) -> dict[str, tuple[int, int]]:
        """Byte offset and number of bytes of each tensor, by key."""
        return {t.key: (begin, t.num_bytes) for t, begin in zip(self.tensors, self.offsets, strict=True)}

    def other_bytes(self, checksums: Sequence[int]) -> list[tuple[int, bytes]]:
        """The header, and the padding after each tensor."""
        found = [(0, self.header)]
        for tensor, (begin, following) in zip(self.tensors, pairwise(self._ends()), strict=True):
            end = begin + tensor.num_bytes
            found += [(end, bytes(following - end))] if following > end else []
        return found

    def read_index(self, path: Path) -> dict[str, tuple[int, int]]:
        """See ``Writable``; read by the ``gguf`` package."""
        reader = gguf_package().GGUFReader(path)
        return {tensor.name: (int(tensor.data_offset), int(tensor.n_bytes)) for tensor in reader.tensors}


def _dtype(code: str) -> Any:
    import numpy as np  # only a conversion needs it

    return np.dtype(code)


def plan_gguf(checkpoint: NativeCheckpoint, options: WriteOptions) -> ExportPlan:
    """Plan the GGUF files of the architecture of llama.cpp that computes the model; one, unless a size limits it.

    Masks become zeros in the weights; the optimizer state and layers of multi-token prediction are left out.

    Raises:
        MissingExtraError: the ``gguf`` package is not installed.
        UnsupportedError: llama.cpp has no such model, or weights have several types.
    """
    from .gguf_tensors import named_tensors, rotary_tensors
    from .gguf_tokenizer import tokenizer_keys

    gguf_package()
    manifest = checkpoint.manifest
    model, ties, source = manifest["model"], manifest["ties"], manifest.get("source")
    preferred = None if source is None else str(source["config"].get("model_type"))
    kind, architecture = architecture_of_model(model, preferred)
    arch = arch_of(kind, model)
    masks = checkpoint.masks()
    mapped = to_foreign(layout_of(load_map(architecture.map), model), checkpoint.weights(), ties, masks)
    named, predicting = named_tensors(arch, kind, model, mapped)
    dtype = _file_type(options.dtype, named)
    outputs = [_output(name, item, dtype) for name, item in named]
    outputs += [(tensor, "F32") for tensor in rotary_tensors(model)]
    folder = tokenizer_folder(checkpoint, options.tokenizer)
    stated = [] if source is None else [source["config"]]
    add_tokenizer, tokenizer, of_text = tokenizer_keys(folder, model["vocab_size"], stated)

    def keys(writer: Any) -> None:
        writer.add_name(checkpoint.directory.resolve().name)
        writer.add_file_type(FILE_TYPES[dtype])
        if dtype in BLOCK_BYTES:
            writer.add_quantization_version(QUANTIZATION_VERSION)
        add_model(writer, kind, arch, model)
        add_tokenizer(writer)

    decisions: dict[str, Any] = {
        "arch": arch,
        "type": dtype,
        "plain_tensors": sum(stored != dtype for _, stored in outputs),
        "tied_left_out": sorted(ties),
        "masks_applied": len(masks),
        "tokenizer": tokenizer,
        "optimizer_tensors_left_out": len(checkpoint.names("optimizer")),
    }
    if predicting:
        decisions["prediction_tensors_left_out"] = predicting
    if unlike := [*differences(arch, model), *of_text]:
        decisions["differs"] = "; ".join(unlike)
    return ExportPlan(files=_files(arch, outputs, keys, options.max_shard_bytes), small_files={}, decisions=decisions)


def _file_type(requested: str | None, named: Sequence[tuple[str, MappedTensor]]) -> str:
    """The type of the matrices, of the experts alone where it is MXFP4."""
    dtypes = sorted({item.content.dtype for _, item in named if len(item.shape) > 1})
    if requested is None and len(dtypes) != 1:
        raise UnsupportedError(f"weights have the types {', '.join(dtypes)}; choose one with --dtype")
    dtype = requested or dtypes[0]
    if dtype not in FILE_TYPES:
        raise UnsupportedError(f"GGUF is written in {', '.join(FILE_TYPES)}; the weights are {dtype}; use --dtype")
    if dtype == "MXFP4" and not any(_is_expert(name) for name, _ in named):
        raise UnsupportedError("MXFP4 is a type of experts, which the model does not have; use --dtype q8_0")
    return dtype


def _is_expert(name: str) -> bool:
    return name.endswith("_exps.weight")


def _files(
    arch: str, outputs: Sequence[tuple[OutputTensor, str]], keys: Callable[[Any], None], limit: int | None
) -> tuple[GgufFile, ...]:
    """One file, or several of at most ``limit`` bytes under the names by which llama.cpp finds them."""
    types = {tensor.key: stored for tensor, stored in outputs}
    tensors = [tensor for tensor, _ in outputs]
    groups = [tensors] if limit is None else shard_by_size(tensors, limit)
    count, stem = len(groups), Path(FILE).stem

    def of_shard(number: int) -> Callable[[Any], None]:
        def add(writer: Any) -> None:
            # The first file has the keys of the model.
            if number == 0:
                keys(writer)
            if count > 1:
                writer.add_uint16("split.no", number)
                writer.add_uint16("split.count", count)
                writer.add_int32("split.tensors.count", len(tensors))

        return add

    return tuple(
        GgufFile(
            name=FILE if count == 1 else f"{stem}-{number + 1:05d}-of-{count:05d}.gguf",
            arch=arch,
            keys=of_shard(number),
            tensors=tuple(group),
            types=tuple(types[tensor.key] for tensor in group),
        )
        for number, group in enumerate(groups)
    )


def _output(name: str, item: MappedTensor, dtype: str) -> tuple[OutputTensor, str]:
    """The tensor to write, and its type."""
    kind = dtype
    # llama.cpp computes with norms, biases and routers in float32.
    if len(item.shape) < 2 or name.endswith(("ffn_gate_inp.weight", ".bias")):
        kind = "F32"
    elif kind == "MXFP4" and not _is_expert(name):
        kind = item.content.dtype
    elif kind in BLOCK_BYTES and item.shape[-1] % BLOCK:
        kind = "F16"
    if kind in BLOCK_BYTES:
        from ..tensors.computed import computed_tensor
        from .gguf_types import Mxfp4Rows, QuantizedRows

        matrix = (math.prod(item.shape[:-1]), item.shape[-1])
        content, mask = item.content.merge_dims(matrix), None if item.mask is None else item.mask.merge_dims(matrix)
        rows = Mxfp4Rows if kind == "MXFP4" else QuantizedRows
        compute: RowComputation = rows(content=content, mask=mask)
        shape = (*item.shape[:-1], item.shape[-1] // BLOCK * BLOCK_BYTES[kind])
        inputs = (content,) if mask is None else (content, mask)
        return OutputTensor(key=name, shape=shape, content=computed_tensor(name, "U8", shape, inputs, compute)), kind
    cast = None if item.content.dtype == kind else kind
    return OutputTensor(key=name, shape=item.shape, content=item.content, mask=item.mask, cast=cast), kind


def _is_gguf(path: Path) -> bool:
    return path.suffix == ".gguf" if path.is_file() else path.is_dir() and any(path.glob("*.gguf"))


GGUF = CheckpointFormat(
    name="gguf",
    description="GGUF of llama.cpp (GPT-2, Llama, Mistral, Qwen, Gemma, Phi, GPT-OSS, DeepSeek), with the tokenizer",
    marker="*.gguf",
    detect=_is_gguf,
    write=plan_gguf,
)
