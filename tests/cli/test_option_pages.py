"""``cli/OPTIONS.md`` of each package has every flag of every command, and the README of the package links to it."""

from __future__ import annotations

import importlib
import re

import pytest
import typer

from tests.cli.test_root_options import COMMANDS
from tests.paths import ROOT


def sections(package):
    """Flags on the page by command."""
    text = (ROOT / package / "cli" / "OPTIONS.md").read_text(encoding="utf-8")
    found = {}
    for part in text.split("\n## ")[1:]:
        heading, _, body = part.partition("\n")
        first, *others = re.findall(r"`([^`]+)`", heading)
        rows = re.findall(r"^\| ((?:`-[^` ]*`(?:, )?)+) \|", body, re.MULTILINE)
        flags = {flag for row in rows for flag in re.findall(r"`(-[^` ]*)`", row)}
        for name in (first, *(" ".join([*first.split()[:-1], other]) for other in others)):
            found[name] = flags
    return found


def commands(command, words):
    """The flags of each command that is not hidden, and of the root."""
    if len(words) == 1 or not hasattr(command, "commands"):
        options = [param for param in command.params if param.param_type_name == "option" and not param.hidden]
        yield " ".join(words), {name for option in options for name in (*option.opts, *option.secondary_opts)}
    for name, inner in getattr(command, "commands", {}).items():
        if not inner.hidden:
            yield from commands(inner, (*words, name))


@pytest.mark.parametrize(("program", "package"), COMMANDS.items())
def test_option_page_has_every_flag_of_every_command(program, package):
    declared = dict(commands(typer.main.get_command(importlib.import_module(f"{package}.cli").app), (program,)))
    assert sections(package) == declared
    assert sum(map(len, declared.values())) > 80


@pytest.mark.parametrize("package", COMMANDS.values())
def test_option_page_is_linked_from_the_readme(package):
    assert "(cli/OPTIONS.md)" in (ROOT / package / "README.md").read_text(encoding="utf-8")


def test_option_page_of_training_names_the_tables_of_a_file():
    text = (ROOT / "dynmo_train" / "cli" / "OPTIONS.md").read_text(encoding="utf-8")
    assert re.search(r"^\| `--num-layers` \| INTEGER, 1 to 100,000 \| required \| `\[model\]` \|", text, re.MULTILINE)
    assert re.search(r"^\| `--schedule` \| gpipe, 1f1b, .* \| `\[parallel\]` \|", text, re.MULTILINE)
