"""A signal that comes while an output is being tidied up leaves nothing half removed."""

from __future__ import annotations

import shutil
import signal
import threading
from contextlib import nullcontext

import pytest

from dynmo_ckpt._common.errors import UsageError
from dynmo_ckpt.io import directory
from dynmo_ckpt.io.directory import check_target, new_directory


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


def test_leftovers_of_killed_processes_are_removed(tmp_path):
    (tmp_path / ".out.tmp-0123abcd").mkdir()
    (tmp_path / ".out.tmp-0123abcd" / "shard").write_bytes(b"half")
    for name in (".out.tmp-other", ".another.tmp-0123abcd"):
        (tmp_path / name).mkdir()
    with new_directory(tmp_path / "out") as staging:
        (staging / "file").write_text("new")
    assert sorted(path.name for path in tmp_path.iterdir()) == [".another.tmp-0123abcd", ".out.tmp-other", "out"]


def test_replaced_target_survives_a_kill_until_the_new_one_is_complete(tmp_path):
    (tmp_path / ".out.old-0123abcd").mkdir()
    (tmp_path / ".out.old-0123abcd" / "file").write_text("previous")
    with pytest.raises(KeyError), new_directory(tmp_path / "out"):
        raise KeyError
    assert (tmp_path / "out" / "file").read_text() == "previous"
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


@pytest.fixture(params=["renameat2", "rename"])
def without_flags(request, monkeypatch):
    """Both ways of the rename: with and without the flags of the system call."""
    if request.param == "rename":
        monkeypatch.setattr(directory, "_rename", lambda *_: False)


@pytest.mark.usefixtures("without_flags")
def test_target_that_appears_meanwhile_stays(tmp_path):
    def write_twice():
        with new_directory(tmp_path / "out") as first:
            with new_directory(tmp_path / "out") as second:
                (second / "file").write_text("second")
            assert first.is_dir()
            (first / "file").write_text("first")

    with pytest.raises(UsageError, match="by another program meanwhile"):
        write_twice()
    assert (tmp_path / "out" / "file").read_text() == "second"
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


@pytest.mark.usefixtures("without_flags")
@pytest.mark.parametrize("refusals", [{1}, {2}, set()])
def test_target_is_checked_before_and_after_it_is_moved(tmp_path, refusals):
    """A folder that changes between the first check and the rename is moved back."""
    calls = []

    def check(path):
        calls.append(path)
        assert (path / "thesis.txt").read_text() == "old"
        if len(calls) in refusals:
            raise UsageError("not a checkpoint")

    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "thesis.txt").write_text("old")
    with pytest.raises(UsageError) if refusals else nullcontext(), new_directory(tmp_path / "out", check) as staging:
        (staging / "file").write_text("new")
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["thesis.txt" if refusals else "file"]
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_target_that_an_input_links_to_is_refused(tmp_path):
    (tmp_path / "cache").mkdir()
    (tmp_path / "cache" / "blob").write_text("weights")
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "model.safetensors").symlink_to(tmp_path / "cache" / "blob")
    with pytest.raises(UsageError, match="would replace the input"):
        check_target(tmp_path / "cache", [tmp_path / "in"], check=lambda _: None, need_bytes=0)
