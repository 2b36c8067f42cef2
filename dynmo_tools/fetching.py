"""Fetch the contents of URLs: politely, within bounds, and taken up again where a run stopped.

Every answer is appended to a journal as it comes; a run that was stopped goes on behind it. The output is made of the
journal at the end, in the order of the URLs.
"""

from __future__ import annotations

import concurrent.futures
import json
import os
import threading
import time
import urllib.error
import urllib.request
import urllib.robotparser
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from . import __version__
from .compression import wrap_write
from .errors import UsageError
from .formats._document import append_line, complete_lines
from .htmltext import readable
from .records import encode_row
from .wholefile import whole_file

TEXT_TYPES = ("text/html", "application/xhtml+xml", "text/plain")
ROBOTS_BYTES = 512 << 10


@dataclass(frozen=True, kw_only=True)
class FetchRules:
    """What a fetch may do.

    Attributes:
        user_agent: what the servers are told, also looked for in their robots.txt.
        delay_s: seconds between two requests to one host.
        timeout_s: seconds that a server may be silent.
        max_bytes: of one answer; what is longer is left out.
        connections: requests side by side, to different hosts.
        robots: ask and obey robots.txt.
    """

    user_agent: str = f"dynmo-prep/{__version__}"
    delay_s: float = 1.0
    timeout_s: float = 20.0
    max_bytes: int = 8 << 20
    connections: int = 8
    robots: bool = True


class FetchError(Exception):
    """Why a URL gave no document, in one word or a status."""


@dataclass
class _Host:
    lock: threading.Lock = field(default_factory=threading.Lock)
    free_at: float = 0.0
    robots: urllib.robotparser.RobotFileParser | None = None


class Fetcher:
    """Fetches URLs; one request at a time and host, the rules' delay between two."""

    def __init__(self, rules: FetchRules, stopped: threading.Event) -> None:
        self._rules = rules
        self._stopped = stopped
        self._hosts: dict[str, _Host] = {}
        self._guard = threading.Lock()

    def fetch(self, url: str) -> dict[str, str]:
        """The page's title and text.

        Raises:
            FetchError: there is none, or the rules forbid it.
        """
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise FetchError("scheme")
        with self._guard:
            host = self._hosts.setdefault(parts.netloc, _Host())
        with host.lock:
            if self._rules.robots:
                if host.robots is None:
                    host.robots = self._read_robots(f"{parts.scheme}://{parts.netloc}/robots.txt", host)
                if not host.robots.can_fetch(self._rules.user_agent, url):
                    raise FetchError("robots")
            kind, charset, payload = self._get(url, host, self._rules.max_bytes)
        if kind not in TEXT_TYPES:
            raise FetchError(f"type {kind}")
        try:
            text = payload.decode(charset, "replace")
        except LookupError:
            text = payload.decode("utf-8", "replace")
        title, body = ("", text.strip()) if kind == "text/plain" else readable(text)
        if not body:
            raise FetchError("empty")
        return {"title": title, "text": body}

    def _read_robots(self, url: str, host: _Host) -> urllib.robotparser.RobotFileParser:
        robots = urllib.robotparser.RobotFileParser()
        try:
            _, _, payload = self._get(url, host, ROBOTS_BYTES)
            robots.parse(payload.decode("utf-8", "replace").splitlines())
        except FetchError as error:
            # RFC 9309: no file allows everything, a server that fails allows nothing
            robots.parse([] if str(error).startswith("4") else ["User-agent: *", "Disallow: /"])
        return robots

    def _get(self, url: str, host: _Host, limit: int) -> tuple[str, str, bytes]:
        self._stopped.wait(max(0.0, host.free_at - time.monotonic()))
        if self._stopped.is_set():
            raise FetchError("stopped")
        request = urllib.request.Request(url, headers={"User-Agent": self._rules.user_agent})
        try:
            with urllib.request.urlopen(request, timeout=self._rules.timeout_s) as answer:
                if urlsplit(answer.url).scheme not in ("http", "https"):
                    raise FetchError("scheme")
                payload = answer.read(limit + 1)
                if len(payload) > limit:
                    raise FetchError("long")
                headers = answer.headers
                return headers.get_content_type(), headers.get_content_charset() or "utf-8", payload
        except urllib.error.HTTPError as error:
            raise FetchError(str(error.code)) from error
        except TimeoutError as error:
            raise FetchError("timeout") from error
        except (OSError, ValueError, urllib.error.URLError) as error:
            late = "timed out" in str(error)
            raise FetchError("timeout" if late else "connection") from error
        finally:
            host.free_at = time.monotonic() + self._rules.delay_s


def read_journal(path: Path, digest: str) -> dict[int, str | None]:
    """The URLs that were answered, by number: the reason of each failure, None for a page.

    Raises:
        UsageError: the journal is of other URLs or rules.
    """
    try:
        payload = path.read_bytes()
    except FileNotFoundError:
        append_line(path, {"digest": digest})
        return {}
    if not payload.endswith(b"\n"):  # a run was killed while it wrote; what follows must begin a line
        os.truncate(path, payload.rfind(b"\n") + 1)
    lines = list(complete_lines(payload))
    if not lines:  # killed before it wrote the first line
        append_line(path, {"digest": digest})
        return {}
    if json.loads(lines[0]).get("digest") != digest:
        raise UsageError(f"{path}: belongs to other URLs or rules; use --overwrite to begin anew")
    return {(row := json.loads(line))["number"]: row.get("failed") for line in lines[1:]}


def fetch_all(
    urls: Sequence[str], rules: FetchRules, journal: Path, tick: Callable[[float, str], None], *, digest: str
) -> None:
    """Fetch all URLs that the journal has no answer for."""
    stopped = threading.Event()
    fetcher = Fetcher(rules, stopped)
    answered = read_journal(journal, digest)
    tick(len(answered), "")
    written = threading.Lock()

    def one(number: int) -> None:
        try:
            row: dict[str, Any] = fetcher.fetch(urls[number])
        except FetchError as error:
            row = {"failed": str(error)}
        if row.get("failed") == "stopped":
            return
        with written:
            append_line(journal, {"number": number, **row})

    with concurrent.futures.ThreadPoolExecutor(rules.connections) as pool:
        try:
            waiting = [pool.submit(one, number) for number in range(len(urls)) if number not in answered]
            for done in concurrent.futures.as_completed(waiting):
                done.result()
                tick(1, "")
        except BaseException:
            stopped.set()
            pool.shutdown(cancel_futures=True)
            raise


def write_pages(urls: Sequence[str], journal: Path, output: Path) -> dict[str, int]:
    """Make the output of the journal, in the order of the URLs; the number of failures by reason."""
    places: dict[int, int] = {}
    failures: dict[str, int] = {}
    with open(journal, "rb") as source, whole_file(output) as handle:
        offset = len(source.readline())
        for line in source:
            if line.endswith(b"\n"):
                row = json.loads(line)
                if (reason := row.get("failed")) is not None:
                    failures[reason] = failures.get(reason, 0) + 1
                else:
                    places[row["number"]] = offset
            offset += len(line)
        writer = wrap_write(handle, output.suffix)
        for number in sorted(places):
            source.seek(places[number])
            row = json.loads(source.readline())
            writer.write(encode_row({"url": urls[number], "title": row["title"], "text": row["text"]}) + b"\n")
        if writer is not handle:
            writer.close()
    return dict(sorted(failures.items()))


def digest_rules(urls: Sequence[str], rules: FetchRules) -> str:
    """What a run must have in common with the run that it goes on with."""
    import hashlib

    bounds = {"max_bytes": rules.max_bytes, "robots": rules.robots}
    content = json.dumps([list(urls), bounds])
    return hashlib.sha256(content.encode("utf-8", "surrogatepass")).hexdigest()
