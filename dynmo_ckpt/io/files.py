"""Opens input files: regular files of a disk, or objects of a store, of bounded size."""

from __future__ import annotations

import os
from pathlib import Path
from typing import BinaryIO

from .._common.document import (
    MAX_DOCUMENT_BYTES,
    MAX_WORD_BYTES,
    DocumentError,
    UnreadableError,
    open_regular,
    read_bytes,
)
from .._common.errors import UsageError
from .errors import CorruptError
from .remote import RemotePath, open_remote, read_remote

LFS_POINTER = b"version https://git-lfs.github.com/spec/"
MAX_POINTER_BYTES = 1024


def open_file(path: Path) -> BinaryIO:
    """Open a checkpoint file for reading; a FIFO or device is refused without blocking.

    Raises:
        CorruptError: the file does not exist, is not a regular file, or permissions forbid reading it.
        StorageError: an object store cannot be reached or denies access.
    """
    if isinstance(path, RemotePath):
        return open_remote(path)
    try:
        handle = open_regular(path)
    except UnreadableError as error:
        raise CorruptError(f"{path}: {_unreadable(path, error.reason)}") from error
    if os.fstat(handle.fileno()).st_size <= MAX_POINTER_BYTES:
        try:
            check_pointer(path, handle.read(len(LFS_POINTER)))
        except BaseException:
            handle.close()
            raise
        handle.seek(0)
    return handle


def check_pointer(path: Path, payload: bytes) -> None:
    """Refuse what Git has in place of a large file.

    Args:
        path: the file, for messages.
        payload: its first bytes.

    Raises:
        CorruptError: they are those of a pointer of Git LFS.
    """
    if payload.startswith(LFS_POINTER):
        raise CorruptError(
            f"{path}: is a pointer of Git LFS, without the contents; fetch them with `git lfs pull`, or download the "
            "file again"
        )


def _unreadable(path: Path, reason: str) -> str:
    if path.is_symlink() and not path.exists():
        return f"is a link to {path.readlink()}, which is missing; download the file again"
    return f"cannot be read: {reason}"


def read_file(path: Path, max_bytes: int = MAX_DOCUMENT_BYTES) -> bytes:
    """The contents of a file of at most ``max_bytes`` bytes.

    Raises:
        CorruptError: as ``open_file``, or the file is larger.
        StorageError: as ``open_file``.
    """
    if isinstance(path, RemotePath):
        return read_remote(path, max_bytes)
    try:
        payload = read_bytes(path, max_bytes)
    except UnreadableError as error:
        raise CorruptError(f"{path}: {_unreadable(path, error.reason)}") from error
    except DocumentError as error:
        raise CorruptError(f"{path}: {error.problems[0].message}") from error
    check_pointer(path, payload)
    return payload


def check_link(path: Path, directory: Path) -> None:
    """Refuse a file of a directory that is a link out of it: the output would have the contents of any file.

    Snapshots of the hub's cache link to the ``blobs`` next to them.

    Raises:
        UsageError: the file is such a link.
    """
    if isinstance(path, RemotePath) or not path.is_symlink():
        return
    place, target = directory.resolve(), path.resolve()
    roots = [place, *([place.parents[1] / "blobs"] if place.parent.name == "snapshots" else [])]
    if not any(target.is_relative_to(root) for root in roots):
        raise UsageError(f"{path}: is a link to {target}, out of its directory; copy the file there")


def read_tracker(path: Path) -> str:
    """The contents of a file that names a checkpoint, as they are.

    Raises:
        UnreadableError: a local file cannot be read.
        DocumentError: a local file is longer than a name.
        CorruptError: the same of an object.
    """
    payload = read_remote(path, MAX_WORD_BYTES) if isinstance(path, RemotePath) else read_bytes(path, MAX_WORD_BYTES)
    return payload.decode(errors="replace")
