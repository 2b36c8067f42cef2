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
from dynmo_balance._common.streams import MessageFile

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


def test_messages_on_a_full_disk_are_dropped_and_counted(tmp_path):
    file, full, target = os.open(tmp_path / "log", os.O_CREAT | os.O_RDWR), os.open("/dev/full", os.O_WRONLY), os.dup(1)
    stream = io.TextIOWrapper(io.BufferedWriter(MessageFile(target)), line_buffering=True)
    try:
        for disk, text in (
            (file, "first\nhalf a line"),
            (full, ", lost\n"),
            (full, "lost\n" * 9_000),
            (file, "last\n"),
        ):
            os.dup2(disk, target)
            stream.write(text)
            stream.flush()
        os.set_blocking((ends := os.pipe())[1], False)
        os.dup2(ends[1], target)
        stream.write("x" * (1 << 20))  # a pipe that nobody reads
        os.close(ends[0])
        stream.write("closed\n")
    finally:
        stream.close()
        for descriptor in (file, full, target, ends[1]):
            os.close(descriptor)
    note = "(dropped 9,001 lines of messages: No space left on device)"
    assert (tmp_path / "log").read_text() == f"first\nhalf a line\n{note}\nlast\n"


@pytest.mark.parametrize("target", ["/dev/full", None])
def test_messages_that_cannot_be_written_end_no_command(target):
    code = "import sys; from dynmo_balance._common import console; import typer; app = typer.Typer()\n"
    code += "@app.command()\ndef write():\n    console.print_message('x')\n    print('y', file=sys.stderr)\n"
    code += "    console.emit('data')\nconsole.run_app(app, 'dynmo-plan')"
    command = [sys.executable, "-c", code]
    if target is None:  # closed
        command = ["sh", "-c", 'exec "$@" 2>&-', "sh", *command]
    with open(target or os.devnull, "w") as stderr:
        ended = subprocess.run(command, stderr=stderr, stdout=subprocess.PIPE)
    assert (ended.returncode, ended.stdout) == (0, b"data\n")


def test_full_disk_of_the_messages_ends_with_an_error():
    code = "import sys; from dynmo_balance._common.console import run_app; import typer, errno; app = typer.Typer()\n"
    code += "@app.command()\ndef write():\n    raise OSError(errno.ENOSPC, 'No space left on device')\n"
    code += "run_app(app, 'dynmo-plan')"
    with open("/dev/full", "w") as full:
        ended = subprocess.run([sys.executable, "-c", code], stderr=full, stdout=subprocess.PIPE)
    assert (ended.returncode, ended.stdout) == (1, b"")


def test_error_without_a_file_keeps_its_traceback(monkeypatch, capsys):
    def fork():
        raise OSError(errno.EAGAIN, "no more \x1b[31mprocesses")

    app = typer.Typer()
    app.command()(fork)
    monkeypatch.setattr("sys.argv", ["dynmo-plan"])
    monkeypatch.setattr("sys.excepthook", sys.excepthook)
    with pytest.raises(OSError, match="processes") as error:
        console.run_app(app, "dynmo-plan")
    sys.excepthook(error.type, error.value, error.tb)
    assert capsys.readouterr().err.endswith("] no more \\x1b[31mprocesses\n")


def test_disk_that_refuses_the_removal_reports_its_first_error(monkeypatch, tmp_path):
    def refuse(*_, **__):
        raise OSError(errno.EROFS, "Read-only file system", "removal")

    def fail(*_):
        raise OSError(errno.ENOSPC, "No space left on device", "plan.json")

    monkeypatch.setattr(Path, "unlink", refuse)
    monkeypatch.setattr(os, "fsync", fail)
    with pytest.raises(OSError, match="No space left"):
        write_whole(tmp_path / "plan.json", b"{}")
