"""Steps of a start that any process may find impossible: all learn of it, rank 0 tells it, and all end at once."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from .errors import EXIT_USAGE, UsageError
from .parallel.world import World, broadcast_document, gather_documents

Result = TypeVar("Result")


def agreed(world: World, make: Callable[[], Result]) -> Result:
    """What ``make`` gives at this process, once no process has met a ``UsageError`` in it. Every process calls this.

    Raises:
        UsageError: at rank 0, with what all processes met, each message once.
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
    if world.is_first:
        raise UsageError("\n  ".join(problems))
    raise SystemExit(EXIT_USAGE)
