"""Which URL is fetched next: those of a list in its order, one request at a time and host, in bounded memory.

The target of a redirect is queued at its own host, so the rules for hosts apply to it as to a URL of the list.

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
from typing import NamedTuple
from urllib.parse import urlsplit

from .http_client import DEFAULT_PORTS

WINDOW = 8192
HOSTS = 256


class Request(NamedTuple):
    """A URL to fetch.

    Attributes:
        number: position in the list, from 0.
        url: URL of this hop.
        redirects: number of redirects that led to it.
    """

    number: int
    url: str
    redirects: int = 0


@dataclass(eq=False)
class Host:
    """What is known of one host.

    Attributes:
        free_at: when it may be asked again, in seconds of ``time.monotonic``.
        robots: what it allows, once it was asked.
        unreachable: why its robots.txt could not be had; empty otherwise.
        waiting: requests to it.
        busy: a request is under way.
    """

    free_at: float = 0.0
    robots: urllib.robotparser.RobotFileParser | None = None
    unreachable: str = ""
    waiting: collections.deque[Request] = field(default_factory=collections.deque)
    busy: bool = False


def host_key(url: str) -> str:
    """Host of a URL, with the port where it is not the default one; empty where it has none."""
    try:
        parts = urlsplit(url)
        host = (parts.hostname or "").rstrip(".")
        return host if parts.port in (None, DEFAULT_PORTS.get(parts.scheme)) else f"{host}:{parts.port}"
    except ValueError:
        return ""


class Frontier:
    """Gives out URLs to threads.

    Args:
        source: requests, in the order in which they are wanted.
        window: URLs that are held at most.
        hosts: hosts that are held at most when they were asked, with or without URLs that wait.
    """

    def __init__(self, source: Iterator[Request], *, window: int = WINDOW, hosts: int = HOSTS) -> None:
        self._source = source
        self._window, self._max_active_hosts = window, hosts
        self._new_hosts: dict[str, Host] = {}
        self._active_hosts: dict[str, Host] = {}
        self._num_queued = 0
        self._ended = False
        self._changed = threading.Condition()

    def take(self) -> tuple[Request, Host] | None:
        """The next request and its host, which is the caller's until ``release``; None at the end.

        Waits until a host may be asked.
        """
        with self._changed:
            while True:
                self._fill()
                if self._num_queued == 0 or self._ended:
                    return None
                now = time.monotonic()
                usable = [host for host in self._active_hosts.values() if host.waiting and not host.busy]
                host = min(usable, key=lambda one: one.free_at, default=None)
                if host is None or host.free_at > now:
                    host = self._activate_host(now) or host
                if host is not None and host.free_at <= now:
                    host.busy = True
                    self._num_queued -= 1
                    return host.waiting.popleft(), host
                # of a host without URLs too: its room may be what a new host waits for
                later = [one.free_at for one in self._active_hosts.values() if one.free_at > now and not one.busy]
                self._changed.wait(min(later) - now if later else None)

    def release(self, host: Host) -> None:
        """The request is done; the host may be asked again from its ``free_at`` on."""
        with self._changed:
            host.busy = False
            self._changed.notify_all()

    def add(self, request: Request) -> None:
        """Queue a request that is not of the list, before those that wait for the same host."""
        with self._changed:
            self._host(request.url).waiting.appendleft(request)
            self._num_queued += 1
            self._changed.notify_all()

    def host_of(self, url: str) -> Host:
        """The host of a URL, for a request between its turns."""
        with self._changed:
            key = host_key(url)
            host = self._active_hosts[key] = self._host(url)
            self._new_hosts.pop(key, None)
            return host

    def reserve(self, host: Host, delay_s: float) -> float:
        """Reserve the next request to a host; seconds to wait for it."""
        with self._changed:
            now = time.monotonic()
            start = max(now, host.free_at)
            host.free_at = start + delay_s
            return start - now

    def delay_next(self, host: Host, delay_s: float) -> None:
        """A request to a host has ended: the next one may start after the delay."""
        with self._changed:
            host.free_at = max(host.free_at, time.monotonic() + delay_s)

    def close(self) -> None:
        """Give out no more."""
        with self._changed:
            self._ended = True
            self._changed.notify_all()

    def _fill(self) -> None:
        """Read on from the list until the window is full."""
        while self._num_queued < self._window and (found := next(self._source, None)) is not None:
            self._host(found.url).waiting.append(found)
            self._num_queued += 1

    def _host(self, url: str) -> Host:
        key = host_key(url)
        return self._active_hosts.get(key) or self._new_hosts.setdefault(key, Host())

    def _activate_host(self, now: float) -> Host | None:
        """The first host that was not asked yet, if there is room for it: one without URLs makes room."""
        if not self._new_hosts:
            return None
        while len(self._active_hosts) >= self._max_active_hosts:
            idle = (
                key
                for key, host in self._active_hosts.items()
                if not (host.waiting or host.busy) and host.free_at <= now
            )
            if (old := next(idle, None)) is None:
                return None
            del self._active_hosts[old]
        key = next(iter(self._new_hosts))
        host = self._active_hosts[key] = self._new_hosts.pop(key)
        return host
