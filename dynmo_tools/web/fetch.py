"""Fetch the contents of URLs: politely, within bounds, and taken up again where a run stopped.

Every answer is appended to a journal as it comes; a run that was stopped goes on behind it. The output is made of the
journal at the end, in the order of the URLs. The list of URLs and what is known of each lie on disk.
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
from .fetch_queue import Frontier, Host, Request
from .http_client import REDIRECTS, AllowedHosts, FetchError, Response, get, sendable, without_credentials
from .url_filter import DropReasonStore, each_url

TEXT_TYPES = ("text/html", "application/xhtml+xml", "text/plain")
ROBOTS_BYTES = 512 << 10
UNREACHABLE = ("connection", "timeout", "internal address")
MAX_REDIRECTS = 10
MAX_ROBOTS_REDIRECTS = 5  # RFC 9309, 2.3.1.2
PENDING, FAILED = 0, 1  # else where its page begins in the journal
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
        allowed: hosts that may have addresses that are not public.
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
        rules: what a fetch may do.
        frontier: knows every host; gives one host to one thread at a time.
        stopped: set when the run ends.
    """

    def __init__(self, rules: FetchRules, frontier: Frontier, stopped: threading.Event) -> None:
        self._rules = rules
        self._frontier = frontier
        self._stopped = stopped

    def fetch(self, url: str, host: Host) -> dict[str, str] | str:
        """The title and text of a page, or the URL that it redirects to.

        Raises:
            FetchError: there is no page, or the rules forbid it.
        """
        url = sendable(url)
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
        if not response.is_whole:
            raise FetchError("long")
        kind = response.headers.get_content_type()
        if kind not in TEXT_TYPES:
            raise FetchError(f"type {kind}")
        text = _decode(response)
        title, body = ("", text.strip()) if kind == "text/plain" else extract_text(text)
        if not body:
            raise FetchError("empty")
        return {"title": title, "text": body}

    def _fetch_robots(self, url: str, host: Host) -> None:
        """Read robots.txt by RFC 9309: where there is none, all is allowed; where none can be had, nothing is."""
        host.robots = urllib.robotparser.RobotFileParser()
        lines: list[str] = []
        robots_host = host
        try:
            for _ in range(MAX_ROBOTS_REDIRECTS + 1):
                response = self._get(url, robots_host, ROBOTS_BYTES)
                if response.status not in REDIRECTS:
                    lines = response.payload.decode("utf-8", "replace").splitlines()
                    break
                url = sendable(response.location)
                robots_host = self._frontier.host_of(url)
        except FetchError as error:
            reason = str(error)
            if reason == "stopped":
                host.robots = None
                raise
            if not reason.startswith("4"):
                host.unreachable = reason if reason in UNREACHABLE else f"robots {reason}"
        host.robots.parse(lines)

    def _get(self, url: str, host: Host, limit: int) -> Response:
        """Request one URL when its host may be asked."""
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
            self._frontier.delay_next(host, self._rules.delay_s)


def _decode(response: Response) -> str:
    try:
        return response.payload.decode(response.headers.get_content_charset() or "utf-8", "replace")
    except LookupError:
        return response.payload.decode("utf-8", "replace")


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
        """Give the disk back."""
        self._open.close()

    def __iter__(self) -> Iterator[str]:
        """The URLs; one pass at a time."""
        self._lines.seek(0)
        for line, reason in zip(self._lines, self._reasons, strict=True):
            if reason is None:
                yield line[:-1].decode()


class ResponseStore(contextlib.AbstractContextManager["ResponseStore"]):
    """What the journal says of each URL: ``PENDING``, ``FAILED``, or the offset of its page; on disk.

    Attributes:
        num_done: how many URLs have an answer.
        failures: the number of failures by reason.

    Raises:
        UsageError: the journal is of other URLs or rules.
    """

    def __init__(self, journal: Path, digest: str, count: int) -> None:
        self.num_done = 0
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
        self.num_done += 1

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
                if _digest_of(line) != digest:
                    raise UsageError(f"{path}: belongs to other URLs or rules; use --overwrite to start from scratch")
            else:
                yield offset, parse_any_json(line, MAX_TABLE_BYTES)
            offset += len(line)
    if offset == 0:
        append_line(path, {"digest": digest})


def _digest_of(line: bytes) -> str | None:
    """The digest of the URLs and rules in the first line of a journal; None where there is none."""
    try:
        header = parse_any_json(line)
    except ValueError:
        return None
    return header.get("digest") if isinstance(header, dict) else None


def discard_stale_journal(journal: Path, digest: str) -> None:
    """Remove a journal that belongs to other URLs or rules."""
    if journal.exists():
        with open(journal, "rb") as source:
            line = source.readline()
        if _digest_of(line) != digest:
            journal.unlink()


def fetch_all(
    urls: UrlList, rules: FetchRules, journal: Path, tick: Callable[[float, str], None], *, digest: str
) -> None:
    """Fetch all URLs that the journal has no answer for."""
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
            if row is not None and row.get("failed") != "stopped":
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
            stopped.set()
            frontier.close()
            raise


def _fetch_hop(fetcher: Fetcher, frontier: Frontier, request: Request, host: Host) -> dict[str, str] | None:
    """The journal's row of a URL; None where it redirects: the target then waits for the turn of its own host."""
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
    """Make the output of the journal, in the order of the URLs; the number of failures by reason.

    Raises:
        UsageError: an output of other bytes exists, and ``overwrite`` does not allow to replace it.
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
    """What a run must have in common with the run that it goes on with."""
    allowed = sorted([*map(str, rules.allowed.networks), *rules.allowed.names])
    content = json.dumps(
        [urls.digest, {"max_bytes": rules.max_bytes, "robots": rules.robots, "allowed_hosts": allowed}]
    )
    return hashlib.sha256(content.encode()).hexdigest()
