"""Help of every subcommand of the four programs: grouped, complete, within the terminal, and without heavy modules."""

from __future__ import annotations

import importlib
import subprocess
import sys

import pytest
import typer
from typer.testing import CliRunner

from tests.cli.test_root_options import COMMANDS
from tests.tables import table

FORBIDDEN = (
    *("torch", "numpy", "transformers", "scipy", "matplotlib", "pydantic", "rich", "yaml", "pyarrow", "orjson"),
    *("datasketch", "ftfy", "langdetect", "tokenizers", "gigatoken"),
)


def commands(program, package):
    """Each subcommand that is not hidden, with its words."""

    def walk(command, words):
        for name, inner in getattr(command, "commands", {}).items():
            if not inner.hidden:
                yield from walk(inner, (*words, name))
        if not hasattr(command, "commands"):
            yield words, command

    return walk(typer.main.get_command(importlib.import_module(f"{package}.cli").app), ())


CASES = [
    pytest.param(package, words, command, id=" ".join((program, *words)))
    for program, package in COMMANDS.items()
    for words, command in commands(program, package)
]


# The options of ``tasks`` are those of the task.
WITH_OPTIONS = [case for case in CASES if case.values[1] != ("tasks",)]


def page(package, *words, columns):
    app = importlib.import_module(f"{package}.cli").app
    done = CliRunner().invoke(app, list(words), env={"COLUMNS": str(columns)}, prog_name="x")
    assert done.exit_code == 0, done.output
    return done.output


def options(command):
    return [param for param in command.params if param.param_type_name == "option" and not param.hidden]


@table(("package", "words", "command"), WITH_OPTIONS)
def test_help_all_names_every_flag(package, words, command):
    printed = page(package, *words, "--help-all", columns=160).replace("--[no-]", "--")
    flags = {flag.rstrip(",") for flag in printed.split()}
    assert [name for option in options(command) for name in option.opts if name not in flags] == []


@table(("package", "words", "command"), WITH_OPTIONS)
def test_help_is_grouped_and_counts_the_other_options(package, words, command):
    short, full = (page(package, *words, flag, columns=120) for flag in ("--help", "--help-all"))
    headings = [line for line in full.splitlines() if line.endswith(":") and line[:1].strip()]
    if len(options(command)) <= 12:
        assert short == full
        return
    assert len(headings) > 3
    num_shown = sum(line.startswith("  -") for line in short.partition("\n\n")[2].splitlines())
    num_all = sum(line.startswith("  -") for line in full.partition("\n\n")[2].splitlines())
    last = short.splitlines()[-1]
    if num_all > num_shown:
        assert last.startswith(f"{num_all - num_shown} more option")
        assert last.endswith("--help-all")
    assert num_shown <= 90


@table("columns", [60, 80, 120])
@table(("package", "words", "command"), CASES)
def test_help_lines_fit_into_the_terminal(package, words, command, columns):
    lines = page(package, *words, "--help", columns=columns).splitlines()
    assert [line for line in lines if len(line) > columns and " " in line.strip()] == []


@pytest.mark.parametrize(("program", "package"), COMMANDS.items())
def test_help_of_commands_loads_no_heavy_module(program, package):
    words = [[], *(list(words) for words, _ in commands(program, package))]
    script = (
        f"import sys, {package}.cli as cli\n"
        f"for words in {words!r}:\n"
        "    sys.argv = ['x', *words, '--help']\n"
        "    try:\n        cli.main()\n"
        "    except SystemExit as stop:\n        assert not stop.code, (words, stop.code)\n"
        f"    loaded = [name for name in {FORBIDDEN!r} if name in sys.modules]\n"
        "    assert not loaded, (words, loaded)\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
