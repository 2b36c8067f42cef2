"""Parse the commands that a script starts as they would parse their own command lines, without executing them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import typer

from ..._common.errors import UsageError
from ..tasks import COMMANDS, split_task
from .session import StartStep

CLICK_ERROR: Any = typer.BadParameter.__base__
"""The error of the parser of options; typer has its own copy of click since version 0.20."""


def check_steps(steps: Sequence[StartStep], root: Any, script: str) -> None:
    """Check the options of commands of ``dynmo-train``; other programs check their own.

    Args:
        steps: the commands.
        root: the command ``dynmo-train``.
        script: name of the script, for messages.

    Raises:
        UsageError: unknown, refused or invalid options; names the line of the first command that has them.
    """
    for step in steps:
        if step.words[0] != "dynmo-train":
            continue
        try:
            _parse(root, list(step.words[1:]))
        except typer.Exit:
            continue  # --help or --version
        except CLICK_ERROR as error:
            raise UsageError(f"{script}, line {step.place.line}: {error.format_message()}") from error
        except UsageError as error:
            raise UsageError(f"{script}, line {step.place.line}: {error}") from error


def _parse(root: Any, words: list[str]) -> None:
    """Parse a command line, and that of the command that it launches; ``words`` are those after the program."""
    command, name, parent = root, "dynmo-train", None
    path = []
    while True:
        context = command.make_context(name, words, parent=parent)
        if not hasattr(command, "resolve_command"):
            break
        name, resolved, words = command.resolve_command(context, [*context._protected_args, *context.args])
        command, parent = resolved, context
        path.append(name)
    if path[0] == "tasks":
        task, rest = split_task(context.args)
        if task is not None:
            _parse(root, [*COMMANDS[task], *rest])
    if path[0] == "launch" and (launched := context.params.get("arguments")):
        _parse(root, list(launched))
