"""Find the commands of the other packages, which this package runs as programs."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path


def program_path(name: str) -> str | None:
    """The path of a program next to this interpreter, else on PATH; None if it is not installed."""
    sibling = Path(sys.executable).parent / name
    return str(sibling) if sibling.exists() else shutil.which(name)
