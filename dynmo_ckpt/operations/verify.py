"""Verification of a checkpoint of any format; findings are sentences, none means that the checkpoint is intact.

A native checkpoint is verified against its manifest, other formats against what their containers record. The same
checks run on files that were just written, before they are moved into place.
"""

from __future__ import annotations

import os
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .._common.console import Tick, progress
from .._common.crc32 import combine
from ..errors import CorruptError
from ..formats.choices import Level, SourceKind
from ..io.safetensors import Index, StoredArray, read_index
from ..megatron.read import LegacyOptions
from ..native.checkpoint import (
    STEP_NAME,
    NativeCheckpoint,
    checkpoints_dir,
    find_checkpoint,
    latest_faults,
    open_native,
    read_latest,
    unclaimed_keys,
)
from ..readers.detect import detect, open_any
from ..tensors.copy_plan import Writable
from ..tensors.execute import Written
from ..torch_save.reader import open_torch
from ..torch_save.writer import JoinedTorchFiles

_CHUNK_BYTES = 1 << 20
_JOBS = min(2, os.cpu_count() or 1)


@dataclass(frozen=True, kw_only=True)
class FileSums:
    """Checksums of a safetensors file, read once from end to end."""

    crc32: int
    arrays: Mapping[str, int]


def directory_to_verify(path: Path, step: int | None) -> Path:
    """The directory that ``path`` means even if it is not complete, for that is what is to be found."""
    if STEP_NAME.fullmatch(path.name) and path.is_dir():
        return path
    if step is None and not (path / "manifest.json").exists() and path.is_dir():
        folder = checkpoints_dir(path)
        named = read_latest(folder)
        if STEP_NAME.fullmatch(named) and (folder / named).is_dir():
            return folder / named
    return find_checkpoint(path, step)[0]


def header_findings(directory: Path) -> Iterator[str]:
    """The manifest, the presence and size of every file, the headers of the shards, and nothing beyond them."""
    try:
        checkpoint = open_native(directory)
    except CorruptError as error:
        yield str(error)
        return
    yield from _file_findings(checkpoint)
    for key in unclaimed_keys(checkpoint):
        yield f"{key}: the manifest names it nowhere"


def _file_findings(checkpoint: NativeCheckpoint) -> Iterator[str]:
    directory, files = checkpoint.directory, checkpoint.manifest["files"]
    for name, entry in files.items():
        path = directory / name
        if not path.is_file():
            yield f"{path}: is missing"
        elif path.stat().st_size != entry["bytes"]:
            yield f"{path}: has {path.stat().st_size} bytes, the manifest says {entry['bytes']}"
    for path in sorted(directory.rglob("*")):
        name = path.relative_to(directory).as_posix()
        if not path.is_dir() and name not in files and name != "manifest.json":
            yield f"{path}: the manifest does not name it"


def full_findings(directory: Path, tick: Tick) -> Iterator[str]:
    """All of :func:`header_findings`, then every byte: the checksum of each file and of each shard of a tensor."""
    found = list(header_findings(directory))
    yield from found
    if found:
        return
    manifest = open_native(directory).manifest
    shards = _shards_by_file(manifest)
    for name, entry in manifest["files"].items():
        path = directory / name
        if name in shards:
            index = read_index(path)
            sums = stream_sums(path, index)
            for key, (tensor, crc32) in shards[name].items():
                if f"{sums.arrays[key]:08x}" != crc32:
                    yield f"{path}: {tensor}: CRC-32 is {sums.arrays[key]:08x}, the manifest says {crc32}"
            crc = sums.crc32
        else:
            crc = stream_crc32(path)
        if f"{crc:08x}" != entry["crc32"]:
            yield f"{path}: CRC-32 of the file is {crc:08x}, the manifest says {entry['crc32']}"
        tick(entry["bytes"] / 1e6, name)


def _shards_by_file(manifest: Mapping[str, Any]) -> dict[str, dict[str, tuple[str, str]]]:
    shards: dict[str, dict[str, tuple[str, str]]] = {}
    for name, entry in manifest["tensors"].items():
        for shard in entry["shards"]:
            shards.setdefault(shard["file"], {})[shard["key"]] = (name, shard["crc32"])
    return shards


def stream_crc32(path: Path, begin: int = 0, num_bytes: int | None = None) -> int:
    """CRC-32 of a part of a file, or of all of it."""
    buffer = bytearray(_CHUNK_BYTES)
    left = path.stat().st_size - begin if num_bytes is None else num_bytes
    checksum = 0
    with open(path, "rb", buffering=0) as handle:
        handle.seek(begin)
        while left:
            got = handle.readinto(memoryview(buffer)[: min(left, _CHUNK_BYTES)])
            if not got:
                raise CorruptError(f"{path}: ends {left} bytes early")
            checksum = zlib.crc32(memoryview(buffer)[:got], checksum)
            left -= got
    return checksum


def stream_sums(path: Path, index: Index) -> FileSums:
    """Checksums of every array of a safetensors file and of the file, in one pass."""
    arrays = array_sums(path, index.arrays.values())
    total = zlib.crc32(index.header)
    for key, array in index.arrays.items():
        total = combine(total, arrays[key], array.num_bytes)
    return FileSums(crc32=total, arrays=arrays)


def array_sums(path: Path, arrays: Iterable[StoredArray]) -> dict[str, int]:
    """Checksums of the arrays of a file by key; a few threads share them, for reading and summing go side by side."""
    listed = list(arrays)
    with ThreadPoolExecutor(max_workers=_JOBS) as pool:
        sums = pool.map(lambda array: stream_crc32(path, array.offset, array.num_bytes), listed)
        return {array.key: crc32 for array, crc32 in zip(listed, sums, strict=True)}


def written_findings(directory: Path, files: Sequence[Writable], written: Mapping[str, Written]) -> Iterator[str]:
    """Look at what was just written through the index of each file, as any reader would.

    The tensors' bytes were read back while they were written; here every tensor must lie where they were, and every
    other byte must be the one that was meant.
    """
    for file in files:
        path, meant = directory / file.name, written[file.name]
        found = {key: (array.offset, array.num_bytes) for key, array in _indexed(path, file)}
        planned = file.index
        if found != planned:
            unlike = sorted(key for key in {*found, *planned} if found.get(key) != planned.get(key))
            yield f"{path}: its index says other places than were written: {', '.join(unlike[:5])}"
        with open(path, "rb") as handle:
            for offset, payload in file.other_bytes([meant.tensors[tensor.key] for tensor in file.tensors]):
                handle.seek(offset)
                if handle.read(len(payload)) != payload:
                    yield f"{path}: {len(payload)} bytes at {offset} were read back otherwise than written"
        if path.stat().st_size != file.num_bytes:
            yield f"{path}: has {path.stat().st_size} bytes, {file.num_bytes} were meant"


def _indexed(path: Path, file: Writable) -> Iterator[tuple[str, StoredArray]]:
    """The stored arrays of a file by the keys of ``file.index``."""
    if isinstance(file, JoinedTorchFiles):
        for begin, part in zip(file.begins, file.parts, strict=True):
            for array in open_torch(path, begin, part.num_bytes).storages.values():
                yield f"{begin}:{array.key}", array
        return
    arrays = open_torch(path).storages if path.suffix == ".pt" else read_index(path).arrays
    yield from ((array.key, array) for array in arrays.values())


def small_findings(directory: Path, payloads: Mapping[str, bytes]) -> Iterator[str]:
    """Read small files back."""
    for name, payload in payloads.items():
        if (directory / name).read_bytes() != payload:
            yield f"{directory / name}: read back otherwise than written"


def verify_checkpoint(
    path: Path, step: int | None, level: Level, ignored: tuple[str, ...] = ()
) -> tuple[Path, list[str], list[str]]:
    """What was looked at, what is wrong with it, and remarks for a person.

    Settings of the model that fit a shell pattern of ``ignored`` are left out without a check.

    Raises:
        CorruptError: there is no checkpoint at all.
        UnsafePickleError, UnsupportedError, UsageError: as where it is opened.
    """
    try:
        kind = detect(path)
    except CorruptError as unknown:
        try:
            return _verify_native(path, step, level)  # also without a manifest: its report lists every fault
        except CorruptError:
            raise unknown from None
    if kind is SourceKind.NATIVE:
        return _verify_native(path, step, level)
    options = LegacyOptions(look_only=level is Level.HEADER, ignore_config=ignored)
    try:
        checkpoint, remarks = open_any(path, kind, step, legacy=options)
        arrays = _stored_arrays(checkpoint) if level is Level.FULL else []
        with progress("verify", sum(array.num_bytes for array in arrays) / 1e6, "MB") as tick:
            findings = list(_array_findings(arrays, tick))
    except CorruptError as error:
        return path, [str(error)], []
    bare = sum(array.crc32 is None for array in arrays)
    if bare:
        remarks = [*remarks, f"{bare} of {len(arrays)} arrays have no checksum to compare; they were read to their end"]
    return path, findings, remarks


def _verify_native(path: Path, step: int | None, level: Level) -> tuple[Path, list[str], list[str]]:
    directory = directory_to_verify(path, step)
    findings = [] if directory == path or step is not None else latest_faults(checkpoints_dir(path))
    if level is not Level.FULL:  # nothing is stored twice in one of ours
        return directory, [*findings, *header_findings(directory)], []
    sizes = [file.stat().st_size for file in directory.rglob("*") if file.is_file()]
    with progress("verify", sum(sizes) / 1e6, "MB") as tick:
        return directory, [*findings, *full_findings(directory, tick)], []


def _stored_arrays(checkpoint: NativeCheckpoint) -> list[StoredArray]:
    """Every stored array of the files that hold a checkpoint's tensors; of torch's, optimizer state as well."""
    pieces = (piece for tensor in checkpoint.tensors.values() for piece in tensor.pieces)
    arrays = dict.fromkeys(piece.view.array for piece in pieces)
    folders = dict.fromkeys(array.path.parent for array in arrays if array.path.suffix == ".pt")
    files = [path for folder in folders for path in sorted(folder.glob("*.pt"))]
    stored = [array for path in files for array in open_torch(path).storages.values()]
    return stored + [array for array in arrays if array.path not in files]


def _array_findings(arrays: list[StoredArray], tick: Tick) -> Iterator[str]:
    for array in arrays:
        found = stream_crc32(array.path, array.offset, array.num_bytes)
        if array.crc32 is not None and found != array.crc32:
            yield f"{array.path}: {array.key}: CRC-32 is {found:08x}, the file says {array.crc32:08x}"
        tick(array.num_bytes / 1e6, array.key)
