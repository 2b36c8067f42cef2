"""Opens an input of any known format as if it were a native checkpoint: a manifest, and tensors under our names."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from . import __version__
from .compare import same_bytes
from .errors import UsageError
from .faults import CorruptError
from .formats._document import Problem, envelope
from .formats.checkpoint import BLANK_SEAL, FORMAT, VERSION, model_check
from .formats.checkpoint_rules import block_items
from .hf_models import ARCHITECTURES, hf_model
from .huggingface import read_config, read_tensors, tokenizer_names
from .legacy import LegacyOptions, is_legacy, open_legacy
from .names import Mapped, layout_of, load_map, model_ties, to_ours
from .native import NativeCheckpoint, find_checkpoint, is_native, open_native
from .options import SourceKind

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
    raise CorruptError(
        f"{path}: no checkpoint here; known are native ones (manifest.json, step-NNNNNNNN), Hugging Face directories "
        "(config.json) and legacy Megatron ones (latest_checkpointed_iteration.txt, mp_rank_*)"
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
        directory, remarks = find_checkpoint(path, step)
        return open_native(directory), remarks
    if kind is SourceKind.LEGACY:
        return from_legacy(path, step, legacy)
    if step is not None:
        raise UsageError(f"{path}: --step chooses among the steps of a run directory; this is a {kind} directory")
    return open_hf(path, make_vocab_size_divisible_by), []


def open_hf(directory: Path, make_vocab_size_divisible_by: int) -> NativeCheckpoint:
    """A Hugging Face directory as a checkpoint at step 0 without optimizer state.

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
    tensors = {name: [tensor] for name, tensor in read_tensors(directory).items()}
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
    return NativeCheckpoint(
        directory=directory,
        manifest=new_manifest(model, mapped, ties, run_id=f"from-{directory.resolve().name}"),
        tensors={item.name: item.content for item in mapped},
    )


def from_legacy(path: Path, step: int | None, options: LegacyOptions) -> tuple[NativeCheckpoint, list[str]]:
    """A legacy Megatron GPT directory as a checkpoint without optimizer state, and remarks for a person."""
    found = open_legacy(path, step, options)
    run_id = f"from-{path.resolve().name}"
    checkpoint = NativeCheckpoint(
        directory=path,
        manifest=new_manifest(found.model, found.tensors, found.ties, run_id=run_id, step=found.step),
        tensors={item.name: item.content for item in found.tensors},
    )
    return checkpoint, found.remarks


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
