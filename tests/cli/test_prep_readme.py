"""The README of dynmo_tools has every command; tests/documents checks their options."""

from __future__ import annotations

import re
from pathlib import Path

from dynmo_tools import cli

README = Path(cli.__file__).parents[1] / "README.md"


def test_readme_table_has_every_command():
    rows = [line for line in README.read_text(encoding="utf-8").splitlines() if line.startswith("| `")]
    named = {name for row in rows for name in re.findall(r"`([a-z-]+)`", row.split("|")[1])}
    assert {command.name for command in cli.app.registered_commands} <= named
