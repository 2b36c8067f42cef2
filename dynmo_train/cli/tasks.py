"""``dynmo-train tasks``: the tasks of Megatron's ``tasks/main.py`` under their names."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import typer

from .._common.errors import UsageError
from .._common.help import HelpGroup

ZERO_SHOT = {"WIKITEXT103": "wikitext", "LAMBADA": "lambada"}
FINE_TUNED = {"MNLI": "mnli", "RACE": "race"}
COMMANDS: Mapping[str, tuple[str, str]] = {
    **{task: ("evaluate", name) for task, name in ZERO_SHOT.items()},
    **{task: ("finetune", name) for task, name in FINE_TUNED.items()},
}


def split_task(arguments: Sequence[str]) -> tuple[str | None, list[str]]:
    """Split a command line into the value of ``--task`` (None if missing) and the other words.

    Raises:
        UsageError: unknown task.
    """
    words = list(arguments)
    for at, word in enumerate(words):
        name, equals, value = word.partition("=")
        if name != "--task":
            continue
        rest = words[:at] + words[at + (1 if equals else 2) :]
        task = value if equals else "".join(words[at + 1 : at + 2])
        if task.upper() not in COMMANDS:
            raise UsageError(f"--task {task}: must be one of {', '.join(COMMANDS)}")
        return task.upper(), rest
    return None, words


class EvaluateGroup(HelpGroup):
    """A command group that accepts ``evaluate --task WIKITEXT103 ...`` for ``evaluate wikitext ...``."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Replace ``--task`` by the subcommand."""
        task, rest = split_task(args)
        words: list[str] = super().parse_args(ctx, rest if task is None else [COMMANDS[task][1], *rest])
        return words


def tasks(ctx: typer.Context) -> None:
    """Run a task of Megatron's tasks/main.py: evaluate WIKITEXT103 or LAMBADA, fine-tune on MNLI or RACE.

    --task NAME selects the task. All other options are those of `evaluate wikitext`, `evaluate lambada`, `finetune
    mnli` or `finetune race`.
    """
    task, rest = split_task(ctx.args)
    if task is None:
        raise UsageError(f"--task is required: one of {', '.join(COMMANDS)}")
    group, name = COMMANDS[task]
    parent = ctx.parent
    commands: Mapping[str, Any] = getattr(parent.command, "commands", {}) if parent is not None else {}
    commands[group].main([name, *rest], prog_name=f"dynmo-train {group}", standalone_mode=False)
