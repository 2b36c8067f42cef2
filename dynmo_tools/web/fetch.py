"""Fetches web pages with rate limits, and resumes after an interruption.

    URL files ─> UrlList ─> Frontier (fetch_queue) ─> Fetcher threads ─> journal.jsonl ─> ResponseStore ─> output
                            one request per host        robots.txt, GET   appended         rows in URL order

Each response is appended to the journal immediately; a resumed run fetches the URLs without a response. The output is
written from the journal at the end, in URL order. The URL list and the state of each URL are on disk.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import hashlib
import json
import os
import sys
import tempfile
import threading
import urllib.robotparser
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urljoin

from .. import __version__
from .._common.document import MAX_TABLE_BYTES, append_line, parse_any_json
from .._common.errors import UsageError
from ..extract.html import extract_text
from ..io.atomic_write import open_atomic
from ..io.codecs import wrap_write
from ..io.jsonl import encode_row
from .charset import decode
from .fetch_queue import Frontier, Host, Request
from .http_client import REDIRECTS, AllowedHosts, FetchError, Response, get, sendable, without_credentials
from .url_filter import DropReasonStore, each_url

# Other types, such as PDF, need parsers of their own; their URLs fail with the type as the reason.
TEXT_TYPES = ("text/html", "application/xhtml+xml", "text/plain")
BLANKS = b"\xef\xbb\xbf \t\r\n"  # of UTF-8, with its byte-order mark
# RFC 9309, 2.5: a crawler must parse at least 500 KiB.
ROBOTS_BYTES = 512 << 10
# Reasons that concern the host, not its robots.txt; they are reported without the word "robots".
UNREACHABLE = ("connection", "timeout", "internal address")
MAX_REDIRECTS = 10
MAX_ROBOTS_REDIRECTS = 5  # RFC 9309, 2.3.1.2
PENDING, FAILED = 0, 1  # otherwise the offset of the page in the journal
ENTRY_BYTES = 8
BLOCK_ENTRIES = 1 << 13


@dataclass(frozen=True, kw_only=True)
class FetchRules:
    """Rules of a fetch.

    Attributes:
        user_agent: User-Agent header, also matched against robots.txt.
        delay_s: minimum seconds between two requests to one host.
        timeout_s: timeout of a connection or read, in seconds.
        max_bytes: maximum bytes of a response; larger pages fail.
        connections: maximum concurrent requests, to different hosts.
        robots: obey robots.txt.
        allowed: hosts that may have internal addresses.
    """

    user_agent: str = f"dynmo-prep/{__version__}"
    delay_s: float = 1.0
    timeout_s: float = 20.0
    max_bytes: int = 8 << 20
    connections: int = 8
    robots: bool = True
    allowed: AllowedHosts = field(default_factory=AllowedHosts)


class Fetcher:
    """Fetches pages by the rules.

    Args:
        rules: the rules.
        frontier: state of all hosts; each host is used by one thread at a time.
        stopped: set when the run ends.
    """

    def __init__(self, rules: FetchRules, frontier: Frontier, stopped: threading.Event) -> None:
        self._rules = rules
        self._frontier = frontier
        self._stopped = stopped

    def fetch(self, url: str, host: Host) -> dict[str, str] | str:
        """Fetch one page.

        Returns:
            Title and text of the page, or the URL that it redirects to.

        Raises:
            FetchError: there is no page, or the rules forbid it.
        """
        url = sendable(url)
        # The host belongs to this thread until it is released, so its robots.txt is fetched once.
        if self._rules.robots:
            if host.robots is None:
                self._fetch_robots(urljoin(url, "/robots.txt"), host)
            if host.unreachable:
                raise FetchError(host.unreachable)
            if host.robots is None or not host.robots.can_fetch(self._rules.user_agent, url):
                raise FetchError("robots")
        response = self._get(url, host, self._rules.max_bytes)
        if response.status in REDIRECTS:
            return response.location
        # Half a page would be a document that ends within a sentence.
        if not response.is_whole:
            raise FetchError("long")
        kind = _content_type(response)
        if kind not in TEXT_TYPES:
            raise FetchError(f"type {kind}")
        is_markup = kind != "text/plain"
        text = decode(response.payload, response.headers.get_content_charset(), is_markup=is_markup)
        # Noise would be a document, and would be counted as a page.
        if text is None:
            raise FetchError("not text")
        title, body = extract_text(text) if is_markup else ("", text.strip())
        if not body:
            raise FetchError("empty")
        return {"title": title, "text": body}

    def _fetch_robots(self, url: str, host: Host) -> None:
        """Fetch robots.txt by RFC 9309: without one everything is allowed; if it is unavailable, nothing is."""
        host.robots = urllib.robotparser.RobotFileParser()
        lines: list[str] = []
        robots_host = host
        try:
            for _ in range(MAX_ROBOTS_REDIRECTS + 1):
                response = self._get(url, robots_host, ROBOTS_BYTES)
                if response.status not in REDIRECTS:
                    lines = response.payload.decode("utf-8-sig", "replace").splitlines()
                    break
                url = sendable(response.location)
                robots_host = self._frontier.host_of(url)
        except FetchError as error:
            reason = str(error)
            # An interruption decides nothing about the host: the resumed run fetches its robots.txt again.
            if reason == "stopped":
                host.robots = None
                raise
            # A status of 4xx means that there is no robots.txt; then everything is allowed (RFC 9309, 2.3.1.3).
            if not reason.startswith("4"):
                host.unreachable = reason if reason in UNREACHABLE else f"robots {reason}"
        host.robots.parse(lines)

    def _get(self, url: str, host: Host, limit: int) -> Response:
        """Request one URL after the delay of its host."""
        self._stopped.wait(self._frontier.reserve(host, self._rules.delay_s))
        if self._stopped.is_set():
            raise FetchError("stopped")
        try:
            return get(
                url,
                user_agent=self._rules.user_agent,
                timeout_s=self._rules.timeout_s,
                limit=limit,
                allowed=self._rules.allowed,
            )
        finally:
            # The delay counts from the end of a request too: a slow server gets its pause.
            self._frontier.delay_next(host, self._rules.delay_s)


def _content_type(response: Response) -> str:
    """The type of a page: that of its header, or HTML if there is none and the page begins with a tag."""
    if "/" not in response.headers.get("Content-Type", "") and response.payload.lstrip(BLANKS)[:1] == b"<":
        return "text/html"
    return response.headers.get_content_type()


class UrlList(contextlib.AbstractContextManager["UrlList"]):
    """The distinct URLs of some files, in order, in temporary files.

    Args:
        paths: files, which are read once.
        folder: folder of the copy, with 25 bytes more per URL.

    Attributes:
        count: number of distinct URLs.
        digest: hexadecimal digest of the URLs and their order.
    """

    def __init__(self, paths: Sequence[Path], folder: Path) -> None:
        with contextlib.ExitStack() as opened:
            self._lines = opened.enter_context(tempfile.TemporaryFile(dir=folder))
            self._reasons = opened.enter_context(DropReasonStore(folder))
            for url in each_url(paths):
                self._reasons.add(url, None)
                self._lines.write(url.encode() + b"\n")
            self._reasons.mark_duplicates()
            self.count = 0
            content = hashlib.sha256()
            for url in self:
                self.count += 1
                content.update(url.encode() + b"\n")
            self.digest = content.hexdigest()
            self._open = opened.pop_all()

    def __exit__(self, *_: object) -> None:
        """Delete the temporary files."""
        self._open.close()

    def __iter__(self) -> Iterator[str]:
        """The URLs; one pass at a time."""
        self._lines.seek(0)
        for line, reason in zip(self._lines, self._reasons, strict=True):
            if reason is None:
                yield line[:-1].decode()


class ResponseStore(contextlib.AbstractContextManager["ResponseStore"]):
    """The state of each URL in the journal: ``PENDING``, ``FAILED``, or the offset of its page; on disk.

    Attributes:
        num_done: number of URLs with a response.
        failures: number of failures by reason.

    Args:
        journal: file of the responses; created if it does not exist.
        digest: digest of the URLs and rules, which the journal must have.
        count: number of URLs.

    Raises:
        UsageError: the journal belongs to other URLs or rules.
    """

    def __init__(self, journal: Path, digest: str, count: int) -> None:
        self.num_done = 0
        self.failures: dict[str, int] = {}
        with contextlib.ExitStack() as opened:
            self._file = opened.enter_context(tempfile.TemporaryFile(dir=journal.parent, buffering=0))
            # Zeros, which are PENDING, and take no disk space until they are written.
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
        self.num_done += 1

    def __exit__(self, *_: object) -> None:
        """Delete the temporary file."""
        self._open.close()

    def __iter__(self) -> Iterator[int]:
        """The state of each URL, in order."""
        offset = 0
        while block := os.pread(self._file.fileno(), BLOCK_ENTRIES * ENTRY_BYTES, offset):
            offset += len(block)
            yield from memoryview(block).cast("Q")


def _journal_rows(path: Path, digest: str) -> Iterator[tuple[int, dict[str, Any]]]:
    """The rows of a journal with their offsets; creates a new journal, and removes an incomplete last line."""
    offset = 0
    with open(path, "a+b") as source:
        source.seek(0)
        for line in source:
            # A killed run may have written a part of its last row. The URL counts as pending and is fetched again.
            if not line.endswith(b"\n"):
                source.truncate(offset)  # the next row must begin a line
                break
            if offset == 0:
                if _digest_of(line) != digest:
                    raise UsageError(f"{path}: journal of other URLs or rules; use --overwrite to start from scratch")
            else:
                yield offset, _journal_row(line, path)
            offset += len(line)
    if offset == 0:
        append_line(path, {"digest": digest})


def _journal_row(line: bytes, path: Path) -> dict[str, Any]:
    try:
        row = parse_any_json(line, MAX_TABLE_BYTES)
    except ValueError as error:
        raise UsageError(f"{path}: damaged journal: {error}; use --overwrite to start from scratch") from error
    if not isinstance(row, dict):
        raise UsageError(f"{path}: damaged journal: a row must be an object; use --overwrite to start from scratch")
    return row


def _digest_of(line: bytes) -> str | None:
    """The digest of the URLs and rules in the first line of a journal; None if it has none."""
    try:
        header = parse_any_json(line)
    except ValueError:
        return None
    return header.get("digest") if isinstance(header, dict) else None


def discard_stale_journal(journal: Path, digest: str) -> None:
    """Remove a journal of other URLs or rules."""
    if journal.exists():
        with open(journal, "rb") as source:
            line = source.readline()
        if _digest_of(line) != digest:
            journal.unlink()


def fetch_all(
    urls: UrlList, rules: FetchRules, journal: Path, tick: Callable[[float, str], None], *, digest: str
) -> None:
    """Fetch all URLs without a response in the journal.

    Args:
        urls: all URLs.
        rules: rules of the fetch.
        journal: file that each response is appended to.
        tick: receives the number of URLs done, and a note.
        digest: digest of the URLs and rules.

    Raises:
        UsageError: the journal belongs to other URLs or rules.
    """
    stopped = threading.Event()
    written = threading.Lock()

    def work(frontier: Frontier) -> None:
        fetcher = Fetcher(rules, frontier, stopped)
        while not stopped.is_set() and (taken := frontier.take()) is not None:
            request, host = taken
            try:
                row = _fetch_hop(fetcher, frontier, request, host)
            finally:
                frontier.release(host)
            # A row for an interrupted request would make a resumed run skip the URL.
            if row is not None and row.get("failed") != "stopped":
                # One row at a time: the rows of two threads must not mix.
                with written:
                    append_line(journal, {"number": request.number, **row})
                    tick(1, "")

    with ResponseStore(journal, digest, urls.count) as answers, contextlib.ExitStack() as ended:
        tick(answers.num_done, "")
        pending = (
            Request(number, url)
            for number, (url, answer) in enumerate(zip(urls, answers, strict=True))
            if answer == PENDING
        )
        frontier = Frontier(pending)
        pool = ended.enter_context(concurrent.futures.ThreadPoolExecutor(rules.connections))
        try:
            for done in concurrent.futures.as_completed(
                [pool.submit(work, frontier) for _ in range(rules.connections)]
            ):
                done.result()
        except BaseException:
            # Also for Ctrl-C: the pool waits for its threads, which must wake up from delays and empty queues.
            stopped.set()
            frontier.close()
            raise


def _fetch_hop(fetcher: Fetcher, frontier: Frontier, request: Request, host: Host) -> dict[str, str] | None:
    """Fetch one URL, or one hop of its redirects.

    Returns:
        The journal row; None for a redirect, whose target is queued at its own host.
    """
    try:
        found = fetcher.fetch(request.url, host)
        if not isinstance(found, str):
            return found
        if request.redirects == MAX_REDIRECTS:
            raise FetchError("redirects")
        frontier.add(Request(request.number, sendable(found), request.redirects + 1))
    except FetchError as error:
        return {"failed": str(error)}
    return None


def write_pages(urls: UrlList, journal: Path, output: Path, *, digest: str, overwrite: bool = True) -> dict[str, int]:
    """Write the output from the journal, in URL order, whatever the order of the responses was.

    Args:
        urls: all URLs.
        journal: file of the responses.
        output: file of the pages, compressed by its extension.
        digest: digest of the URLs and rules.
        overwrite: a different output may be replaced.

    Returns:
        The number of failures by reason.

    Raises:
        UsageError: a different output exists, and ``overwrite`` is not set.
    """
    with (
        ResponseStore(journal, digest, urls.count) as answers,
        open(journal, "rb") as source,
        open_atomic(output, replace=overwrite) as handle,
    ):
        writer = wrap_write(handle, output.suffix)
        for url, offset in zip(urls, answers, strict=True):
            if offset > FAILED:
                source.seek(offset)
                row = parse_any_json(source.readline(), MAX_TABLE_BYTES)
                writer.write(
                    encode_row({"url": without_credentials(url), "title": row["title"], "text": row["text"]}) + b"\n"
                )
        if writer is not handle:
            writer.close()
        return dict(sorted(answers.failures.items()))


def digest_rules(urls: UrlList, rules: FetchRules) -> str:
    """The digest of everything that a resumed run must have in common with the interrupted one."""
    # Delay, timeout, connections and User-Agent are absent: a run may be resumed with other ones.
    allowed = sorted([*map(str, rules.allowed.networks), *rules.allowed.names])
    content = json.dumps(
        [urls.digest, {"max_bytes": rules.max_bytes, "robots": rules.robots, "allowed_hosts": allowed}]
    )
    return hashlib.sha256(content.encode()).hexdigest()
