"""Features of all four programs: versions, completion, ``python -m``, command lists without truncation."""

from __future__ import annotations

import importlib
import os
import subprocess
import sys

import pytest
import typer
from typer.testing import CliRunner

import dynmo_train

COMMANDS = {
    "dynmo-prep": "dynmo_tools",
    "dynmo-train": "dynmo_train",
    "dynmo-plan": "dynmo_balance",
    "dynmo-ckpt": "dynmo_ckpt",
}
FIRST = {
    "dynmo_tools": ("fetch-urls", "clean", "dedup", "train-tokenizer", "binarize", "inspect"),
    "dynmo_train": ("pretrain", "launch", "monitor", "evaluate", "generate"),
    "dynmo_balance": ("profile", "partition", "simulate", "watch", "report"),
    "dynmo_ckpt": ("info", "verify", "reshard", "convert"),
}


def run(*words, **environment):
    return subprocess.run(
        [sys.executable, *words], capture_output=True, text=True, timeout=600, env={**os.environ, **environment}
    )


@pytest.mark.parametrize(("command", "package"), COMMANDS.items())
def test_version_does_not_import_torch(command, package):
    program = (
        f"import sys\nimport {package}.cli as cli\nsys.argv = ['x', '--version']\n"
        "try:\n    cli.main()\nexcept SystemExit as stop:\n    assert not stop.code\n"
        "print('torch' in sys.modules)"
    )
    line, loaded = run("-c", program).stdout.splitlines()
    assert line.startswith(f"{command} {dynmo_train.__version__} | distribution: dynmo-toolkit | python: 3.")
    assert " | numpy: " in line
    assert " | torch: " in line
    assert loaded == "False"


@pytest.mark.parametrize(("command", "package"), COMMANDS.items())
def test_completion_lists_commands(command, package):
    variable = f"_{command.replace('-', '_').upper()}_COMPLETE"
    first = FIRST[package][1]
    done = run("-m", package, first[:2], **{variable: "bash"})
    assert first in done.stdout.split()


@pytest.mark.parametrize("package", COMMANDS.values())
def test_help_command_list_is_ordered_without_truncation(package):
    app = importlib.import_module(f"{package}.cli").app
    listed = CliRunner().invoke(app, ["--help"], env={"COLUMNS": "80"}).output.partition("Commands:")[2]
    assert "..." not in listed
    names = [line.split()[0] for line in listed.splitlines() if line[:2] == "  " and line[2:3] not in ("", " ")]
    assert [name for name in names if name in FIRST[package]] == list(FIRST[package])
    assert sorted(names) == sorted(
        name for name, command in typer.main.get_command(app).commands.items() if not command.hidden
    )
    assert max(map(len, listed.splitlines())) <= 80


def groups(package):
    """The command groups of a package."""
    commands = typer.main.get_command(importlib.import_module(f"{package}.cli").app).commands
    return [(package, name) for name, command in commands.items() if hasattr(command, "commands")]


@pytest.mark.parametrize(("package", "name"), [pair for package in COMMANDS.values() for pair in groups(package)])
def test_help_command_list_of_a_group_is_not_truncated(package, name):
    app = importlib.import_module(f"{package}.cli").app
    listed = CliRunner().invoke(app, [name, "--help"], env={"COLUMNS": "80"}).output.partition("Commands:")[2]
    assert "..." not in listed
    commands = typer.main.get_command(app).commands[name].commands
    assert {line.split()[0] for line in listed.splitlines() if line.startswith("  ")} >= set(commands)
    assert max(map(len, listed.splitlines())) <= 80
