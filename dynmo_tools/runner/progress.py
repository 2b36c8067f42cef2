"""Progress of a run: a bar on a terminal; elsewhere the log lines of Megatron's tools."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

from .._common.console import print_message
from .._common.streams import escaped, is_terminal
from .task import Phase

# A log line at least this far apart, whatever ``--log-interval`` is: fast steps read 1,000 documents in milliseconds.
LINE_EVERY_S = 0.5


class Meter(Protocol):
    """Shows how many documents were read."""

    def report(self, documents: int, size: int) -> None:
        """Add ``documents`` documents and ``size`` bytes."""

    def resume(self, phase: Phase, done: int) -> None:
        """A phase starts; ``done`` of its tasks were completed by an earlier run."""


class _LogMeter:
    """Logs ``Processed 3000 documents (1234.5 docs/s, 6.7 MB/s).`` at multiples of the interval."""

    def __init__(self, label: str, total_bytes: int, interval: int) -> None:
        self._label, self._total, self._interval = label, total_bytes, max(interval, 1)
        self._documents = self._bytes = 0
        self._started = self._last_log_time = time.monotonic()
        self._last_logged_documents = 0

    def resume(self, phase: Phase, done: int) -> None:
        """Log that ``done`` tasks of a phase are complete, and take their bytes from the remaining time."""
        if done and done < phase.tasks:
            print_message(f"{self._label}: resumed: {done} of {phase.tasks} tasks of phase {phase.name} are complete")
        if phase.reads:
            self._total -= self._total * done // phase.tasks

    def report(self, documents: int, size: int) -> None:
        """Add ``documents`` documents and ``size`` bytes; log a line if one is due."""
        self._documents += documents
        self._bytes += size
        now = time.monotonic()
        shown = self._documents - self._documents % self._interval
        if now - self._last_log_time >= LINE_EVERY_S and shown > self._last_logged_documents:
            self._last_log_time = now
            rate = self._bytes / (now - self._started)
            self._log(shown, f" {max(self._total - self._bytes, 0) / rate:.0f} s left" if rate and self._total else "")

    def finish(self) -> None:
        """Log the total number of documents."""
        if self._documents > self._last_logged_documents:
            self._log(self._documents)

    def _log(self, shown: int, left: str = "") -> None:
        self._last_logged_documents = shown
        elapsed = max(time.monotonic() - self._started, 1e-9)
        rates = f"{self._documents / elapsed:.1f} docs/s, {self._bytes / elapsed / 1e6:.2f} MB/s"
        print_message(f"Processed {shown} documents ({rates}).{left}")


class _BarMeter:
    def __init__(self, bar: Progress, label: str, total_bytes: int) -> None:
        self._bar = bar
        self._task = bar.add_task(escaped(label), total=total_bytes or None, note="")
        self._documents = self._bytes = 0
        self._started = time.monotonic()

    def resume(self, phase: Phase, done: int) -> None:
        """Show the phase, and that ``done`` of its tasks are complete."""
        note = f"{phase.name}: resumed at {done}/{phase.tasks}" if done else phase.name
        self._bar.update(self._task, note=note)

    def report(self, documents: int, size: int) -> None:
        """Add ``documents`` documents and ``size`` bytes."""
        self._documents += documents
        self._bytes += size
        elapsed = max(time.monotonic() - self._started, 1e-9)
        note = f"{self._documents / elapsed:,.0f} docs/s, {self._bytes / 1e6 / elapsed:.1f} MB/s"
        self._bar.update(self._task, advance=size, note=note)


@contextmanager
def progress_meter(label: str, total_bytes: int, *, log_interval: int = 1000) -> Iterator[Meter]:
    """Show the progress of a run.

    Args:
        label: name of the step.
        total_bytes: bytes of all inputs.
        log_interval: documents between two log lines.
    """
    if is_terminal(sys.stderr):
        columns = (
            TextColumn("{task.description}", markup=False),
            BarColumn(),
            TextColumn("{task.percentage:>3.0f}%"),
            TimeRemainingColumn(),
            TextColumn("{task.fields[note]}", markup=False),
        )
        with Progress(*columns, console=Console(file=sys.stderr), transient=True) as bar:
            yield _BarMeter(bar, label, total_bytes)
    else:
        lines = _LogMeter(label, total_bytes, log_interval)
        yield lines
        lines.finish()
