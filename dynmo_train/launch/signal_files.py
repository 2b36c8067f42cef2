"""Files whose existence is the message: of a launcher to its ranks, in the log folder.

A folder that has become read-only or has vanished must neither end a launch nor hide why it ended. A file that cannot
be created is a message that is not sent; one that cannot be removed has a name that no later launch uses.
"""

from __future__ import annotations

import contextlib
from pathlib import Path


def create_file(path: Path) -> None:
    """Create an empty file, where its folder allows it."""
    with contextlib.suppress(OSError):
        path.touch()


def remove_file(path: Path) -> None:
    """Remove a file if it exists, where its folder allows it."""
    with contextlib.suppress(OSError):
        path.unlink(missing_ok=True)
