"""Files of a launcher and its ranks in the launcher's folder, whose existence is a message.

A folder that is full or has vanished must neither end a launch nor hide why it ended. A file that cannot be created is
a message that is not sent.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from pathlib import Path

from .._common.streams import MessageFile

_DROPPED = "dropped-"


def create_file(path: Path) -> None:
    """Create an empty file, where its folder allows it."""
    with contextlib.suppress(OSError):
        path.touch()


def remove_file(path: Path) -> None:
    """Remove a file if it exists, where its folder allows it."""
    with contextlib.suppress(OSError):
        path.unlink(missing_ok=True)


def record_dropped(folder: Path, rank: int) -> None:
    """Record for the launcher how many lines this rank could not write to its logs.

    Args:
        folder: folder of the launcher.
        rank: global rank of this process.
    """
    files = (getattr(getattr(stream, "buffer", None), "raw", None) for stream in (sys.stdout, sys.stderr))
    dropping = [file for file in files if isinstance(file, MessageFile) and file.dropped_lines]
    if dropping:
        text = f"{sum(file.dropped_lines for file in dropping)} {dropping[0].problem}"
        with contextlib.suppress(OSError):
            (folder / f"{_DROPPED}{rank}").write_text(text, encoding="utf-8")


def take_dropped(folder: Path) -> Iterator[tuple[int, int, str]]:
    """Rank, number of dropped lines and reason of each record of :func:`record_dropped`, which are removed."""
    for path in sorted(folder.glob(f"{_DROPPED}*")):
        with contextlib.suppress(OSError, ValueError):
            count, _, problem = path.read_text(encoding="utf-8").partition(" ")
            remove_file(path)
            yield int(path.name.removeprefix(_DROPPED)), int(count), problem
