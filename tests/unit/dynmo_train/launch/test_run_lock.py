"""The lock that shows whether a run has living processes."""

from __future__ import annotations

import subprocess
import sys

import pytest

from dynmo_train.launch import run_lock
from dynmo_train.launch.run_lock import LOCK_NAME, hold, holding_when_known, is_locked, release
from tests.waiting import wait_for

OWNER = """
import sys
from pathlib import Path
from dynmo_train.launch.run_lock import hold
print(hold(Path(sys.argv[1])), flush=True)
sys.stdin.read()
"""


def test_lock_ends_with_its_last_process_also_after_sigkill(tmp_path):
    assert is_locked(tmp_path) is None  # a run of an earlier version
    owner = subprocess.Popen([sys.executable, "-c", OWNER, str(tmp_path)], stdin=-1, stdout=-1)
    try:
        assert owner.stdout.readline().strip().isdigit()
        own = hold(tmp_path)  # rank 0 and the launcher have it at the same time
        assert is_locked(tmp_path)
        owner.kill()
        owner.wait()
        assert is_locked(tmp_path)
        release(own)
        assert is_locked(tmp_path) is False
        (tmp_path / LOCK_NAME).write_text("of another machine\n")
        assert is_locked(tmp_path) is None
    finally:
        owner.kill()
        owner.communicate()


def test_launcher_locks_the_run_once_rank_0_has_recorded_it(tmp_path, monkeypatch):
    monkeypatch.setattr(run_lock, "_POLL_S", 0.01)
    run = tmp_path / "run"
    run.mkdir()
    with holding_when_known(tmp_path / "run_dir"):
        (tmp_path / "run_dir").write_text(str(run))
        wait_for(lambda: is_locked(run), "lock of the launcher")
    assert is_locked(run) is False
    with holding_when_known(tmp_path / "absent"):
        pass


@pytest.mark.parametrize("missing", ["folder", "boot id"])
def test_run_that_cannot_be_locked_is_not_known(tmp_path, monkeypatch, missing):
    if missing == "boot id":
        monkeypatch.setattr(run_lock, "_BOOT_ID", tmp_path / "absent")
    place = tmp_path / "absent" if missing == "folder" else tmp_path
    assert hold(place) is None
    assert is_locked(place) is None
