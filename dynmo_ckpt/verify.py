"""Checks of what lies on disk; each function yields findings, one sentence each, and nothing when all is well."""

from __future__ import annotations

import os
import zlib
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .console import Tick
from .execute import Written
from .faults import CorruptError
from .io.crc32 import combine
from .io.safetensors import Index, StoredArray, read_index
from .io.torchfile import open_torch
from .native import (
    STEP_NAME,
    NativeCheckpoint,
    checkpoints_dir,
    find_checkpoint,
    open_native,
    read_latest,
    unclaimed_keys,
)

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


def written_findings(directory: Path, written: Mapping[str, Written], tick: Tick) -> Iterator[str]:
    """Read back what was just written, through the index of each file, and compare with what was meant."""
    for name, meant in written.items():
        path = directory / name
        if path.suffix == ".pt":
            sums = FileSums(crc32=stream_crc32(path), arrays=array_sums(path, open_torch(path).storages.values()))
        else:
            sums = stream_sums(path, read_index(path))
        if dict(sums.arrays) != dict(meant.tensors):
            unlike = sorted(k for k in {*sums.arrays, *meant.tensors} if sums.arrays.get(k) != meant.tensors.get(k))
            yield f"{path}: read back otherwise than written: {', '.join(unlike[:5])}"
        elif sums.crc32 != meant.crc32:
            yield f"{path}: read back otherwise than written"
        tick(meant.num_bytes / 1e6, name)
