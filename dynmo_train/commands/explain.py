"""``dynmo-train explain-flags``: what a script of Megatron-LM, DeepSpeed or Optimus-CC means here."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import click
import typer

from ..config.scripts import Meaning, ScriptCommand, explain, read_script
from ..console import Format, emit, emit_json, emit_table
from ..errors import UsageError


def _declared(ours: str) -> tuple[dict[str, int], dict[str, str]]:
    """Flags of one of our commands with the words that follow them, and what each does; empty where not ours to say."""
    from ..cli import app

    program, *names = ours.split()
    if program != "dynmo-train":
        return {}, {}
    command: Any = typer.main.get_command(app)
    context = click.Context(command)
    for name in names:
        command = command.get_command(context, name) if command is not None else None
    if command is None:
        return {}, {}
    flags: dict[str, int] = {}
    helps: dict[str, str] = {}
    for option in command.params:
        for name in (*option.opts, *option.secondary_opts):
            if name.startswith("-"):
                flags[name] = 0 if getattr(option, "is_flag", False) else option.nargs
                helps[name] = getattr(option, "help", None) or ""
    return flags, helps


def _document(command: ScriptCommand, meanings: list[Meaning]) -> dict[str, Any]:
    return {
        "program": command.program,
        "command": command.ours,
        "launcher": command.launcher,
        "flags": [{"flag": m.flag, "values": list(m.values), "kind": m.kind, "meaning": m.text} for m in meanings],
    }


def explain_flags(
    script: Annotated[Path, typer.Argument(help="A shell script that starts Megatron's programs; it is not run.")],
    form: Annotated[Format, typer.Option("--format", help="How to report.")] = Format.TEXT,
) -> None:
    """Say, flag by flag, what a script of Megatron-LM and its kin means here.

    Ends with exit code 3 where a flag is refused or unknown.
    """
    try:
        text = script.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"cannot read {script}: {error}") from error
    commands = read_script(text)
    if not commands:
        raise UsageError(f"{script} starts none of the programs that are known here, such as pretrain_gpt.py")
    explained = [(command, explain(command, *_declared(command.ours))) for command in commands]
    if form is Format.JSON:
        emit_json([_document(command, meanings) for command, meanings in explained])
    else:
        for command, meanings in explained:
            _show(command, meanings)
    bad = any(
        m.kind in ("refused", "unknown") for c, meanings in explained if c.ours[:11] == "dynmo-train" for m in meanings
    )
    raise typer.Exit(3 if bad else 0)


def _show(command: ScriptCommand, meanings: list[Meaning]) -> None:
    emit(f"{command.program}: {command.ours}" + (f", started by {command.launcher}" if command.launcher else ""))
    if not command.ours.startswith("dynmo-train"):
        emit(f"  its flags: {command.ours} --help\n")
        return
    rows = [(" ".join((m.flag, *m.values)), m.kind, m.text) for m in meanings]
    emit_table("", ("flag", "here", "meaning"), rows)
