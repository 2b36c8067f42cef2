"""``dynmo-train explain-flags``: what a script of Megatron-LM, DeepSpeed or Optimus-CC means here."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import typer

from ..._common.console import Format, emit, emit_json, emit_table
from ..._common.errors import UsageError
from ...config.compat import FLAGS, Known
from ...config.resolve import option_specs
from ...config.task_command import TASK_FLAGS, TaskCommand
from ...formats.input_text import read_input
from .command_help import explain_foreign, script_of
from .published_scripts import TABLE
from .script_commands import Meaning, ScriptCommand, explain, read_script

# Flags of the programs behind evaluation that the name of the command here, or its --load, replaces.
_TASK_SCRIPTS = {
    "--task": Known("nothing", ("the name of the command says it",), 1),
    "--model": Known("nothing", ("the checkpoint says it",), 1),
    "--model_args": Known("refused", ("write --load and the directory that pretrained= names",), 1),
}


def _command(root: Any, ours: str) -> Any:
    """The subcommand that a name such as ``dynmo-train pretrain gpt`` stands for; None for another package's.

    Args:
        root: the command ``dynmo-train``.
        ours: the name.
    """
    program, *names = ours.split()
    command: Any = root if program == "dynmo-train" else None
    for name in names:
        command = getattr(command, "commands", {}).get(name)
    return command


def _explain(root: Any, command: ScriptCommand) -> list[Meaning] | None:
    """Every flag of a command of a script; None where its command here is not installed, or a script."""
    ours = _command(root, command.ours)
    if ours is None:
        return explain_foreign(command)
    flags: dict[str, int] = {}
    helps: dict[str, str] = {}
    table: Mapping[str, Known] = FLAGS
    if isinstance(ours, TaskCommand):
        table = {**TASK_FLAGS, **_TASK_SCRIPTS}
        for spec in option_specs().values():
            says = "checked against the checkpoint" if spec.concern == "model" else "nothing to do without training"
            for name in (spec.flag, spec.negative):
                if name:
                    flags[name], helps[name] = int(spec.kind is not bool), says
    for option in ours.params:
        for name in (*option.opts, *option.secondary_opts):
            flags[name] = 0 if getattr(option, "is_flag", False) else option.nargs
            helps[name] = getattr(option, "help", None) or ""
    return explain(command, flags, helps, table)


def _document(command: ScriptCommand, meanings: list[Meaning]) -> dict[str, Any]:
    return {
        "program": command.program,
        "command": command.ours,
        "launcher": command.launcher,
        "flags": [{"flag": m.flag, "values": list(m.values), "kind": m.kind, "meaning": m.text} for m in meanings],
    }


def explain_flags(
    context: typer.Context,
    script: Annotated[
        Path | None, typer.Argument(help="A shell script that starts Megatron's programs; it is not run.")
    ] = None,
    table: Annotated[
        bool, typer.Option("--table", help="Print the table of published scripts and what they are here.")
    ] = False,
    form: Annotated[Format, typer.Option("--format", help="How to report.")] = Format.TEXT,
) -> None:
    """Say, flag by flag, what a script of Megatron-LM and its kin means here.

    Ends with exit code 3 where a flag is refused or unknown.
    """
    if table:
        _show_table(form)
        return
    if script is None:
        raise UsageError("explain-flags needs a SCRIPT, or --table")
    commands, stands_in = read_script(read_input(script)), script_of(str(script))
    if not commands and stands_in is None:
        raise UsageError(f"{script} starts none of the programs that are known here, such as pretrain_gpt.py")
    root = context.find_root().command
    explained = [(command, _explain(root, command)) for command in commands]
    if form is Format.JSON:
        emit_json([_document(command, meanings or []) for command, meanings in explained])
    else:
        if stands_in:
            emit(f"{script}: here {stands_in}\n")
        for command, meanings in explained:
            _show(command, meanings)
    bad = any(one.kind in ("refused", "unknown") for _, meanings in explained for one in meanings or ())
    raise typer.Exit(3 if bad else 0)


def _show_table(form: Format) -> None:
    rows = [(row.source, row.name, row.ours) for row in TABLE]
    if form is Format.JSON:
        emit_json([{"source": source, "name": name, "ours": ours} for source, name, ours in rows])
    else:
        emit_table("", ("published by", "script", "here"), rows)


def _show(command: ScriptCommand, meanings: list[Meaning] | None) -> None:
    emit(f"{command.program}: {command.ours}" + (f", started by {command.launcher}" if command.launcher else ""))
    if meanings is None:
        emit(
            "  what it takes is said at its head\n" if command.ours.startswith("bin/") else f"  {command.ours} --help\n"
        )
        return
    rows = [(" ".join((m.flag, *m.values)), m.kind, m.text) for m in meanings]
    emit_table("", ("flag", "here", "meaning"), rows)
