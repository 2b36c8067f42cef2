"""``dynmo-train explain-flags``: the equivalents of flags in a script of Megatron-LM, DeepSpeed or Optimus-CC."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import typer

from ..._common.console import Format, emit, emit_json, emit_table, print_message
from ..._common.document import parse_toml
from ..._common.errors import UsageError
from ...config.compat.flag import CompatFlag, ignored, refused
from ...config.compat.flags import FLAGS
from ...config.resolve import option_specs
from ...config.task_command import TASK_FLAGS, TaskCommand
from ...formats.input_text import read_input
from ..published_scripts import TABLE
from .command_help import equivalent_script, explain_other_package
from .python_commands import command_of_config
from .python_config import read_python_config
from .script_commands import (
    FlagMeaning,
    ScriptCommand,
    command_of_words,
    explain,
    read_script,
    read_torchtitan,
    unresolved_names,
    with_flags_of,
)

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


Commands = list[tuple[ScriptCommand, list[FlagMeaning]]]


def _python_commands(root: Any, script: Path, text: str, function: str | None, modules: list[Path]) -> Commands:
    """The command of a recipe of Megatron-Bridge or a configuration of torchtitan."""
    declared = {
        name
        for command in root.commands["pretrain"].commands.values()
        for option in command.params
        for name in (*option.opts, *option.secondary_opts)
    }
    try:
        config = read_python_config(text, function, [read_input(module) for module in modules])
    except UsageError as error:
        raise UsageError(f"{script}: {error}") from error
    return [command_of_config(config, lambda flag: flag in declared or flag in FLAGS, FLAGS)]


def _started(script: Path) -> list[ScriptCommand]:
    """The commands that the script starts in this environment; none, and a message, if it cannot be interpreted."""
    from ..run_script.command import interpret_file
    from ..run_script.session import StartStep

    try:
        steps = interpret_file(script, [], {}, os.environ).steps
    except UsageError as error:
        print_message(f"dynmo-train run refuses the script, whose flags are read by line: {error}")
        return []
    words = [step.origin for step in steps if isinstance(step, StartStep)]
    return [command for origin in words if (command := command_of_words(origin))]


def _commands(script: Path, text: str) -> list[ScriptCommand]:
    if script.suffix != ".toml":
        commands = with_flags_of(read_script(text), _started(script))
        for name in dict.fromkeys(name for command in commands for name in unresolved_names(command)):
            print_message(f"{script}: {name} has no value here; flags in it are not explained")
        return commands
    try:
        return [read_torchtitan(parse_toml(text))]
    except ValueError as error:
        raise UsageError(f"{script}: is not TOML: {error}; give a shell script, or a file of torchtitan") from error


def explain_flags(
    context: typer.Context,
    script: Annotated[
        Path | None,
        typer.Argument(help="Shell script (not executed), TOML file, or Python configuration (not executed)."),
    ] = None,
    function: Annotated[
        str | None, typer.Option("--function", help="Function of a Python file that returns the configuration.")
    ] = None,
    module: Annotated[
        list[Path] | None, typer.Option("--module", help="Python file whose functions and constants are imported.")
    ] = None,
    table: Annotated[bool, typer.Option("--table", help="Print published scripts and their equivalents.")] = False,
    form: Annotated[Format, typer.Option("--format", help="Output format.")] = Format.TEXT,
) -> None:
    """Translate the flags of a script of Megatron-LM, DeepSpeed or Optimus-CC, or the keys of torchtitan.

    Python files are recipes of Megatron-Bridge and configurations of torchtitan.

    Exits with code 3 if a flag is refused or unknown.
    """
    if table:
        _show_table(form)
        return
    if script is None:
        raise UsageError("SCRIPT is missing; give the path of a shell script, or --table")
    root, text, equivalent = context.find_root().command, read_input(script), equivalent_script(str(script))
    if script.suffix == ".py":
        commands = _python_commands(root, script, text, function, module or [])
    elif function or module:
        raise UsageError("--function and --module are of Python files; remove them")
    else:
        commands = [(command, []) for command in _commands(script, text)]
    if not commands and equivalent is None:
        raise UsageError(f"{script}: must start a known program, such as pretrain_gpt.py")
    explained = [(command, _with_more(_explain(root, command), more)) for command, more in commands]
    if form is Format.JSON:
        emit_json([_document(command, meanings or []) for command, meanings in explained])
    else:
        if equivalent:
            emit(f"{script}: equivalent to {equivalent}\n")
        for command, meanings in explained:
            _show(command, meanings)
    bad = any(one.kind in ("refused", "unknown") for _, meanings in explained for one in meanings or ())
    raise typer.Exit(3 if bad else 0)


def _with_more(meanings: list[FlagMeaning] | None, more: list[FlagMeaning]) -> list[FlagMeaning] | None:
    return [*(meanings or []), *more] if more else meanings


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
