"""Finds and opens native checkpoints: the manifest, and each tensor assembled from its shards."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from .._common.document import MAX_TABLE_BYTES, DocumentError, short_repr
from .._common.errors import UsageError
from ..formats.checkpoint import parse_manifest
from ..formats.checkpoint_rules import VOCABULARY_ROWS
from ..io.errors import CorruptError, UnsupportedError, short_name
from ..io.files import read_file, read_tracker
from ..io.safetensors import StoredArray, read_index
from ..tensors.views import Piece, Tensor, as_tensor

STEP_NAME = re.compile(r"step-(\d{8,})")


@dataclass(frozen=True, kw_only=True)
class NativeCheckpoint:
    """A checkpoint in the common form of all formats.

    Attributes:
        directory: the input.
        manifest: as in ``manifest.json``; shards and files are empty where the input has another format.
        tensors: the stored tensors by global name, in the order of the manifest.
        scratch: keeps alive the directory with unpacked tensors.
        tokenizer: the directory of the tokenizer's files; None: next to the weights, or in ``tokenizer`` there.
        is_renamed: a Hugging Face directory with names that transformers does not read, such as those of wrappers.
    """

    directory: Path
    manifest: Mapping[str, Any]
    tensors: Mapping[str, Tensor]
    scratch: object = None
    tokenizer: Path | None = None
    is_renamed: bool = False

    def names(self, *roles: str) -> list[str]:
        """Names of the stored tensors with one of ``roles``."""
        return [name for name, entry in self.manifest["tensors"].items() if entry["role"] in roles]

    def weights(self) -> dict[str, Tensor]:
        """Stored parameters and buffers of the model; not the buffers of gradient compression (``.memory.``)."""
        names = self.names("parameter", "buffer")
        return {name: self.tensors[name] for name in names if ".memory." not in name}

    def masks(self) -> dict[str, Tensor]:
        """Pruning masks by the name of the weight."""
        return {name.removesuffix(".mask"): self.tensors[name] for name in self.names("mask")}


def load_manifest(directory: Path) -> dict[str, Any]:
    """The manifest of one checkpoint directory.

    Raises:
        CorruptError: the file is missing, altered, or breaks the format; the message has every problem.
    """
    path = directory / "manifest.json"
    try:
        return parse_manifest(read_file(path, MAX_TABLE_BYTES), str(path))
    except DocumentError as error:
        raise CorruptError(str(error)) from error


def incomplete_reason(directory: Path) -> str:
    """Why a checkpoint is incomplete: an invalid manifest, or a file with another size; empty where it is complete."""
    try:
        manifest = load_manifest(directory)
    except CorruptError as error:
        return str(error)
    for name, entry in manifest["files"].items():
        path = directory / name
        if not path.is_file():
            return f"{path}: is missing"
        if path.stat().st_size != entry["bytes"]:
            return f"{path}: has {path.stat().st_size} bytes; the manifest records {entry['bytes']}"
    return ""


def is_native(path: Path) -> bool:
    """Whether ``path`` is a run directory, its ``checkpoints``, or one native checkpoint."""
    if (path / "manifest.json").is_file():
        return True
    return path.is_dir() and any(STEP_NAME.fullmatch(child.name) for child in checkpoints_dir(path).iterdir())


def checkpoints_dir(path: Path) -> Path:
    """The directory with the steps, given that directory or the run directory."""
    return path / "checkpoints" if (path / "checkpoints").is_dir() else path


def find_checkpoint(path: Path, step: int | None = None) -> tuple[Path, list[str]]:
    """The checkpoint directory of a run, and remarks on incomplete checkpoints that were skipped.

    Args:
        path: a run directory, its ``checkpoints``, or one checkpoint.
        step: the step; None: the one that ``LATEST`` names, or, where that is not complete, the newest complete one.

    Raises:
        CorruptError: no checkpoint, or no complete one.
        UsageError: ``step`` is missing.
    """
    if (path / "manifest.json").exists():
        if step is not None and path.name != f"step-{step:08d}":
            raise UsageError(f"{path}: has one checkpoint; --step selects a step of a run directory")
        return path, []
    folder = checkpoints_dir(path)
    names = step_names(folder)
    if step is not None:
        if f"step-{step:08d}" not in names:
            raise UsageError(f"{folder}: has no step {step}; choose from {', '.join(names) or 'none'}")
        return folder / f"step-{step:08d}", []
    if not names:
        raise CorruptError(
            f"{path}: no checkpoint here; give a run directory, its checkpoints, or the directory of a step"
        )
    remarks = latest_problems(folder)
    latest = read_latest(folder)
    # LATEST is written after a checkpoint is renamed into place. But a disk may lose data, and a user may delete files:
    # then the newest complete step is used, and the reason is reported.
    for name in ([latest] if latest in names else []) + [name for name in names if name != latest]:
        reason = incomplete_reason(folder / name)
        if not reason:
            return folder / name, remarks
        remarks.append(f"skipped: {reason}")
    raise CorruptError("\n  ".join([f"{folder}: no complete checkpoint", *remarks]))


def step_names(folder: Path) -> list[str]:
    """Names of the step directories, newest first.

    ``step-00000010`` and ``step-000000010`` are the same step; then the name with fewer digits comes first, which is
    the one that writers use. So the order does not depend on the order in which the file system lists the directory.
    """
    names = [child.name for child in folder.iterdir() if STEP_NAME.fullmatch(child.name)] if folder.is_dir() else []
    return sorted(names, key=lambda name: (-int(name.removeprefix("step-")), len(name)))


def read_latest(folder: Path) -> str:
    """The contents of ``LATEST``; empty where there is no such file."""
    path = folder / "LATEST"
    return read_tracker(path).removesuffix("\n") if path.is_file() else ""


def latest_problems(folder: Path) -> list[str]:
    """What is wrong with ``LATEST``: missing, not the name of a step, or the name of a missing one."""
    latest = read_latest(folder)
    if STEP_NAME.fullmatch(latest) and (folder / latest).is_dir():
        return []
    return [
        f"{folder / 'LATEST'}: "
        f"{'is missing or empty' if not latest else f'names {short_repr(latest)}, which does not exist'}"
    ]


def open_native(directory: Path) -> NativeCheckpoint:
    """Open one checkpoint directory and index its shards; no tensor's bytes are read.

    Raises:
        CorruptError: the manifest or a shard is missing or invalid, or they contradict each other.
        UnsupportedError: it has adapters alone, and refers to another checkpoint for the other weights.
    """
    manifest = load_manifest(directory)
    if "x_base" in manifest:
        raise UnsupportedError(
            f"{directory} has the adapters of LoRA alone; write a checkpoint with all weights first, by dynmo-train"
            " export-adapter --merge, or the adapters for PEFT, without --merge"
        )
    files = {shard["file"] for entry in manifest["tensors"].values() for shard in entry["shards"]}
    indices = {name: read_index(directory / name).arrays for name in sorted(files)}
    tensors = {name: _assemble(directory, name, entry, indices) for name, entry in manifest["tensors"].items()}
    return _with_true_rows(NativeCheckpoint(directory=directory, manifest=manifest, tensors=tensors))


def has_vocabulary_rows(name: str) -> bool:
    """Whether a tensor has a row for each token id: word embeddings, the head and its bias, their masks and state."""
    return VOCABULARY_ROWS.fullmatch(name) is not None


def _with_true_rows(checkpoint: NativeCheckpoint) -> NativeCheckpoint:
    """The checkpoint without padding rows of the vocabulary, which older trainers stored; the shards are unchanged."""
    manifest, tensors = checkpoint.manifest, dict(checkpoint.tensors)
    rows, entries = manifest["model"]["vocab_size"], dict(manifest["tensors"])
    for name, entry in manifest["tensors"].items():
        if has_vocabulary_rows(name) and entry["shape"][0] > rows:
            tensors[name] = tensors[name].narrow(0, 0, rows)
            entries[name] = {**entry, "shape": [rows, *entry["shape"][1:]]}
    return replace(checkpoint, manifest={**manifest, "tensors": entries}, tensors=tensors)


def _assemble(
    directory: Path, name: str, entry: Mapping[str, Any], indices: Mapping[str, Mapping[str, StoredArray]]
) -> Tensor:
    pieces = []
    for shard in entry["shards"]:
        array = indices[shard["file"]].get(shard["key"])
        shape = tuple(end - begin for begin, end in shard["index"])
        if array is None or (array.dtype, array.shape) != (entry["dtype"], shape):
            found = "nothing" if array is None else f"{array.dtype} {list(array.shape)}"
            raise CorruptError(
                f"{directory / shard['file']}: {short_name(shard['key'])}: found {found}; the manifest records "
                f"{entry['dtype']} {list(shape)} for this part of {short_name(name)}"
            )
        # safetensors has no checksums: with that of the manifest, each copy also verifies what it reads.
        view = as_tensor(replace(array, crc32=int(shard["crc32"], 16))).pieces[0].view
        pieces.append(Piece(tuple(begin for begin, _ in shard["index"]), view))
    return Tensor(entry["dtype"], tuple(entry["shape"]), tuple(pieces))


def unclaimed_keys(checkpoint: NativeCheckpoint) -> Iterable[str]:
    """Arrays in the shards that the manifest does not name, as ``FILE: KEY``."""
    claimed: dict[str, set[str]] = {}
    for entry in checkpoint.manifest["tensors"].values():
        for shard in entry["shards"]:
            claimed.setdefault(shard["file"], set()).add(shard["key"])
    for name, keys in sorted(claimed.items()):
        for key in read_index(checkpoint.directory / name).arrays:
            if key not in keys:
                yield f"{checkpoint.directory / name}: {short_name(key)}"
