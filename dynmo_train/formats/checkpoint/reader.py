"""Finds and reads native checkpoints: only the wanted tensors' bytes, each checked, on any partition."""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

from ..._common.document import MAX_TABLE_BYTES, DocumentError, UnreadableError, read_bytes
from ..._common.errors import UsageError
from .document import parse_manifest
from .shards import HEADER_LIMIT_BYTES, TORCH_NAMES, Place, decode_header
from .writer import STEP_NAME, read_latest

if TYPE_CHECKING:
    import torch


_CHUNK_BYTES = 1 << 22
# How the names of files begin that only the resumption of a run reads: moments, and what compression remembers.
OPTIMIZER_FILES = ("optimizer-", "memory-")


class CheckpointError(UsageError):
    """A checkpoint that is missing, incomplete or altered; the message names the file and the tensor."""


def _load_manifest(step_dir: Path) -> dict[str, Any]:
    path = step_dir / "manifest.json"
    try:
        return parse_manifest(read_bytes(path, MAX_TABLE_BYTES), str(path))
    except UnreadableError as error:
        raise CheckpointError(f"{path}: cannot be read: {error.reason}") from error


def _fault(step_dir: Path, *, weights_only: bool = False) -> str:
    """Why ``step_dir`` is not a complete checkpoint; empty when it is: its manifest parses and the sizes match."""
    try:
        manifest = _load_manifest(step_dir)
    except (CheckpointError, DocumentError) as error:
        return str(error)
    for name, entry in _needed_files(manifest, weights_only=weights_only).items():
        path = step_dir / name
        if not path.is_file() or path.stat().st_size != entry["bytes"]:
            found = f"{path.stat().st_size} bytes" if path.is_file() else "no file"
            return f"{path}: {found}, where the manifest says {entry['bytes']} bytes"
    return ""


def _needed_files(manifest: Mapping[str, Any], *, weights_only: bool) -> dict[str, dict[str, Any]]:
    """The files of a checkpoint with their sizes and checksums; with ``weights_only`` without the optimizer state."""
    left_out = OPTIMIZER_FILES if weights_only else ()
    return {name: entry for name, entry in manifest["files"].items() if not name.startswith(left_out)}


def list_checkpoints(path: Path) -> list[Path]:
    """What ``path`` may mean, best first: a run directory, its ``checkpoints``, or one step's directory.

    First is what ``LATEST`` names, then the steps before it from the newest to the oldest: they are of the same course
    of training. Steps after it are of one that was abandoned, as when a run was resumed from an earlier checkpoint;
    they come last. Without ``LATEST`` all come from the newest to the oldest; one step's directory means itself.

    Raises:
        CheckpointError: there is no checkpoint.
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


def find_checkpoint(path: Path, *, weights_only: bool = False) -> Path:
    """The directory of the checkpoint meant by ``path``: the first of :func:`list_checkpoints` that is complete.

    With ``weights_only`` the files of the optimizer state may be missing.

    Raises:
        CheckpointError: there is none; says what was looked at and why each was refused.
    """
    faults = []
    for candidate in list_checkpoints(path):
        fault = _fault(candidate, weights_only=weights_only)
        if not fault:
            return candidate
        faults.append(fault)
    raise CheckpointError("\n  ".join([f"{path}: no complete checkpoint here", *faults]))


def find_damage(step_dir: Path, part: int = 0, parts: int = 1, *, weights_only: bool = False) -> str:
    """What is damaged in a checkpoint: its manifest, a file's presence or size, or a byte; empty where it is sound.

    Args:
        step_dir: its directory.
        part, parts: of the files, every ``parts``-th is read from the ``part``-th on, so that processes share the work.
        weights_only: leave out the files of the optimizer state.
    """
    fault = _fault(step_dir, weights_only=weights_only)
    if fault:
        return fault
    files = _needed_files(_load_manifest(step_dir), weights_only=weights_only)
    for name in sorted(files, key=lambda name: -files[name]["bytes"])[part::parts]:
        path = step_dir / name
        try:
            found = _file_crc32(path)
        except OSError as error:
            return f"{path}: cannot be read: {error.strerror}"
        if found != files[name]["crc32"]:
            return f"{path}: CRC-32 is {found}, the manifest says {files[name]['crc32']}: the bytes were altered"
    return ""


def _file_crc32(path: Path) -> str:
    checksum, buffer = 0, bytearray(_CHUNK_BYTES)
    with open(path, "rb", buffering=0) as handle:
        while got := handle.readinto(buffer):
            checksum = zlib.crc32(memoryview(buffer)[:got], checksum)
    return f"{checksum:08x}"


def open_checkpoint(step_dir: Path) -> Checkpoint:
    """Read and check the manifest of one step's directory; raises ``CheckpointError`` or ``DocumentError``."""
    return Checkpoint(directory=step_dir, manifest=_load_manifest(step_dir))


@dataclass(frozen=True, kw_only=True)
class Checkpoint:
    """A checkpoint on disk: its manifest, and its tensors by their global names.

    ``skipped_checkpoints`` says of damaged ones, which this one stands for, what is wrong with them.
    """

    directory: Path
    manifest: Mapping[str, Any]
    skipped_checkpoints: tuple[str, ...] = ()

    def stored_name(self, name: str) -> str:
        """The name under which ``name`` is stored: that of the tensor it is tied to, for optimizer state as well."""
        ties: Mapping[str, str] = self.manifest["ties"]
        for tied, target in ties.items():
            if name == tied or name.startswith(f"{tied}."):
                return target + name[len(tied) :]
        return name

    def names(self, *roles: str) -> list[str]:
        """Names of the stored tensors, in layer order; of these roles where any are given."""
        return [name for name, entry in self.manifest["tensors"].items() if not roles or entry["role"] in roles]

    def has(self, name: str) -> bool:
        """Whether ``name``, or what it is tied to, is stored."""
        return self.stored_name(name) in self.manifest["tensors"]

    def load(self, names: Iterable[str], device: str | torch.device = "cpu") -> dict[str, torch.Tensor]:
        """Whole tensors by name, put together from their shards; reads no byte of any other tensor.

        Raises:
            CheckpointError: an unknown name, a file that is missing or not as the manifest says, or bytes whose
                checksum differs; names the file and the tensor.
        """
        places: dict[str, dict[str, Place]] = {}
        result = {}
        for name in names:
            stored = self.stored_name(name)
            if stored not in self.manifest["tensors"]:
                raise CheckpointError(f"{self.directory}: holds no tensor {stored}")
            result[name] = self._load_one(stored, places).to(device)
        return result

    def _load_one(self, name: str, places: dict[str, dict[str, Place]]) -> torch.Tensor:
        import torch

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


def _read_places(handle: BinaryIO, path: Path) -> dict[str, Place]:
    size = path.stat().st_size
    length = handle.read(8)
    text = handle.read(min(int.from_bytes(length, "little"), size, HEADER_LIMIT_BYTES))
    try:
        return decode_header(length, text, size)
    except ValueError as error:
        raise CheckpointError(f"{path}: not a safetensors file: {error}") from error


def _read_tensor(handle: BinaryIO, place: Place, crc32: str, where: str) -> torch.Tensor:
    import torch

    tensor = torch.empty(place.shape, dtype=getattr(torch, TORCH_NAMES[place.dtype]))
    view = tensor.reshape(-1).view(torch.uint8).numpy().data
    handle.seek(place.begin)
    if handle.readinto(view) != place.end - place.begin:  # type: ignore[attr-defined]
        raise CheckpointError(f"{where}: the file ends within the tensor")
    found = f"{zlib.crc32(view):08x}"
    if found != crc32:
        raise CheckpointError(f"{where}: CRC-32 is {found}, the manifest says {crc32}: the bytes were altered")
    return tensor
