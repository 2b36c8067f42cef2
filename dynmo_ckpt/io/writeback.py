"""Starts writeback of written pages early, and drops them from the page cache when they are on disk.

A large output that stays in the page cache costs twice: the final flush waits for all of it, and each page is fresh
memory, whose page fault takes longer than the copy, most of all in a virtual machine. With writeback a few windows of
pages are reused, and the rest of the system keeps its cache.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from .._common.portable import drop_cached

WINDOW_BYTES = 8 << 20
WINDOWS = 8


@dataclass
class Writeback:
    """The windows of one thread; without ``release``, for small outputs, nothing is dropped from the cache."""

    release: bool
    spans: dict[int, tuple[int, int]] = field(default_factory=dict)
    started: deque[tuple[int, int, int]] = field(default_factory=deque)

    def add(self, descriptor: int, begin: int, num_bytes: int) -> None:
        """Record written bytes; a full window starts writeback, and the oldest started one leaves the cache.

        Args:
            descriptor: the open file.
            begin: offset of the first written byte.
            num_bytes: number of written bytes.
        """
        if not self.release:
            return
        first, end = self.spans.get(descriptor, (begin, begin))
        # A window is contiguous: a write elsewhere in the file begins a new one.
        if end != begin:
            self._start(descriptor)
            first = begin
        self.spans[descriptor] = (first, begin + num_bytes)
        if begin + num_bytes - first >= WINDOW_BYTES:
            self._start(descriptor)

    def _start(self, descriptor: int) -> None:
        span = (descriptor, *self.spans.pop(descriptor))
        _drop(*span)
        self.started.append(span)
        if len(self.started) > WINDOWS:
            _drop(*self.started.popleft())


def _drop(descriptor: int, begin: int, end: int) -> None:
    """Start writeback of dirty pages and drop clean ones: so the second call for a window drops it."""
    drop_cached(descriptor, begin, end - begin)
