"""``dynmo-train run``: the command line."""

from __future__ import annotations

import os
import re
import shlex
import signal
import subprocess
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import FrameType
from typing import Annotated

import typer

from ..._common.console import emit, print_message
from ..._common.document import DocumentError
from ..._common.errors import UsageError
from ...formats.input_text import read_input
from ...formats.os_errors import reason
from ...launch.find_command import program_path
from .check import check_steps
from .interpreter import interpret_script
from .session import HARMLESS_VARIABLE, MAX_SCRIPT_BYTES, ScriptResult, StartStep, Step, WriteStep
from .slurm_header import slurm_directives, slurm_variables, submission_options

# As bash: all words after the script are its arguments.
SCRIPT_LAST = {"allow_interspersed_args": False, "ignore_unknown_options": True}


def interpret_file(
    script: Path, arguments: Sequence[str], settings: Mapping[str, str], environment: Mapping[str, str]
) -> ScriptResult:
    """Read and interpret a script.

    Args:
        script: path of the script.
        arguments: its arguments.
        settings: variables whose value the script cannot change.
        environment: environment of the script.

    Raises:
        UsageError: it cannot be read or interpreted.
    """
    try:
        text = read_input(script, MAX_SCRIPT_BYTES)
    except DocumentError as error:
        raise UsageError(f"{script}: {reason(error)}; give the path of a shell script") from error
    directives = {} if environment.get("SLURM_JOB_ID") else slurm_directives(text)
    result = interpret_script(
        text, str(script), arguments, {**slurm_variables(directives), **environment}, Path.cwd(), settings
    )
    result.steps = [_submitted(step, directives) for step in result.steps]
    return result


def _submitted(step: Step, directives: dict[str, str]) -> Step:
    """A step of ``launch slurm`` with the options of the ``#SBATCH`` lines."""
    if not directives or not isinstance(step, StartStep) or step.words[1:3] != ("launch", "slurm"):
        return step
    words = list(step.words)
    end = words.index("--") if "--" in words else 3
    words[end:end] = submission_options(directives, words[:end])
    return replace(step, words=tuple(words))


def _settings(texts: Iterable[str]) -> dict[str, str]:
    """Parse ``NAME=VALUE``.

    Raises:
        UsageError: a text has no name or no equals sign.
    """
    found = {}
    for text in texts:
        name, equals, value = text.partition("=")
        if not equals or not name.isidentifier() or not name.isascii() or "\0" in value:
            raise UsageError(f"--set {text!r}: must be NAME=VALUE")
        found[name] = value
    return found


def with_overrides(steps: Sequence[Step], texts: Sequence[str]) -> list[Step]:
    """The steps, with options after those of each command of ``dynmo-train``, which therefore replace them.

    Args:
        steps: steps of a script.
        texts: options as a shell reads them, such as ``--num-layers 2 --train-iters 5``.

    Raises:
        UsageError: a text is not a list of options, or the script starts no command or several kinds of them.
    """
    words: list[str] = []
    for text in texts:
        try:
            parts = shlex.split(text)
        except ValueError as error:
            raise UsageError(f"--override {text!r}: {str(error).lower()}; close the quotes") from error
        if not parts or not re.match(r"--?[A-Za-z]", parts[0]) or "--" in parts:
            raise UsageError(f"--override {text!r}: must be options, such as '--num-layers 2 --train-iters 5'")
        words += parts
    if not words:
        return list(steps)
    kinds = {kind for step in steps if (kind := _kind(step))}
    if len(kinds) != 1:
        found = f"starts {' and '.join(sorted(kinds))}" if kinds else "starts no command of dynmo-train"
        raise UsageError(
            f"--override: the script {found}; must be one kind of command; write the options in the script"
        )
    return [
        replace(step, words=(*step.words, *words)) if isinstance(step, StartStep) and _kind(step) else step
        for step in steps
    ]


def _kind(step: Step) -> str:
    """``pretrain``, ``evaluate`` or another command of ``dynmo-train``, behind a launcher or without; else empty."""
    if not isinstance(step, StartStep) or step.words[0] != "dynmo-train":
        return ""
    own = step.words[step.words.index("--") + 1 :] if "--" in step.words else step.words[1:]
    return own[0] if own else ""


def command_line(step: StartStep) -> str:
    """The command of a step as a line for a shell, with its folder and variables."""
    line = shlex.join([*(f"{name}={value}" for name, value in step.environment.items()), *step.words])
    for name in step.environment:
        line = (
            line.replace(f"'{name}=", f"{name}='", 1)
            if line.startswith(f"'{name}=")
            else line.replace(f" '{name}=", f" {name}='", 1)
        )
    return line if step.folder == Path.cwd() else f"cd {shlex.quote(str(step.folder))} && {line}"


def _without_other_variables(step: StartStep) -> StartStep:
    """The command with the variables that do not change which code it executes, so that its line is safe to paste."""
    printed = {name: value for name, value in step.environment.items() if HARMLESS_VARIABLE.fullmatch(name)}
    if others := sorted(step.environment.keys() - printed.keys()):
        print_message(
            f"line {step.place.line}: variables that may change which code is executed are not printed:"
            f" {', '.join(others)}; a run without --dry-run sets them"
        )
    return replace(step, environment=printed)


def _write(step: WriteStep) -> None:
    """Write a JSON file.

    Raises:
        UsageError: it cannot be written.
    """
    try:
        step.path.parent.mkdir(parents=True, exist_ok=True)
        step.path.write_text(step.text, encoding="utf-8")
    except OSError as error:
        raise UsageError(
            f"{step.path}: cannot be written: {error.strerror}; give a folder that can be written"
        ) from error


def _program(name: str) -> list[str]:
    """The program of a command of this project.

    Raises:
        UsageError: its package is not installed.
    """
    if name == "dynmo-train":
        return [sys.executable, "-m", "dynmo_train"]
    path = program_path(name)
    if path is None:
        raise UsageError(f"{name} is not installed; run: pip install dynmo-toolkit")
    return [path]


def _run(step: StartStep) -> int:
    """Run the command of a step; its exit code. Signals go to the command."""
    command = [*_program(step.words[0]), *step.words[1:]]
    process = subprocess.Popen(command, cwd=step.folder, env={**os.environ, **step.environment})

    def forward(number: int, _frame: FrameType | None) -> None:
        process.send_signal(number)

    numbers = (signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2)
    handlers = {number: signal.signal(number, forward) for number in numbers}
    # Ctrl-C reaches the command from the terminal; this process waits for its end.
    handlers[signal.SIGINT] = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        return process.wait()
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)


def run_script(
    context: typer.Context,
    script: Annotated[Path, typer.Argument(help="Shell script of Megatron-LM, DeepSpeed or similar projects.")],
    arguments: Annotated[list[str] | None, typer.Argument(help="Arguments of the script.")] = None,
    settings: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="NAME=VALUE", help="Variable that the script cannot change; repeatable."),
    ] = None,
    overrides: Annotated[
        list[str] | None,
        typer.Option(
            "--override", metavar="OPTIONS", help="Options that replace those of dynmo-train commands; quoted."
        ),
    ] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Parse and print the commands; execute and write nothing.")
    ] = False,
) -> None:
    """Execute the commands of a published training script; the script is trusted, as if a shell ran it.

    Its programs and launchers become ours: torchrun, deepspeed, srun, mpirun, python -m torch.distributed.launch. A
    line that cannot be interpreted is refused with its number before anything is executed. Exits with the exit code of
    the first command that fails. --dry-run executes and writes nothing, and parses the options of the commands.
    """
    result = interpret_file(script, arguments or [], _settings(settings or []), os.environ)
    for text in result.printed:
        print_message(text)
    for note in result.notes:
        print_message(f"{script}, {note}")
    if not result.steps and not result.exit_code:
        raise UsageError(
            f"{script}: starts no known program; dynmo-train explain-flags --table lists those that are known"
        )
    result.steps = with_overrides(result.steps, overrides or [])
    if dry_run:
        for step in result.steps:
            if isinstance(step, StartStep):
                emit(command_line(_without_other_variables(step)))
            else:
                emit(f"# writes {step.path} ({len(step.text):,} characters)")
        started = [step for step in result.steps if isinstance(step, StartStep)]
        check_steps(started, context.find_root().command, str(script))
        raise typer.Exit(result.exit_code)
    if result.exit_code:
        raise UsageError(f"{script}: exits with code {result.exit_code}; nothing was executed")
    for step in result.steps:
        if isinstance(step, WriteStep):
            _write(step)
            continue
        print_message(f"line {step.place.line}: {command_line(step)}")
        code = _run(step)
        if code:
            raise typer.Exit(128 - code if code < 0 else code)
