"""Reads text files given on the command line: scripts, options, prompts, hostfiles.

A shell's process substitution (``explain-flags <(sed ... run.sh)``) and standard input are pipes under the name of a
descriptor. They are read up to the size limit of a file. A FIFO of another name is refused:
it may never have a writer.
"""

from __future__ import annotations

import os
import re
from pathlib import Path

from .._common.document import MAX_DOCUMENT_BYTES, DocumentError, Problem, UnreadableError, read_text

_DESCRIPTOR = re.compile(r"/(?:dev|proc/self)/fd/(\d{1,9})")


def read_input(path: Path, max_bytes: int = MAX_DOCUMENT_BYTES) -> str:
    """Return the text of a regular file, of ``/dev/stdin`` or of ``/dev/fd/N``; a descriptor can be read only once.

    Raises:
        UnreadableError: It cannot be read.
        DocumentError: It has more than ``max_bytes`` bytes, or is not UTF-8.
    """
    match = _DESCRIPTOR.fullmatch(str(path))
    if match is None and str(path) != "/dev/stdin":
        return read_text(path, max_bytes)
    try:
        with os.fdopen(os.dup(int(match[1]) if match else 0), "rb") as handle:
            payload = handle.read(max_bytes + 1)
    except OSError as error:
        raise UnreadableError(path, error) from error
    if len(payload) > max_bytes:
        raise DocumentError(str(path), [Problem("", "size", f"has more than {max_bytes:,} bytes, the limit")])
    try:
        return payload.decode()
    except UnicodeDecodeError as error:
        raise DocumentError(str(path), [Problem("", "encoding", f"is not UTF-8: {error}")]) from error
