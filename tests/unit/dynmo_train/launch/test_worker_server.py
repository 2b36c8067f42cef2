"""A server that cannot fork a rank reports the reason and serves the next request."""

from __future__ import annotations

import errno
import os
import socket

import pytest

from dynmo_train.launch import worker_server


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
