"""What the shared console prints: tables, with numbers to the right and words to the left, and errors."""

from __future__ import annotations

import errno
import io
import os
import subprocess
import sys
from pathlib import Path

import pytest
import typer

from dynmo_balance._common import console
from dynmo_balance._common.console import emit_table
from dynmo_balance._common.document import write_whole

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


def run(monkeypatch, action):
    app = typer.Typer()
    app.command()(action)
    monkeypatch.setattr("sys.argv", ["dynmo-plan"])
    with pytest.raises(SystemExit) as ended:
        console.run_app(app, "dynmo-plan")
    return ended.value.code


def test_error_of_a_file_is_one_message_with_its_name(monkeypatch, capfd, tmp_path):
    def write():
        write_whole(tmp_path / "absent" / "plan.json", b"{}")

    assert run(monkeypatch, write) == 1
    out, err = capfd.readouterr()
    assert out == ""
    assert err == f"dynmo-plan: error: {tmp_path}/absent/.plan.json.tmp-{os.getpid()}: No such file or directory\n"


def test_full_disk_of_an_open_file_is_one_message(monkeypatch, capfd):
    def write():
        with open("/dev/full", "w") as file:
            file.write("x")

    assert run(monkeypatch, write) == 1
    assert capfd.readouterr() == ("", "dynmo-plan: error: a file: No space left on device\n")


def test_full_disk_of_the_messages_ends_with_an_error():
    code = "import sys; from dynmo_balance._common.console import run_app; import typer, errno; app = typer.Typer()\n"
    code += "@app.command()\ndef write():\n    raise OSError(errno.ENOSPC, 'No space left on device')\n"
    code += "run_app(app, 'dynmo-plan')"
    with open("/dev/full", "w") as full:
        ended = subprocess.run([sys.executable, "-c", code], stderr=full, stdout=subprocess.PIPE)
    assert (ended.returncode, ended.stdout) == (1, b"")


def test_error_without_a_file_keeps_its_traceback(monkeypatch):
    def fork():
        raise OSError(errno.EAGAIN, "no more processes")

    app = typer.Typer()
    app.command()(fork)
    monkeypatch.setattr("sys.argv", ["dynmo-plan"])
    with pytest.raises(OSError, match="no more processes"):
        console.run_app(app, "dynmo-plan")


def test_disk_that_refuses_the_removal_reports_its_first_error(monkeypatch, tmp_path):
    def refuse(*_, **__):
        raise OSError(errno.EROFS, "Read-only file system", "removal")

    def fail(*_):
        raise OSError(errno.ENOSPC, "No space left on device", "plan.json")

    monkeypatch.setattr(Path, "unlink", refuse)
    monkeypatch.setattr(os, "fsync", fail)
    with pytest.raises(OSError, match="No space left"):
        write_whole(tmp_path / "plan.json", b"{}")
