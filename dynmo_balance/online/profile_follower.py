"""Follows a growing profile: complete lines only, new lines only, across rotation of the file.

A profile may be renamed and restarted, or copied and truncated (``copytruncate`` of logrotate). The next file continues
where the previous one ended, unless its lines belong to another run; then the state is reset::

    stat: same file, same size and time   nothing new
          same file                       read from the offset; the bytes before it differ: truncated, read from 0
          another file                    read the old one to its end first, then the new one from 0

A line counts once it ends with a newline, because the trainer appends each with one ``write()`` and may be killed in
the middle of it.
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
"""Bytes before the read position that are compared, to detect a file that was truncated and has grown past it."""


@dataclass(frozen=True, kw_only=True)
class TailUpdate:
    """The result of a poll.

    Attributes:
        restarted: whether the file belongs to another run, or repeats the same one from the start; earlier state is
            void.
        records: the new valid records, in order.
        problems: the problems of lines that were skipped.
    """

    restarted: bool = False
    records: tuple[Record, ...] = ()
    problems: tuple[Problem, ...] = ()


@dataclass
class _UpdateBuilder:
    restarted: bool = False
    records: list[Record] = field(default_factory=list)
    problems: list[Problem] = field(default_factory=list)


class _OpenFile:
    """An open file, which can be read to its end after it was renamed, and the position up to which it was read."""

    def __init__(self, path: Path) -> None:
        # Only regular files: opening a named pipe would block the planner until somebody writes to it.
        try:
            with open_regular(path) as handle:
                self.fd = os.dup(handle.fileno())
        except UnreadableError as error:
            if isinstance(error.__cause__, FileNotFoundError):  # renamed since poll() found it
                raise error.__cause__ from None
            raise
        weakref.finalize(self, os.close, self.fd)
        self.offset = 0
        self.last_status: tuple[int, int] | None = None
        self._mark = b""
        self._identity = _identity(os.fstat(self.fd))

    def same_file(self, status: os.stat_result) -> bool:
        return _identity(status) == self._identity

    def is_truncated(self) -> bool:
        """Whether the bytes that were read last are no longer there."""
        return os.pread(self.fd, len(self._mark), self.offset - len(self._mark)) != self._mark

    def read(self) -> tuple[list[bytes], bytes]:
        """The new complete lines, and the incomplete line after them."""
        # In parts of 16 MB, so that a long profile needs no second copy of itself while it is read. ``pread`` has its
        # own position, so an incomplete line is simply read again by the next poll.
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


class ProfileFollower:
    """Reads a profile incrementally; a poll without new data costs one ``stat()``.

    Args:
        path: of the profile.
        beat: called before each line, because a poll of a long profile takes seconds.
    """

    def __init__(self, path: Path, *, beat: Callable[[], None] = lambda: None) -> None:
        self._path, self._beat = path, beat
        self._parser = LineParser()
        self._file: _OpenFile | None = None
        self._is_undecided = False
        self._repeated: bytes | None = None

    def poll(self) -> TailUpdate:
        """What was appended since the last poll; nothing while the file does not exist."""
        try:
            status = os.stat(self._path)
            file = self._file = self._file or _OpenFile(self._path)
        except FileNotFoundError:
            if self._file is None:
                return TailUpdate()
            file = self._file
            status = os.fstat(file.fd)  # renamed; its writer may continue it until it starts the next one
        # Only when the new file has contents: until then the writer may still append to the old one.
        rotated = not file.same_file(status) and status.st_size > 0
        if not rotated:
            status = status if file.same_file(status) else os.fstat(file.fd)
            if file.last_status == (status.st_size, status.st_mtime_ns):
                return TailUpdate()
            file.last_status = status.st_size, status.st_mtime_ns
        update = _UpdateBuilder()
        rest = self._read(file, update)
        if rotated:
            if rest.strip():
                place = f"line {self._parser.lines + 1}"
                update.problems.append(Problem(place, "json", "the file was rotated before the line was complete"))
            try:
                self._file = _OpenFile(self._path)
            except FileNotFoundError:  # rotated once more; the next poll finds the next file
                return TailUpdate(records=tuple(update.records), problems=tuple(update.problems))
            self._begin()
            self._read(self._file, update)
        return TailUpdate(restarted=update.restarted, records=tuple(update.records), problems=tuple(update.problems))

    def _read(self, file: _OpenFile, update: _UpdateBuilder) -> bytes:
        if file.is_truncated():
            file.rewind()
            self._begin()
        lines, rest = file.read()
        for line in lines:
            self._beat()
            if line.strip():
                if self._is_undecided:
                    self._place(line, update)
                else:
                    self._parse(line, update)
        return rest

    def _begin(self) -> None:
        """Start a file; its first lines show whether it continues the previous one."""
        self._parser.lines, self._repeated = 0, None
        self._is_undecided = self._parser.header is not None

    def _parse(self, line: bytes, update: _UpdateBuilder) -> None:
        record, found = self._parser.parse(line)
        update.problems.extend(found)
        if record is not None:
            update.records.append(record)

    def _place(self, line: bytes, update: _UpdateBuilder) -> None:
        """Parse a line of a file that may continue the previous one or belong to another run."""
        # A parser of its own: the real one must not take the header of another run before that is decided.
        before = self._parser.header
        probe = LineParser()
        probe.header = before
        record, _ = probe.parse(line)
        if record is None:
            probe.header = None  # accept a header that does not continue the previous one
            record, _ = probe.parse(line)
        if record is None or before is None:
            self._parse(line, update)
        elif not isinstance(record, Header):
            self._is_undecided = False
            last = self._parser.last_step
            # The same header and steps that go back: the file repeats the run from its start. The same header and later
            # steps: a rotated file that begins with a copy of the header.
            again = record.step < last or (isinstance(record, Step) and record.step == last)
            if again and self._repeated is not None:
                self._restart(update)
                self._parse(self._repeated, update)
            self._parse(line, update)
        elif record == before:
            self._parser.lines += 1
            self._repeated = line
        else:
            self._is_undecided = False
            if record.run_id == before.run_id and record.segment > before.segment:
                self._parser = LineParser()  # a file with the segments between may have been rotated away unread
            else:
                self._restart(update)
            self._parse(line, update)

    def _restart(self, update: _UpdateBuilder) -> None:
        self._parser = LineParser()
        update.restarted = True
        update.records.clear()
