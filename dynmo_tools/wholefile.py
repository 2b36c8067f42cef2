"""A file of any size that takes its name only when it is complete."""

from __future__ import annotations

import contextlib
import glob
import io
import os
from collections.abc import Iterator
from pathlib import Path
from typing import IO


def sweep_temporaries(path: Path) -> None:
    """Remove what killed runs left of ``path`` under temporary names, which end with the number of their process."""
    for left in path.parent.glob(f".{glob.escape(path.name)}.tmp-*"):
        with contextlib.suppress(ValueError, PermissionError):  # a foreign name, another user's process
            try:
                os.kill(int(left.name.rpartition("-")[2]), 0)
            except ProcessLookupError:
                left.unlink(missing_ok=True)


@contextlib.contextmanager
def whole_file(path: Path | None) -> Iterator[IO[bytes]]:
    """Open ``path`` under a temporary name; in place and flushed to disk when the block ends well, gone when it fails.

    Without a path, what is written goes nowhere.
    """
    if path is None:
        with open(os.devnull, "wb") as nowhere:
            yield nowhere
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    sweep_temporaries(path)
    temporary = path.with_name(f".{path.name}.tmp-{os.getpid()}")
    try:
        with open(temporary, "wb", buffering=io.DEFAULT_BUFFER_SIZE * 64) as handle:
            yield handle
            handle.flush()
            os.fsync(handle.fileno())
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)
