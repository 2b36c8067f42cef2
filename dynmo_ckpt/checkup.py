"""Looks a checkpoint of any format over: ours by its manifest, others by what their containers tell."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from ._common.console import Tick, progress
from .faults import CorruptError
from .io.safetensors import StoredArray
from .io.torchfile import open_torch
from .legacy import LegacyOptions
from .native import NativeCheckpoint, checkpoints_dir, latest_faults
from .options import Level, SourceKind
from .sources import detect, open_any
from .verify import directory_to_verify, full_findings, header_findings, stream_crc32


def look_over(
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
            return _native(path, step, level)  # one of ours without a manifest is told of fault by fault
        except CorruptError:
            raise unknown from None
    if kind is SourceKind.NATIVE:
        return _native(path, step, level)
    options = LegacyOptions(look_only=level is Level.HEADER, ignore_config=ignored)
    try:
        checkpoint, remarks = open_any(path, kind, step, legacy=options)
        arrays = _arrays(checkpoint) if level is Level.FULL else []
        with progress("verify", sum(array.num_bytes for array in arrays) / 1e6, "MB") as tick:
            findings = list(_array_findings(arrays, tick))
    except CorruptError as error:
        return path, [str(error)], []
    bare = sum(array.crc32 is None for array in arrays)
    if bare:
        remarks = [*remarks, f"{bare} of {len(arrays)} arrays have no checksum to compare; they were read to their end"]
    return path, findings, remarks


def _native(path: Path, step: int | None, level: Level) -> tuple[Path, list[str], list[str]]:
    directory = directory_to_verify(path, step)
    findings = [] if directory == path or step is not None else latest_faults(checkpoints_dir(path))
    if level is not Level.FULL:  # nothing is stored twice in one of ours
        return directory, [*findings, *header_findings(directory)], []
    sizes = [file.stat().st_size for file in directory.rglob("*") if file.is_file()]
    with progress("verify", sum(sizes) / 1e6, "MB") as tick:
        return directory, [*findings, *full_findings(directory, tick)], []


def _arrays(checkpoint: NativeCheckpoint) -> list[StoredArray]:
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
