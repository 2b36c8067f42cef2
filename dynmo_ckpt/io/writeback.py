"""Sends written pages to the disk early and gives them up once they are there.

A large output that stays in the page cache costs twice: the flush at the end waits for all of it, and every page of it
is fresh memory, whose first touch takes longer than the copy (most of all in a virtual machine). Here a few windows of
pages are used again and again, and the rest of the system keeps its cache.
"""

from __future__ import annotations

import os
from collections import deque
from dataclasses import dataclass, field

WINDOW_BYTES = 8 << 20
WINDOWS = 8


@dataclass
class Writeback:
    """The windows of one thread; without ``release`` nothing is done, for small outputs may stay in the cache."""

    release: bool
    span: tuple[int, int, int] = (-1, 0, 0)
    under_way: deque[tuple[int, int, int]] = field(default_factory=deque)

    def wrote(self, descriptor: int, begin: int, num_bytes: int) -> None:
        """Note that bytes were written; every full window starts on its way, and the oldest is given up."""
        if not self.release:
            return
        if (descriptor, begin) == (self.span[0], self.span[2]):
            self.span = (descriptor, self.span[1], begin + num_bytes)
        else:
            self._start()
            self.span = (descriptor, begin, begin + num_bytes)
        if self.span[2] - self.span[1] >= WINDOW_BYTES:
            self._start()

    def _start(self) -> None:
        descriptor, begin, end = self.span
        if descriptor < 0:
            return
        _give_up(descriptor, begin, end)
        self.under_way.append(self.span)
        self.span = (-1, 0, 0)
        if len(self.under_way) > WINDOWS:
            _give_up(*self.under_way.popleft())


def _give_up(descriptor: int, begin: int, end: int) -> None:
    """Dirty pages start on their way to the disk; clean ones leave the cache."""
    if hasattr(os, "posix_fadvise"):
        os.posix_fadvise(descriptor, begin, end - begin, os.POSIX_FADV_DONTNEED)
