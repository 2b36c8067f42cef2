"""Sends written pages to the disk early and gives them up once they are there.

A large output that stays in the page cache costs twice: the flush at the end waits for all of it, and every page of it
is fresh memory, whose first touch takes longer than the copy (most of all in a virtual machine). Here a few windows of
pages are used again and again, and the rest of the system keeps its cache.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from .._common.portable import drop_cached

WINDOW_BYTES = 8 << 20
WINDOWS = 8


@dataclass
class Writeback:
    """The windows of one thread; without ``release`` nothing is done, for small outputs may stay in the cache."""

    release: bool
    spans: dict[int, tuple[int, int]] = field(default_factory=dict)
    under_way: deque[tuple[int, int, int]] = field(default_factory=deque)

    def wrote(self, descriptor: int, begin: int, num_bytes: int) -> None:
        """Note that bytes were written; every full window starts on its way, and the oldest is given up."""
        if not self.release:
            return
        first, end = self.spans.get(descriptor, (begin, begin))
        if end != begin:
            self._start(descriptor)
            first = begin
        self.spans[descriptor] = (first, begin + num_bytes)
        if begin + num_bytes - first >= WINDOW_BYTES:
            self._start(descriptor)

    def _start(self, descriptor: int) -> None:
        span = (descriptor, *self.spans.pop(descriptor))
        _give_up(*span)
        self.under_way.append(span)
        if len(self.under_way) > WINDOWS:
            _give_up(*self.under_way.popleft())


def _give_up(descriptor: int, begin: int, end: int) -> None:
    """Dirty pages start on their way to the disk; clean ones leave the cache."""
    drop_cached(descriptor, begin, end - begin)
