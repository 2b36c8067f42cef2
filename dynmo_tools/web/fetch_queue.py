"""The order of fetches: URLs of a list, at most one request per host at a time, in bounded memory.

The target of a redirect is queued at its own host, so the rules of a host apply to it too.

``WINDOW`` URLs of the list are in memory, and ``HOSTS`` active hosts with their robots.txt. An active host that may be
requested again precedes new hosts, which limits the number of active hosts.
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

# In memory: about 56 MB for the process with a list of 300,000 URLs (tests/benchmarks/prep_results.md).
WINDOW = 8192
# A robots.txt has up to 512 KiB, and every active host keeps its own.
HOSTS = 256


class Request(NamedTuple):
    """A URL to fetch.

    Attributes:
        number: position in the list, from 0.
        url: URL of this hop.
        redirects: number of redirects before it.
    """

    number: int
    url: str
    redirects: int = 0


@dataclass(eq=False)
class Host:
    """State of one host.

    Attributes:
        free_at: earliest time of the next request, in seconds of ``time.monotonic``.
        robots: its robots.txt, once fetched.
        unreachable: why robots.txt is unavailable; empty otherwise.
        waiting: queued requests.
        busy: a request is in progress.
    """

    free_at: float = 0.0
    robots: urllib.robotparser.RobotFileParser | None = None
    unreachable: str = ""
    waiting: collections.deque[Request] = field(default_factory=collections.deque)
    busy: bool = False


def host_key(url: str) -> str:
    """The host of a URL, with a port that is not the default; empty if it has none."""
    try:
        parts = urlsplit(url)
        host = (parts.hostname or "").rstrip(".")
        return host if parts.port in (None, DEFAULT_PORTS.get(parts.scheme)) else f"{host}:{parts.port}"
    except ValueError:
        return ""


class Frontier:
    """Distributes URLs among threads.

    Args:
        source: requests, in order.
        window: maximum number of queued URLs.
        hosts: maximum number of active hosts, with or without queued URLs.
    """

    def __init__(self, source: Iterator[Request], *, window: int = WINDOW, hosts: int = HOSTS) -> None:
        self._source = source
        self._window, self._max_active_hosts = window, hosts
        self._new_hosts: dict[str, Host] = {}
        self.active_hosts: dict[str, Host] = {}
        self._num_queued = 0
        self._ended = False
        self.changed = threading.Condition()

    def take(self) -> tuple[Request, Host] | None:
        """The next request and its host, which belongs to the caller until ``release``; None at the end.

        Blocks until a host may be requested.
        """
        with self.changed:
            while True:
                self._fill()
                if self._num_queued == 0 or self._ended:
                    return None
                now = time.monotonic()
                # An active host that is free goes first: its robots.txt is known, and its slot becomes free sooner.
                usable = [host for host in self.active_hosts.values() if host.waiting and not host.busy]
                host = min(usable, key=lambda one: one.free_at, default=None)
                if host is None or host.free_at > now:
                    host = self._activate_host(now) or host
                if host is not None and host.free_at <= now:
                    host.busy = True
                    self._num_queued -= 1
                    return host.waiting.popleft(), host
                # also of hosts without URLs: a new host may be waiting for one of their slots
                later = [one.free_at for one in self.active_hosts.values() if one.free_at > now and not one.busy]
                self.changed.wait(min(later) - now if later else None)

    def release(self, host: Host) -> None:
        """Release a host after a request."""
        with self.changed:
            host.busy = False
            self.changed.notify_all()

    def add(self, request: Request) -> None:
        """Queue a redirect, before the other requests of its host."""
        with self.changed:
            self._host(request.url).waiting.appendleft(request)
            self._num_queued += 1
            self.changed.notify_all()

    def host_of(self, url: str) -> Host:
        """The host of a URL, for a request between its turns."""
        with self.changed:
            key = host_key(url)
            host = self.active_hosts[key] = self._host(url)
            self._new_hosts.pop(key, None)
            return host

    def reserve(self, host: Host, delay_s: float) -> float:
        """Reserve the next request to a host.

        Threads of other hosts may request a robots.txt of this one, so a request is reserved before it is sent.

        Args:
            host: the host.
            delay_s: minimum seconds between two requests to it.

        Returns:
            The seconds to wait before the request, from now.
        """
        with self.changed:
            now = time.monotonic()
            start = max(now, host.free_at)
            host.free_at = start + delay_s
            return start - now

    def delay_next(self, host: Host, delay_s: float) -> None:
        """A request to a host ended: the next one may start after ``delay_s`` seconds."""
        with self.changed:
            host.free_at = max(host.free_at, time.monotonic() + delay_s)

    def close(self) -> None:
        """Stop: ``take`` returns None."""
        with self.changed:
            self._ended = True
            self.changed.notify_all()

    def _fill(self) -> None:
        """Read URLs of the list until the window is full."""
        while self._num_queued < self._window and (found := next(self._source, None)) is not None:
            self._host(found.url).waiting.append(found)
            self._num_queued += 1

    def _host(self, url: str) -> Host:
        key = host_key(url)
        return self.active_hosts.get(key) or self._new_hosts.setdefault(key, Host())

    def _activate_host(self, now: float) -> Host | None:
        """Activate the first new host if a slot is free; an idle host without URLs releases its slot."""
        # A host is idle only after its delay. Forgotten earlier, it could be activated again and requested too soon.
        if not self._new_hosts:
            return None
        while len(self.active_hosts) >= self._max_active_hosts:
            idle = (
                key
                for key, host in self.active_hosts.items()
                if not (host.waiting or host.busy) and host.free_at <= now
            )
            if (old := next(idle, None)) is None:
                return None
            del self.active_hosts[old]
        key = next(iter(self._new_hosts))
        host = self.active_hosts[key] = self._new_hosts.pop(key)
        return host
