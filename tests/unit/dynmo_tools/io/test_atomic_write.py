"""Files that are written whole: bytes are on the disk before the rename, the folder's entries after it."""

from __future__ import annotations

import errno
import os
import stat
import subprocess
import sys

import pytest

from dynmo_tools._common.errors import DynmoError
from dynmo_tools.io.atomic_write import open_atomic, sweep_temporaries
from dynmo_tools.tokenization.indexed_ops import _new_dataset


@pytest.fixture
def calls(monkeypatch):
    """What is flushed and renamed, in order."""
    made, fsync, replace = [], os.fsync, os.replace

    def flushed(descriptor):
        made.append("folder" if stat.S_ISDIR(os.fstat(descriptor).st_mode) else "file")
        fsync(descriptor)

    def renamed(source, target):
        made.append("rename")
        replace(source, target)

    monkeypatch.setattr(os, "fsync", flushed)
    monkeypatch.setattr(os, "replace", renamed)
    return made


def test_new_file_survives_a_power_loss_after_the_command(tmp_path, calls):
    with open_atomic(tmp_path / "out.json") as handle:
        handle.write(b"{}")
    assert calls == ["file", "rename", "folder"]


def test_new_dataset_survives_a_power_loss_after_the_command(tmp_path, calls):
    with _new_dataset(tmp_path / "data") as files:
        for handle in files:
            handle.write(b"x")
    assert calls == ["file"] * 3 + ["rename"] * 3 + ["folder"]


def test_new_dataset_on_a_full_disk_is_one_message_and_leaves_nothing(tmp_path):
    full = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    with (
        pytest.raises(DynmoError, match="data: No space left on device; no output was kept"),
        _new_dataset(tmp_path / "data"),
    ):
        raise full
    assert list(tmp_path.iterdir()) == []


def test_temporary_files_of_ended_processes_are_removed(tmp_path):
    ended = subprocess.Popen([sys.executable, "-c", ""])
    os.waitid(os.P_PID, ended.pid, os.WEXITED | os.WNOWAIT)  # has ended, and is not waited for
    gone = subprocess.Popen([sys.executable, "-c", ""])
    gone.wait()
    for pid in (ended.pid, gone.pid, os.getpid()):
        (tmp_path / f".out.bin.tmp-{pid}").touch()
    (tmp_path / ".out.bin.tmp-other").touch()
    sweep_temporaries(tmp_path / "out.bin")
    ended.wait()
    assert {path.name for path in tmp_path.iterdir()} == {f".out.bin.tmp-{os.getpid()}", ".out.bin.tmp-other"}


def test_empty_sidecar_is_gone_before_the_index_has_its_name(tmp_path, monkeypatch):
    replace, found = os.replace, []

    def recorded(source, target):
        replace(source, target)
        found.append(sorted(path.name for path in tmp_path.iterdir() if ".dataset.json" in path.name))

    monkeypatch.setattr(os, "replace", recorded)
    with _new_dataset(tmp_path / "data") as (tokens, _, index):
        tokens.write(b"x")
        index.write(b"x")
    assert found == [[], []]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["data.bin", "data.idx"]
