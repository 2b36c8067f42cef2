"""Messages on full disks: folders of a launcher in memory, logs of a round, pauses between restarts."""

from __future__ import annotations

import errno
import os
import subprocess
import sys

import pytest

from dynmo_train._common.errors import UsageError
from dynmo_train.launch import launch_folder as module
from dynmo_train.launch.elastic.restart import MAX_PAUSE_S, restart_pause_s
from dynmo_train.launch.launch_folder import LogFolders, launch_folder, temporary_folder
from dynmo_train.launch.signal_files import record_dropped, take_dropped

OWNER = """
import os, sys
from pathlib import Path
from dynmo_train.launch import launch_folder
launch_folder._MEMORY = Path(sys.argv[1])
with launch_folder.launch_folder() as folder:
    print(folder, flush=True)
    sys.stdin.read()
"""


def test_folder_of_a_killed_launcher_is_removed_by_the_next_one(tmp_path, monkeypatch):
    monkeypatch.setattr(module, "_MEMORY", tmp_path)
    (tmp_path / "dynmo-heartbeats-of-another-version").mkdir()
    command = [sys.executable, "-c", OWNER, str(tmp_path)]
    owner = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    try:
        stale = owner.stdout.readline().strip()
        with launch_folder() as folder:
            assert os.path.isdir(stale), "its owner lives"
            assert folder.parent == tmp_path
        owner.kill()
        owner.wait()
        with launch_folder() as folder:
            assert sorted(path.name for path in tmp_path.iterdir()) == sorted(
                ["dynmo-heartbeats-of-another-version", folder.name]
            )
    finally:
        owner.kill()
        owner.communicate()


def test_round_whose_log_disk_is_full_has_its_logs_in_memory(tmp_path, monkeypatch, capsys):
    logs, folders = tmp_path / "logs", LogFolders()
    monkeypatch.setattr(module, "_MEMORY", tmp_path)
    assert folders.of_round(logs, is_first=True) == logs
    assert list(logs.iterdir()) == []

    def refuse(number):
        def write(*_):
            raise OSError(number, os.strerror(number))

        monkeypatch.setattr(module, "_check_writable", write)

    refuse(errno.EACCES)
    with pytest.raises(OSError, match="Permission denied"):
        folders.of_round(logs, is_first=True)
    refuse(errno.ENOSPC)
    memory = folders.of_round(logs, is_first=True)
    assert (memory.parent, memory.is_dir()) == (tmp_path, True)
    assert f"{logs}: No space left on device; the logs of this round are in memory: {memory}" in capsys.readouterr().err
    refuse(errno.ENOENT)  # a folder that vanished between two rounds
    assert folders.of_round(logs, is_first=False) == memory
    folders.remove_memory()
    assert not memory.exists()


def test_temporary_folder_on_a_full_disk_is_an_error_with_a_remedy(monkeypatch):
    def refuse(**_):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(module.tempfile, "mkdtemp", refuse)
    with pytest.raises(UsageError, match="No space left on device; set TMPDIR"):
        temporary_folder("x-")


def test_pause_before_a_restart_without_progress_grows_to_its_limit():
    pauses = [restart_pause_s(number) for number in range(1, 2000)]
    assert pauses[:7] == [0.0, 5.0, 10.0, 20.0, 40.0, 60.0, 60.0]
    assert max(pauses) == MAX_PAUSE_S


def test_launcher_learns_how_many_lines_its_ranks_dropped(tmp_path, monkeypatch):
    from dynmo_train._common.streams import MessageFile

    full = os.open("/dev/full", os.O_WRONLY)
    file = MessageFile(full)
    stream = open(os.devnull, "w")  # noqa: SIM115 - closed below
    try:
        for text in (b"one\n", b"two\n"):
            assert file.write(text) == len(text)
        monkeypatch.setattr(sys, "stdout", type("Stream", (), {"buffer": type("Buffer", (), {"raw": file})})())
        monkeypatch.setattr(sys, "stderr", stream)
        record_dropped(tmp_path, 3)
    finally:
        stream.close()
        os.close(full)
    assert list(take_dropped(tmp_path)) == [(3, 2, "No space left on device")]
    assert list(take_dropped(tmp_path)) == []
