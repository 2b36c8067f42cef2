"""Stamps around arithmetic that cost next to nothing: CPU time of the thread, or CUDA events without a wait."""

from __future__ import annotations

import time
from typing import Any, Protocol

import torch


class Clock(Protocol):
    """Takes stamps in the step, and turns pairs of them into nanoseconds after it."""

    def stamp(self) -> Any:
        """A point in the stream of arithmetic, now."""

    def elapsed_ns(self, begin: Any, end: Any) -> int:
        """Nanoseconds between two stamps; on CUDA only after the device has reached both."""


class CpuClock:
    """The wall clock, or the thread's own CPU time where one thread does all arithmetic: preemption does not count."""

    def __init__(self, threads: int) -> None:
        self._now = time.thread_time_ns if threads == 1 else time.perf_counter_ns

    def stamp(self) -> int:
        """Nanoseconds since an arbitrary start."""
        return self._now()

    def elapsed_ns(self, begin: int, end: int) -> int:
        """The difference."""
        return end - begin


class CudaClock:
    """CUDA events on the current stream."""

    def stamp(self) -> torch.cuda.Event:
        """An event recorded now."""
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def elapsed_ns(self, begin: torch.cuda.Event, end: torch.cuda.Event) -> int:
        """The time between two events that have completed."""
        return int(begin.elapsed_time(end) * 1e6)


def clock_for(device: torch.device) -> Clock:
    """The clock of a device."""
    return CudaClock() if device.type == "cuda" else CpuClock(torch.get_num_threads())
