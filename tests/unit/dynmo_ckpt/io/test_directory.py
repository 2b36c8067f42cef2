"""A signal that comes while an output is being tidied up leaves nothing half removed."""

from __future__ import annotations

import shutil
import signal
import threading

import pytest

from dynmo_ckpt.io import directory
from dynmo_ckpt.io.directory import new_directory


@pytest.fixture(autouse=True)
def ends_by_sigterm():
    def end(_number, _frame):
        raise SystemExit(143)

    before = signal.signal(signal.SIGTERM, end)
    yield
    signal.signal(signal.SIGTERM, before)


def spoilt(target):
    with new_directory(target) as staging:
        (staging / "part").write_bytes(b"x")
        raise KeyError("a fault of the block")


def test_clean_up_defers_signal_until_the_end(tmp_path, monkeypatch):
    remove, sent = shutil.rmtree, []

    def removing(path):
        # Another thread sends it: which thread the system gives a signal to is open.
        sender = threading.Thread(target=signal.raise_signal, args=(signal.SIGTERM,))
        sender.start()
        sender.join()
        sent.append(path)
        remove(path)

    monkeypatch.setattr(directory.shutil, "rmtree", removing)
    with pytest.raises(SystemExit):
        spoilt(tmp_path / "out")
    assert len(sent) == 1
    assert list(tmp_path.iterdir()) == []


def test_new_directory_signal_before_clean_up_leaves_nothing(tmp_path, monkeypatch):
    tidy_up, calls = directory.clean_up, []

    def first_ended(*paths):
        calls.append(paths)
        if len(calls) == 1:
            raise SystemExit(143)
        tidy_up(*paths)

    monkeypatch.setattr(directory, "clean_up", first_ended)
    with pytest.raises(SystemExit):
        spoilt(tmp_path / "out")
    assert len(calls) == 2
    assert list(tmp_path.iterdir()) == []
