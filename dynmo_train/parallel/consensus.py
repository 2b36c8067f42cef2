"""Runs a function on all ranks so that an error on any of them ends all of them, with one message."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import TypeVar

from .._common.errors import EXIT_USAGE, UsageError
from ..launch.worker import LAUNCHER_PID_VARIABLE
from .process_groups import World, all_gather_objects, broadcast_object

Result = TypeVar("Result")


def is_reporting_rank(*, first: bool) -> bool:
    """Whether a process reports errors on stderr: rank 0 only, so that each error is printed once.

    Under ``launch`` each process has its own log and reports, too: the launcher shows another log where rank 0 was
    ended before it could report.
    """
    return first or LAUNCHER_PID_VARIABLE in os.environ


def run_on_all_ranks(world: World, make: Callable[[], Result]) -> Result:
    """Call ``make`` on every rank and return its result; a collective.

    Args:
        world: Processes of the run.
        make: May raise ``UsageError`` on any rank.

    Raises:
        UsageError: ``make`` failed on a rank; on ranks that report, with the distinct messages of all ranks.
        SystemExit: The same on the other ranks, with the same exit code.
    """
    # No rank raises before all have answered: the others would wait in their next collective until its timeout.
    result, problem = _attempt(make)
    _end_together(world, problem)
    if result is None:
        raise UsageError("a rank has no result to continue with")
    return result[0]


def rank0_first(world: World, make: Callable[[], Result]) -> Result:
    """As :func:`run_on_all_ranks`, but rank 0 runs first, so that the others find what it has cached.

    Raises:
        UsageError: On a reporting rank, with the errors of all ranks.
        SystemExit: On the other ranks, with the same exit code.
    """
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
