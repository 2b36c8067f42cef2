"""The README of dynmo_tools names every command, and its first example does what it says."""

from __future__ import annotations

import re
from pathlib import Path

from dynmo_tools import cli

README = Path(cli.__file__).parents[1] / "README.md"


def test_every_command_is_in_the_table():
    rows = [line for line in README.read_text(encoding="utf-8").splitlines() if line.startswith("| `")]
    named = {name for row in rows for name in re.findall(r"`([a-z-]+)`", row.split("|")[1])}
    assert {command.name for command in cli.app.registered_commands} <= named


def test_every_example_names_flags_that_exist():
    text = README.read_text(encoding="utf-8")
    import typer.main

    group = typer.main.get_command(cli.app)
    for line in re.findall(r"`dynmo-prep ([a-z-]+[^`]*)`", text):
        name, *words = line.split()
        known = {option for param in group.commands[name].params for option in [*param.opts, *param.secondary_opts]}
        assert {word for word in words if word.startswith("-")} <= known, line
