"""Help pages: sections, layouts by the width of the terminal, colour, and defaults that depend on other values."""

from __future__ import annotations

import os
import pty
import subprocess
import sys
from pathlib import Path
from typing import Annotated

import pytest
import typer
from typer.testing import CliRunner

from dynmo_balance._common.help import CommandLine, OptionHelp, describe, sections
from dynmo_balance._common.panel import Panel

app = CommandLine(no_args_is_help=False)


def extra(number):
    return Annotated[int, typer.Option(f"--extra-{number}", rich_help_panel=Panel("Extra", rare=True), help="Rare.")]


@app.command()
def single(
    source: Annotated[Path, typer.Argument(help="Input file.")],
    *,
    late: Annotated[str, typer.Option(help="A required option.", rich_help_panel="Later")],
    kind: Annotated[
        str, typer.Option(metavar="alpha|beta|gamma|delta|epsilon", help="Choices.", rich_help_panel="Later")
    ] = "alpha",
    window: Annotated[int, typer.Option(min=1, max=100_000, help="Number of records.", rich_help_panel="Costs")] = 20,
    width: Annotated[int | None, typer.Option(min=1, help="Columns. Default: those of the terminal.")] = None,
    verify: Annotated[bool, typer.Option("--verify/--no-verify", help="Read back.", rich_help_panel="Costs")] = True,
    tie: Annotated[bool, typer.Option("--tie/--untie", help="Share it.", rich_help_panel="Costs")] = True,
    e1: extra(1) = 1,
    e2: extra(2) = 1,
    e3: extra(3) = 1,
    e4: extra(4) = 1,
    e5: extra(5) = 1,
    e6: extra(6) = 1,
    e7: extra(7) = 1,
) -> None:
    """A command with many options."""


def shown(*words, columns):
    done = CliRunner().invoke(app, list(words), env={"COLUMNS": str(columns), "TERM": "xterm"}, prog_name="many")
    assert done.exit_code == 0, done.output
    return done.output


def headings(page):
    return [line for line in page.splitlines() if line.endswith(":") and not line.startswith(" ")]


def test_help_shows_required_first_and_counts_rare_options():
    page = shown("--help", columns=120)
    assert headings(page) == ["Arguments:", "Required:", "Options:", "Later:", "Costs:", "Help:"]
    assert page.splitlines()[-1] == "7 more options: many --help-all"
    assert "--extra-1" not in page


def test_help_all_shows_every_option_in_the_same_order():
    page = shown("--help-all", columns=120)
    assert headings(page) == ["Arguments:", "Required:", "Options:", "Later:", "Costs:", "Extra:", "Help:"]
    assert all(f"--extra-{number}" in page for number in range(1, 8))
    assert "more option" not in page


def test_help_of_120_columns_aligns_values_and_defaults():
    lines = shown("--help", columns=120).splitlines()
    window, kind = (next(line for line in lines if f"--{name} " in line) for name in ("window", "kind"))
    assert window.split() == ["--window", "INTEGER", "20", "Number", "of", "records.", "[1", "to", "100,000]"]
    assert window.index("20") == kind.index("alpha ")
    assert window.index("Number") == kind.index("Choices.")


@pytest.mark.parametrize("columns", [40, 60, 80, 99, 100, 120, 200])
def test_help_fits_into_the_width_without_losing_a_word(columns):
    page = shown("--help-all", columns=columns)
    assert max(map(len, page.splitlines())) <= columns
    wide = shown("--help-all", columns=500)
    for word in ("alpha", "epsilon", "--[no-]verify", "--tie,", "--untie", "those", "terminal"):
        assert word in page
        assert word in wide


def test_help_takes_a_default_from_the_end_of_the_help():
    assert "those of the terminal  Columns." in shown("--help", columns=300)


@pytest.mark.parametrize(
    ("text", "default", "rest"),
    [
        ("Where to cut. Default: as in the profile.", "as in the profile", "Where to cut."),
        ("Nodes  [default: 1].", "1", "Nodes."),
        ("Rejects [default: OUTPUT.work]", "OUTPUT.work", "Rejects."),
        ("Step of a run; default: the latest.", "the latest", "Step of a run."),
        ("Has no default.", "", "Has no default."),
    ],
)
def test_describe_separates_text_and_default(text, default, rest):
    def other(value=None): ...

    other.__annotations__ = {"value": Annotated[str | None, typer.Option(help=text)]}
    one = CommandLine()
    one.command()(other)
    found = describe(typer.main.get_command(one).params[0], None)
    assert (found.default, found.text) == (default, rest)


def test_sections_of_few_options_are_one():
    rows = [OptionHelp(names="--a", panel="X"), OptionHelp(names="--b", panel="Y", required=True)]
    assert {title: [row.names for row in each] for title, each in sections(rows).items()} == {"Options": ["--b", "--a"]}


def in_terminal(**environment):
    """Output of ``dynmo-plan partition --help`` on a pseudo-terminal."""
    parent, child = pty.openpty()
    clean = {name: value for name, value in os.environ.items() if name not in ("NO_COLOR", "TERM")}
    command = [sys.executable, "-m", "dynmo_balance", "partition", "--help"]
    process = subprocess.Popen(command, stdout=child, env={**clean, "COLUMNS": "90", **environment})
    os.close(child)
    output = b""
    try:
        while part := os.read(parent, 65536):
            output += part
    except OSError:  # the other end is closed
        pass
    os.close(parent)
    assert process.wait() == 0
    return output.decode()


def test_help_on_a_terminal_is_in_colour():
    assert "\x1b[1mPipeline:\x1b[0m" in in_terminal(TERM="xterm")


@pytest.mark.parametrize("environment", [{"TERM": "dumb"}, {"TERM": "xterm", "NO_COLOR": "1"}])
def test_help_without_colours_has_no_escape_sequence(environment):
    assert "\x1b" not in in_terminal(**environment)


def test_help_in_a_pipe_is_plain_ascii():
    command = [sys.executable, "-m", "dynmo_balance", "partition", "--help-all"]
    done = subprocess.run(command, capture_output=True, check=True, env={**os.environ, "TERM": "xterm"})
    assert b"\x1b" not in done.stdout
    done.stdout.decode("ascii")


def test_help_separates_a_value_that_is_wider_than_its_column():
    def long(kind="x"): ...

    long.__annotations__ = {"kind": Annotated[str, typer.Option(metavar="B" * 40, help="Kind.")]}
    one = CommandLine()
    one.command()(long)
    lines = CliRunner().invoke(one, ["--help"], env={"COLUMNS": "120"}).output.splitlines()
    assert next(line for line in lines if "--kind" in line).split() == ["--kind", "B" * 40, "x", "Kind."]
