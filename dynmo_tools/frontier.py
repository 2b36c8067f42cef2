"""Which URL is fetched next: those of a list in its order, one request at a time and host, in bounded memory.

Of the list, ``WINDOW`` URLs are held at a time, by host; of the hosts that were asked, ``HOSTS`` are held with their
robots.txt. A host that may be asked again is taken before one that was not asked yet, so few hosts are under way.
"""

from __future__ import annotations

import collections
import threading
import time
import urllib.robotparser
from collections.abc import Iterator
from dataclasses import dataclass, field
from urllib.parse import urlsplit

WINDOW = 8192
HOSTS = 256


@dataclass(eq=False)
class Host:
    """What is known of one host.

    Attributes:
        free_at: when it may be asked again, in seconds of ``time.monotonic``.
        robots: what it allows, once it was asked.
        waiting: the numbers and URLs that it is to be asked for.
        busy: a request is under way.
    """

    free_at: float = 0.0
    robots: urllib.robotparser.RobotFileParser | None = None
    waiting: collections.deque[tuple[int, str]] = field(default_factory=collections.deque)
    busy: bool = False


def host_key(url: str) -> str:
    """Host and port of a URL; empty where it has none."""
    try:
        return urlsplit(url).netloc.lower()
    except ValueError:
        return ""


class Frontier:
    """Gives out URLs to threads.

    Args:
        source: numbers and URLs, in the order in which they are wanted.
        window: URLs that are held at most.
        hosts: hosts that are held at most when they were asked, with or without URLs that wait.
    """

    def __init__(self, source: Iterator[tuple[int, str]], *, window: int = WINDOW, hosts: int = HOSTS) -> None:
        self._source = source
        self._window, self._most_asked = window, hosts
        self._fresh: dict[str, Host] = {}
        self._asked: dict[str, Host] = {}
        self._held = 0
        self._ended = False
        self._changed = threading.Condition()

    def take(self) -> tuple[int, str, Host] | None:
        """The next URL with its number and host, which is the caller's until ``release``; None at the end.

        Waits until a host may be asked.
        """
        with self._changed:
            while True:
                self._fill()
                if self._held == 0 or self._ended:
                    return None
                now = time.monotonic()
                usable = [host for host in self._asked.values() if host.waiting and not host.busy]
                host = min(usable, key=lambda one: one.free_at, default=None)
                if host is None or host.free_at > now:
                    host = self._begin_host(now) or host
                if host is not None and host.free_at <= now:
                    host.busy = True
                    self._held -= 1
                    return (*host.waiting.popleft(), host)
                # of a host without URLs too: its room may be what a new host waits for
                later = [one.free_at for one in self._asked.values() if one.free_at > now and not one.busy]
                self._changed.wait(min(later) - now if later else None)

    def release(self, host: Host) -> None:
        """The request is done; the host may be asked again from its ``free_at`` on."""
        with self._changed:
            host.busy = False
            self._changed.notify_all()

    def close(self) -> None:
        """Give out no more."""
        with self._changed:
            self._ended = True
            self._changed.notify_all()

    def _fill(self) -> None:
        """Read on from the list until the window is full."""
        while self._held < self._window and (found := next(self._source, None)) is not None:
            key = host_key(found[1])
            host = self._asked.get(key) or self._fresh.setdefault(key, Host())
            host.waiting.append(found)
            self._held += 1

    def _begin_host(self, now: float) -> Host | None:
        """The first host that was not asked yet, if there is room for it: one without URLs makes room."""
        if not self._fresh:
            return None
        if len(self._asked) >= self._most_asked:
            idle = (key for key, host in self._asked.items() if not (host.waiting or host.busy) and host.free_at <= now)
            if (old := next(idle, None)) is None:
                return None
            del self._asked[old]
        key = next(iter(self._fresh))
        host = self._asked[key] = self._fresh.pop(key)
        return host
