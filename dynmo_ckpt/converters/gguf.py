"""GGUF, the files of llama.cpp: written in F32, F16, BF16 or Q8_0, with the tokenizer; not read.

Names and keys come from the ``gguf`` package; the tensors are copied as in every other format, in bounded memory. What
differs from a Hugging Face directory:

* names of llama.cpp, experts stacked in one tensor each;
* a Llama's rows of queries and keys pair neighbors; Gemma's norms are stored as 1 + w; GPT-2's matrices as [out, in];
* Llama 3's rotary scaling is a tensor of divisors;
* vectors and routers stay in float32, and rows that blocks do not divide in float16.
"""

from __future__ import annotations

import math
import re
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..formats.choices import WriteOptions
from ..huggingface.models import architecture_of_model, hf_config
from ..io.errors import UnsupportedError
from ..maps.decoder_fields import decoder_fields
from ..maps.name_map import MappedTensor, layout_of, load_map, to_foreign
from ..native.checkpoint import NativeCheckpoint
from ..tensors.copy_plan import ExportPlan, OutputTensor
from ..tensors.views import Tensor, concatenate
from .gguf_package import gguf_package
from .registry import CheckpointFormat

if TYPE_CHECKING:
    from ..io.computed import RowComputation

FILE = "model.gguf"
ALIGNMENT = 32
QUANTIZATION_VERSION = 2
# Types of the file and of its matrices: ggml's number, and general.file_type.
FILE_TYPES = {"F32": 0, "F16": 1, "Q8_0": 7, "BF16": 32}
TENSOR_TYPES = {"F32": 0, "F16": 1, "Q8_0": 8, "BF16": 30}
BLOCK = 32  # values of a row that share a scale in Q8_0
ARCHES = {
    "gpt2": "gpt2",
    "llama": "llama",
    "mistral": "llama",
    "mixtral": "llama",
    "qwen2": "qwen2",
    "qwen3": "qwen3",
    "qwen3_moe": "qwen3moe",
    "gemma": "gemma",
    "olmo2": "olmo2",
}
_EXPERT = re.compile(r"model\.layers\.(\d+)\..*experts\.(\d+)\.(w1|w2|w3|gate_proj|up_proj|down_proj)\.weight")
_EXPERT_NAMES = {"w1": "gate", "gate_proj": "gate", "w3": "up", "up_proj": "up", "w2": "down", "down_proj": "down"}
_QUERY_KEY = re.compile(r".*\.self_attn\.[qk]_proj\.(weight|bias)")


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
                # A shape of bytes where the type has blocks, which the package converts; of elements elsewhere.
                width = {"F32": "f4", "F16": "f2", "BF16": "u2", "Q8_0": "u1"}[kind]
                raw = gguf.GGMLQuantizationType(TENSOR_TYPES[kind])
                writer.add_tensor_info(tensor.key, tensor.shape, _dtype(width), tensor.num_bytes, raw)
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
    """Plan a GGUF file of the architecture of llama.cpp that computes the model.

    Masks become zeros in the weights; the optimizer state is left out.

    Raises:
        MissingExtraError: the ``gguf`` package is not installed.
        UnsupportedError: llama.cpp has no such model, or weights have several types.
    """
    from .gguf_tokenizer import tokenizer_keys

    gguf_package()
    manifest = checkpoint.manifest
    model, ties = manifest["model"], manifest["ties"]
    kind, architecture = architecture_of_model(model)
    arch = _arch(kind, model)
    masks = checkpoint.masks()
    mapped = to_foreign(layout_of(load_map(architecture.map), model), checkpoint.weights(), ties, masks)
    dtypes = sorted({item.content.dtype for item in mapped})
    if options.dtype is None and len(dtypes) != 1:
        raise UnsupportedError(f"weights have the types {', '.join(dtypes)}; choose one with --dtype")
    dtype = options.dtype or dtypes[0]
    if dtype not in FILE_TYPES:
        raise UnsupportedError(f"GGUF is written in {', '.join(FILE_TYPES)}; the weights are {dtype}; use --dtype")
    tensors, types = [], []
    for name, item in _named(arch, model, mapped):
        tensor, stored = _output(name, _laid_out(arch, kind, model, item), dtype)
        tensors.append(tensor)
        types.append(stored)
    divisors = _rotary_divisors(model)
    if divisors is not None:
        tensors.append(divisors)
        types.append("F32")
    config = hf_config(model, "float32", None)
    inside = checkpoint.directory / "tokenizer"
    folder = options.tokenizer or (inside if inside.is_dir() else checkpoint.directory)
    add_tokenizer, tokenizer = tokenizer_keys(folder, model["vocab_size"], (manifest.get("source") or {}).get("config"))

    def keys(writer: Any) -> None:
        writer.add_name(checkpoint.directory.resolve().name)
        writer.add_file_type(FILE_TYPES[dtype])
        if dtype == "Q8_0":
            writer.add_quantization_version(QUANTIZATION_VERSION)
        _add_model(writer, kind, model, config)
        add_tokenizer(writer)

    file = GgufFile(name=FILE, arch=arch, keys=keys, tensors=tuple(tensors), types=tuple(types))
    decisions = {
        "arch": arch,
        "type": dtype,
        "plain_tensors": sum(stored != dtype for stored in types),
        "tied_left_out": sorted(ties),
        "masks_applied": len(masks),
        "tokenizer": tokenizer,
        "optimizer_tensors_left_out": len(checkpoint.names("optimizer")),
    }
    if arch == "llama" and model.get("sliding_window"):
        decisions["differs"] = "llama.cpp attends beyond the sliding window of a Mistral"
    return ExportPlan(files=(file,), small_files={}, decisions=decisions)


def _arch(kind: str, model: Mapping[str, Any]) -> str:
    """The architecture of llama.cpp; refuses what it does not compute."""
    fields, arch = decoder_fields(model), ARCHES.get(kind)
    if arch is None:
        raise UnsupportedError(f"GGUF is written for {', '.join(ARCHES)}; the model is a {kind}")
    scaling = fields["rotary_scaling"] or {"rope_type": "default"}
    unlike = {
        "activation": kind == "gpt2" and model["activation"] != "gelu_tanh",
        "attention_bias": arch not in ("gpt2", "llama", "qwen2") and fields["attention_bias"] != "none",
        "moe_router_pre_softmax": bool(model.get("moe_router_pre_softmax")),
        "rotary_scaling": scaling["rope_type"] not in ("default", "linear", "yarn", "llama3")
        or (scaling["rope_type"] == "yarn" and not {*scaling} <= {"rope_type", *_YARN}),
        "rotary_fraction": fields["rotary_fraction"] != 1.0,
        "attention_scale": fields["attention_scale"] is not None,
    }
    found = [name for name, differs in unlike.items() if differs]
    if found:
        raise UnsupportedError(f"llama.cpp's {arch} does not compute {found[0]} of this model")
    return arch


_YARN = ("factor", "original_max_position_embeddings")


def _add_model(writer: Any, kind: str, model: Mapping[str, Any], config: Mapping[str, Any]) -> None:
    """Add the sizes and constants of a model to a ``GGUFWriter``."""
    heads, hidden = model["num_attention_heads"], model["hidden_size"]
    width = model.get("head_dim", hidden // heads)
    writer.add_vocab_size(model["vocab_size"])
    writer.add_context_length(model["max_position_embeddings"])
    writer.add_embedding_length(hidden)
    writer.add_block_count(model["num_layers"])
    writer.add_feed_forward_length(model["ffn_hidden_size"])
    writer.add_head_count(heads)
    if kind == "gpt2":
        writer.add_layer_norm_eps(model["layernorm_epsilon"])
        return
    writer.add_head_count_kv(model.get("num_key_value_heads", heads))
    writer.add_key_length(width)
    writer.add_value_length(width)
    writer.add_layer_norm_rms_eps(model["layernorm_epsilon"])
    writer.add_rope_dimension_count(width)
    writer.add_rope_freq_base(float(config["rope_theta"]))
    scaling = decoder_fields(model)["rotary_scaling"] or {}
    if scaling.get("rope_type") in ("linear", "yarn"):
        kinds = gguf_package().RopeScalingType
        writer.add_rope_scaling_type(kinds.YARN if scaling["rope_type"] == "yarn" else kinds.LINEAR)
        writer.add_rope_scaling_factor(scaling["factor"])
    if scaling.get("rope_type") == "yarn":
        writer.add_rope_scaling_orig_ctx_len(scaling["original_max_position_embeddings"])
    if model.get("sliding_window"):
        writer.add_sliding_window(model["sliding_window"])
    if model.get("num_experts"):
        writer.add_expert_count(model["num_experts"])
        writer.add_expert_used_count(model.get("moe_top_k", 2))
    if kind == "qwen3_moe":
        writer.add_expert_feed_forward_length(model["ffn_hidden_size"])


def _named(arch: str, model: Mapping[str, Any], mapped: Sequence[MappedTensor]) -> list[tuple[str, MappedTensor]]:
    """The tensors under llama.cpp's names, the experts of a layer stacked."""
    gguf = gguf_package()
    number = next(key for key, name in gguf.MODEL_ARCH_NAMES.items() if name == arch)
    names = gguf.get_tensor_name_map(number, model["num_layers"])
    found: list[tuple[str, MappedTensor]] = []
    stacks: dict[str, list[MappedTensor]] = {}
    for item in mapped:
        match = _EXPERT.fullmatch(item.name)
        if match:
            name = f"blk.{match[1]}.ffn_{_EXPERT_NAMES[match[3]]}_exps.weight"
            # Experts are mapped in the order of their numbers.
            stacks.setdefault(name, []).append(item)
            continue
        name = names.get_name(item.name, try_suffixes=(".weight", ".bias"))
        if name is None:
            raise UnsupportedError(f"llama.cpp's {arch} has no tensor for {item.name}")
        found.append((name, item))
    return found + [(name, _stacked(name, items)) for name, items in stacks.items()]


def _stacked(name: str, items: Sequence[MappedTensor]) -> MappedTensor:
    masks = [item.mask for item in items if item.mask is not None]
    if masks and len(masks) != len(items):
        raise UnsupportedError(f"{name}: either all or none of the experts must have a mask")
    return MappedTensor(
        name=name,
        source_name=items[0].source_name,
        content=_stack([item.content for item in items]),
        shape=(len(items), *items[0].shape),
        mask=_stack(masks) if masks else None,
    )


def _stack(tensors: Sequence[Tensor]) -> Tensor:
    return concatenate([tensor.with_unit_dims((1, *tensor.shape)) for tensor in tensors], 0)


def _laid_out(arch: str, kind: str, model: Mapping[str, Any], item: MappedTensor) -> MappedTensor:
    """A tensor with llama.cpp's order of rows and columns, and Gemma's norms as 1 + w."""
    if arch == "llama" and (match := _QUERY_KEY.fullmatch(item.name)):
        # The content has a dimension for each axis: the head dimension is the last one of the rows.
        dim = len(item.content.shape) - (2 if match[1] == "weight" else 1)
        return _each(item, lambda tensor: _interleaved(tensor, dim))
    if kind == "gpt2" and len(item.shape) == 2 and ".h." in item.name:
        return replace(_each(item, lambda tensor: _transposed(tensor, item.shape[0])), shape=item.shape[::-1])
    if arch == "gemma" and item.name.endswith("norm.weight"):
        from ..tensors.computed import computed_tensor
        from .gguf_types import OnePlus

        vector = item.content
        return replace(item, content=computed_tensor(item.name, "F32", item.shape, (vector,), OnePlus(vector=vector)))
    return item


def _each(item: MappedTensor, change: Callable[[Tensor], Tensor]) -> MappedTensor:
    return replace(item, content=change(item.content), mask=None if item.mask is None else change(item.mask))


def _interleaved(tensor: Tensor, dim: int) -> Tensor:
    """The two halves of the head dimension ``dim`` interleaved, as llama.cpp's Llama rotates neighbors."""
    halves = tensor.unflatten(dim, (2, tensor.shape[dim] // 2))
    order = list(range(len(halves.shape)))
    order[dim : dim + 2] = [dim + 1, dim]
    return halves.permute(order)


def _transposed(tensor: Tensor, rows: int) -> Tensor:
    """A matrix of ``rows`` rows, which are the first dimensions, with rows and columns exchanged."""
    first = next(k for k in range(len(tensor.shape) + 1) if math.prod(tensor.shape[:k]) == rows)
    return tensor.permute([*range(first, len(tensor.shape)), *range(first)])


def _output(name: str, item: MappedTensor, dtype: str) -> tuple[OutputTensor, str]:
    """The tensor to write, and its type."""
    kind = dtype
    # llama.cpp computes with norms, biases and routers in float32.
    if len(item.shape) < 2 or name.endswith("ffn_gate_inp.weight"):
        kind = "F32"
    elif kind == "Q8_0" and item.shape[-1] % BLOCK:
        kind = "F16"
    if kind == "Q8_0":
        from ..tensors.computed import computed_tensor
        from .gguf_types import BLOCK_BYTES, QuantizedRows

        matrix = (math.prod(item.shape[:-1]), item.shape[-1])
        content, mask = item.content.merge_dims(matrix), None if item.mask is None else item.mask.merge_dims(matrix)
        compute: RowComputation = QuantizedRows(content=content, mask=mask)
        shape = (*item.shape[:-1], item.shape[-1] // BLOCK * BLOCK_BYTES)
        inputs = (content,) if mask is None else (content, mask)
        return OutputTensor(key=name, shape=shape, content=computed_tensor(name, "U8", shape, inputs, compute)), kind
    cast = None if item.content.dtype == kind else kind
    return OutputTensor(key=name, shape=item.shape, content=item.content, mask=item.mask, cast=cast), kind


def _rotary_divisors(model: Mapping[str, Any]) -> OutputTensor | None:
    """Llama 3's scaling as divisors of the rotary frequencies; None for other models."""
    fields = decoder_fields(model)
    scaling = fields["rotary_scaling"]
    if not scaling or scaling["rope_type"] != "llama3":
        return None
    from ..tensors.computed import constant_tensor
    from .gguf_types import llama3_divisors

    width = model.get("head_dim", model["hidden_size"] // model["num_attention_heads"])
    numbers = llama3_divisors(width, float(fields["rotary_base"]), scaling)
    content = constant_tensor("rope_freqs.weight", numbers)
    return OutputTensor(key="rope_freqs.weight", shape=content.shape, content=content)


def _is_gguf(path: Path) -> bool:
    return path.suffix == ".gguf" if path.is_file() else path.is_dir() and any(path.glob("*.gguf"))


GGUF = CheckpointFormat(
    name="gguf",
    description="GGUF of llama.cpp (GPT-2, Llama, Mistral, Mixtral, Qwen, Gemma, OLMo 2), with the tokenizer",
    marker="*.gguf",
    detect=_is_gguf,
    write=plan_gguf,
)
