"""Opens input files: regular files only, of bounded size."""

from __future__ import annotations

from pathlib import Path
from typing import BinaryIO

from .._common.document import MAX_DOCUMENT_BYTES, DocumentError, UnreadableError, open_regular, read_bytes
from .errors import CorruptError


def open_file(path: Path) -> BinaryIO:
    """Open a checkpoint file for reading; a FIFO or device is refused without blocking.

    Raises:
        CorruptError: the file does not exist, is not a regular file, or permissions forbid reading it.
    """
    try:
        return open_regular(path)
    except UnreadableError as error:
        raise CorruptError(f"{path}: cannot be read: {error.reason}") from error


def read_file(path: Path, max_bytes: int = MAX_DOCUMENT_BYTES) -> bytes:
    """The contents of a file of at most ``max_bytes`` bytes.

    Raises:
        CorruptError: as ``open_file``, or the file is larger.
    """
    try:
        return read_bytes(path, max_bytes)
    except UnreadableError as error:
        raise CorruptError(f"{path}: cannot be read: {error.reason}") from error
    except DocumentError as error:
        raise CorruptError(f"{path}: {error.problems[0].message}") from error
