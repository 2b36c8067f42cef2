"""Writes a native checkpoint atomically.

Every rank writes its files into one staging directory; rank 0 then adds the manifest and renames the directory. A crash
at any time leaves the older checkpoints and ``LATEST`` unchanged::

    new_staging   .step-00001000.tmp-1a2b3c4d/
    write_shard   .step-00001000.tmp-1a2b3c4d/*.safetensors   (every rank)
    commit        manifest.json, fsync, rename to step-00001000/, LATEST
"""

from __future__ import annotations

import os
import re
import secrets
import shutil
import zlib
from collections.abc import Mapping, Sequence
from io import RawIOBase
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..._common.crc32 import combine
from ..._common.document import DocumentError, read_word, sync_directory, write_whole
from ..._common.errors import UsageError
from ..._common.portable import allocate, drop_cached
from .document import manifest_problems, seal
from .shards import DTYPE_BYTES, TORCH_NAMES, decode_header, encode_header

if TYPE_CHECKING:
    import torch

STEP_NAME = re.compile(r"step-(\d{8,})")
_CHUNK_BYTES = 1 << 23
_CACHED_CHUNKS = 8


def step_name(step: int) -> str:
    """Return the name of a step's directory: ``step-00001000``."""
    return f"step-{step:08d}"


def new_staging(checkpoints_dir: Path, step: int) -> Path:
    """Create the directory that all ranks write the checkpoint after ``step`` into.

    Rank 0 calls this and broadcasts the name. The random part keeps the leftovers of a killed save apart.
    """
    staging = checkpoints_dir / f".{step_name(step)}.tmp-{secrets.token_hex(4)}"
    staging.mkdir(parents=True)
    return staging


def remove_stale_staging(checkpoints_dir: Path) -> list[str]:
    """Remove leftovers of an interrupted save or prune and return their names; rank 0 calls this at the start."""
    stale = sorted(checkpoints_dir.glob(".step-*.tmp-*")) + sorted(checkpoints_dir.glob(".step-*.old-*"))
    for path in stale:
        shutil.rmtree(path)
    return [path.name for path in stale]


def dtype_name(dtype: torch.dtype) -> str:
    """Return the safetensors name of a dtype: ``torch.float32`` is ``F32``.

    Raises:
        UsageError: The format has no such dtype.
    """
    names = {f"torch.{torch_name}": name for name, torch_name in TORCH_NAMES.items()}
    if str(dtype) not in names:
        raise UsageError(f"a tensor of dtype {dtype} cannot be stored; supported are {', '.join(names)}")
    return names[str(dtype)]


def write_shard(directory: Path, filename: str, tensors: Mapping[str, torch.Tensor]) -> dict[str, str]:
    """Write tensors to one safetensors file and flush it to disk; one tensor at a time is copied to the host.

    Args:
        directory: Staging directory.
        filename: Name of the file.
        tensors: Key -> tensor, of any shape, on any device.

    Returns:
        Key -> CRC-32 of the tensor's raw little-endian bytes, as 8 hexadecimal digits.

    Raises:
        UsageError: The format lacks the dtype of a tensor.
    """
    types = {key: dtype_name(tensor.dtype) for key, tensor in tensors.items()}
    order = sorted(tensors, key=lambda key: -DTYPE_BYTES[types[key]])
    header = encode_header([(key, types[key], tuple(tensors[key].shape)) for key in order])
    checksums = {}
    with open(directory / filename, "wb", buffering=0) as handle:
        allocate(handle.fileno(), 0, len(header) + sum(tensors[key].nbytes for key in order))
        handle.write(header)
        for key in order:
            checksums[key] = f"{_write_tensor(handle, tensors[key]):08x}"
        os.fsync(handle.fileno())
    return checksums


def _write_tensor(handle: RawIOBase, tensor: torch.Tensor) -> int:
    import torch

    flat = tensor.detach().to("cpu").contiguous().reshape(-1).view(torch.uint8).numpy()
    checksum = 0
    for begin in range(0, flat.size, _CHUNK_BYTES):
        chunk = flat[begin : begin + _CHUNK_BYTES].data
        checksum = zlib.crc32(chunk, checksum)
        while chunk:
            chunk = chunk[handle.write(chunk) :]
        _start_writeback(handle)
    return checksum


def _start_writeback(handle: RawIOBase) -> None:
    """Start the writeback of the last chunk, and drop the cached pages of earlier ones.

    Otherwise the flush at the end waits for all bytes, and each write touches new memory, which is slow.
    """
    end = handle.seek(0, os.SEEK_CUR)
    for back in (_CHUNK_BYTES, _CACHED_CHUNKS * _CHUNK_BYTES):
        begin = max(0, end - back)
        drop_cached(handle.fileno(), begin, min(_CHUNK_BYTES, end - begin))


def commit(checkpoints_dir: Path, step: int, staging: Path, manifest: Mapping[str, Any]) -> Path:
    """Make a staged checkpoint the run's latest one; rank 0 calls this after every rank has written its files.

    Adds ``files`` and the seal to the manifest, renames the directory to ``step-NNNNNNNN`` and replaces ``LATEST``. An
    existing checkpoint of the same step is replaced. Returns the new directory.

    Raises:
        DocumentError: The manifest does not describe the staged files; nothing is changed.
    """
    document = {**manifest, "files": _file_entries(staging, manifest)}
    problems = manifest_problems({**document, "manifest_crc32": "0" * 8})
    if problems:
        raise DocumentError(str(staging / "manifest.json"), problems)
    write_whole(staging / "manifest.json", seal(document))
    for directory in [path for path in staging.rglob("*") if path.is_dir()] + [staging]:
        sync_directory(directory)
    # A directory cannot be replaced in one rename. An old checkpoint of the same step is renamed first; a crash between
    # the two renames leaves the older steps, and the staged files are removed at the next start.
    target = checkpoints_dir / step_name(step)
    replaced = checkpoints_dir / f".{target.name}.old-{secrets.token_hex(4)}"
    if target.exists():
        target.rename(replaced)
    try:
        staging.rename(target)
    except OSError:
        if replaced.exists():
            replaced.rename(target)
        raise
    sync_directory(checkpoints_dir)
    # After the directory is on disk: ``LATEST`` never names a checkpoint that a power failure can remove.
    write_whole(checkpoints_dir / "LATEST", f"{target.name}\n".encode())
    sync_directory(checkpoints_dir)
    if replaced.exists():
        shutil.rmtree(replaced)
    return target


def _file_entries(staging: Path, manifest: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """Return size and CRC-32 of every staged file; a shard's is combined from those of its header and tensors."""
    checksums: dict[str, dict[str, int]] = {}
    for entry in manifest["tensors"].values():
        for shard in entry["shards"]:
            checksums.setdefault(shard["file"], {})[shard["key"]] = int(shard["crc32"], 16)
    entries = {}
    for path in sorted(path for path in staging.rglob("*") if path.is_file()):
        name = path.relative_to(staging).as_posix()
        found = _shard_checksum(path, checksums[name]) if name in checksums else zlib.crc32(path.read_bytes())
        entries[name] = {"bytes": path.stat().st_size, "crc32": f"{found:08x}"}
    return entries


def _shard_checksum(path: Path, checksums: Mapping[str, int]) -> int:
    size = path.stat().st_size
    with open(path, "rb") as handle:
        length = handle.read(8)
        text = handle.read(int.from_bytes(length, "little"))
    places = decode_header(length, text, size)
    if set(places) != set(checksums):
        unlike = ", ".join(sorted(set(places) ^ set(checksums))[:5])
        raise UsageError(f"{path}: the tensors of the file and of the manifest differ: {unlike}")
    total = zlib.crc32(length + text)
    for key, place in sorted(places.items(), key=lambda item: item[1].begin):
        total = combine(total, checksums[key], place.end - place.begin)
    return total


def read_latest(folder: Path) -> str:
    """Return the step's name in ``LATEST``; empty where the file is missing, unreadable or too long."""
    try:
        return read_word(folder / "LATEST")
    except DocumentError:
        return ""


def prune(checkpoints_dir: Path, keep: int) -> list[str]:
    """Remove all but the newest ``keep`` checkpoints, but never all; return the names of the removed ones.

    Checkpoints of the active branch, which ends at ``LATEST``, are kept first. Those of branches that a resume from an
    earlier step abandoned stay only where the active branch has fewer than ``keep``. Each checkpoint is renamed before
    it is removed, so that an interrupted removal leaves no incomplete checkpoint.
    """
    steps = [path for path in checkpoints_dir.iterdir() if STEP_NAME.fullmatch(path.name)]
    active = _active_branch(steps, read_latest(checkpoints_dir))
    steps.sort(key=lambda path: (path in active, _step_number(path)))
    removed = steps[: max(0, len(steps) - max(keep, 1))]
    for path in removed:
        aside = path.with_name(f".{path.name}.old-{secrets.token_hex(4)}")
        path.rename(aside)
        shutil.rmtree(aside)
    return [path.name for path in removed]


def _active_branch(steps: Sequence[Path], named: str) -> set[Path]:
    """Return the checkpoints that led to the one in ``LATEST``; all where it names none of them.

    A checkpoint that was written after one of a higher step is of a run that resumed before that step: the higher one
    is abandoned. Times are those of the manifests, which a rename does not change.
    """
    last = next((_step_number(path) for path in steps if path.name == named), None)
    if last is None:
        return set(steps)
    branch: list[Path] = []
    for path in sorted(steps, key=lambda path: (path.name == named, _written_ns(path), _step_number(path))):
        while branch and _step_number(branch[-1]) > _step_number(path):
            branch.pop()
        branch.append(path)
    return {path for path in branch if _step_number(path) <= last}


def _written_ns(path: Path) -> int:
    try:
        return (path / "manifest.json").stat().st_mtime_ns
    except OSError:
        return 0


def _step_number(path: Path) -> int:
    return int(path.name.removeprefix("step-"))
