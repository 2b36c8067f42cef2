"""Plans conversions between the native format and others. Decides; ``operations.write`` writes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .._common.document import encode_json
from ..errors import UnsupportedError
from ..huggingface.files import DTYPE_NAMES, plan_files, tokenizer_files, weight_index
from ..huggingface.models import architecture_of_model, hf_config
from ..huggingface.source_config import carried_config, carried_generation, named_classes
from ..maps.name_map import layout_of, load_map, to_theirs
from ..megatron.write import plan_legacy
from ..megatron.write_core import plan_core
from ..megatron.write_deepspeed import plan_deepspeed
from ..native.checkpoint import NativeCheckpoint
from ..tensors.copy_plan import Writable


@dataclass(frozen=True, kw_only=True)
class ExportPlan:
    """A foreign directory to write: weights, small files by name, and what was decided on the way."""

    files: tuple[Writable, ...]
    small_files: Mapping[str, bytes]
    decisions: Mapping[str, Any]


def plan_hf_export(
    checkpoint: NativeCheckpoint, *, tokenizer: Path | None, shard_bytes: int, dtype: str | None = None
) -> ExportPlan:
    """Plan ``convert --to hf`` of a native checkpoint as the architecture of transformers that computes it.

    Args:
        checkpoint: the input; its masks become zeros in the weights, its optimizer state stays behind.
        tokenizer: a directory with the tokenizer's files; None: that of the checkpoint, where it has one.
        shard_bytes: the largest weight file.
        dtype: the type of the weights, as in safetensors; None: as they are.

    Raises:
        UnsupportedError: a tensor that the map does not take, or weights of several types.
    """
    manifest = checkpoint.manifest
    model, ties = manifest["model"], manifest["ties"]
    if model["tied_embeddings"] != ("head.weight" in ties):
        raise UnsupportedError("model.tied_embeddings and ties do not say the same about head.weight")
    name, architecture = architecture_of_model(model)
    layout = layout_of(load_map(architecture.map), model)
    stored = {name: checkpoint.tensors[name] for name in checkpoint.weights()}
    masks = {name.removesuffix(".mask"): checkpoint.tensors[name] for name in checkpoint.names("mask")}
    mapped = to_theirs(layout, stored, ties, masks)
    dtypes = sorted({item.content.dtype for item in mapped})
    if dtype is None and len(dtypes) != 1:
        raise UnsupportedError(f"weights of the types {', '.join(dtypes)} in one model; give --dtype")
    inside = checkpoint.directory / "tokenizer"
    source = tokenizer or (inside if inside.is_dir() else checkpoint.directory)
    copied, end = tokenizer_files(source, model["vocab_size"], model["max_position_embeddings"])
    files = tuple(plan_files(mapped, shard_bytes, dtype or dtypes[0]))
    carried = manifest.get("source")
    computed = hf_config(model, DTYPE_NAMES[dtype or dtypes[0]], end)
    config = named_classes(carried_config(carried, model, computed), manifest)
    generation = {"bos_token_id": end, "eos_token_id": end, "pad_token_id": end}
    if model["family"] == "t5":
        generation["decoder_start_token_id"] = end
    settings = carried_generation(carried, {key: id_ for key, id_ in generation.items() if id_ is not None})
    small = {"config.json": encode_json(config), **copied}
    if settings is not None:
        small["generation_config.json"] = encode_json(settings)
    index = weight_index(files)
    if index is not None:
        small["model.safetensors.index.json"] = index
    decisions = {
        "architecture": config["architectures"][0],
        "map": architecture.map,
        "activation_function": config.get("activation_function", config.get("hidden_act")),
        "tied_left_out": sorted(ties),
        "masks_applied": len(masks),
        **_remarks(model, name),
        "eos_token_id": config.get("eos_token_id"),
        "left_behind": len(checkpoint.names("optimizer")),
    }
    return ExportPlan(files=files, small_files=small, decisions=decisions)


def _remarks(model: Mapping[str, Any], name: str) -> dict[str, str]:
    """What the other side does not compute as we do."""
    if name == "megatron-bert" and model["activation"] != "gelu":
        return {"differs": "transformers uses the MLP's activation in the head as well, where ours is the exact GELU"}
    return {}


def plan_legacy_export(
    checkpoint: NativeCheckpoint,
    *,
    counts: list[int],
    tensor_parallel_size: int,
    virtual_stages_per_worker: int,
    version: float,
    dtype: str | None = None,
    with_optimizer: bool = False,
) -> ExportPlan:
    """Plan ``convert --to legacy``: a Megatron directory on the topology asked for; parameters as ``plan_legacy``."""
    files, small = plan_legacy(
        checkpoint,
        counts=counts,
        tensor_parallel_size=tensor_parallel_size,
        virtual_stages_per_worker=virtual_stages_per_worker,
        version=version,
        dtype=dtype,
        with_optimizer=with_optimizer,
    )
    decisions = {
        "checkpoint_version": version,
        "layers_per_stage": list(counts),
        "tensor_parallel_size": tensor_parallel_size,
        **_state_decisions(checkpoint, with_optimizer),
    }
    return ExportPlan(files=tuple(files), small_files=small, decisions=decisions)


def plan_deepspeed_export(
    checkpoint: NativeCheckpoint, *, tensor_parallel_size: int, dtype: str | None = None, with_optimizer: bool = False
) -> ExportPlan:
    """Plan ``convert --to deepspeed``; parameters as ``plan_deepspeed``."""
    files, small = plan_deepspeed(
        checkpoint, tensor_parallel_size=tensor_parallel_size, dtype=dtype, with_optimizer=with_optimizer
    )
    decisions = _state_decisions(checkpoint, with_optimizer) | {"tensor_parallel_size": tensor_parallel_size}
    return ExportPlan(files=tuple(files), small_files=small, decisions=decisions)


def plan_core_export(
    checkpoint: NativeCheckpoint, *, dtype: str | None = None, with_optimizer: bool = False
) -> ExportPlan:
    """Plan ``convert --to dcp``, Megatron-core's distributed checkpoint; parameters as ``plan_core``."""
    files, small = plan_core(checkpoint, dtype=dtype, with_optimizer=with_optimizer)
    return ExportPlan(files=tuple(files), small_files=small, decisions=_state_decisions(checkpoint, with_optimizer))


def _state_decisions(checkpoint: NativeCheckpoint, with_optimizer: bool) -> dict[str, Any]:
    return {
        "masks_applied": len(checkpoint.names("mask")),
        "with_optimizer": with_optimizer,
        "left_behind": 0 if with_optimizer else len(checkpoint.names("optimizer")),
    }
