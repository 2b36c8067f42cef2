"""The README of dynmo_tools has every command, and its examples use existing flags."""

from __future__ import annotations

import re
from pathlib import Path

from dynmo_tools import cli

README = Path(cli.__file__).parents[1] / "README.md"


def test_readme_table_has_every_command():
    rows = [line for line in README.read_text(encoding="utf-8").splitlines() if line.startswith("| `")]
    named = {name for row in rows for name in re.findall(r"`([a-z-]+)`", row.split("|")[1])}
    assert {command.name for command in cli.app.registered_commands} <= named


def test_readme_examples_use_existing_flags():
    text = README.read_text(encoding="utf-8")
    import typer.main

    group = typer.main.get_command(cli.app)
    for line in re.findall(r"`dynmo-prep ([a-z][a-z-]+[^`]*)`", text):
        name, *words = line.split()
        known = {option for param in group.commands[name].params for option in [*param.opts, *param.secondary_opts]}
        assert {word for word in words if word.startswith("-")} <= known, line
