"""Finds and reads native checkpoints: the bytes of requested tensors only, each verified, for any partition."""

from __future__ import annotations

import hashlib
import re
import zlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

from ..._common.document import MAX_TABLE_BYTES, DocumentError, UnreadableError, read_bytes
from ..._common.errors import UsageError
from .document import parse_manifest
from .shards import HEADER_LIMIT_BYTES, TORCH_NAMES, TensorLocation, decode_header
from .writer import STEP_NAME, read_latest

if TYPE_CHECKING:
    import torch


_CHUNK_BYTES = 1 << 22
BASE = "x_base"
"""Key of the manifest of a checkpoint of adapters alone: directory and digest of the checkpoint with the weights."""
_DIGEST = re.compile(r"[0-9a-f]{64}")
# Prefixes of files that only a resume reads: moments, and memories of gradient compression.
OPTIMIZER_FILES = ("optimizer-", "memory-")


class CheckpointError(UsageError):
    """A checkpoint is missing, incomplete or altered; the message names the file and the tensor."""


def load_manifest(step_dir: Path) -> dict[str, Any]:
    """The manifest of a checkpoint directory.

    Raises:
        CheckpointError: the file cannot be read, or is not a valid manifest.
    """
    path = step_dir / "manifest.json"
    try:
        return parse_manifest(read_bytes(path, MAX_TABLE_BYTES), str(path))
    except UnreadableError as error:
        raise CheckpointError(f"{path}: cannot be read: {error.reason}") from error


def _fault(step_dir: Path, *, weights_only: bool = False) -> str:
    """Return why ``step_dir`` is not a complete checkpoint (manifest, sizes of files); empty if it is."""
    try:
        manifest = load_manifest(step_dir)
    except (CheckpointError, DocumentError) as error:
        return str(error)
    if fault := _base_fault(manifest, step_dir):
        return fault
    for name, entry in _needed_files(manifest, weights_only=weights_only).items():
        path = step_dir / name
        if not path.is_file() or path.stat().st_size != entry["bytes"]:
            found = f"{path.stat().st_size} bytes" if path.is_file() else "no file"
            return f"{path}: {found}; the manifest has {entry['bytes']} bytes"
    return ""


def base_reference(directory: Path) -> dict[str, str]:
    """What the manifest of a checkpoint of adapters states of its base, a checkpoint in ``directory``.

    The digest is that of the base's manifest, which has the checksums of all tensors.

    Raises:
        CheckpointError: the manifest of the base cannot be read.
    """
    path = directory.resolve() / "manifest.json"
    try:
        digest = hashlib.sha256(read_bytes(path, MAX_TABLE_BYTES)).hexdigest()
    except UnreadableError as error:
        raise CheckpointError(f"{path}: cannot be read: {error.reason}") from error
    return {"path": str(path.parent), "manifest_sha256": digest}


def _base_fault(manifest: Mapping[str, Any], step_dir: Path) -> str:
    """Why the base of a checkpoint of adapters cannot be used; empty if it can, or where all weights are stored."""
    if BASE not in manifest:
        return ""
    stated = manifest[BASE]
    place, digest = (stated.get(key) if isinstance(stated, dict) else None for key in ("path", "manifest_sha256"))
    if not isinstance(place, str) or not isinstance(digest, str) or not _DIGEST.fullmatch(digest) or "\0" in place:
        return f"{step_dir}: {BASE} must have the path and manifest_sha256 of the base checkpoint"
    try:
        found = base_reference(Path(place))
    except (CheckpointError, DocumentError) as error:
        return f"{step_dir} has adapters alone, and their base is not there; put it back: {error}"
    if found["manifest_sha256"] != digest:
        return f"{step_dir} has adapters alone, and {place} is not the base that they were trained on: it was changed"
    return ""


def _needed_files(manifest: Mapping[str, Any], *, weights_only: bool) -> dict[str, dict[str, Any]]:
    """Return the files of a checkpoint with sizes and checksums; with ``weights_only`` without optimizer state."""
    excluded = OPTIMIZER_FILES if weights_only else ()
    return {name: entry for name, entry in manifest["files"].items() if not name.startswith(excluded)}


def list_checkpoints(path: Path) -> list[Path]:
    """Return the checkpoints of a run directory, of its ``checkpoints``, or of one step's directory, best first.

    The first is the one that ``LATEST`` names, followed by the steps before it, newest first: they are of the same
    branch of training. Steps after it are of an abandoned branch, as when a run resumed from an earlier checkpoint, and
    come last. Without ``LATEST`` all are sorted newest first.

    Raises:
        CheckpointError: There is no checkpoint.
    """
    if (path / "manifest.json").exists() or (STEP_NAME.fullmatch(path.name) and path.is_dir()):
        return [path]
    folder = path / "checkpoints" if (path / "checkpoints").is_dir() else path
    names = [child.name for child in folder.iterdir()] if folder.is_dir() else []
    steps = sorted((name for name in names if STEP_NAME.fullmatch(name)), key=lambda name: -int(name[5:]))
    if not steps:
        raise CheckpointError(
            f"{path}: no checkpoint here; give a run directory, its checkpoints directory or a step-NNNNNNNN directory"
        )
    named = read_latest(folder)
    later = steps[: steps.index(named)] if named in steps else []
    return [folder / name for name in steps[len(later) :] + later]


def step_of(checkpoint: Path) -> int:
    """Return the number of completed steps of a checkpoint directory ``step-NNNNNNNN``."""
    return int(checkpoint.name.removeprefix("step-"))


def find_checkpoint(path: Path, *, weights_only: bool = False) -> Path:
    """Return the directory of the first complete checkpoint of :func:`list_checkpoints`.

    Args:
        path: Run directory, its ``checkpoints``, or one step's directory.
        weights_only: The files of the optimizer state may be missing.

    Raises:
        CheckpointError: No checkpoint is complete; lists the candidates and why each was rejected.
    """
    faults = []
    for candidate in list_checkpoints(path):
        fault = _fault(candidate, weights_only=weights_only)
        if not fault:
            return candidate
        faults.append(fault)
    raise CheckpointError("\n  ".join([f"{path}: no complete checkpoint here", *faults]))


def find_damage(step_dir: Path, part: int = 0, parts: int = 1, *, weights_only: bool = False) -> str:
    """Return what is damaged in a checkpoint: its manifest, a missing file, a size, a checksum; empty if nothing is.

    Args:
        step_dir: Directory of the checkpoint.
        part: First file whose bytes are read.
        parts: Read every ``parts``-th file, so that processes share the work.
        weights_only: Skip the files of the optimizer state.
    """
    fault = _fault(step_dir, weights_only=weights_only)
    if fault:
        return fault
    manifest = load_manifest(step_dir)
    files = _needed_files(manifest, weights_only=weights_only)
    for name in sorted(files, key=lambda name: -files[name]["bytes"])[part::parts]:
        path = step_dir / name
        try:
            found = _file_crc32(path)
        except OSError as error:
            return f"{path}: cannot be read: {error.strerror}"
        if found != files[name]["crc32"]:
            return f"{path}: CRC-32 is {found}, the manifest has {files[name]['crc32']}: the bytes were altered"
    return find_damage(Path(manifest[BASE]["path"]), part, parts, weights_only=True) if BASE in manifest else ""


def _file_crc32(path: Path) -> str:
    checksum, buffer = 0, bytearray(_CHUNK_BYTES)
    with open(path, "rb", buffering=0) as handle:
        while got := handle.readinto(buffer):
            checksum = zlib.crc32(memoryview(buffer)[:got], checksum)
    return f"{checksum:08x}"


def open_checkpoint(step_dir: Path) -> Checkpoint:
    """Read and check the manifest of one step's directory; for adapters alone, that of their base as well.

    Raises:
        CheckpointError: The manifest cannot be read, or the base is missing or another one.
        DocumentError: The manifest is invalid.
    """
    manifest = load_manifest(step_dir)
    if BASE not in manifest:
        return Checkpoint(directory=step_dir, manifest=manifest)
    if fault := _base_fault(manifest, step_dir):
        raise CheckpointError(fault)
    base = open_checkpoint(Path(manifest[BASE]["path"]))
    own = manifest["tensors"]
    weights = {name: each for name, each in base.manifest["tensors"].items() if each["role"] != "optimizer"}
    whole = {**manifest, "tensors": {**weights, **own}, "ties": base.manifest["ties"]}
    return Checkpoint(directory=step_dir, manifest=whole, base=base, own=frozenset(own))


@dataclass(frozen=True, kw_only=True)
class Checkpoint:
    """A checkpoint on disk: its manifest, and its tensors by global names.

    Attributes:
        directory: Directory of the checkpoint.
        manifest: Its manifest.
        skipped_checkpoints: What is wrong with each damaged checkpoint in whose place this one is used.
        base: Checkpoint that has the other weights of one with adapters alone; None where all are stored.
        own: Names of the tensors that are not those of the base.
    """

    directory: Path
    manifest: Mapping[str, Any]
    skipped_checkpoints: tuple[str, ...] = ()
    base: Checkpoint | None = None
    own: frozenset[str] = frozenset()

    def stored_name(self, name: str) -> str:
        """Return the name under which a tensor is stored: that of the one it is tied to, also for optimizer state."""
        ties: Mapping[str, str] = self.manifest["ties"]
        for tied, target in ties.items():
            if name == tied or name.startswith(f"{tied}."):
                return target + name[len(tied) :]
        return name

    def names(self, *roles: str) -> list[str]:
        """Return the names of the stored tensors, in layer order; of these roles, or of all."""
        return [name for name, entry in self.manifest["tensors"].items() if not roles or entry["role"] in roles]

    def has(self, name: str) -> bool:
        """Whether a tensor, or the one it is tied to, is stored."""
        return self.stored_name(name) in self.manifest["tensors"]

    def load(self, names: Iterable[str], device: str | torch.device = "cpu") -> dict[str, torch.Tensor]:
        """Return global tensors by name, concatenated from their shards; reads no bytes of other tensors.

        Args:
            names: Global names.
            device: Device of the result.

        Raises:
            CheckpointError: A name is unknown, a file is missing or differs from the manifest, or a checksum is wrong;
                names the file and the tensor.
        """
        places: dict[str, dict[str, TensorLocation]] = {}
        result = {}
        for name in names:
            stored = self.stored_name(name)
            if stored not in self.manifest["tensors"]:
                raise CheckpointError(f"{self.directory}: has no tensor {stored}")
            result[name] = self._load_one(stored, places).to(device)
        return result

    def _load_one(self, name: str, places: dict[str, dict[str, TensorLocation]]) -> torch.Tensor:
        import torch

        if self.base is not None and name not in self.own:
            return self.base.load([name])[name]
        entry = self.manifest["tensors"][name]
        parts = []
        for shard in entry["shards"]:
            path = self.directory / shard["file"]
            try:
                with open(path, "rb") as handle:
                    if shard["file"] not in places:
                        places[shard["file"]] = _read_places(handle, path)
                    place = places[shard["file"]].get(shard["key"])
                    shape = tuple(end - begin for begin, end in shard["index"])
                    if place is None or (place.dtype, place.shape) != (entry["dtype"], shape):
                        raise CheckpointError(f"{path}: {name}: {entry['dtype']} {shape} expected, found {place}")
                    parts.append(_read_tensor(handle, place, shard["crc32"], f"{path}: {name}"))
            except OSError as error:
                raise CheckpointError(f"{path}: {name}: cannot be read: {error.strerror}") from error
        return parts[0] if len(parts) == 1 else torch.cat(parts, dim=entry["split_dim"])


def _read_places(handle: BinaryIO, path: Path) -> dict[str, TensorLocation]:
    size = path.stat().st_size
    length = handle.read(8)
    text = handle.read(min(int.from_bytes(length, "little"), size, HEADER_LIMIT_BYTES))
    try:
        return decode_header(length, text, size)
    except ValueError as error:
        raise CheckpointError(f"{path}: not a safetensors file: {error}") from error


def _read_tensor(handle: BinaryIO, place: TensorLocation, crc32: str, where: str) -> torch.Tensor:
    import torch

    tensor = torch.empty(place.shape, dtype=getattr(torch, TORCH_NAMES[place.dtype]))
    # Read into the tensor's own memory: no second copy of its bytes.
    view = tensor.reshape(-1).view(torch.uint8).numpy().data
    handle.seek(place.begin)
    if handle.readinto(view) != place.end - place.begin:  # type: ignore[attr-defined]
        raise CheckpointError(f"{where}: the file ends within the tensor")
    found = f"{zlib.crc32(view):08x}"
    if found != crc32:
        raise CheckpointError(f"{where}: CRC-32 is {found}, the manifest has {crc32}: the bytes were altered")
    return tensor
