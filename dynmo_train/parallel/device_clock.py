"""Time stamps with negligible cost: CPU time of the thread, or CUDA events without synchronization."""

from __future__ import annotations

import time
from typing import Any, Protocol

import torch


class Clock(Protocol):
    """Takes stamps during a step, and converts pairs of them to nanoseconds after it."""

    def stamp(self) -> Any:
        """Return a stamp of the current time."""

    def elapsed_ns(self, begin: Any, end: Any) -> int:
        """Return the nanoseconds between two stamps; on CUDA the device must have reached both."""


class CpuClock:
    """The wall clock, or with one thread its CPU time, which does not count preemption.

    Args:
        threads: Number of threads that compute.

    Attributes:
        is_processor_time: Whether preemption does not count.
    """

    def __init__(self, threads: int) -> None:
        self.is_processor_time = threads == 1
        self._now = time.thread_time_ns if threads == 1 else time.perf_counter_ns

    def stamp(self) -> int:
        """Return nanoseconds since an arbitrary start."""
        return self._now()

    def elapsed_ns(self, begin: int, end: int) -> int:
        """Return the nanoseconds from stamp ``begin`` to stamp ``end``."""
        return end - begin


class CudaClock:
    """CUDA events on the current stream."""

    def stamp(self) -> torch.cuda.Event:
        """Record and return an event."""
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def elapsed_ns(self, begin: torch.cuda.Event, end: torch.cuda.Event) -> int:
        """Return the nanoseconds between two completed events."""
        # torch returns milliseconds.
        return int(begin.elapsed_time(end) * 1e6)


def clock_for(device: torch.device) -> Clock:
    """Return the clock of a device."""
    return CudaClock() if device.type == "cuda" else CpuClock(torch.get_num_threads())
