"""Sends the scalars and events of a run to an experiment tracker without ever making a training step wait.

Data flow::

    TrainingLog.scalars --> waiting (at most MAX_WAITING records) --+
                                                                    |  one thread per tracker
    RUN/events.jsonl --JsonlTail--> last MAX_EVENTS events ---------+--> TrackerClient --> W&B, MLflow

A client may fail in any way and at any time: no network, a full disk, a run that was deleted on the server. The thread
reports the first failure, keeps the records and tries again, and training continues. ``metrics.jsonl`` and
``events.jsonl`` have everything in any case.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any, Protocol

from ...._common.console import print_message
from ..jsonl_tail import JsonlTail

# Records that wait for a client that does not answer: a few MB.
MAX_WAITING = 10_000
# Records of one call of a client.
MAX_BATCH = 1_000
# Events at the end of the file that a start reads, in bytes.
_EVENT_BYTES = 1 << 24
MAX_EVENTS = 1_000
# A call per step would take time of the interpreter from the training.
WRITE_EVERY_S = 2.0
# A tracker uploads all events as one file, so that they are sent now and then only.
EVENTS_EVERY_S = 60.0
RETRY_S = 30.0
# Attempts for the same records: with the time between, outages of 10 minutes lose nothing.
MAX_ATTEMPTS = 20
CLOSE_S = 30.0


@dataclass(frozen=True, kw_only=True)
class ScalarRecord:
    """Scalars of a step.

    Attributes:
        step: number of completed steps.
        time_s: seconds since the epoch.
        scalars: name -> value.
    """

    step: int
    time_s: float
    scalars: Mapping[str, float]


class TrackerClient(Protocol):
    """A tracker's own client. All methods are called in one thread, and may raise anything."""

    name: str

    def start(self) -> None:
        """Open the run on the tracker, or the one of the earlier starts; called again after a failure."""

    def write(self, records: Sequence[ScalarRecord]) -> None:
        """Send scalars; called again with the same records after a failure."""

    def write_events(self, events: Sequence[Mapping[str, Any]]) -> None:
        """Send the last events of the run, which replace those of the last call."""

    def finish(self, exit_code: int | None) -> None:
        """End the run on the tracker.

        Args:
            exit_code: exit code of the training; None after an error.
        """


class TrackerThread:
    """Calls a client in a thread of its own.

    Args:
        client: client of the tracker.
        events: ``events.jsonl`` of the run; it need not exist yet.
        write_every_s: minimum seconds between calls with records.
        retry_s: seconds between attempts.
        close_s: seconds after which :meth:`close` gives up.
    """

    def __init__(
        self,
        client: TrackerClient,
        events: Path,
        *,
        write_every_s: float = WRITE_EVERY_S,
        retry_s: float = RETRY_S,
        close_s: float = CLOSE_S,
    ) -> None:
        self._client, self._events_tail = client, JsonlTail(events, tail_bytes=_EVENT_BYTES)
        self._write_every_s, self._retry_s, self._close_s = write_every_s, retry_s, close_s
        self._waiting: deque[ScalarRecord] = deque()
        self._num_dropped = 0
        self._has_news = threading.Condition()
        self._is_closing = False
        self._exit_code: int | None = None
        # Of the thread alone.
        self._is_started = self._has_warned = False
        self._events: deque[dict[str, Any]] = deque(maxlen=MAX_EVENTS)
        self._has_new_events, self._events_sent_s = False, time.monotonic()
        self._written_s = float("-inf")
        # A daemon: the process must be able to end while a client waits for its server.
        self._thread = threading.Thread(target=self._run, name=f"tracker {client.name}", daemon=True)
        self._thread.start()

    def scalars(self, step: int, scalars: Mapping[str, float]) -> None:
        """Queue the scalars of ``step``; never waits. Beyond ``MAX_WAITING`` records the oldest are dropped."""
        record = ScalarRecord(step=step, time_s=time.time(), scalars=dict(scalars))
        with self._has_news:
            self._waiting.append(record)
            if len(self._waiting) > MAX_WAITING:
                self._waiting.popleft()
                self._num_dropped += 1
            self._has_news.notify()

    def close(self, exit_code: int | None = None) -> None:
        """Send what waits, within a limited time, and end the run on the tracker.

        Args:
            exit_code: exit code of the training; None after an error.
        """
        with self._has_news:
            self._is_closing, self._exit_code = True, exit_code
            self._has_news.notify()
        self._thread.join(self._close_s)
        lost = self._num_dropped + len(self._waiting)
        if self._thread.is_alive():
            print_message(f"warning: {self._client.name} has not ended after {self._close_s:.0f} s")
        if lost:
            records = f"{lost:,} record{'' if lost == 1 else 's'}"
            print_message(f"warning: {self._client.name}: {records} not sent; metrics.jsonl has all of them")

    def _run(self) -> None:
        attempts, is_done = 0, False
        while not is_done:
            batch, is_closing = self._next_batch()
            try:
                is_done = self._send(batch, is_closing=is_closing)
                attempts = 0
            except Exception as error:  # noqa: BLE001 - the client of another project may raise anything
                attempts += 1
                self._warn(error)
                # The last attempt was made: nothing waits for this thread any more.
                is_done = is_closing
                if self._is_started and attempts >= MAX_ATTEMPTS:
                    self._discard(batch)
                    attempts = 0
                if not is_done:
                    self._wait(time.monotonic() + self._retry_s)

    def _next_batch(self) -> tuple[list[ScalarRecord], bool]:
        """The oldest records, and whether the run ends; waits for either, or for the time of the events."""
        with self._has_news:
            if not self._waiting and not self._is_closing and self._is_started:
                self._has_news.wait(EVENTS_EVERY_S)
        if self._is_started:
            self._wait(self._written_s + self._write_every_s)
        with self._has_news:
            return list(islice(self._waiting, MAX_BATCH)), self._is_closing

    def _send(self, batch: list[ScalarRecord], *, is_closing: bool) -> bool:
        """Send records and events; whether everything is sent and the run is ended."""
        if not self._is_started:
            self._client.start()
            self._is_started = True
        if batch:
            self._client.write(batch)
            self._discard(batch, is_sent=True)
            self._written_s = time.monotonic()
        is_last = is_closing and not self._waiting
        try:
            self._send_events(is_last=is_last)
        finally:
            # Also if the events are refused: a run without an end stays "running" on the tracker.
            if is_last:
                self._client.finish(self._exit_code)
        return is_last

    def _send_events(self, *, is_last: bool) -> None:
        if self._events_tail.has_restarted():
            self._events.clear()
        for event in self._events_tail.read():
            self._events.append(event)
            self._has_new_events = True
        if self._has_new_events and (is_last or time.monotonic() - self._events_sent_s >= EVENTS_EVERY_S):
            self._client.write_events(list(self._events))
            self._has_new_events, self._events_sent_s = False, time.monotonic()

    def _discard(self, batch: Sequence[ScalarRecord], *, is_sent: bool = False) -> None:
        """Remove records of a batch that are still waiting: a full queue may have dropped some of them."""
        sent = set(map(id, batch))
        with self._has_news:
            while self._waiting and id(self._waiting[0]) in sent:
                self._waiting.popleft()
                self._num_dropped += not is_sent

    def _wait(self, deadline: float) -> None:
        """Wait until a time of the monotonic clock, or the end of the run."""
        with self._has_news:
            while not self._is_closing and (left_s := deadline - time.monotonic()) > 0:
                self._has_news.wait(left_s)

    def _warn(self, error: Exception) -> None:
        if self._has_warned:
            return
        self._has_warned = True
        cause = " ".join(f"{type(error).__name__}: {error}".split())[:300]
        print_message(f"warning: {self._client.name}: {cause}; training continues, and records wait in memory")
