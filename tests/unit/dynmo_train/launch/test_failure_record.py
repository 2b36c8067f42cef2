"""Records of failed processes: one line for the launcher, the stack in the log only."""

from __future__ import annotations

import errno

import pytest

from dynmo_train._common.errors import DynmoError, UsageError
from dynmo_train.launch.failure_record import (
    WITHHELD,
    QuietLines,
    error_line,
    failure_of,
    forget_failure,
    printed_text,
    read_failure,
    recording_failure,
    withheld_text,
)
from dynmo_train.launch.worker import LAUNCHER_PID_VARIABLE

CPP = """boom: 3
Exception raised from check at ../c10/util/Exception.h:12 (most recent call first):
frame #0: c10::Error::Error(c10::SourceLocation) + 0x80 (0x7f in libc10.so)
frame #1: <unknown function>
"""


def environment(folder):
    return {LAUNCHER_PID_VARIABLE: "1", "TORCHELASTIC_ERROR_FILE": str(folder / "error.json")}


def test_recording_failure_of_a_launched_process_writes_record_and_stack(tmp_path, capsys):
    with pytest.raises(SystemExit) as ended, recording_failure(environment(tmp_path)):
        raise RuntimeError(CPP)
    assert ended.value.code == 1
    err = capsys.readouterr().err
    assert err.startswith(f"{WITHHELD}\nTraceback")
    assert "frame #1" in err
    (tmp_path / "stderr.log").write_text(err)
    found = read_failure(tmp_path / "stderr.log")
    assert (found.message, found.is_consequence) == ("RuntimeError: boom: 3", False)
    assert withheld_text(err) == err.partition("\n")[2]


def test_recording_failure_of_an_error_of_ours_keeps_it(tmp_path, capsys):
    with pytest.raises(DynmoError), recording_failure(environment(tmp_path), lambda _: True):
        raise DynmoError("disk full\nmore")
    found = read_failure(tmp_path / "stderr.log")
    assert (found.message, found.is_consequence) == ("disk full", True)
    assert capsys.readouterr().err == f"{WITHHELD}\n"


@pytest.mark.parametrize("error", [UsageError("x"), RuntimeError("x")])
def test_failure_without_launcher_or_of_usage_is_not_recorded(tmp_path, capsys, error):
    given = environment(tmp_path) if isinstance(error, UsageError) else {}
    with pytest.raises(type(error)), recording_failure(given):
        raise error
    assert capsys.readouterr().err == ""
    assert read_failure(tmp_path / "stderr.log") is None


def test_failure_of_a_process_that_may_continue_is_raised_and_forgotten(tmp_path, capsys):
    given = environment(tmp_path)
    with pytest.raises(RuntimeError, match="x"), recording_failure(given, is_final=False):
        raise RuntimeError("x")
    assert "x" in read_failure(tmp_path / "stderr.log").message
    assert capsys.readouterr().err == ""
    forget_failure(given)
    assert read_failure(tmp_path / "stderr.log") is None


@pytest.mark.parametrize("text", ["", "[", "{}", "[1]"])
def test_read_failure_damaged_record_is_none(tmp_path, text):
    (tmp_path / "failure.json").write_text(text)
    assert read_failure(tmp_path / "stderr.log") is None


def test_quiet_lines_stop_at_the_mark_and_leave_out_cpp_frames():
    log = f"talk\n{CPP}more\n[rank1]: frame #2: x\nhalf"
    quiet = QuietLines()
    pieces = [quiet.feed(log[at : at + 7]) for at in range(0, len(log), 7)]
    assert "".join(pieces) + quiet.finish() == "talk\nboom: 3\nmore\nhalf"
    assert printed_text(f"a\n{WITHHELD}\nTraceback\n") == "a\n"


def test_error_line_is_short():
    assert len(error_line(ValueError("x" * 10_000))) < 700
    assert error_line(ValueError()) == "ValueError"


def test_record_on_a_full_disk_is_in_the_memory_of_the_launcher(tmp_path, monkeypatch):
    def refuse(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("dynmo_train.launch.failure_record.write_whole", refuse)
    place = {"DYNMO_HEARTBEATS": str(tmp_path), "TORCHELASTIC_RUN_ID": "round-0", "RANK": "3"}
    given = {**environment(tmp_path / "full"), **place}
    with pytest.raises(DynmoError), recording_failure(given):
        raise DynmoError("first cause")
    log = tmp_path / "full/stderr.log"
    assert failure_of(log, given, 3, "round-0").message == "first cause"
    assert failure_of(log, given, 3, "round-1") is None
    forget_failure(given)
    assert failure_of(log, given, 3, "round-0") is None
