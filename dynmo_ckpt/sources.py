"""Opens an input of any known format as if it were a native checkpoint: a manifest, and tensors under our names."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from . import __version__
from .compare import same_bytes, set_elements
from .deepspeed import is_deepspeed, open_deepspeed
from .errors import UsageError
from .faults import CorruptError
from .formats._document import Problem, envelope
from .formats.checkpoint import BLANK_SEAL, FORMAT, VERSION, model_check
from .formats.checkpoint_rules import block_items
from .hf_models import ARCHITECTURES, hf_model
from .huggingface import read_config, read_tensors, tokenizer_names
from .legacy import LegacyCheckpoint, LegacyOptions, is_legacy, open_legacy
from .llama2c import is_llama2c, read_llama2c
from .names import Mapped, layout_of, load_map, model_ties, to_ours
from .native import NativeCheckpoint, find_checkpoint, is_native, open_native
from .options import SourceKind
from .views import Tensor

NOTHING_ADDED = LegacyOptions()
RNG = {"scheme": "hash(seed,step,microbatch,item)", "seed": 0}


def detect(path: Path) -> SourceKind:
    """The format of ``path``; raises ``CorruptError`` where it is none that is known."""
    if is_native(path):
        return SourceKind.NATIVE
    if (path / "config.json").is_file():
        return SourceKind.HF
    if is_legacy(path):
        return SourceKind.LEGACY
    if is_deepspeed(path):
        return SourceKind.DEEPSPEED
    if is_llama2c(path):
        return SourceKind.LLAMA2C
    raise CorruptError(
        f"{path}: no checkpoint here; known are native ones (manifest.json, step-NNNNNNNN), Hugging Face directories "
        "(config.json), legacy Megatron ones (latest_checkpointed_iteration.txt, mp_rank_*), Megatron-DeepSpeed's "
        "(latest, global_stepN) and files of llama2.c (NAME.bin)"
    )


def open_any(
    path: Path,
    kind: SourceKind,
    step: int | None,
    make_vocab_size_divisible_by: int = 128,
    legacy: LegacyOptions = NOTHING_ADDED,
) -> tuple[NativeCheckpoint, list[str]]:
    """Open ``path``; returns the checkpoint and remarks for a person.

    Args:
        path: the input.
        kind: its format, or ``auto``.
        step: which step of a run directory; None: the latest.
        make_vocab_size_divisible_by: what the vocabulary of a Hugging Face model is padded to a multiple of.
        legacy: what a person adds for a legacy checkpoint.
    """
    kind = detect(path) if kind is SourceKind.AUTO else kind
    if kind is SourceKind.NATIVE:
        if legacy.sparse or legacy.untie or legacy.first_replica or legacy.drop:
            raise UsageError("--sparse, --untie, --replicas and --drop go with input that is not a native checkpoint")
        directory, remarks = find_checkpoint(path, step)
        return open_native(directory), remarks
    if kind is SourceKind.LEGACY:
        return from_legacy(open_legacy(path, step, legacy), path)
    if kind is SourceKind.DEEPSPEED:
        return from_legacy(open_deepspeed(path, step, legacy), path)
    if step is not None:
        raise UsageError(f"{path}: --step chooses among the steps of a run directory; this is a {kind} directory")
    if kind is SourceKind.LLAMA2C:
        return open_llama2c(path, make_vocab_size_divisible_by), []
    return open_hf(path, make_vocab_size_divisible_by, legacy.drop)


def open_llama2c(path: Path, make_vocab_size_divisible_by: int) -> NativeCheckpoint:
    """A ``NAME.bin`` of llama2.c as a checkpoint at step 0."""
    model, tensors = read_llama2c(path, make_vocab_size_divisible_by)
    ties = model_ties(model)
    mapped, _ = to_ours(layout_of(load_map("llama2c"), model), {name: [each] for name, each in tensors.items()}, ties)
    return NativeCheckpoint(
        directory=path.parent,
        manifest=new_manifest(model, mapped, ties, run_id=f"from-{path.stem}"),
        tensors={item.name: item.content for item in mapped},
    )


def open_hf(
    directory: Path, make_vocab_size_divisible_by: int, drop: Sequence[str] = ()
) -> tuple[NativeCheckpoint, list[str]]:
    """A Hugging Face directory as a checkpoint at step 0 without optimizer state, and remarks for a person.

    Tensors whose name fits a pattern of ``drop`` are left out.

    Raises:
        CorruptError: a file is missing or broken, the configuration holds impossible sizes, or copies differ.
        UnsupportedError: another architecture, or tensors that do not fit the map.
    """
    config = read_config(directory)
    model = hf_model(config, make_vocab_size_divisible_by)
    problems: list[Problem] = []
    model_check(model, "", problems)
    if problems:
        raise CorruptError("\n  ".join([f"{directory / 'config.json'}: impossible sizes", *map(str, problems)]))
    layout = layout_of(load_map(ARCHITECTURES[config["model_type"]].map), model)
    found = read_tensors(directory)
    dropped = [name for name in found if any(fnmatchcase(name, pattern) for pattern in drop)]
    tensors = {name: [tensor] for name, tensor in found.items() if name not in dropped}
    ties = model_ties(model)
    apart = {link.ours for link in layout.links if link.shared and link.ours in ties}
    mapped, pairs = to_ours(layout, tensors, ties)
    for what, one, other in pairs:
        if not same_bytes(one, other):
            if not apart:
                raise CorruptError(f"{directory}: {what} differ, where they must be equal")
            ties = {name: target for name, target in ties.items() if name not in apart}
    if len(ties) != len(model_ties(model)):
        mapped, _ = to_ours(layout, tensors, ties)
    checkpoint = NativeCheckpoint(
        directory=directory,
        manifest=new_manifest(model, mapped, ties, run_id=f"from-{directory.resolve().name}"),
        tensors={item.name: item.content for item in mapped},
    )
    return checkpoint, [f"{name}: left out, as --drop asks" for name in dropped]


def from_legacy(found: LegacyCheckpoint, path: Path) -> tuple[NativeCheckpoint, list[str]]:
    """A legacy Megatron checkpoint as one of ours without optimizer state, and remarks for a person."""
    manifest = new_manifest(
        found.model, found.tensors, found.ties, run_id=f"from-{path.resolve().name}", step=found.step
    )
    tensors = {item.name: item.content for item in found.tensors}
    pruned = total = 0
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


def small_files(checkpoint: NativeCheckpoint, tokenizer: Path | None) -> dict[str, bytes]:
    """What lies beside the shards and goes along, by path: a native checkpoint's other files, a model's tokenizer.

    An older record of a conversion is left out. ``tokenizer`` is another directory to take the tokenizer's files from.
    """
    directory, listed = checkpoint.directory, checkpoint.manifest["files"]
    shards = {shard["file"] for entry in checkpoint.manifest["tensors"].values() for shard in entry["shards"]}
    kept = {name: directory / name for name in sorted(set(listed) - shards - {"conversion.json"})}
    if tokenizer is not None or not listed:
        kept = {name: path for name, path in kept.items() if not name.startswith("tokenizer/")}
        names = tokenizer_names(tokenizer or directory)
        kept |= {f"tokenizer/{name}": (tokenizer or directory) / name for name in names}
    return {name: path.read_bytes() for name, path in kept.items()}
