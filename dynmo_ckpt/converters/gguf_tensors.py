"""Tensors of a model under llama.cpp's names and in its layouts, from those of transformers. Pure.

* The experts of a layer are stacked in one tensor each.
* A Llama's rows of queries and keys pair neighbors; Gemma's norms are stored as 1 + w; GPT-2's matrices as [out, in].
* GPT-OSS's experts are [expert, out, in], gate and up apart.
* DeepSeek's keys and values from the latent are apart, the keys as [head, latent, key]; its rotation pairs neighbors.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from ..huggingface.files import is_conv1d
from ..io.errors import UnsupportedError
from ..maps.decoder_fields import decoder_fields
from ..maps.name_map import MappedTensor
from ..tensors.computed import Floats, computed_tensor, constant_tensor
from ..tensors.copy_plan import OutputTensor
from ..tensors.views import Tensor, concatenate
from .gguf_models import GEMMAS, rotated_width
from .gguf_package import gguf_package
from .gguf_types import OnePlus, llama3_divisors

Model = Mapping[str, Any]
Change = Callable[[Tensor], Tensor]
_EXPERT = re.compile(r"model\.layers\.(\d+)\..*experts\.(\d+)\.(w1|w2|w3|gate_proj|up_proj|down_proj)\.weight")
_EXPERT_NAMES = {"w1": "gate", "gate_proj": "gate", "w3": "up", "up_proj": "up", "w2": "down", "down_proj": "down"}
_STACKED = re.compile(r"(model\.layers\.\d+\.mlp\.experts)\.(gate_up|down)_proj(_bias)?")
_QUERY_KEY = re.compile(r".*\.self_attn\.[qk]_proj\.(weight|bias)")
_PREDICTION = re.compile(r"model\.layers\.(\d+)\.")


def named_tensors(
    arch: str, kind: str, model: Model, mapped: Sequence[MappedTensor]
) -> tuple[list[tuple[str, MappedTensor]], int]:
    """The tensors under llama.cpp's names, and the number of those of multi-token prediction, which it does not have.

    Args:
        arch: the architecture of llama.cpp.
        kind: ``model_type`` of transformers.
        model: the ``model`` of a manifest.
        mapped: the tensors under the names of transformers.

    Raises:
        UnsupportedError: llama.cpp has no tensor for one of them.
    """
    gguf = gguf_package()
    number = next(key for key, name in gguf.MODEL_ARCH_NAMES.items() if name == arch)
    names = gguf.get_tensor_name_map(number, model["num_layers"])
    found: list[tuple[str, MappedTensor]] = []
    stacks: dict[str, list[MappedTensor]] = {}
    predicting = 0
    for item in mapped:
        layer = _PREDICTION.match(item.name)
        if layer and int(layer[1]) >= model["num_layers"]:
            predicting += 1
            continue
        match = _EXPERT.fullmatch(item.name)
        if match:
            name = f"blk.{match[1]}.ffn_{_EXPERT_NAMES[match[3]]}_exps.weight"
            # Experts are mapped in the order of their numbers.
            stacks.setdefault(name, []).append(item)
            continue
        for part in laid_out(arch, kind, model, item):
            name = names.get_name(part.name, try_suffixes=(".weight", ".bias"))
            if name is None:
                raise UnsupportedError(f"llama.cpp's {arch} has no tensor for {item.name}")
            found.append((name, part))
    return found + [(name, _stacked(name, items)) for name, items in stacks.items()], predicting


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


def laid_out(arch: str, kind: str, model: Model, item: MappedTensor) -> list[MappedTensor]:
    """A tensor in llama.cpp's layout, under a name that its table knows; several where it divides the tensor.

    Args:
        arch: the architecture of llama.cpp.
        kind: ``model_type`` of transformers.
        model: the ``model`` of a manifest.
        item: the tensor in the layout of transformers; its content has a dimension for each axis.
    """
    if arch == "llama" and (match := _QUERY_KEY.fullmatch(item.name)):
        # The head dimension is the last one of the rows.
        dim = len(item.content.shape) - (2 if match[1] == "weight" else 1)
        return [_changed(item, lambda tensor: _interleaved(tensor, dim))]
    if kind == "gpt2" and len(item.shape) == 2 and is_conv1d(item.name):
        return [_changed(item, lambda tensor: _transposed(tensor, item.shape[0]), shape=item.shape[::-1])]
    if arch in GEMMAS and item.name.endswith("norm.weight"):
        vector = item.content
        return [replace(item, content=computed_tensor(item.name, "F32", item.shape, (vector,), OnePlus(vector=vector)))]
    if arch == "gpt-oss":
        return _of_gpt_oss(item)
    return _of_deepseek(model, item) if arch == "deepseek2" else [item]


def _of_gpt_oss(item: MappedTensor) -> list[MappedTensor]:
    if item.name.endswith(".sinks"):
        return [replace(item, name=f"{item.name}.weight")]
    match = _STACKED.fullmatch(item.name)
    if match is None:
        return [item]
    suffix = "bias" if match[3] else "weight"
    if match[2] == "down":
        if suffix == "bias":
            return [replace(item, name=f"{match[1]}.down_proj.bias")]
        experts, inner, hidden = item.shape
        down = _changed(item, lambda tensor: tensor.permute((0, 2, 1)), shape=(experts, hidden, inner))
        return [replace(down, name=f"{match[1]}.down_proj.weight")]
    found = []
    for number, name in enumerate(("gate", "up")):
        # [expert, in, out, gate or up] of weights, [expert, out, gate or up] of biases.
        shape = (item.shape[0], item.shape[-1] // 2, *item.shape[1:-1])
        part = _changed(item, lambda tensor, number=number: _part_of_experts(tensor, number), shape=shape)  # type: ignore[misc]
        found.append(replace(part, name=f"{match[1]}.{name}_proj.{suffix}"))
    return found


def _part_of_experts(tensor: Tensor, number: int) -> Tensor:
    last = len(tensor.shape) - 1
    part = tensor.narrow(last, number, number + 1)
    return part.permute((0, 2, 1, 3)) if last == 3 else part


def _of_deepseek(model: Model, item: MappedTensor) -> list[MappedTensor]:
    heads, plain, rank = model["num_attention_heads"], model["qk_head_dim"], model["kv_lora_rank"]
    if item.name.endswith(".kv_b_proj.weight"):
        values, base = model["v_head_dim"], item.name.removesuffix("kv_b_proj.weight")
        keys = _changed(item, lambda t: t.narrow(1, 0, plain).permute((0, 2, 1)), shape=(heads, rank, plain))
        rows = _changed(item, lambda t: t.narrow(1, plain, plain + values), shape=(heads, values, rank))
        return [replace(keys, name=f"{base}k_b_proj.weight"), replace(rows, name=f"{base}v_b_proj.weight")]
    if item.name.endswith("e_score_correction_bias"):
        return [replace(item, name=f"{item.name.removesuffix('_bias')}.bias")]
    if not model.get("rotary_interleaved", True):
        if item.name.endswith((".q_proj.weight", ".q_b_proj.weight")):
            return [_changed(item, lambda tensor: _rotated_interleaved(tensor, 1, plain))]
        if item.name.endswith(".kv_a_proj_with_mqa.weight"):
            return [_changed(item, lambda tensor: _rotated_interleaved(tensor, 0, rank))]
    return [item]


def _changed(item: MappedTensor, change: Change, shape: tuple[int, ...] | None = None) -> MappedTensor:
    mask = None if item.mask is None else change(item.mask)
    return replace(item, content=change(item.content), mask=mask, shape=item.shape if shape is None else shape)


def _interleaved(tensor: Tensor, dim: int) -> Tensor:
    """The two halves of the dimension ``dim`` interleaved, as llama.cpp rotates neighbors."""
    halves = tensor.unflatten(dim, (2, tensor.shape[dim] // 2))
    order = list(range(len(halves.shape)))
    order[dim : dim + 2] = [dim + 1, dim]
    return halves.permute(order)


def _rotated_interleaved(tensor: Tensor, dim: int, begin: int) -> Tensor:
    """As :func:`_interleaved`, of the entries from ``begin``; the dimension stays one."""
    rotated = _interleaved(tensor.narrow(dim, begin, tensor.shape[dim]), dim).flatten(dim)
    return concatenate([tensor.narrow(dim, 0, begin), rotated], dim)


def _transposed(tensor: Tensor, rows: int) -> Tensor:
    """A matrix of ``rows`` rows, which are the first dimensions, with rows and columns exchanged."""
    first = next(k for k in range(len(tensor.shape) + 1) if math.prod(tensor.shape[:k]) == rows)
    return tensor.permute([*range(first, len(tensor.shape)), *range(first)])


def rotary_tensors(model: Model) -> list[OutputTensor]:
    """Rotary scaling as divisors of the frequencies: Llama 3's, and the long and short factors of Phi-3.

    Args:
        model: the ``model`` of a manifest.

    Raises:
        UnsupportedError: the number of factors is not that of the frequencies.
    """
    fields, width = decoder_fields(model), rotated_width(model)
    scaling = fields["rotary_scaling"] or {"rope_type": "default"}
    if scaling["rope_type"] == "llama3":
        return [_constant("rope_freqs.weight", llama3_divisors(width, float(fields["rotary_base"]), scaling))]
    if scaling["rope_type"] != "longrope":
        return []
    found = []
    for name in ("long", "short"):
        factors = np.array(scaling[f"{name}_factor"], np.float32)
        if factors.shape != (width // 2,):
            raise UnsupportedError(f"{name}_factor: must have {width // 2} factors, found {factors.size}")
        found.append(_constant(f"rope_factors_{name}.weight", factors))
    return found


def _constant(name: str, numbers: Floats) -> OutputTensor:
    content = constant_tensor(name, numbers)
    return OutputTensor(key=name, shape=content.shape, content=content)
