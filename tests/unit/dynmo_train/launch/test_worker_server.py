"""A server that cannot fork a rank reports the reason and serves the next request."""

from __future__ import annotations

import errno
import os
import socket

import pytest

from dynmo_train._common.errors import DynmoError
from dynmo_train.launch import worker_server, worker_start


@pytest.mark.parametrize(("call", "failing"), [("pipe", 1), ("pipe", 2), ("fork", 1)])
def test_error_of_a_fork_is_answered_and_leaves_no_files_open(monkeypatch, call, failing):
    calls, own = [], getattr(os, call)

    def limited():
        calls.append(call)
        if len(calls) == failing:
            raise OSError(errno.EMFILE, "too many open files")
        return own()

    here, there = socket.socketpair()
    with here, there:
        before = set(os.listdir("/proc/self/fd"))
        monkeypatch.setattr(os, call, limited)
        assert not worker_server._fork_rank(here, ())
        assert worker_server.receive_message(there) == ({"pid": 0, "errno": errno.EMFILE}, [])
        assert set(os.listdir("/proc/self/fd")) == before


READY = "c = socket.socket(fileno=int(sys.argv[1])); worker_server.send_message(c, {'problem': None})"
STUCK = "import socket, sys, time; from dynmo_train.launch import worker_server; {}; time.sleep(600)"


@pytest.mark.parametrize("is_ready", [False, True])
def test_server_that_does_not_answer_is_replaced_once(monkeypatch, capsys, is_ready):
    monkeypatch.setattr(worker_start, "_SERVER", ("-c", STUCK.format(READY if is_ready else "pass")))
    monkeypatch.setattr(worker_start, "IMPORTS_S", 60.0 if is_ready else 0.05)
    monkeypatch.setattr(worker_start, "FORK_S", 0.05)
    started, popen = [], worker_start.subprocess.Popen
    monkeypatch.setattr(worker_start.subprocess, "Popen", lambda *a, **k: started.append(popen(*a, **k)) or started[-1])
    with worker_start.WorkerServer() as server:
        assert server.is_usable() == is_ready
        if is_ready:
            with pytest.raises(DynmoError, match=r"does not answer within 0\.05 s"):
                server.fork(["python", "-m", "x"], {}, ())
        else:
            assert not server.is_usable()
            assert capsys.readouterr().err.count("did not import its modules within 0.05 s, twice") == 1
        assert len(started) == 2
    assert all(process.poll() is not None for process in started)
