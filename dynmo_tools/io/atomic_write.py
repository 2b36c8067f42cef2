"""Atomic writes of files of any size."""

from __future__ import annotations

import contextlib
import glob
import io
import os
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import IO

from .._common.document import sync_directory
from .._common.errors import UsageError

PIECE_BYTES = 1 << 20


def sweep_temporaries(path: Path) -> None:
    """Remove temporary files of ``path`` that killed processes left; their names end with the process id."""
    for path_ in path.parent.glob(f".{glob.escape(path.name)}.tmp-*"):
        with contextlib.suppress(ValueError, PermissionError):  # a foreign name, another user's process
            if not _runs(int(path_.name.rpartition("-")[2])):
                path_.unlink(missing_ok=True)


def _runs(pid: int) -> bool:
    """Whether a process runs; one that has ended and that its parent has not waited for does not.

    Raises:
        PermissionError: the process is another user's.
    """
    try:
        # Signal 0 sends nothing; it only checks that the process exists.
        os.kill(pid, 0)
        # proc(5): the state follows the name, which may have spaces.
        status = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    except ProcessLookupError:
        return False
    except FileNotFoundError:  # no /proc
        return True
    return status.rpartition(")")[2].split()[0] != "Z"


def refuse_existing(paths: Iterable[Path]) -> None:
    """Refuse outputs that exist.

    Raises:
        UsageError: one of ``paths`` exists, or is a link, also a broken one.
    """
    for path in paths:
        if path.exists() or path.is_symlink():
            raise UsageError(f"{path}: already exists; use --overwrite to replace it, or choose another output")


def _is_same(new: Path, old: Path) -> bool:
    """Whether two files have the same bytes."""
    # Sizes first: most changed files differ in size, and no byte need be read.
    if not old.is_file() or old.stat().st_size != new.stat().st_size:
        return False
    with open(new, "rb") as one, open(old, "rb") as other:
        while piece := one.read(PIECE_BYTES):
            if piece != other.read(PIECE_BYTES):
                return False
    return True


@contextlib.contextmanager
def open_atomic(path: Path | None, *, replace: bool = True) -> Iterator[IO[bytes]]:
    """Open a temporary file that replaces ``path`` when the block succeeds, and is deleted when it fails.

    An existing file of the same bytes is not replaced and keeps its date: later steps that read it need not run again.

    Args:
        path: the file; None discards what is written.
        replace: a file of other bytes may be replaced.

    Raises:
        UsageError: a file of other bytes exists and must not be replaced; raised at the end of the block.
    """
    if path is None:
        with open(os.devnull, "wb") as nowhere:
            yield nowhere
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    sweep_temporaries(path)
    # In the same folder: a rename is atomic within one file system only. Hidden, so that patterns do not match it.
    temporary = path.with_name(f".{path.name}.tmp-{os.getpid()}")
    try:
        with open(temporary, "wb", buffering=io.DEFAULT_BUFFER_SIZE * 64) as handle:
            yield handle
            handle.flush()
            # Before the rename: after a power loss, the file has its old or its new contents, never a part.
            os.fsync(handle.fileno())
        if not _is_same(temporary, path):
            if not replace:
                refuse_existing([path])
            os.replace(temporary, path)
            # Behind the rename: a file of a command that has exited with 0 survives a power loss.
            sync_directory(path.parent)
    finally:
        temporary.unlink(missing_ok=True)
