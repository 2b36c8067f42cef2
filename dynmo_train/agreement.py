"""Steps of a start that any process may find impossible: all learn of it, rank 0 tells it, and all end at once."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import TypeVar

from .errors import EXIT_USAGE, UsageError
from .launch.worker import LAUNCHER_PID_VARIABLE
from .parallel.world import World, broadcast_document, gather_documents

Result = TypeVar("Result")


def speaks(*, first: bool) -> bool:
    """Whether a process says on stderr what is wrong: rank 0 alone, so that a person reads it once.

    Under ``launch`` each process has a log of its own. There all of them say it: the launcher takes it from another log
    where rank 0 was ended before it could speak.
    """
    return first or LAUNCHER_PID_VARIABLE in os.environ


def agreed(world: World, make: Callable[[], Result]) -> Result:
    """What ``make`` gives at this process, once no process has met a ``UsageError`` in it. Every process calls this.

    Raises:
        UsageError: at those that speak, with what all processes met, each message once.
        SystemExit: with the same exit code, at the others.
    """
    result, problem = _attempt(make)
    _end_together(world, problem)
    if result is None:
        raise UsageError("a process has nothing to go on with")
    return result[0]


def first_then_others(world: World, make: Callable[[], Result]) -> Result:
    """As ``agreed``, but rank 0 goes first: what it leaves in a cache, the others find there."""
    result: tuple[Result] | None = None
    problem: str | None = None
    if world.is_first:
        result, problem = _attempt(make)
    if broadcast_document(world, problem is not None):
        _end_together(world, problem)
    return agreed(world, make if result is None else lambda: result[0])


def _attempt(make: Callable[[], Result]) -> tuple[tuple[Result] | None, str | None]:
    try:
        return (make(),), None
    except UsageError as error:
        return None, str(error)


def _end_together(world: World, problem: str | None) -> None:
    problems = list(dict.fromkeys(told for told in gather_documents(world, problem) if told is not None))
    if not problems:
        return
    if speaks(first=world.is_first):
        raise UsageError("\n  ".join(problems))
    raise SystemExit(EXIT_USAGE)
