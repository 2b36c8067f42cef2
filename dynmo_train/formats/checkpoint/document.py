"""The checkpoint manifest (``manifest.json``, format ``dynmo.checkpoint``): fields, rules across fields, seal.

The format belongs to ``dynmo_ckpt``; the specification is ``dynmo_ckpt/formats/checkpoint.md``.
"""

from __future__ import annotations

import re
import zlib
from collections.abc import Iterator, Mapping
from typing import Any

from ..._common.document import (
    MAX_ALL_EXPERTS,
    MAX_TABLE_BYTES,
    DocumentError,
    Problem,
    encode_json,
    envelope_problems,
    parse_json,
    short_repr,
)
from ..checkpoint_fields import DOCUMENT

FORMAT = "dynmo.checkpoint"
NEEDS_WINDOW = "layer_types and local_rotary_base need sliding_window, the window of sliding layers"
VERSION = 1
# Optimizer state by ``optimizer.type``: each is PARAMETER.NAME.
OPTIMIZER_STATE = {
    "adamw": ("exp_avg", "exp_avg_sq"),
    "sgd": ("momentum_buffer",),
    "muon": ("momentum_buffer", "exp_avg", "exp_avg_sq"),
    "adafactor": ("row_var", "col_var", "variance"),
    "none": ("exp_avg", "exp_avg_sq"),
}
# Moments that a run may keep in bfloat16.
HALF_MOMENTS = ("exp_avg", "exp_avg_sq")
# Factors of the second moment of a matrix: the dimension, from the end, that has one element.
FACTOR_DIMS = {"row_var": 1, "col_var": 2}
# Tensors with a row for each token id of the vocabulary.
VOCABULARY_ROWS = re.compile(
    r"((encoder|decoder|query|context)\.)?embedding\.word\.weight(\.(mask|exp_avg|exp_avg_sq|momentum_buffer|row_var|master))?"
    r"|head\.(weight|bias)(\.(mask|exp_avg|exp_avg_sq|momentum_buffer|row_var|variance|master))?"
)
LATENT_SIZES = ("kv_lora_rank", "qk_head_dim", "qk_pos_emb_head_dim", "v_head_dim")
_SEAL = re.compile(rb'"manifest_crc32"\s*:\s*"([0-9a-f]{8})"')


_PLAIN = ("attention", "mlp")
# Families of two stacks: name of each stack, the field with its number of blocks, and the parts of a block.
STACKS: Mapping[str, Mapping[str, tuple[str, tuple[str, ...]]]] = {
    "t5": {
        "encoder": ("num_encoder_layers", _PLAIN),
        "decoder": ("num_decoder_layers", ("attention", "cross_attention", "mlp")),
    },
    "ict": {"query": ("num_layers", _PLAIN), "context": ("num_layers", _PLAIN)},
}


def _blocks(model: Mapping[str, Any]) -> dict[str, list[str]]:
    """Return each block of the model, and its parts."""
    if model["family"] not in STACKS:
        return {f"layers.{i}": [f"layers.{i}.attention", f"layers.{i}.mlp"] for i in range(model["num_layers"])}
    return {
        f"{stack}.layers.{i}": [f"{stack}.layers.{i}.{part}" for part in parts]
        for stack, (count, parts) in STACKS[model["family"]].items()
        for i in range(model.get(count, 0))
    }


def finest_items(items: list[str], model: Mapping[str, Any]) -> list[str]:
    """Return ``items`` at the finest granularity: ``layers.3`` becomes its attention and its MLP."""
    blocks = _blocks(model)
    return [part for item in items for part in blocks.get(item, [item])]


def model_items(model: Mapping[str, Any]) -> list[str]:
    """Return all items of a model at the finest granularity, in layer order."""
    blocks, stacks = list(_blocks(model)), STACKS.get(model["family"])
    if stacks is None:
        further = [f"mtp.{depth}" for depth in range(model.get("mtp_num_layers", 0))]
        return finest_items(["embedding", *blocks, *further, "head"], model)
    first, second = stacks
    front = [block for block in blocks if block.startswith(f"{first}.")]
    ends = [f"{first}.{'norm' if model['family'] == 't5' else 'pooler'}", f"{second}.embedding"]
    return finest_items([f"{first}.embedding", *front, *ends, *blocks[len(front) :], "head"], model)


def _tensor_problems(name: str, entry: dict[str, Any], manifest: dict[str, Any]) -> Iterator[Problem]:
    """Check that shards cover a tensor once, and that masks and optimizer state match their parameter."""
    shape, dim, path = entry["shape"], entry["split_dim"], f"tensors.{name}"
    role, dtype, tensors = entry["role"], entry["dtype"], manifest["tensors"]
    indices = sorted(shard["index"] for shard in entry["shards"])
    covered = 0
    for index in indices:
        expected = [[0, size] for size in shape]
        if dim is not None and dim < len(shape) and dim < len(index):
            expected[dim] = [covered, max(index[dim][1], covered)]
            covered = expected[dim][1]
        if index != expected:
            yield Problem(path, "cover", f"a shard has the index {index}, must be {expected}")
    if dim is None and len(indices) != 1:
        yield Problem(path, "cover", f"has {len(indices)} shards; must have one where split_dim is null")
    if dim is not None and (dim >= len(shape) or covered != shape[dim]):
        yield Problem(path, "cover", f"shards cover {covered} along dimension {dim} of the shape {shape}")
    for shard in entry["shards"]:
        if shard["file"] not in manifest["files"]:
            yield Problem(path, "reference", f"its file {short_repr(shard['file'])} is not in files")
    if role not in ("mask", "optimizer"):
        return
    stored_type = (manifest["optimizer"] or {"type": "none"})["type"]
    suffixes = ("mask",) if role == "mask" else OPTIMIZER_STATE[stored_type]
    parameter, _, suffix = name.rpartition(".")
    base = tensors.get(parameter)
    dtypes = ("BOOL",) if role == "mask" else ("F32", "BF16") if suffix in HALF_MOMENTS else ("F32",)
    if suffix not in suffixes or base is None or base["role"] != "parameter":
        yield Problem(
            path,
            "reference",
            f"has the role {role}; its name must be a parameter's name followed by .{' or .'.join(suffixes)}",
        )
    elif shape != (needed := state_shape(suffix, base["shape"])) or dtype not in dtypes:
        yield Problem(path, "shape", f"must be {' or '.join(dtypes)} of the shape {needed}, is {dtype} {shape}")


def _expert_bias_problems(manifest: dict[str, Any]) -> Iterator[Problem]:
    """Check that each router has the biases of its experts where the model has them, float32 whatever the precision."""
    model, tensors = manifest["model"], manifest["tensors"]
    # A router of mixture of depths, ``attention.router``, has none.
    needed = {name for name in tensors if name.endswith(".mlp.router.expert_bias")}
    if model.get("moe_router_enable_expert_bias"):
        routers = [name for name in tensors if name.endswith(".mlp.router.weight")]
        needed |= {name.removesuffix("weight") + "expert_bias" for name in routers}
    for name in sorted(needed):
        entry = tensors.get(name)
        if entry is None:
            yield Problem(f"tensors.{name}", "reference", "is missing, but moe_router_enable_expert_bias is true")
        elif entry["role"] != "buffer" or entry["dtype"] != "F32" or entry["shape"] != [model.get("num_experts", 0)]:
            yield Problem(f"tensors.{name}", "shape", "must be a buffer of F32, one of each of num_experts experts")


def state_shape(suffix: str, shape: list[int]) -> list[int]:
    """Return the shape of a mask or of a tensor of the optimizer state of a parameter of this ``shape``."""
    dim = FACTOR_DIMS.get(suffix, 0)
    return shape if not dim or len(shape) < 2 else [*shape[:-dim], 1, *shape[len(shape) - dim + 1 :]]


def _safe(path: str) -> bool:
    return "\\" not in path and all(part not in ("", ".", "..") for part in path.split("/")) and path != "manifest.json"


def _model_problems(manifest: dict[str, Any], order: list[str]) -> Iterator[Problem]:
    model, dynamic = manifest["model"], manifest["dynamic"]
    if finest_items([item for stage in manifest["topology"]["partition"] for item in stage], model) != order:
        yield Problem("topology.partition", "order", "must have each item once, in layer order")
    for item in finest_items(dynamic["frozen_items"], model):
        if item not in order:
            yield Problem("dynamic.frozen_items", "reference", f"{short_repr(item)} is not an item of the model")
    heads, layers = model["num_attention_heads"], model["num_layers"]
    pattern = model.get("moe_layer_pattern", [1] * layers)
    for wrong, rule in (
        (
            len(pattern) != layers or (layers and not any(pattern)),
            "moe_layer_pattern must have num_layers entries, not all 0",
        ),
        (sum(field in model for field in LATENT_SIZES) % len(LATENT_SIZES), f"must have all or none of {LATENT_SIZES}"),
        ("head_dim" not in model and model["hidden_size"] % heads, "heads must divide hidden_size"),
        (heads % model.get("num_key_value_heads", heads), "num_key_value_heads must divide num_attention_heads"),
        (model["padded_vocab_size"] < model["vocab_size"], "padded_vocab_size must be at least vocab_size"),
        (model.get("moe_top_k", 0) > model.get("num_experts", 0), "moe_top_k must be at most num_experts"),
        (model.get("num_encoder_layers", layers) != layers, "num_encoder_layers must be num_layers"),
        (len(model.get("layer_types", ())) not in (0, layers), "layer_types must have num_layers entries"),
        (len(model.get("no_rope_freq", ())) not in (0, layers), "no_rope_freq must have num_layers entries"),
        ({"layer_types", "local_rotary_base"} & model.keys() and "sliding_window" not in model, NEEDS_WINDOW),
    ):
        if wrong:
            yield Problem("model", "range", rule)
    for field in ("num_encoder_layers", "num_decoder_layers"):
        if (model["family"] == "t5") != (field in model):
            yield Problem(f"model.{field}", "family", "must be present for the family t5, and for no other")
    for field in ("projection_size", "shared_towers"):
        if (model["family"] == "ict") != (field in model):
            yield Problem(f"model.{field}", "family", "must be present for the family ict, and for no other")


def across_problems(manifest: dict[str, Any]) -> Iterator[Problem]:
    """Yield violations of rules across fields; the structure of the document must be valid."""
    tensors, optimizer, order = manifest["tensors"], manifest["optimizer"], model_items(manifest["model"])
    yield from _model_problems(manifest, order)
    for name, entry in tensors.items():
        yield from _tensor_problems(name, entry, manifest)
        rows = [manifest["model"][field] for field in ("vocab_size", "padded_vocab_size")]
        if VOCABULARY_ROWS.fullmatch(name) and (not entry["shape"] or entry["shape"][0] not in rows):
            yield Problem(f"tensors.{name}", "shape", f"must have the rows of the vocabulary, {rows[0]} or {rows[1]}")
        if not name.startswith(tuple(f"{item}." for item in order)):
            yield Problem(f"tensors.{name}", "reference", "belongs to no item of the partition")
        if entry["role"] == "optimizer" and optimizer is None:
            yield Problem(f"tensors.{name}", "reference", "is optimizer state, but optimizer is null")
    for name, target in manifest["ties"].items():
        if name in tensors or tensors.get(target, {}).get("role") != "parameter":
            yield Problem(
                f"ties.{name}", "reference", f"must not be stored, and {short_repr(target)} must be a stored parameter"
            )
    yield from _expert_bias_problems(manifest)
    named = [*optimizer["steps"], *(n for g in optimizer["groups"] for n in g["parameters"])] if optimizer else []
    for name in sorted({name for name in named if tensors.get(name, {}).get("role") != "parameter"}):
        yield Problem("optimizer", "reference", f"{short_repr(name)} is not a stored parameter")
    for path in manifest["files"]:
        if not _safe(path):
            yield Problem(f"files.{path}", "path", "must be a relative path within the directory, without . and ..")


def manifest_problems(value: Any) -> list[Problem]:
    """Return every problem of a manifest, except those of the seal."""
    problems = envelope_problems(value, FORMAT, VERSION)
    if not problems:
        DOCUMENT(value, "", problems)
    return problems or _expert_problems(value["model"]) or list(across_problems(value))


def _expert_problems(model: Mapping[str, Any]) -> list[Problem]:
    """Check the bound of the number of experts over all layers."""
    if model["num_layers"] * model.get("num_experts", 0) <= MAX_ALL_EXPERTS:
        return []
    return [Problem("model.num_experts", "range", f"times num_layers must be at most {MAX_ALL_EXPERTS:,}")]


def seal(manifest: Mapping[str, Any]) -> bytes:
    """Return the bytes of ``manifest.json``, with their own CRC-32 in ``manifest_crc32``."""
    blank = encode_json({**manifest, "manifest_crc32": "0" * 8})
    begin = _single_seal(blank, "manifest")
    return blank[:begin] + f"{zlib.crc32(blank):08x}".encode() + blank[begin + 8 :]


def _single_seal(payload: bytes, source: str) -> int:
    found = list(_SEAL.finditer(payload))
    if len(found) != 1:
        raise DocumentError(source, [Problem("manifest_crc32", "crc32", "must occur once, with 8 hexadecimal digits")])
    return found[0].start(1)


def parse_manifest(payload: bytes, source: str) -> dict[str, Any]:
    """Return the manifest in ``payload``.

    Args:
        payload: Bytes of ``manifest.json``.
        source: Name of the document in messages.

    Raises:
        DocumentError: The seal or the document is invalid; with every problem.
    """
    begin = _single_seal(payload, source)
    stored = payload[begin : begin + 8].decode()
    found = f"{zlib.crc32(payload[:begin] + b'0' * 8 + payload[begin + 8 :]):08x}"
    if stored != found:
        message = f"is {stored}, the CRC-32 of the bytes is {found}: the file was altered"
        raise DocumentError(source, [Problem("manifest_crc32", "crc32", message)])
    try:
        value = parse_json(payload, MAX_TABLE_BYTES)
    except ValueError as error:
        raise DocumentError(source, [Problem("", "json", str(error))]) from error
    problems = manifest_problems(value)
    if problems:
        raise DocumentError(source, problems)
    manifest: dict[str, Any] = value
    return manifest
