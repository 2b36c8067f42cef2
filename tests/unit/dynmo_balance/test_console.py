"""What the shared console prints: tables, with numbers to the right and words to the left."""

from __future__ import annotations

import io
import sys

from dynmo_balance._common.console import emit_table

COLUMNS = ["stage", "items", "size", "change", "when"]
ROWS = [
    ["0", "embedding .. layers.1 (5)", "1.2 MB", "+3.4%", "1f1b"],
    ["10", "[bold]", "-", "-12.0%", ""],
]


def test_table_in_a_pipe_aligns_numbers_right(capsys):
    emit_table("loads", COLUMNS, ROWS)
    assert capsys.readouterr().out.splitlines() == [
        "loads",
        "  stage  items                        size  change  when",
        "      0  embedding .. layers.1 (5)  1.2 MB   +3.4%  1f1b",
        "     10  [bold]                          -  -12.0%",
    ]


def test_table_on_a_terminal_has_no_markup(monkeypatch):
    class Terminal(io.StringIO):
        def isatty(self):
            return True

    terminal = Terminal()
    monkeypatch.setattr(sys, "stdout", terminal)
    monkeypatch.setenv("COLUMNS", "100")
    emit_table("loads", COLUMNS, ROWS)
    row = next(line for line in terminal.getvalue().splitlines() if "[bold]" in line)
    assert "│    10 │ [bold]  " in row


def test_table_without_rows_has_its_heading(capsys):
    emit_table("nothing", ["item", "ms"], [])
    assert capsys.readouterr().out == "nothing\n  item  ms\n"
