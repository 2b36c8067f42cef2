"""What a rule is, and how it tells what it found."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from ..._common.document import Problem
from ..schema import Config

Rule = Callable[[Config, int], Iterator[Problem]]


def conflict(flag: str, message: str) -> Problem:
    """Two options that contradict each other."""
    return Problem(flag, "conflict", message)


def later(flag: str, message: str) -> Problem:
    """A combination of options that a run cannot have."""
    return Problem(flag, "unsupported", message)
