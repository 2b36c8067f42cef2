"""A probe that makes each item take a stated time, by sleeping for what its arithmetic leaves of it.

So a pipeline of many workers runs on few cores with the real schedule, transfers, measurements and moves: sleeping
workers overlap. Times must be well above what arithmetic and engine take (10 ms for a layer of a tiny model).
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

from ..dynamics.technique import Event
from ..parallel.device_clock import CpuClock
from .emulation_trace import NOTHING, ItemTimes, Trace
from .profiler import LayerProfiler


class EmulatedProfiler(LayerProfiler):
    """Measures by the wall clock, and sleeps inside of what it measures."""

    def __init__(self, trace: Trace) -> None:
        super().__init__(CpuClock(0))
        self.always_marks = True
        self.trace = trace
        self._times: Mapping[str, ItemTimes] = trace.at(1)
        self._inside: tuple[str, ...] = ()
        self._reached, self._due, self._whole = 0, 0, True

    def begin_step(self, sampling: bool, step: int) -> None:
        """Take the times of ``step``."""
        super().begin_step(sampling, step)
        self._times = self.trace.at(step)

    def events(self, step: int) -> Sequence[Event]:
        """What the trace tells after ``step``."""
        return self.trace.events.get(step, ())

    def _take(self, length_ns: float) -> None:
        """Let this much more of the present operation have passed: an item that was late is made up for by the next."""
        self._due += round(length_ns)
        sleep_until(self._due)

    @contextmanager
    def busy(self) -> Iterator[None]:
        """As measured; the stated times of its items count from here."""
        self._due = time.perf_counter_ns()
        with super().busy():
            yield

    @contextmanager
    def forward(self, name: str) -> Iterator[None]:
        """As measured, and as long as stated."""
        with super().forward(name):
            yield
            self._take(self._times.get(name, NOTHING).forward_ns)

    @contextmanager
    def backward(self, names: tuple[str, ...], *, whole: bool = True) -> Iterator[None]:
        """As measured; each item's part ends when its stated time is over, at its mark."""
        self._inside, self._reached, self._whole = names, len(names), whole
        with super().backward(names, whole=whole):
            yield
            self._take_down_to(0)

    def gradient_reached(self, position: int) -> None:
        """The items behind the mark take their time before the next one begins."""
        self._take_down_to(position)
        super().gradient_reached(position)

    def _take_down_to(self, position: int) -> None:
        for name in reversed(self._inside[position : self._reached]):
            stated = self._times.get(name, NOTHING)
            self._take(stated.backward_input_ns + (stated.backward_weight_ns if self._whole else 0))
        self._reached = min(self._reached, position)

    @contextmanager
    def weight(self, name: str, share: float = 1.0) -> Iterator[None]:
        """As measured, and as long as this share of the stated time."""
        with super().weight(name, share):
            yield
            self._take(self._times.get(name, NOTHING).backward_weight_ns * share)


def sleep_until(moment: int) -> None:
    """Sleep until ``time.perf_counter_ns`` shows ``moment``, if it does not yet."""
    while (left := moment - time.perf_counter_ns()) > 0:
        time.sleep(left / 1e9)
