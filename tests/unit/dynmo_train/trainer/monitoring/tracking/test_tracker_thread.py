"""The thread of a tracker: what a client gets, and that a client that waits or fails delays and ends nothing."""

from __future__ import annotations

import json
import threading
import time

import pytest

from dynmo_train.trainer.monitoring.tracking import tracker_thread
from dynmo_train.trainer.monitoring.tracking.tracker_thread import TrackerThread
from tests.waiting import wait_for


class Client:
    """Records calls; raises the given errors first, one per call."""

    name = "Tracker"

    def __init__(self, start=(), write=(), events=()):
        self.calls, self.steps, self.events, self.exit_code = [], [], [], "none"
        self._errors = {"start": list(start), "write": list(write), "write_events": list(events)}

    def _call(self, name):
        self.calls.append(name)
        if self._errors[name]:
            raise self._errors[name].pop(0)

    def start(self):
        self._call("start")

    def write(self, records):
        self._call("write")
        self.steps += [record.step for record in records]

    def write_events(self, events):
        self._call("write_events")
        self.events = [event["message"] for event in events]

    def finish(self, exit_code):
        self.calls.append("finish")
        self.exit_code = exit_code


def run(client, tmp_path, steps=3, **options):
    thread = TrackerThread(
        client, tmp_path / "events.jsonl", **{"write_every_s": 0.0, "retry_s": 0.01, "close_s": 20.0} | options
    )
    for step in range(1, steps + 1):
        thread.scalars(step, {"lm loss": 1.0 / step})
    return thread


def test_client_gets_all_records_in_order_and_the_exit_code(tmp_path, capsys):
    client = Client()
    run(client, tmp_path, steps=1000).close(75)
    assert client.steps == list(range(1, 1001))
    assert client.exit_code == 75
    assert client.calls.count("start") == 1
    assert capsys.readouterr().err == ""


def test_records_are_written_during_the_run(tmp_path):
    client = Client()
    thread = run(client, tmp_path, steps=2)
    wait_for(lambda: client.steps == [1, 2], "the records")
    thread.scalars(3, {})
    wait_for(lambda: client.steps == [1, 2, 3], "the third record")
    thread.close(0)


def test_records_of_many_steps_are_written_together(tmp_path):
    client = Client()
    thread = run(client, tmp_path, write_every_s=1000.0)
    wait_for(lambda: client.steps, "the first records")
    for step in range(4, 20):
        thread.scalars(step, {})
        time.sleep(0.01)
    assert client.calls.count("write") == 1
    thread.close(0)
    assert client.steps == list(range(1, 20))
    assert client.calls.count("write") == 2


def test_client_that_fails_is_called_again_after_one_warning(tmp_path, capsys):
    errors = [OSError("no\nroute"), ValueError("b")]
    client = Client(start=errors[:], write=errors[:])
    thread = run(client, tmp_path)
    wait_for(lambda: client.steps == [1, 2, 3], "the records")
    thread.close(0)
    assert client.calls.count("start") == 3
    warning = "warning: Tracker: OSError: no route; training continues, and records wait in memory\n"
    assert capsys.readouterr().err == warning


def test_client_that_always_fails_ends_with_the_run(tmp_path, capsys):
    client = Client(start=[OSError("away")] * 10_000)
    thread = run(client, tmp_path, retry_s=1000.0)
    wait_for(lambda: client.calls, "the first attempt")
    started = time.monotonic()
    thread.close(0)
    assert time.monotonic() - started < 5
    # A last attempt at the end.
    assert client.calls == ["start", "start"]
    assert capsys.readouterr().err.endswith("warning: Tracker: 3 records not sent; metrics.jsonl has all of them\n")


def test_client_that_waits_delays_neither_steps_nor_the_end(tmp_path, capsys):
    client, release = Client(), threading.Event()
    client.start = release.wait
    started = time.monotonic()
    thread = run(client, tmp_path, steps=100, close_s=0.2)
    assert time.monotonic() - started < 0.2
    thread.close(0)
    assert time.monotonic() - started < 5
    # The process ends without waiting for it.
    assert [each.daemon for each in threading.enumerate() if each.name == "tracker Tracker"] == [True]
    release.set()
    message = capsys.readouterr().err
    assert "warning: Tracker has not ended after 0 s\n" in message
    assert "100 records not sent" in message


def test_queue_is_bounded_and_drops_the_oldest(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(tracker_thread, "MAX_WAITING", 5)
    client, release = Client(), threading.Event()
    client.start = release.wait
    thread = run(client, tmp_path, steps=12)
    release.set()
    thread.close(0)
    assert client.steps == [8, 9, 10, 11, 12]
    assert "7 records not sent" in capsys.readouterr().err


def test_refused_records_are_dropped_after_some_attempts(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(tracker_thread, "MAX_ATTEMPTS", 3)
    monkeypatch.setattr(tracker_thread, "MAX_BATCH", 2)
    client, release = Client(write=[ValueError("refused")] * 3), threading.Event()
    client.start = release.wait
    thread = run(client, tmp_path, steps=5)
    release.set()
    wait_for(lambda: client.steps == [3, 4, 5], "the other records")
    thread.close(0)
    assert "2 records not sent" in capsys.readouterr().err


def write_events(path, *messages):
    with path.open("a") as handle:
        handle.writelines(json.dumps({"message": message}) + "\n" for message in messages)


def test_events_of_all_starts_are_sent_at_the_end(tmp_path, monkeypatch):
    monkeypatch.setattr(tracker_thread, "MAX_EVENTS", 2)
    client = Client()
    write_events(tmp_path / "events.jsonl", "a", "b")
    thread = run(client, tmp_path)
    write_events(tmp_path / "events.jsonl", "c")
    thread.close(0)
    assert client.events == ["b", "c"]
    assert client.calls[-2:] == ["write_events", "finish"]


def test_events_are_sent_now_and_then(tmp_path, monkeypatch):
    monkeypatch.setattr(tracker_thread, "EVENTS_EVERY_S", 0.05)
    client = Client()
    thread = run(client, tmp_path)
    write_events(tmp_path / "events.jsonl", "a")
    wait_for(lambda: client.events == ["a"], "the event")
    calls = len(client.calls)
    time.sleep(0.3)
    # Without new events nothing is sent.
    assert len(client.calls) == calls
    thread.close(0)


@pytest.mark.parametrize("exit_code", [0, None])
def test_run_is_ended_although_its_events_are_refused(tmp_path, capsys, exit_code):
    client = Client(events=[ValueError("too long")] * 10)
    write_events(tmp_path / "events.jsonl", "a")
    run(client, tmp_path).close(exit_code)
    assert client.calls[-1] == "finish"
    assert client.exit_code == exit_code
    assert "ValueError: too long" in capsys.readouterr().err
