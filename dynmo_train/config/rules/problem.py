"""The type of a rule over several options, and constructors of its problems."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from ..._common.document import Problem
from ..schema import Config

Rule = Callable[[Config, int], Iterator[Problem]]


def conflict(flag: str, message: str) -> Problem:
    """A value that disagrees with other options."""
    return Problem(flag, "conflict", message)


def unsupported(flag: str, message: str) -> Problem:
    """A combination of options that is not supported."""
    return Problem(flag, "unsupported", message)
