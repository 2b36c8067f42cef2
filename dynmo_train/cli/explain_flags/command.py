"""``dynmo-train explain-flags``: the equivalents of flags in a script of Megatron-LM, DeepSpeed or Optimus-CC."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import typer

from ..._common.console import Format, emit, emit_json, emit_table
from ..._common.document import parse_toml
from ..._common.errors import UsageError
from ...config.compat_flag import CompatFlag, ignored, refused
from ...config.compat_flags import FLAGS
from ...config.resolve import option_specs
from ...config.task_command import TASK_FLAGS, TaskCommand
from ...formats.input_text import read_input
from .command_help import equivalent_script, explain_other_package
from .published_scripts import TABLE
from .script_commands import FlagMeaning, ScriptCommand, explain, read_script, read_torchtitan

# Flags of evaluation programs that the name of the command, or --load, replaces.
_TASK_SCRIPT_FLAGS = {
    "--task": ignored("implied by the command", 1),
    "--model": ignored("implied by the checkpoint", 1),
    "--model_args": refused("is not supported; use --load with the directory of pretrained=", 1),
}


def _find_command(root: Any, name: str) -> Any:
    """The subcommand of a name such as ``dynmo-train pretrain gpt``; None for a command of another package.

    Args:
        root: the command ``dynmo-train``.
        name: name of the subcommand.
    """
    program, *names = name.split()
    command: Any = root if program == "dynmo-train" else None
    for name in names:
        command = getattr(command, "commands", {}).get(name)
    return command


def _explain(root: Any, command: ScriptCommand) -> list[FlagMeaning] | None:
    """The meaning of each flag of a command; None if its equivalent is a script or not installed."""
    equivalent = _find_command(root, command.equivalent)
    if equivalent is None:
        return explain_other_package(command)
    flags: dict[str, int] = {}
    helps: dict[str, str] = {}
    table: Mapping[str, CompatFlag] = FLAGS
    if isinstance(equivalent, TaskCommand):
        table = {**TASK_FLAGS, **_TASK_SCRIPT_FLAGS}
        for spec in option_specs().values():
            meaning = "checked against the checkpoint" if spec.concern == "model" else "no effect without training"
            for name in (spec.flag, spec.negative):
                if name:
                    flags[name], helps[name] = int(spec.kind is not bool), meaning
    for option in equivalent.params:
        for name in (*option.opts, *option.secondary_opts):
            flags[name] = 0 if getattr(option, "is_flag", False) else option.nargs
            helps[name] = getattr(option, "help", None) or ""
    return explain(command, flags, helps, table)


def _document(command: ScriptCommand, meanings: list[FlagMeaning]) -> dict[str, Any]:
    return {
        "program": command.program,
        "command": command.equivalent,
        "launcher": command.launcher,
        "flags": [{"flag": m.flag, "values": list(m.values), "kind": m.kind, "meaning": m.text} for m in meanings],
    }


def _commands(script: Path, text: str) -> list[ScriptCommand]:
    if script.suffix != ".toml":
        return read_script(text)
    try:
        return [read_torchtitan(parse_toml(text))]
    except ValueError as error:
        raise UsageError(f"{script}: is not TOML: {error}; give a shell script, or a file of torchtitan") from error


def explain_flags(
    context: typer.Context,
    script: Annotated[
        Path | None,
        typer.Argument(help="Shell script of Megatron's programs (not executed), or TOML file of torchtitan."),
    ] = None,
    table: Annotated[bool, typer.Option("--table", help="Print published scripts and their equivalents.")] = False,
    form: Annotated[Format, typer.Option("--format", help="Output format.")] = Format.TEXT,
) -> None:
    """Translate the flags of a script of Megatron-LM, DeepSpeed or Optimus-CC, or the keys of torchtitan.

    Exits with code 3 if a flag is refused or unknown.
    """
    if table:
        _show_table(form)
        return
    if script is None:
        raise UsageError("SCRIPT is missing; give the path of a shell script, or --table")
    commands, equivalent = _commands(script, read_input(script)), equivalent_script(str(script))
    if not commands and equivalent is None:
        raise UsageError(f"{script}: must start a known program, such as pretrain_gpt.py")
    root = context.find_root().command
    explained = [(command, _explain(root, command)) for command in commands]
    if form is Format.JSON:
        emit_json([_document(command, meanings or []) for command, meanings in explained])
    else:
        if equivalent:
            emit(f"{script}: equivalent to {equivalent}\n")
        for command, meanings in explained:
            _show(command, meanings)
    bad = any(one.kind in ("refused", "unknown") for _, meanings in explained for one in meanings or ())
    raise typer.Exit(3 if bad else 0)


def _show_table(form: Format) -> None:
    rows = [(row.source, row.name, row.equivalent) for row in TABLE]
    if form is Format.JSON:
        emit_json([{"source": source, "name": name, "equivalent": equivalent} for source, name, equivalent in rows])
    else:
        emit_table("", ("publisher", "script", "equivalent"), rows)


def _show(command: ScriptCommand, meanings: list[FlagMeaning] | None) -> None:
    emit(f"{command.program}: {command.equivalent}" + (f", launched by {command.launcher}" if command.launcher else ""))
    if meanings is None:
        is_script = command.equivalent.startswith("bin/")
        emit("  see the comment at the top of the script\n" if is_script else f"  {command.equivalent} --help\n")
        return
    rows = [(" ".join((m.flag, *m.values)), m.kind, m.text) for m in meanings]
    emit_table("", ("flag", "kind", "meaning"), rows)
