"""A profiler that makes each item take a given time: it sleeps for what the arithmetic leaves of that time.

So a pipeline of many ranks runs on few cores with the real schedule, transfers, measurements and moves, because
sleeping ranks overlap. Times must be well above those of arithmetic and engine (10 ms for a layer of a tiny model).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch

from ..dynamics.technique import Event
from ..parallel.device_clock import CpuClock
from .emulation_trace import ZERO_TIMES, EmulationTrace, ItemTimes
from .profiler import LayerProfiler

# Emulated time of the calibration product at normal speed.
CALIBRATION_NS = 1_000_000


class EmulatedProfiler(LayerProfiler):
    """Measures by the wall clock, and sleeps within what it measures.

    Args:
        trace: Times of each item.
        slowdown: Step -> factor of all times of this rank; 1 is normal.
    """

    def __init__(self, trace: EmulationTrace, slowdown: Callable[[int], float] = lambda _step: 1.0) -> None:
        # Wall clock: CPU time does not advance while a thread sleeps.
        super().__init__(CpuClock(0))
        # Backward times are slept at the marks, so that every step needs them.
        self.always_marks = True
        self.trace, self._slowdown, self._factor = trace, slowdown, slowdown(1)
        self._times: Mapping[str, ItemTimes] = trace.at(1)
        self._stage_names: tuple[str, ...] = ()
        self._reached, self._due_ns, self._full = 0, 0, True

    def begin_step(self, sampling: bool, step: int) -> None:
        """Use the times of ``step``."""
        super().begin_step(sampling, step)
        self._times, self._factor = self.trace.at(step), self._slowdown(step)

    def calibrate(self, device: torch.device) -> None:
        """Record the time that the product takes on the emulated device; sleeping would add the delay of a wake-up."""
        if self.sampling:
            self._calibrations.append((0, round(CALIBRATION_NS * self._factor)))

    def events(self, step: int) -> Sequence[Event]:
        """Return the trace's events after ``step``."""
        return self.trace.events.get(step, ())

    def _take(self, duration_ns: float) -> None:
        """Extend the current operation by this time; an item that is late shortens the sleep of the next one."""
        # A deadline instead of a duration: late wake-ups do not add up over the items of an operation.
        self._due_ns += round(duration_ns * self._factor)
        sleep_until(self._due_ns)

    @contextmanager
    def busy(self) -> Iterator[None]:
        """Measure one operation; the times of its items count from here."""
        self._due_ns = time.perf_counter_ns()
        with super().busy():
            yield

    @contextmanager
    def forward(self, name: str) -> Iterator[None]:
        """Take the forward time of one item."""
        with super().forward(name):
            yield
            self._take(self._times.get(name, ZERO_TIMES).forward_ns)

    @contextmanager
    def backward(self, names: tuple[str, ...], *, full: bool = True) -> Iterator[None]:
        """Take the backward times of a stage; each item's time ends at its mark."""
        self._stage_names, self._reached, self._full = names, len(names), full
        with super().backward(names, full=full):
            yield
            # The items before the first mark: an input that requires no grad has none.
            self._take_down_to(0)

    def gradient_reached(self, position: int) -> None:
        """Take the times of the items from ``position`` of the stage on, before the earlier item starts."""
        self._take_down_to(position)
        super().gradient_reached(position)

    def _take_down_to(self, position: int) -> None:
        for name in reversed(self._stage_names[position : self._reached]):
            times = self._times.get(name, ZERO_TIMES)
            self._take(times.backward_input_ns + (times.backward_weight_ns if self._full else 0))
        self._reached = min(self._reached, position)

    @contextmanager
    def weight(self, name: str, share: float = 1.0) -> Iterator[None]:
        """Take a share of the weight-gradient time of one item."""
        with super().weight(name, share):
            yield
            self._take(self._times.get(name, ZERO_TIMES).backward_weight_ns * share)


def sleep_until(deadline_ns: int) -> None:
    """Sleep until ``time.perf_counter_ns`` reaches ``deadline_ns``."""
    while (remaining := deadline_ns - time.perf_counter_ns()) > 0:
        time.sleep(remaining / 1e9)
