"""Copies the files of a checkpoint directory unchanged, between local paths and addresses.

Each file becomes one tensor of bytes, so that the copy uses the plan, the checksums and the atomic outputs of a
conversion. A native checkpoint is copied against the checksums of its manifest.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from .._common.console import print_message
from .._common.document import MAX_TABLE_BYTES
from .._common.errors import UsageError
from ..converters.registry import detect
from ..io.errors import CorruptError, UnsupportedError, short_name
from ..io.files import check_link, open_file, read_file
from ..io.safetensors import StoredArray
from ..io.uploads import is_marker
from ..io.urls import is_plain_name
from ..native.checkpoint import find_checkpoint, load_manifest
from ..tensors.copy_plan import ExportPlan, OutputTensor
from ..tensors.views import as_tensor
from .verify import MANIFEST
from .write import WriteSettings, write_plan


@dataclass(frozen=True, kw_only=True)
class CopiedFile:
    """A file whose bytes are copied; ``tensors`` has one, or none for an empty file."""

    name: str
    tensors: tuple[OutputTensor, ...]

    @property
    def offsets(self) -> list[int]:
        """See ``Writable``."""
        return [0] * len(self.tensors)

    @property
    def num_bytes(self) -> int:
        """See ``Writable``."""
        return sum(tensor.num_bytes for tensor in self.tensors)

    @property
    def index(self) -> dict[str, tuple[int, int]]:
        """See ``Writable``."""
        return {tensor.key: (0, tensor.num_bytes) for tensor in self.tensors}

    def other_bytes(self, checksums: Sequence[int]) -> list[tuple[int, bytes]]:
        """See ``Writable``; there are none."""
        del checksums
        return []

    def read_index(self, path: Path) -> dict[str, tuple[int, int]]:
        """See ``Writable``: the size is compared elsewhere, and the bytes while they are written."""
        del path
        return self.index


def copy_checkpoint(source: Path, target: Path, *, step: int | None, settings: WriteSettings) -> None:
    """Copy a checkpoint directory of any format.

    Args:
        source: a checkpoint; of a native run, one step is copied.
        target: the new directory.
        step: the step of a native run; None: the latest one.
        settings: how to write.

    Raises:
        UsageError: ``target`` exists, or overlaps the input; or the step is missing.
        CorruptError: no checkpoint, or the bytes of a native one do not have their recorded checksums.
        StorageError: no space or permission, or the written bytes read back differently.
    """
    recorded: Mapping[str, Any] = {}
    directory = source
    if is_native := detect(source).name == "native":
        directory, remarks = find_checkpoint(source, step)
        for remark in remarks:
            print_message(remark)
        recorded = load_manifest(directory)["files"]
    elif step is not None:
        raise UsageError(f"{source}: --step selects a step of a native run; give the directory of the checkpoint")
    paths = [directory / name for name in recorded] if is_native else list(checkpoint_files(directory))
    found = {path.relative_to(directory).as_posix(): path for path in paths}
    # Programs find a model by these, so they are written when everything else is there.
    small = {name: read_file(path, MAX_TABLE_BYTES) for name, path in found.items() if is_marker(name)}
    files = tuple(copied_file(directory, name, recorded.get(name)) for name in found if name not in small)
    final = {MANIFEST: read_file(directory / MANIFEST, MAX_TABLE_BYTES)} if is_native else {}
    plan = ExportPlan(
        files=files, small_files=small, decisions={"files": len(found) + len(final)}, finish=lambda *_: final
    )
    write_plan(directory, target, plan, small, replace(settings, logits=None))


def checkpoint_files(directory: Path) -> Iterator[Path]:
    """The files below a directory, in order of their names.

    Raises:
        UnsupportedError: a link to a directory, or a name that another system may not have.
        UsageError: ``directory`` is a file.
    """
    if directory.is_file():
        raise UsageError(f"{directory}: is a file; copy it with another program")
    for path in sorted(directory.rglob("*")):
        if path.is_dir():
            if path.is_symlink():
                raise UnsupportedError(f"{path}: is a link to a directory; copy that directory")
            continue
        check_link(path, directory)
        if not all(map(is_plain_name, path.relative_to(directory).parts)):
            raise UnsupportedError(f"{directory}: the name {short_name(path.name)} cannot be copied; rename the file")
        yield path


def copied_file(directory: Path, name: str, recorded: Mapping[str, Any] | None) -> CopiedFile:
    """A file to copy.

    Args:
        directory: the input.
        name: path of the file in it.
        recorded: number of bytes and CRC-32 in the manifest; None where there is none.

    Raises:
        CorruptError: the file is missing, or has another size than recorded.
    """
    path = directory / name
    with open_file(path) as handle:
        size = handle.seek(0, os.SEEK_END)
    if recorded is not None and size != recorded["bytes"]:
        raise CorruptError(f"{path}: has {size} bytes; the manifest records {recorded['bytes']}")
    crc32 = None if recorded is None else int(recorded["crc32"], 16)
    stored = StoredArray(path=path, key=name, dtype="U8", shape=(size,), offset=0, crc32=crc32)
    tensors = (OutputTensor(key=name, shape=(size,), content=as_tensor(stored)),) if size else ()
    return CopiedFile(name=name, tensors=tensors)
