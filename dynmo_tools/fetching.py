"""Fetch the contents of URLs: politely, within bounds, and taken up again where a run stopped.

Every answer is appended to a journal as it comes; a run that was stopped goes on behind it. The output is made of the
journal at the end, in the order of the URLs. The list of URLs and what is known of each lie on disk.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import hashlib
import http.client
import json
import os
import string
import sys
import tempfile
import threading
import time
import urllib.error
import urllib.request
import urllib.robotparser
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import quote, urlsplit, urlunsplit

from . import __version__
from .compression import wrap_write
from .errors import UsageError
from .formats._document import append_line
from .frontier import Frontier, Host
from .htmltext import readable
from .records import encode_row
from .urls import UNSENDABLE, SeenOnce, each_url
from .wholefile import whole_file

TEXT_TYPES = ("text/html", "application/xhtml+xml", "text/plain")
ROBOTS_BYTES = 512 << 10
UNANSWERED, FAILED = 0, 1  # else where its page begins in the journal
ENTRY_BYTES = 8
BLOCK_ENTRIES = 1 << 13


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


def sendable(url: str) -> str:
    """The URL in ASCII: its host by IDNA, what else is not ASCII as percent-encoded UTF-8.

    Raises:
        FetchError: it is not of the web, or malformed.
    """
    try:
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https"):
            raise FetchError("scheme")
        _ = parts.port  # refuses what is no port
        if not parts.hostname or UNSENDABLE.search(url):
            raise FetchError("malformed")
        host = parts.netloc if parts.netloc.isascii() else parts.netloc.encode("idna").decode()
    except ValueError as error:
        raise FetchError("malformed") from error
    path, query = (quote(part, safe=string.punctuation) for part in (parts.path, parts.query))
    return urlunsplit(parts._replace(netloc=host, path=path, query=query, fragment=""))


class Fetcher:
    """Fetches URLs by the rules; a host is asked by one thread at a time, which is the caller's care."""

    def __init__(self, rules: FetchRules, stopped: threading.Event) -> None:
        self._rules = rules
        self._stopped = stopped

    def fetch(self, url: str, host: Host) -> dict[str, str]:
        """The page's title and text.

        Raises:
            FetchError: there is none, or the rules forbid it.
        """
        url = sendable(url)
        parts = urlsplit(url)
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

    def _read_robots(self, url: str, host: Host) -> urllib.robotparser.RobotFileParser:
        robots = urllib.robotparser.RobotFileParser()
        try:
            _, _, payload = self._get(url, host, ROBOTS_BYTES)
            robots.parse(payload.decode("utf-8", "replace").splitlines())
        except FetchError as error:
            # RFC 9309: no file allows everything, a server that fails allows nothing
            robots.parse([] if str(error).startswith("4") else ["User-agent: *", "Disallow: /"])
        return robots

    def _get(self, url: str, host: Host, limit: int) -> tuple[str, str, bytes]:
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
                if answer.length:
                    raise FetchError("connection")  # it ended before the page did
                headers = answer.headers
                return headers.get_content_type(), headers.get_content_charset() or "utf-8", payload
        except urllib.error.HTTPError as error:
            raise FetchError(str(error.code)) from error
        except TimeoutError as error:
            raise FetchError("timeout") from error
        except (OSError, ValueError, http.client.HTTPException) as error:  # the last: no HTTP, or cut off
            late = "timed out" in str(error)
            raise FetchError("timeout" if late else "connection") from error
        finally:
            host.free_at = time.monotonic() + self._rules.delay_s


class UrlList(contextlib.AbstractContextManager["UrlList"]):
    """The URLs of some files, each once, in order; on disk, in files without names.

    Args:
        paths: of the files, which are read once.
        folder: where the copy lies, with 25 bytes more a URL.

    Attributes:
        count: of different URLs.
        digest: of them and their order, hexadecimal.
    """

    def __init__(self, paths: Sequence[Path], folder: Path) -> None:
        with contextlib.ExitStack() as opened:
            self._lines = opened.enter_context(tempfile.TemporaryFile(dir=folder))
            self._seen = opened.enter_context(SeenOnce(folder))
            for url in each_url(paths):
                self._seen.add(url, None)
                self._lines.write(url.encode() + b"\n")
            self._seen.mark_repeated()
            self.count = 0
            content = hashlib.sha256()
            for url in self:
                self.count += 1
                content.update(url.encode() + b"\n")
            self.digest = content.hexdigest()
            self._open = opened.pop_all()

    def __exit__(self, *_: object) -> None:
        """Give the disk back."""
        self._open.close()

    def __iter__(self) -> Iterator[str]:
        """The URLs; one pass at a time."""
        self._lines.seek(0)
        for line, reason in zip(self._lines, self._seen, strict=True):
            if reason is None:
                yield line[:-1].decode()


class Answers(contextlib.AbstractContextManager["Answers"]):
    """What the journal says of each URL: ``UNANSWERED``, ``FAILED``, or the offset of its page; on disk.

    Attributes:
        answered: how many URLs have an answer.
        failures: the number of failures by reason.

    Raises:
        UsageError: the journal is of other URLs or rules.
    """

    def __init__(self, journal: Path, digest: str, count: int) -> None:
        self.answered = 0
        self.failures: dict[str, int] = {}
        with contextlib.ExitStack() as opened:
            self._file = opened.enter_context(tempfile.TemporaryFile(dir=journal.parent, buffering=0))
            self._file.truncate(count * ENTRY_BYTES)
            for offset, row in _journal_rows(journal, digest):
                self._note(row, offset)
            self._open = opened.pop_all()

    def _note(self, row: dict[str, Any], offset: int) -> None:
        entry = offset
        if (reason := row.get("failed")) is not None:
            self.failures[reason] = self.failures.get(reason, 0) + 1
            entry = FAILED
        os.pwrite(self._file.fileno(), entry.to_bytes(ENTRY_BYTES, sys.byteorder), row["number"] * ENTRY_BYTES)
        self.answered += 1

    def __exit__(self, *_: object) -> None:
        """Give the disk back."""
        self._open.close()

    def __iter__(self) -> Iterator[int]:
        """The entry of each URL, in order."""
        offset = 0
        while block := os.pread(self._file.fileno(), BLOCK_ENTRIES * ENTRY_BYTES, offset):
            offset += len(block)
            yield from memoryview(block).cast("Q")


def _journal_rows(path: Path, digest: str) -> Iterator[tuple[int, dict[str, Any]]]:
    """The answers of a journal with their offsets; a new journal is begun, and a line that a kill cut off removed."""
    offset = 0
    with open(path, "a+b") as source:
        source.seek(0)
        for line in source:
            if not line.endswith(b"\n"):
                source.truncate(offset)  # what is appended must begin a line
                break
            if offset == 0:
                if json.loads(line).get("digest") != digest:
                    raise UsageError(f"{path}: belongs to other URLs or rules; use --overwrite to begin anew")
            else:
                yield offset, json.loads(line)
            offset += len(line)
    if offset == 0:
        append_line(path, {"digest": digest})


def fetch_all(
    urls: UrlList, rules: FetchRules, journal: Path, tick: Callable[[float, str], None], *, digest: str
) -> None:
    """Fetch all URLs that the journal has no answer for."""
    stopped = threading.Event()
    fetcher = Fetcher(rules, stopped)
    written = threading.Lock()

    def work(frontier: Frontier) -> None:
        while not stopped.is_set() and (found := frontier.take()) is not None:
            number, url, host = found
            try:
                row: dict[str, Any] = fetcher.fetch(url, host)
            except FetchError as error:
                row = {"failed": str(error)}
            finally:
                frontier.release(host)
            if row.get("failed") != "stopped":
                with written:
                    append_line(journal, {"number": number, **row})
                    tick(1, "")

    with Answers(journal, digest, urls.count) as answers, contextlib.ExitStack() as ended:
        tick(answers.answered, "")
        left = (
            (number, url)
            for number, (url, answer) in enumerate(zip(urls, answers, strict=True))
            if answer == UNANSWERED
        )
        frontier = Frontier(left)
        pool = ended.enter_context(concurrent.futures.ThreadPoolExecutor(rules.connections))
        try:
            for done in concurrent.futures.as_completed(
                [pool.submit(work, frontier) for _ in range(rules.connections)]
            ):
                done.result()
        except BaseException:
            stopped.set()
            frontier.close()
            raise


def write_pages(urls: UrlList, journal: Path, output: Path, *, digest: str) -> dict[str, int]:
    """Make the output of the journal, in the order of the URLs; the number of failures by reason."""
    with Answers(journal, digest, urls.count) as answers, open(journal, "rb") as source, whole_file(output) as handle:
        writer = wrap_write(handle, output.suffix)
        for url, offset in zip(urls, answers, strict=True):
            if offset > FAILED:
                source.seek(offset)
                row = json.loads(source.readline())
                writer.write(encode_row({"url": url, "title": row["title"], "text": row["text"]}) + b"\n")
        if writer is not handle:
            writer.close()
        return dict(sorted(answers.failures.items()))


def digest_rules(urls: UrlList, rules: FetchRules) -> str:
    """What a run must have in common with the run that it goes on with."""
    content = json.dumps([urls.digest, {"max_bytes": rules.max_bytes, "robots": rules.robots}])
    return hashlib.sha256(content.encode()).hexdigest()
