"""Plans conversions between the native format and others. Decides; ``actions`` writes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .copyplan import Writable
from .faults import UnsupportedError
from .formats._document import encode_json
from .huggingface import gpt2_config, plan_files, tokenizer_files, weight_index
from .legacy_write import plan_legacy
from .names import Mapped, load_map, to_theirs
from .native import NativeCheckpoint


@dataclass(frozen=True, kw_only=True)
class ExportPlan:
    """A foreign directory to write: weights, small files by name, and what was decided on the way."""

    files: tuple[Writable, ...]
    small_files: Mapping[str, bytes]
    decisions: Mapping[str, Any]


def plan_hf_export(checkpoint: NativeCheckpoint, *, tokenizer: Path | None, shard_bytes: int) -> ExportPlan:
    """Plan ``convert --to hf`` of a native GPT checkpoint as a ``GPT2LMHeadModel``.

    Args:
        checkpoint: the input; its masks become zeros in the weights, its optimizer state stays behind.
        tokenizer: a directory with the tokenizer's files; None: that of the checkpoint, where it has one.
        shard_bytes: the largest weight file.

    Raises:
        UnsupportedError: a tensor that the map does not take, or weights of several types.
    """
    manifest = checkpoint.manifest
    model, ties = manifest["model"], manifest["ties"]
    if model["tied_embeddings"] != ("head.weight" in ties):
        raise UnsupportedError("model.tied_embeddings and ties do not say the same about head.weight")
    name_map = load_map("gpt2")
    stored = {name: checkpoint.tensors[name] for name in checkpoint.names("parameter", "buffer")}
    mapped = to_theirs(name_map, model, stored, ties)
    masks = _masks(checkpoint, mapped)
    dtypes = sorted({item.content.dtype for item in mapped})
    if len(dtypes) != 1:
        raise UnsupportedError(f"weights of the types {', '.join(dtypes)} in one model; one type is expected")
    inside = checkpoint.directory / "tokenizer"
    source = tokenizer or (inside if inside.is_dir() else checkpoint.directory)
    copied, end = tokenizer_files(source, model["vocab_size"], model["max_position_embeddings"])
    files = tuple(plan_files(mapped, masks, shard_bytes))
    generation = {"bos_token_id": end, "eos_token_id": end, "pad_token_id": end}
    small = {
        "config.json": encode_json(gpt2_config(model, dtypes[0], end)),
        "generation_config.json": encode_json({key: value for key, value in generation.items() if value is not None}),
        **copied,
    }
    index = weight_index(files)
    if index is not None:
        small["model.safetensors.index.json"] = index
    decisions = {
        "architecture": "GPT2LMHeadModel",
        "map": "gpt2",
        "activation_function": gpt2_config(model, dtypes[0], end)["activation_function"],
        "vocabulary_rows_cut_off": model["padded_vocab_size"] - model["vocab_size"],
        "tied_left_out": sorted(ties),
        "masks_applied": len(masks),
        "eos_token_id": end,
        "left_behind": len(checkpoint.names("optimizer")),
    }
    return ExportPlan(files=files, small_files=small, decisions=decisions)


def _masks(checkpoint: NativeCheckpoint, mapped: list[Mapped]) -> dict[str, Any]:
    """The masks in the layouts of the foreign names."""
    model, ties = checkpoint.manifest["model"], checkpoint.manifest["ties"]
    names = checkpoint.names("mask")
    if not names:
        return {}
    masked = {name.removesuffix(".mask"): checkpoint.tensors[name] for name in names}
    layouts = {item.source_name: checkpoint.tensors[item.source_name] for item in mapped} | masked
    moved = to_theirs(load_map("gpt2"), model, layouts, ties)
    return {item.name: item.content for item in moved if item.source_name in masked}


def plan_legacy_export(
    checkpoint: NativeCheckpoint,
    *,
    counts: list[int],
    tensor_parallel_size: int,
    virtual_stages_per_worker: int,
    version: float,
) -> ExportPlan:
    """Plan ``convert --to legacy``: a Megatron directory on the topology asked for; parameters as ``plan_legacy``."""
    files, small = plan_legacy(
        checkpoint,
        counts=counts,
        tensor_parallel_size=tensor_parallel_size,
        virtual_stages_per_worker=virtual_stages_per_worker,
        version=version,
    )
    decisions = {
        "checkpoint_version": version,
        "layers_per_stage": list(counts),
        "tensor_parallel_size": tensor_parallel_size,
        "masks_applied": len(checkpoint.names("mask")),
        "left_behind": len(checkpoint.names("optimizer")),
    }
    return ExportPlan(files=tuple(files), small_files=small, decisions=decisions)
