"""Verifies a checkpoint of any format; each finding is a sentence, and an intact checkpoint has none.

A native checkpoint is verified against its manifest, other formats against the checksums of their containers. The same
checks run on new files before they are renamed into place.
"""

from __future__ import annotations

import io
import os
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, cast

from .._common.console import Tick, progress
from .._common.crc32 import combine
from ..converters.registry import check_options, detect, open_checkpoint
from ..formats.choices import ReadOptions, VerifyLevel
from ..io.computed import stored_inputs
from ..io.errors import CorruptError, StorageError, short_name, short_names
from ..io.files import open_file
from ..io.remote import HUB, REPOSITORY_FILES, RemotePath
from ..io.safetensors import Index, StoredArray, read_index
from ..native.checkpoint import (
    STEP_NAME,
    NativeCheckpoint,
    checkpoints_dir,
    find_checkpoint,
    latest_problems,
    open_native,
    read_latest,
    unclaimed_keys,
)
from ..tensors.copy_plan import Writable, WrittenFile
from ..torch_save.reader import open_torch

MANIFEST = "manifest.json"
_CHUNK_BYTES = 1 << 20
_JOBS = min(2, os.cpu_count() or 1)


@dataclass(frozen=True, kw_only=True)
class FileSums:
    """CRC-32 of a safetensors file and of each of its arrays by key, computed in one pass."""

    crc32: int
    arrays: Mapping[str, int]


def directory_to_verify(path: Path, step: int | None) -> Path:
    """The checkpoint directory of ``path``, even if it is incomplete: that is a finding, not an error.

    Args:
        path: a run directory, its ``checkpoints``, or one checkpoint.
        step: the step; None: the one that ``LATEST`` names, else the newest complete one.
    """
    if STEP_NAME.fullmatch(path.name) and path.is_dir():
        return path
    if step is None and not (path / "manifest.json").exists() and path.is_dir():
        folder = checkpoints_dir(path)
        latest = read_latest(folder)
        if STEP_NAME.fullmatch(latest) and (folder / latest).is_dir():
            return folder / latest
    return find_checkpoint(path, step)[0]


def header_findings(directory: Path) -> Iterator[str]:
    """Findings in the manifest, the presence and sizes of files, and the headers of the shards."""
    try:
        checkpoint = open_native(directory)
    except CorruptError as error:
        yield str(error)
        return
    name, step = STEP_NAME.fullmatch(directory.resolve().name), checkpoint.manifest["step"]
    if name and int(name[1]) != step:
        yield f"{directory}: the manifest is of step {step}; the directory was renamed, or its files come from another"
    yield from _file_findings(checkpoint)
    for key in unclaimed_keys(checkpoint):
        yield f"{key}: the manifest does not name it"


def _file_findings(checkpoint: NativeCheckpoint) -> Iterator[str]:
    directory, files = checkpoint.directory, checkpoint.manifest["files"]
    for name, entry in files.items():
        path = directory / name
        if not path.is_file():
            yield f"{path}: is missing"
        elif path.stat().st_size != entry["bytes"]:
            yield f"{path}: has {path.stat().st_size} bytes; the manifest records {entry['bytes']}"
    others = REPOSITORY_FILES if isinstance(directory, RemotePath) and directory.scheme == HUB else ()
    for path in sorted(directory.rglob("*")):
        name = path.relative_to(directory).as_posix()
        if not path.is_dir() and name not in files and name not in (MANIFEST, *others):
            yield f"{path}: the manifest does not name it"


def full_findings(directory: Path, tick: Tick) -> Iterator[str]:
    """All of :func:`header_findings`, then the checksum of each file and of each shard of a tensor."""
    found = list(header_findings(directory))
    yield from found
    # Checksums of files with wrong sizes or headers would repeat the same findings.
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
                    yield (
                        f"{path}: {short_name(tensor)}: CRC-32 is {sums.arrays[key]:08x}; the manifest records {crc32}"
                    )
            crc = sums.crc32
        else:
            crc = stream_crc32(path)
        if f"{crc:08x}" != entry["crc32"]:
            yield f"{path}: CRC-32 of the file is {crc:08x}; the manifest records {entry['crc32']}"
        tick(entry["bytes"] / 1e6, name)


def _shards_by_file(manifest: Mapping[str, Any]) -> dict[str, dict[str, tuple[str, str]]]:
    shards: dict[str, dict[str, tuple[str, str]]] = {}
    for name, entry in manifest["tensors"].items():
        for shard in entry["shards"]:
            shards.setdefault(shard["file"], {})[shard["key"]] = (name, shard["crc32"])
    return shards


def stream_crc32(path: Path, begin: int = 0, num_bytes: int | None = None) -> int:
    """CRC-32 of a range of a file.

    Args:
        path: the file.
        begin: offset of the first byte.
        num_bytes: number of bytes; None: to the end of the file.

    Raises:
        CorruptError: the file ends within the range.
    """
    buffer = bytearray(_CHUNK_BYTES)
    remaining = path.stat().st_size - begin if num_bytes is None else num_bytes
    checksum = 0
    with open_file(path) as handle:
        handle.seek(begin)
        while remaining:
            got = cast("io.BufferedReader", handle).readinto(memoryview(buffer)[: min(remaining, _CHUNK_BYTES)])
            if not got:
                raise CorruptError(f"{path}: ends {remaining} bytes early")
            checksum = zlib.crc32(memoryview(buffer)[:got], checksum)
            remaining -= got
    return checksum


def stream_sums(path: Path, index: Index) -> FileSums:
    """CRC-32 of a safetensors file and of each of its arrays, in one pass.

    Raises:
        CorruptError: the file ends within an array.
    """
    arrays = array_sums(path, index.arrays.values())
    # The header and the arrays are the complete file, so its CRC-32 follows without a second read.
    total = zlib.crc32(index.header)
    for key, array in index.arrays.items():
        total = combine(total, arrays[key], array.num_bytes)
    return FileSums(crc32=total, arrays=arrays)


def array_sums(path: Path, arrays: Iterable[StoredArray]) -> dict[str, int]:
    """CRC-32 of the arrays of a file by key. Threads overlap reading with zlib, which releases the GIL.

    Raises:
        CorruptError: the file ends within an array.
    """
    listed = list(arrays)
    with ThreadPoolExecutor(max_workers=_JOBS) as pool:
        sums = pool.map(lambda array: stream_crc32(path, array.offset, array.num_bytes), listed)
        return {array.key: crc32 for array, crc32 in zip(listed, sums, strict=True)}


def written_findings(directory: Path, files: Sequence[Writable], written: Mapping[str, WrittenFile]) -> Iterator[str]:
    """Findings in files that were just written.

    The bytes of tensors were read back while they were written. Here each tensor must have the planned offset in the
    index that a reader sees, and all other bytes must be as planned.
    """
    for file in files:
        path, sums = directory / file.name, written[file.name]
        found, planned = file.read_index(path), file.index
        if found != planned:
            unlike = sorted(key for key in {*found, *planned} if found.get(key) != planned.get(key))
            yield f"{path}: its index has other offsets than planned: {short_names(unlike)}"
        with open_file(path) as handle:
            for offset, payload in file.other_bytes([sums.tensors[tensor.key] for tensor in file.tensors]):
                handle.seek(offset)
                if handle.read(len(payload)) != payload:
                    yield f"{path}: {len(payload)} bytes at {offset} read back differently"
        if path.stat().st_size != file.num_bytes:
            yield f"{path}: has {path.stat().st_size} bytes; expected {file.num_bytes}"


def small_findings(directory: Path, payloads: Mapping[str, bytes]) -> Iterator[str]:
    """Findings in small files that were just written."""
    for name, payload in payloads.items():
        if (directory / name).read_bytes() != payload:
            yield f"{directory / name}: reads back differently"


def refuse_findings(findings: Iterable[str]) -> None:
    """Refuse what was just written, if it has findings.

    Raises:
        StorageError: it has.
    """
    found: list[str] = []
    try:
        found.extend(findings)
    except CorruptError as error:  # in what was just written: the disk is at fault, not the input
        found.append(str(error))
    if found:
        raise StorageError("\n  ".join(["the written files read back differently; no output was kept", *found]))


def verify_checkpoint(path: Path, read: ReadOptions, level: VerifyLevel) -> tuple[Path, list[str], list[str]]:
    """Verify a checkpoint.

    Args:
        path: the input.
        read: how to read it.
        level: how much to check.

    Returns:
        The verified directory, the findings, and remarks for the user.

    Raises:
        CorruptError: no checkpoint at all.
        UnsafePickleError: a pickle refers to more than plain data.
        UnsupportedError: a model or tensor that cannot be mapped.
        UsageError: the step is missing.
    """
    try:
        found = detect(path)
    except CorruptError as unknown:
        try:
            return _verify_native(path, read.step, level)  # a checkpoint without a manifest: reports every finding
        except CorruptError:
            raise unknown from None
    if found.name == "native":
        check_options(path, found, read)
        return _verify_native(path, read.step, level)
    options = replace(read, headers_only=level is VerifyLevel.HEADER)
    try:
        checkpoint, remarks = open_checkpoint(path, found.name, options)
        arrays = _stored_arrays(checkpoint) if level is VerifyLevel.FULL else []
        with progress("verify", sum(array.num_bytes for array in arrays) / 1e6, "MB") as tick:
            findings = list(_array_findings(arrays, tick))
    except CorruptError as error:
        return path, [str(error)], []
    unchecked = sum(array.crc32 is None for array in arrays)
    if unchecked:
        remarks = [*remarks, f"{unchecked} of {len(arrays)} arrays have no recorded checksum; they were only read"]
    return path, findings, remarks


def _verify_native(path: Path, step: int | None, level: VerifyLevel) -> tuple[Path, list[str], list[str]]:
    directory = directory_to_verify(path, step)
    findings = [] if directory == path or step is not None else latest_problems(checkpoints_dir(path))
    if level is not VerifyLevel.FULL:  # a native checkpoint has no replicas
        return directory, [*findings, *header_findings(directory)], []
    sizes = [file.stat().st_size for file in directory.rglob("*") if file.is_file()]
    with progress("verify", sum(sizes) / 1e6, "MB") as tick:
        return directory, [*findings, *full_findings(directory, tick)], []


def _stored_arrays(checkpoint: NativeCheckpoint) -> list[StoredArray]:
    """Every stored array of the files with the tensors of a checkpoint; of torch's files also the optimizer state."""
    pieces = (piece for tensor in checkpoint.tensors.values() for piece in tensor.pieces)
    arrays = dict.fromkeys(stored for piece in pieces for stored in stored_inputs(piece.view.array))
    folders = dict.fromkeys(array.path.parent for array in arrays if array.path.suffix == ".pt")
    # Optimizer state may be in files next to the weights (distrib_optim.pt, zero_pp_rank_*).
    files = [path for folder in folders for path in sorted(folder.glob("*.pt"))]
    stored = [array for path in files for array in open_torch(path).storages.values()]
    return stored + [array for array in arrays if array.path not in files]


def _array_findings(arrays: list[StoredArray], tick: Tick) -> Iterator[str]:
    for array in arrays:
        found = stream_crc32(array.path, array.offset, array.num_bytes)
        if array.crc32 is not None and found != array.crc32:
            yield f"{array.path}: {short_name(array.key)}: CRC-32 is {found:08x}; the file records {array.crc32:08x}"
        tick(array.num_bytes / 1e6, array.key)
