"""The rules across fields of a manifest (section "Rules across fields" of ``checkpoint.md``)."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from typing import Any

from .._common.document import Problem, short_repr
from ..io.errors import short_name

Document = dict[str, Any]
# Tensors with a row for each token id.
LATENT_SIZES = ("kv_lora_rank", "qk_head_dim", "qk_pos_emb_head_dim", "v_head_dim")
VOCABULARY_ROWS = re.compile(
    r"((encoder|decoder|query|context)\.)?embedding\.word\.weight(\.(mask|exp_avg|exp_avg_sq|momentum_buffer|row_var|master))?"
    r"|head\.(weight|bias)(\.(mask|exp_avg|exp_avg_sq|momentum_buffer|row_var|variance|master))?"
)
# Optimizer state by ``optimizer.type``: each is PARAMETER.NAME.
OPTIMIZER_STATE = {
    "adamw": ("exp_avg", "exp_avg_sq"),
    "sgd": ("momentum_buffer",),
    "muon": ("momentum_buffer", "exp_avg", "exp_avg_sq"),
    "adafactor": ("row_var", "col_var", "variance"),
    "none": ("exp_avg", "exp_avg_sq"),
}
# Factors of the second moment of a matrix: the dimension, from the end, that has one element.
FACTOR_DIMS = {"row_var": 1, "col_var": 2}
STATE_DTYPES = {"mask": ("BOOL",), "optimizer": ("F32",)}
# Moments that a run may keep in bfloat16.
HALF_MOMENTS = ("exp_avg", "exp_avg_sq")

# The router of a block with mixture of depths is ``attention.router``, which has none.
EXPERT_BIASES = ".mlp.router.expert_bias"


def model_blocks(model: Document) -> dict[str, tuple[str, ...]]:
    """The blocks of a model in layer order, each with its parts: ``layers.3`` has ``attention`` and ``mlp``."""
    if model["family"] == "ict":
        towers = ("query", "context")
        return {f"{tower}.layers.{i}": ("attention", "mlp") for tower in towers for i in range(model["num_layers"])}
    if model["family"] != "t5":
        return {f"layers.{i}": ("attention", "mlp") for i in range(model["num_layers"])}
    encoder = {f"encoder.layers.{i}": ("attention", "mlp") for i in range(model["num_layers"])}
    decoder = range(model.get("num_decoder_layers", 0))
    return encoder | {f"decoder.layers.{i}": ("attention", "cross_attention", "mlp") for i in decoder}


def block_items(model: Document) -> list[str]:
    """Item names of a model in layer order, each block as one item."""
    blocks = list(model_blocks(model))
    if model["family"] not in ("ict", "t5"):
        return ["embedding", *blocks, *(f"mtp.{k}" for k in range(model.get("mtp_num_layers", 0))), "head"]
    layers = model["num_layers"]
    if model["family"] == "ict":
        return ["query.embedding", *blocks[:layers], "query.pooler", "context.embedding", *blocks[layers:], "head"]
    return ["encoder.embedding", *blocks[:layers], "encoder.norm", "decoder.embedding", *blocks[layers:], "head"]


def model_items(model: Document) -> list[str]:
    """Item names of a model in layer order, each block as its parts."""
    return finest_items(block_items(model), model)


def finest_items(items: Iterable[str], model: Document) -> list[str]:
    """``items`` with each block replaced by its parts."""
    blocks = model_blocks(model)
    return [name for item in items for name in ([f"{item}.{part}" for part in blocks.get(item, ())] or [item])]


def cross_field_problems(manifest: Document) -> list[Problem]:
    """Every broken rule across fields of a manifest whose fields are valid."""
    return [
        *_sizes(manifest),
        *_partition(manifest),
        *_coverage(manifest),
        *_roles(manifest),
        *_expert_biases(manifest),
        *_references(manifest),
        *_paths(manifest),
    ]


def _path(tensor: str) -> str:
    return f"tensors.{short_name(tensor)}"


def _sizes(manifest: Document) -> Iterator[Problem]:
    model = manifest["model"]
    hidden, heads = model["hidden_size"], model["num_attention_heads"]
    if "head_dim" not in model and hidden % heads:
        yield Problem("model.num_attention_heads", "range", f"{heads} heads must divide hidden_size {hidden}")
    if heads % model.get("num_key_value_heads", heads):
        yield Problem("model.num_key_value_heads", "range", f"must divide num_attention_heads {heads}")
    if model["padded_vocab_size"] < model["vocab_size"]:
        yield Problem("model.padded_vocab_size", "range", f"must not be below vocab_size {model['vocab_size']}")
    if model.get("moe_top_k", 0) > model.get("num_experts", 0):
        yield Problem("model.moe_top_k", "range", f"must be at most num_experts {model.get('num_experts', 0)}")
    pattern = model.get("moe_layer_pattern")
    if pattern is not None and (len(pattern) != model["num_layers"] or not any(pattern)):
        yield Problem(
            "model.moe_layer_pattern", "range", f"must have num_layers {model['num_layers']} entries, not all 0"
        )
    if len(latent := [field for field in LATENT_SIZES if field not in model]) % len(LATENT_SIZES):
        yield Problem("model.kv_lora_rank", "reference", f"requires {', '.join(latent)}")
    yield from _windows(model)
    for field in ("num_encoder_layers", "num_decoder_layers"):
        if (model["family"] == "t5") != (field in model):
            yield Problem(f"model.{field}", "family", "is required for the family t5, and not permitted for others")
    for field in ("projection_size", "shared_towers"):
        if (model["family"] == "ict") != (field in model):
            yield Problem(f"model.{field}", "family", "is required for the family ict, and not permitted for others")
    if model.get("num_encoder_layers", model["num_layers"]) != model["num_layers"]:
        yield Problem("model.num_encoder_layers", "range", f"must be num_layers {model['num_layers']}")


def _windows(model: Document) -> Iterator[Problem]:
    for field in ("layer_types", "no_rope_freq"):
        if len(model.get(field, ())) not in (0, model["num_layers"]):
            yield Problem(f"model.{field}", "range", f"must have num_layers {model['num_layers']} entries")
    for field in ("layer_types", "local_rotary_base"):
        if field in model and "sliding_window" not in model:
            yield Problem(f"model.{field}", "range", "needs sliding_window, the window of sliding layers")


def _partition(manifest: Document) -> Iterator[Problem]:
    model = manifest["model"]
    items = model_items(model)
    if finest_items([item for stage in manifest["topology"]["partition"] for item in stage], model) != items:
        yield Problem("topology.partition", "order", "must have each item once, in layer order")
    for item in finest_items(manifest["dynamic"]["frozen_items"], model):
        if item not in items:
            yield Problem("dynamic.frozen_items", "reference", f"{short_repr(item)} is not an item of the model")
    owners = tuple(f"{item}." for item in items)
    # Older trainers stored the padding rows of the vocabulary; new files have the true number.
    rows = [model["vocab_size"], model["padded_vocab_size"]]
    for name, entry in manifest["tensors"].items():
        if not name.startswith(owners):
            yield Problem(_path(name), "reference", "belongs to no item of the partition")
        if VOCABULARY_ROWS.fullmatch(name) and (not entry["shape"] or entry["shape"][0] not in rows):
            yield Problem(
                _path(name), "shape", f"must have the number of rows of the vocabulary, {rows[0]} or {rows[1]}"
            )


def _coverage(manifest: Document) -> Iterator[Problem]:
    """Each tensor must be covered once: by one shard, or by contiguous slices along ``split_dim``."""
    for name, entry in manifest["tensors"].items():
        shape, dim = entry["shape"], entry["split_dim"]
        path = _path(name)
        if dim is not None and dim >= len(shape):
            yield Problem(path, "cover", f"split_dim is {dim}, the shape is {shape}")
            continue
        boxes = [shard["index"] for shard in entry["shards"]]
        if any(len(box) != len(shape) for box in boxes):
            yield Problem(path, "cover", f"each index needs {len(shape)} ranges")
            continue
        full = [[0, size] for size in shape]
        if dim is None:
            covered = boxes == [full]
        else:
            # Each slice must begin where the preceding one ends; its other dimensions must be complete.
            spans = sorted(box[dim] for box in boxes)
            ends = [0, *(end for _, end in spans)]
            covered = all(begin == at and end >= begin for (begin, end), at in zip(spans, ends, strict=False))
            covered = covered and ends[-1] == shape[dim]
            covered = covered and all(box[:dim] + box[dim + 1 :] == full[:dim] + full[dim + 1 :] for box in boxes)
        if not covered:
            yield Problem(path, "cover", f"its shards must cover the shape {shape} exactly once: {short_repr(boxes)}")


def _roles(manifest: Document) -> Iterator[Problem]:
    """Masks and optimizer state must extend the name of a parameter and have its shape."""
    tensors = manifest["tensors"]
    for name, entry in tensors.items():
        role, path = entry["role"], _path(name)
        if role == "optimizer" and manifest["optimizer"] is None:
            yield Problem(path, "reference", "has the role optimizer, but optimizer is null")
        if role not in STATE_DTYPES:
            continue
        suffixes = ("mask",) if role == "mask" else OPTIMIZER_STATE[(manifest["optimizer"] or {"type": "none"})["type"]]
        base, _, suffix = name.rpartition(".")
        parameter = tensors.get(base, {})
        if suffix not in suffixes or parameter.get("role") != "parameter":
            allowed = " or ".join(f".{suffix}" for suffix in suffixes)
            yield Problem(path, "reference", f"of role {role}: must be the name of a parameter, followed by {allowed}")
            continue
        expected = state_shape(suffix, parameter["shape"])
        dtypes = ("F32", "BF16") if suffix in HALF_MOMENTS else STATE_DTYPES[role]
        if entry["dtype"] not in dtypes or entry["shape"] != expected:
            yield Problem(path, "shape", f"must be {' or '.join(dtypes)} with the shape {expected}")


def _expert_biases(manifest: Document) -> Iterator[Problem]:
    """The biases of a router's experts: float32 in every precision, and stored where the model has them."""
    model, tensors = manifest["model"], manifest["tensors"]
    if model.get("moe_router_enable_expert_bias"):
        for router in (name.removesuffix(".weight") for name in tensors if name.endswith(".mlp.router.weight")):
            if (name := f"{router}.expert_bias") not in tensors:
                yield Problem(_path(name), "reference", "is missing; moe_router_enable_expert_bias is true")
    shape = [model.get("num_experts", 0)]
    for name, entry in tensors.items():
        found = (entry["role"], entry["dtype"], entry["shape"])
        if name.endswith(EXPERT_BIASES) and found != ("buffer", "F32", shape):
            yield Problem(_path(name), "shape", f"must be a buffer, F32 with the shape {shape}")


def state_shape(suffix: str, shape: list[int]) -> list[int]:
    """The shape of a mask or a tensor of the optimizer state of a parameter of this ``shape``."""
    dim = FACTOR_DIMS.get(suffix, 0)
    return shape if not dim or len(shape) < 2 else [*shape[:-dim], 1, *shape[len(shape) - dim + 1 :]]


def _references(manifest: Document) -> Iterator[Problem]:
    tensors, optimizer = manifest["tensors"], manifest["optimizer"] or {"steps": {}, "groups": []}
    parameters = {name for name, entry in tensors.items() if entry["role"] == "parameter"}
    for name, target in manifest["ties"].items():
        if name in tensors:
            yield Problem(f"ties.{short_name(name)}", "reference", "is stored; a tied tensor must be stored once")
        if target not in parameters:
            yield Problem(f"ties.{short_name(name)}", "reference", f"{short_repr(target)} is not a stored parameter")
    for name in optimizer["steps"]:
        if name not in parameters:
            yield Problem(f"optimizer.steps.{short_name(name)}", "reference", "is not a stored parameter")
    for index, group in enumerate(optimizer["groups"]):
        for name in group["parameters"]:
            if name not in parameters:
                yield Problem(
                    f"optimizer.groups[{index}]", "reference", f"{short_repr(name)} is not a stored parameter"
                )
    for name, entry in tensors.items():
        for shard in entry["shards"]:
            if shard["file"] not in manifest["files"]:
                yield Problem(_path(name), "reference", f"its file {short_repr(shard['file'])} must be in files")


def _paths(manifest: Document) -> Iterator[Problem]:
    for path in manifest["files"]:
        if path == "manifest.json" or "\\" in path or any(part in ("", ".", "..") for part in path.split("/")):
            yield Problem(f"files.{short_name(path)}", "path", "must be a plain relative path within the directory")
