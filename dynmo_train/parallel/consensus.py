"""Steps of a start that any process may find impossible: all learn of it, rank 0 reports it, and all end at once."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import TypeVar

from .._common.errors import EXIT_USAGE, UsageError
from ..launch.worker import LAUNCHER_PID_VARIABLE
from .process_groups import World, all_gather_objects, broadcast_object

Result = TypeVar("Result")


def is_reporting_rank(*, first: bool) -> bool:
    """Whether a process reports errors on stderr: rank 0 alone, so that each is printed once.

    Under ``launch`` each process has a log of its own. There all of them report: the launcher shows another log
    where rank 0 was ended before it could report.
    """
    return first or LAUNCHER_PID_VARIABLE in os.environ


def run_on_all_ranks(world: World, make: Callable[[], Result]) -> Result:
    """What ``make`` gives at this process, once no process has raised a ``UsageError`` in it. Every process calls this.

    Raises:
        UsageError: at those that report, with the messages of all processes, each once.
        SystemExit: with the same exit code, at the others.
    """
    result, problem = _attempt(make)
    _end_together(world, problem)
    if result is None:
        raise UsageError("a process has no result to continue with")
    return result[0]


def rank0_first(world: World, make: Callable[[], Result]) -> Result:
    """As ``run_on_all_ranks``, but rank 0 goes first: what it leaves in a cache, the others find there."""
    result: tuple[Result] | None = None
    problem: str | None = None
    if world.is_rank0:
        result, problem = _attempt(make)
    if broadcast_object(world, problem is not None):
        _end_together(world, problem)
    return run_on_all_ranks(world, make if result is None else lambda: result[0])


def _attempt(make: Callable[[], Result]) -> tuple[tuple[Result] | None, str | None]:
    try:
        return (make(),), None
    except UsageError as error:
        return None, str(error)


def _end_together(world: World, problem: str | None) -> None:
    problems = list(dict.fromkeys(each for each in all_gather_objects(world, problem) if each is not None))
    if not problems:
        return
    if is_reporting_rank(first=world.is_rank0):
        raise UsageError("\n  ".join(problems))
    raise SystemExit(EXIT_USAGE)
