"""Where the other commands of the project are: this package talks to them as to any other program."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path


def program_path(name: str) -> str | None:
    """The path of a program: beside this interpreter, else on PATH; None where it is not installed."""
    beside = Path(sys.executable).parent / name
    return str(beside) if beside.exists() else shutil.which(name)
