"""Makes a native checkpoint out of what a reader found: a model's sizes, and tensors under foreign names or ours."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .. import __version__
from .._common.document import Problem, envelope
from ..errors import CorruptError
from ..formats.checkpoint import BLANK_SEAL, FORMAT, VERSION, model_check
from ..formats.checkpoint_rules import block_items
from ..huggingface.models import hf_model
from ..maps.name_map import Mapped, layout_of, load_map, model_ties, to_ours
from ..megatron.training_progress import in_manifest
from ..native.checkpoint import NativeCheckpoint
from ..tensors.views import Tensor

if TYPE_CHECKING:
    from ..megatron.read import LegacyCheckpoint

RNG = {"scheme": "hash(seed,step,microbatch,item)", "seed": 0}


def checked_model(
    config: Mapping[str, Any], source: Path, make_vocab_size_divisible_by: int, ignored: Sequence[str] = ()
) -> dict[str, Any]:
    """The ``model`` of a manifest from a Hugging Face configuration; raises ``CorruptError`` for impossible sizes.

    Keys of the configuration that fit a pattern of ``ignored`` are left out without a check.
    """
    model = hf_model(config, make_vocab_size_divisible_by, ignored)
    problems: list[Problem] = []
    model_check(model, "", problems)
    if problems:
        raise CorruptError("\n  ".join([f"{source}: impossible sizes", *map(str, problems)]))
    return model


def from_map(
    directory: Path,
    model: Mapping[str, Any],
    map_name: str,
    found: Mapping[str, Tensor],
    drop: Sequence[str],
    *,
    run_id: str,
    step: int = 0,
    source: Mapping[str, Any] | None = None,
) -> tuple[NativeCheckpoint, list[str]]:
    """A checkpoint from whole tensors under the names of a table of ``maps/``, and remarks for a person.

    Tensors whose name fits a pattern of ``drop`` are left out; ``source`` is what the manifest carries along.

    Raises:
        CorruptError: copies of tied tensors differ.
        UnsupportedError: tensors that do not fit the map.
    """
    layout = layout_of(load_map(map_name), model)
    dropped = [name for name in found if any(fnmatchcase(name, pattern) for pattern in drop)]
    tensors = {name: [tensor] for name, tensor in found.items() if name not in dropped}
    ties = model_ties(model)
    apart = {link.ours for link in layout.links if link.shared and link.ours in ties}
    mapped, pairs = to_ours(layout, tensors, ties)
    if pairs:
        from ..tensors.equality import same_bytes  # loads numpy, which is not needed without pairs
    for pair in pairs:
        if not same_bytes(pair.one, pair.other):
            # Only a tie that our model can also store apart may end; any other copy would be lost.
            if pair.ours not in apart:
                raise CorruptError(f"{directory}: {pair.what} differ, where they must be equal")
            ties = {name: target for name, target in ties.items() if name != pair.ours}
    if len(ties) != len(model_ties(model)):
        mapped, _ = to_ours(layout, tensors, ties)
    checkpoint = NativeCheckpoint(
        directory=directory,
        manifest=new_manifest(model, mapped, ties, run_id=f"from-{run_id}", step=step)
        | ({} if source is None else {"source": dict(source)}),
        tensors={item.name: item.content for item in mapped},
    )
    return checkpoint, [f"{name}: left out, as --drop asks" for name in dropped]


def from_legacy(found: LegacyCheckpoint, path: Path) -> tuple[NativeCheckpoint, list[str]]:
    """A checkpoint of one of the Megatrons as one of ours, and remarks for a person."""
    manifest = new_manifest(
        found.model, found.tensors, found.ties, run_id=f"from-{path.resolve().name}", step=found.step
    )
    manifest |= in_manifest(found.progress) | {"rng": {**RNG, "seed": found.progress.seed}}
    tensors = {item.name: item.content for item in found.tensors}
    pruned = total = 0
    if found.masks:
        from ..tensors.equality import set_elements
    for name, mask in found.masks.items():
        shape = manifest["tensors"][name]["shape"]
        entry = {"dtype": "BOOL", "shape": shape, "role": "mask", "split_dim": None, "shards": []}
        manifest["tensors"][f"{name}.mask"], tensors[f"{name}.mask"] = entry, mask
        total += math.prod(shape)
        pruned += math.prod(shape) - set_elements(mask)
    if total:
        manifest["dynamic"]["pruning"] = {"sparsity": pruned / total, "sparsity_by_item": {}}
    if found.optimizer:
        _add_optimizer(manifest, tensors, found)
    checkpoint = NativeCheckpoint(directory=path, manifest=manifest, tensors=tensors, scratch=found.scratch)
    return checkpoint, found.remarks


def _add_optimizer(manifest: dict[str, Any], tensors: dict[str, Tensor], found: LegacyCheckpoint) -> None:
    """Adam's moments beside the weights; the groups are Megatron's, by the number of dimensions."""
    names = [item.name for item in found.tensors]
    decayed = [name for name in names if len(manifest["tensors"][name]["shape"]) > 1]
    for item in found.optimizer:
        shape = list(item.shape)
        entry = {"dtype": "F32", "shape": shape, "role": "optimizer", "split_dim": None, "shards": []}
        manifest["tensors"][item.name], tensors[item.name] = entry, item.content
    manifest["optimizer"] = {
        "type": "adamw",
        "steps": dict.fromkeys(names, found.optimizer_steps),
        "groups": [
            {"name": "decay", "weight_decay": found.weight_decay, "parameters": decayed},
            {"name": "no_decay", "weight_decay": 0.0, "parameters": [n for n in names if n not in set(decayed)]},
        ],
    }


def new_manifest(
    model: Mapping[str, Any], mapped: list[Mapped], ties: Mapping[str, str], *, run_id: str, step: int = 0
) -> dict[str, Any]:
    """The manifest of an imported model on one worker, its shards and files still to come."""
    entries = {
        item.name: {
            "dtype": item.content.dtype,
            "shape": list(item.shape),
            "role": "parameter",
            "split_dim": None,
            "shards": [],
        }
        for item in mapped
    }
    return {
        **envelope(FORMAT, VERSION, f"dynmo-ckpt {__version__}"),
        "manifest_crc32": BLANK_SEAL,
        "run_id": run_id,
        "step": step,
        "consumed_train_samples": 0,
        "model": dict(model),
        "topology": {
            "tensor_parallel_size": 1,
            "pipeline_parallel_size": 1,
            "data_parallel_size": 1,
            "virtual_stages_per_worker": 1,
            "schedule": "none",
            "world_size": 1,
            "partition": [block_items(dict(model))],
        },
        "dynamic": {"frozen_items": [], "pruning": None, "sparse_thresholds": {}},
        "tensors": entries,
        "ties": dict(ties),
        "optimizer": None,
        "data": None,
        "rng": dict(RNG),
        "files": {},
    }
