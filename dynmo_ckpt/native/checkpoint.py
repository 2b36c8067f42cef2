"""Finds and opens native checkpoints: the manifest, and every tensor as pieces of its shards."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from .._common.document import MAX_TABLE_BYTES, MAX_WORD_BYTES, DocumentError, read_bytes, short_repr
from .._common.errors import UsageError
from ..errors import CorruptError
from ..formats.checkpoint import parse_manifest
from ..formats.checkpoint_rules import VOCABULARY_ROWS
from ..io.files import read_file
from ..io.safetensors import StoredArray, read_index
from ..tensors.views import Piece, Tensor, whole

STEP_NAME = re.compile(r"step-(\d{8,})")


@dataclass(frozen=True, kw_only=True)
class NativeCheckpoint:
    """A checkpoint directory: its manifest, and its stored tensors by global name, in the manifest's order.

    ``scratch`` keeps alive what tensors were unpacked to.
    """

    directory: Path
    manifest: Mapping[str, Any]
    tensors: Mapping[str, Tensor]
    scratch: object = None

    def names(self, *roles: str) -> list[str]:
        """Stored names of these roles."""
        return [name for name, entry in self.manifest["tensors"].items() if entry["role"] in roles]

    def weights(self) -> list[str]:
        """Stored names of what the model computes with; not what compression remembers between steps."""
        return [name for name in self.names("parameter", "buffer") if ".memory." not in name]


def load_manifest(directory: Path) -> dict[str, Any]:
    """The manifest of one checkpoint directory; raises ``CorruptError`` with every problem."""
    path = directory / "manifest.json"
    try:
        return parse_manifest(read_file(path, MAX_TABLE_BYTES), str(path))
    except DocumentError as error:
        raise CorruptError(str(error)) from error


def incomplete_because(directory: Path) -> str:
    """Why a directory is not a complete checkpoint: no good manifest, or a file's size differs; empty when it is."""
    try:
        manifest = load_manifest(directory)
    except CorruptError as error:
        return str(error)
    for name, entry in manifest["files"].items():
        path = directory / name
        if not path.is_file():
            return f"{path}: is missing"
        if path.stat().st_size != entry["bytes"]:
            return f"{path}: has {path.stat().st_size} bytes, the manifest says {entry['bytes']}"
    return ""


def is_native(path: Path) -> bool:
    """Whether ``path`` looks like a run directory, its checkpoints or one native checkpoint."""
    if (path / "manifest.json").is_file():
        return True
    return path.is_dir() and any(STEP_NAME.fullmatch(child.name) for child in checkpoints_dir(path).iterdir())


def checkpoints_dir(path: Path) -> Path:
    """The directory of the steps, for a run directory or that directory itself."""
    return path / "checkpoints" if (path / "checkpoints").is_dir() else path


def find_checkpoint(path: Path, step: int | None = None) -> tuple[Path, list[str]]:
    """The checkpoint directory that ``path`` means, and remarks on what was passed over on the way.

    ``path`` is a run directory, its ``checkpoints``, or one checkpoint's directory. Without ``step``, ``LATEST`` is
    followed; where that names no complete checkpoint, the newest complete one is taken.

    Raises:
        CorruptError: there is none, or none that is complete.
        UsageError: ``step`` is not there.
    """
    if (path / "manifest.json").exists():
        if step is not None and path.name != f"step-{step:08d}":
            raise UsageError(f"{path}: is one checkpoint; --step chooses among those of a run directory")
        return path, []
    folder = checkpoints_dir(path)
    names = [child.name for child in folder.iterdir() if STEP_NAME.fullmatch(child.name)] if folder.is_dir() else []
    names.sort(key=lambda name: -int(name.removeprefix("step-")))
    if step is not None:
        if f"step-{step:08d}" not in names:
            raise UsageError(f"{folder}: has no step {step}; it has {', '.join(names) or 'none'}")
        return folder / f"step-{step:08d}", []
    if not names:
        raise CorruptError(f"{path}: no checkpoint here; give a run directory, its checkpoints, or a step's directory")
    remarks = latest_faults(folder)
    named = read_latest(folder)
    for name in ([named] if named in names else []) + [name for name in names if name != named]:
        fault = incomplete_because(folder / name)
        if not fault:
            return folder / name, remarks
        remarks.append(f"passed over: {fault}")
    raise CorruptError("\n  ".join([f"{folder}: no complete checkpoint", *remarks]))


def read_latest(folder: Path) -> str:
    """What ``LATEST`` says; empty where there is none."""
    path = folder / "LATEST"
    return read_bytes(path, MAX_WORD_BYTES).decode(errors="replace").removesuffix("\n") if path.is_file() else ""


def latest_faults(folder: Path) -> list[str]:
    """What is wrong with ``LATEST``: missing, not a step's name, or naming one that is not there."""
    named = read_latest(folder)
    if STEP_NAME.fullmatch(named) and (folder / named).is_dir():
        return []
    return [
        f"{folder / 'LATEST'}: "
        f"{'is missing or empty' if not named else f'names {short_repr(named)}, which is not there'}"
    ]


def open_native(directory: Path) -> NativeCheckpoint:
    """Open one checkpoint directory and index its shards; no tensor's bytes are read.

    Raises:
        CorruptError: the manifest or a shard is missing or broken, or they contradict each other.
    """
    manifest = load_manifest(directory)
    files = {shard["file"] for entry in manifest["tensors"].values() for shard in entry["shards"]}
    indices = {name: read_index(directory / name).arrays for name in sorted(files)}
    tensors = {name: _assemble(directory, name, entry, indices) for name, entry in manifest["tensors"].items()}
    return _with_true_rows(NativeCheckpoint(directory=directory, manifest=manifest, tensors=tensors))


def has_vocabulary_rows(name: str) -> bool:
    """Whether a tensor has a row for each id of the vocabulary: word tables, the head and its bias, and their state."""
    return VOCABULARY_ROWS.fullmatch(name) is not None


def _with_true_rows(checkpoint: NativeCheckpoint) -> NativeCheckpoint:
    """The checkpoint without rows of padding, which older versions of the trainer stored; shards stay as they are."""
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
                f"{directory / shard['file']}: {shard['key']}: found {found}, "
                f"the manifest says {entry['dtype']} {list(shape)} for a part of {name}"
            )
        view = whole(replace(array, crc32=int(shard["crc32"], 16))).pieces[0].view
        pieces.append(Piece(tuple(begin for begin, _ in shard["index"]), view))
    return Tensor(entry["dtype"], tuple(entry["shape"]), tuple(pieces))


def unclaimed_keys(checkpoint: NativeCheckpoint) -> Iterable[str]:
    """Arrays in the checkpoint's shards that the manifest names nowhere, as ``FILE: KEY``."""
    claimed: dict[str, set[str]] = {}
    for entry in checkpoint.manifest["tensors"].values():
        for shard in entry["shards"]:
            claimed.setdefault(shard["file"], set()).add(shard["key"])
    for name, keys in sorted(claimed.items()):
        for key in read_index(checkpoint.directory / name).arrays:
            if key not in keys:
                yield f"{checkpoint.directory / name}: {key}"
