"""Summarizes a checkpoint from its manifest. Pure."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Any

from .._common.console import human_bytes
from ..io.computed import stored_inputs
from ..io.errors import short_name, short_names
from ..io.safetensors import DTYPE_BYTES
from ..maps.decoder_fields import unlike_family

if TYPE_CHECKING:
    from ..native.checkpoint import NativeCheckpoint


def tensor_bytes(entry: Mapping[str, Any]) -> int:
    """Size in bytes of a tensor, from its entry in the manifest."""
    return int(math.prod(entry["shape"])) * DTYPE_BYTES[entry["dtype"]]


def summarize(directory: str, manifest: Mapping[str, Any], other_format: str | None = None) -> dict[str, Any]:
    """Run, model, topology, counts and sizes by role, pruning and frozen items of a checkpoint.

    Args:
        directory: the checkpoint.
        manifest: its manifest, or the one of the common form.
        other_format: the name of its format; None: native. Files of other formats do not record when they were written.
    """
    written = {key: manifest[key] if other_format is None else None for key in ("written_by", "created_utc")}
    config = (manifest.get("source") or {}).get("config") or {}
    roles: dict[str, dict[str, int]] = {}
    for entry in manifest["tensors"].values():
        role = roles.setdefault(entry["role"], {"tensors": 0, "elements": 0, "bytes": 0})
        role["tensors"] += 1
        role["elements"] += math.prod(entry["shape"])
        role["bytes"] += tensor_bytes(entry)
    dtypes = sorted({e["dtype"] for e in manifest["tensors"].values() if e["role"] == "parameter"})
    return {
        "path": directory,
        "format": other_format or f"{manifest['format']} {manifest['version']}",
        "architectures": config.get("architectures"),
        **written,
        **{key: manifest[key] for key in ("run_id", "step", "consumed_train_samples")},
        "model": manifest["model"],
        "parameter_dtypes": dtypes,
        "roles": roles,
        "topology": manifest["topology"],
        "dynamic": manifest["dynamic"],
        "ties": manifest["ties"],
        "optimizer": None if manifest["optimizer"] is None else manifest["optimizer"]["type"],
        "files": manifest["files"],
        "bytes": sum(entry["bytes"] for entry in manifest["files"].values()),
    }


def stored_files(checkpoint: NativeCheckpoint) -> dict[str, dict[str, int]]:
    """The files with the tensors of a checkpoint whose manifest does not list them: path -> ``bytes``."""
    pieces = (piece for tensor in checkpoint.tensors.values() for piece in tensor.pieces)
    found = sorted({stored.path for piece in pieces for stored in stored_inputs(piece.view.array)})
    # Sparse weights were unpacked to a scratch directory, which is not part of the checkpoint.
    inside = [path for path in found if path.is_relative_to(checkpoint.directory)]
    return {str(path.relative_to(checkpoint.directory)): {"bytes": path.stat().st_size} for path in inside}


def summary_rows(summary: Mapping[str, Any]) -> list[tuple[str, str]]:
    """The summary as rows of a table."""
    model, topology, dynamic = summary["model"], summary["topology"], summary["dynamic"]
    parameters = summary["roles"].get("parameter", {"elements": 0, "tensors": 0})
    unlike = unlike_family(model) if model["family"] in ("gpt", "llama") else {}
    if model.get("sliding_window"):
        unlike["sliding_window"] = model["sliding_window"]
    if types := unlike.get("layer_types"):
        unlike["layer_types"] = " and ".join(f"{count} {kind}" for kind, count in sorted(Counter(types).items()))
    stages = [stage_text(stage) for stage in topology["partition"]]
    names = summary["architectures"]
    architecture = f", {short_names(names)}" if isinstance(names, list) and names else ""
    return [
        ("format", f"{summary['format']}{architecture}"),
        ("run", f"{summary['run_id']}, step {summary['step']}, {summary['consumed_train_samples']} samples"),
        *([("written", f"{summary['created_utc']} by {summary['written_by']}")] if summary["written_by"] else []),
        (
            "model",
            f"{model['family']}, {model['num_layers']} layers, hidden {model['hidden_size']}, "
            f"{model['num_attention_heads']} heads, "
            f"vocabulary {model['vocab_size']} (padded {model['padded_vocab_size']})",
        ),
        *([("differs by", ", ".join(f"{name} {value}" for name, value in unlike.items()))] if unlike else []),
        (
            "parameters",
            f"{parameters['elements']:,} in {parameters['tensors']} tensors, {' '.join(summary['parameter_dtypes'])}",
        ),
        (
            "topology",
            f"tensor {topology['tensor_parallel_size']} x pipeline {topology['pipeline_parallel_size']} x "
            f"data {topology['data_parallel_size']}, {topology['schedule']}",
        ),
        *((f"stage {index}", text) for index, text in enumerate(stages)),
        ("frozen", ", ".join(dynamic["frozen_items"]) or "nothing"),
        ("pruned", _pruned_text(dynamic["pruning"], summary["roles"].get("mask", {}).get("tensors", 0))),
        ("tied", ", ".join(f"{name} = {target}" for name, target in summary["ties"].items()) or "nothing"),
        ("optimizer", summary["optimizer"] or "not stored"),
        ("files", f"{len(summary['files'])}, {human_bytes(summary['bytes'])}"),
    ]


def _pruned_text(pruning: Mapping[str, Any] | None, masks: int) -> str:
    if pruning is None:
        return f"no ({masks} masks)" if masks else "no"
    return f"to {pruning['sparsity']:.4f}, {masks} masks"


def stage_text(items: list[str]) -> str:
    """A stage in brief: its first and last item, and their number."""
    if len(items) < 3:
        return ", ".join(items) or "empty"
    return f"{items[0]} ... {items[-1]} ({len(items)} items)"


def tensor_rows(manifest: Mapping[str, Any], pattern: str) -> list[tuple[str, str, str, str, str]]:
    """Name, role, type, shape and files of the tensors whose name matches a shell pattern."""
    return [
        (
            short_name(name),
            entry["role"],
            entry["dtype"],
            "x".join(map(str, entry["shape"])) or "scalar",
            " ".join(shard["file"] for shard in entry["shards"]),
        )
        for name, entry in manifest["tensors"].items()
        if fnmatchcase(name, pattern)
    ]
