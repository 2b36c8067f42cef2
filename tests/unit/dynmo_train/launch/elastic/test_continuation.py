"""Continuing a round without dead ranks: which deaths allow it, and what the launcher announces."""

from __future__ import annotations

import signal

import pytest
from torch.distributed import HashStore, PrefixStore

from dynmo_train.launch.elastic import continuation
from dynmo_train.launch.elastic.continuation import Continuation, Notice, decode_notice, encode_notice, may_continue

KILLED = -signal.SIGKILL


def ready(store, generation):
    PrefixStore("continuation", store).set(f"ready/{generation}", "1")


@pytest.mark.parametrize(
    ("codes", "survivors", "is_training", "expected"),
    [
        ({1: KILLED}, [0, 2], True, True),
        ({1: -signal.SIGSEGV, 2: KILLED}, [0], True, True),
        ({1: KILLED}, [0, 2], False, False),
        ({1: KILLED}, [], True, False),
        ({1: 1}, [0, 2], True, False),
        ({1: 75}, [0, 2], True, False),
        ({1: -signal.SIGTERM}, [0, 2], True, False),
        ({0: KILLED, 1: 1}, [2], True, False),
    ],
)
def test_only_kills_during_training_continue(codes, survivors, is_training, expected):
    assert may_continue(codes, survivors, is_training=is_training) is expected


def test_notice_survives_the_store():
    notice = Notice(generation=2, ranks=(0, 3), lost=(1,), sizes=(1, 1), cause="killed by SIGKILL", since=12.5)
    assert decode_notice(encode_notice(notice).encode()) == notice


def test_death_before_the_survivors_train_ends_the_round():
    store = HashStore()
    launcher = Continuation(store, (3,))
    assert not launcher.may_take({2: KILLED}, [0, 1])
    ready(store, 0)
    notice = launcher.take({2: KILLED}, [0, 1])
    assert (notice.generation, notice.ranks, notice.lost, notice.cause) == (1, (0, 1), (2,), "killed by SIGKILL")
    assert decode_notice(PrefixStore("continuation", store).get("next/1")) == notice
    assert not launcher.may_take({1: KILLED}, [0])
    assert launcher.pending == {2: KILLED}
    ready(store, 1)
    assert launcher.is_training
    assert launcher.pending == {}
    assert launcher.take({1: KILLED}, [0]).generation == 2


def test_survivors_that_do_not_train_in_time_are_overdue(monkeypatch):
    store, now = HashStore(), [100.0]
    monkeypatch.setattr(continuation.time, "monotonic", lambda: now[0])
    launcher = Continuation(store, (3,))
    ready(store, 0)
    assert not launcher.is_overdue
    launcher.take({1: KILLED}, [0])
    now[0] += continuation.LIMIT_S
    assert not launcher.is_overdue
    now[0] += 1
    assert launcher.is_overdue
    ready(store, 1)
    assert not launcher.is_overdue


def test_death_by_the_watchdog_has_its_cause():
    store = HashStore()
    ready(store, 0)
    causes = {(1,): "killed after a hang: stopped"}
    assert (
        Continuation(store, (2,), lambda ranks: causes.get(tuple(ranks))).take({1: KILLED}, [0]).cause == causes[(1,)]
    )
