"""Follows a growing profile: only complete lines, only what is new, across rotation of the file.

A profile may be renamed and begun anew, or copied and cut to nothing (``copytruncate``). What follows goes on where the
file before ended, unless it tells another run; then all starts anew.
"""

from __future__ import annotations

import os
import weakref
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from .._common.document import Problem, UnreadableError, open_regular
from ..formats.profile import Header, LineParser, Record, Step

MARK_BYTES = 64
"""So many bytes before the place read to are compared, to see a file that was cut and has grown past it since."""


@dataclass(frozen=True, kw_only=True)
class News:
    """What a poll found.

    Attributes:
        restarted: the file tells another run or the same anew, so all earlier state is void.
        records: the new valid records, in order.
        problems: the faults of lines that were skipped.
    """

    restarted: bool = False
    records: tuple[Record, ...] = ()
    problems: tuple[Problem, ...] = ()


@dataclass
class _Gathered:
    restarted: bool = False
    records: list[Record] = field(default_factory=list)
    problems: list[Problem] = field(default_factory=list)


class _Open:
    """A file that is held open, so that it can be read to its end after it was renamed, and how far it is read."""

    def __init__(self, path: Path) -> None:
        try:
            with open_regular(path) as handle:
                self.fd = os.dup(handle.fileno())
        except UnreadableError as error:
            if isinstance(error.__cause__, FileNotFoundError):  # renamed since poll() found it
                raise error.__cause__ from None
            raise
        weakref.finalize(self, os.close, self.fd)
        self.offset = 0
        self.seen: tuple[int, int] | None = None
        self._mark = b""
        self._identity = _identity(os.fstat(self.fd))

    def is_that(self, status: os.stat_result) -> bool:
        return _identity(status) == self._identity

    def was_cut(self) -> bool:
        """Whether what was read is no longer there."""
        return os.pread(self.fd, len(self._mark), self.offset - len(self._mark)) != self._mark

    def read(self) -> tuple[list[bytes], bytes]:
        """The new complete lines, and what follows the last of them."""
        parts = []
        at = self.offset
        while part := os.pread(self.fd, 1 << 24, at):
            parts.append(part)
            at += len(part)
        payload = b"".join(parts)
        end = payload.rfind(b"\n") + 1
        if end:
            self._mark = (self._mark + payload[max(0, end - MARK_BYTES) : end])[-MARK_BYTES:]
        self.offset += end
        return payload[:end].split(b"\n"), payload[end:]

    def rewind(self) -> None:
        self.offset, self._mark = 0, b""


def _identity(status: os.stat_result) -> tuple[int, int]:
    return status.st_dev, status.st_ino


class ProfileTail:
    """Reads a profile bit by bit. A poll without news costs one ``stat()``.

    Args:
        path: of the profile.
        beat: called before each line, as a poll of a long profile takes seconds.
    """

    def __init__(self, path: Path, *, beat: Callable[[], None] = lambda: None) -> None:
        self._path, self._beat = path, beat
        self._parser = LineParser()
        self._file: _Open | None = None
        self._undecided = False
        self._repeated: bytes | None = None

    def poll(self) -> News:
        """What was appended since the last poll; nothing while the file does not exist."""
        try:
            status = os.stat(self._path)
            file = self._file = self._file or _Open(self._path)
        except FileNotFoundError:
            if self._file is None:
                return News()
            file = self._file
            status = os.fstat(file.fd)  # renamed; its writer may go on with it until it begins the next
        rotated = not file.is_that(status) and status.st_size > 0
        if not rotated:
            status = status if file.is_that(status) else os.fstat(file.fd)
            if file.seen == (status.st_size, status.st_mtime_ns):
                return News()
            file.seen = status.st_size, status.st_mtime_ns
        news = _Gathered()
        rest = self._read(file, news)
        if rotated:
            if rest.strip():
                place = f"line {self._parser.lines + 1}"
                news.problems.append(Problem(place, "json", "the file was rotated away before the line was complete"))
            try:
                self._file = _Open(self._path)
            except FileNotFoundError:  # rotated once more just now; the next poll finds what follows
                return News(records=tuple(news.records), problems=tuple(news.problems))
            self._begin()
            self._read(self._file, news)
        return News(restarted=news.restarted, records=tuple(news.records), problems=tuple(news.problems))

    def _read(self, file: _Open, news: _Gathered) -> bytes:
        if file.was_cut():
            file.rewind()
            self._begin()
        lines, rest = file.read()
        for line in lines:
            self._beat()
            if line.strip():
                if self._undecided:
                    self._place(line, news)
                else:
                    self._parse(line, news)
        return rest

    def _begin(self) -> None:
        """A file begins; whether it goes on with the one before is seen from its first lines."""
        self._parser.lines, self._repeated = 0, None
        self._undecided = self._parser.header is not None

    def _parse(self, line: bytes, news: _Gathered) -> None:
        record, found = self._parser.parse(line)
        news.problems.extend(found)
        if record is not None:
            news.records.append(record)

    def _place(self, line: bytes, news: _Gathered) -> None:
        """Take a line of a file that may go on with the one before, or tell another run."""
        before = self._parser.header
        probe = LineParser()
        probe.header = before
        record, _ = probe.parse(line)
        if record is None:
            probe.header = None  # a header that does not follow on the one before is one all the same
            record, _ = probe.parse(line)
        if record is None or before is None:
            self._parse(line, news)
        elif not isinstance(record, Header):
            self._undecided = False
            last = self._parser.last_step
            again = record.step < last or (isinstance(record, Step) and record.step == last)
            if again and self._repeated is not None:
                self._restart(news)
                self._parse(self._repeated, news)
            self._parse(line, news)
        elif record == before:
            self._parser.lines += 1
            self._repeated = line
        else:
            self._undecided = False
            if record.run_id == before.run_id and record.segment > before.segment:
                self._parser = LineParser()  # segments between may have come and gone with a file that was never seen
            else:
                self._restart(news)
            self._parse(line, news)

    def _restart(self, news: _Gathered) -> None:
        self._parser = LineParser()
        news.restarted = True
        news.records.clear()
