"""Follows a growing profile: complete lines only, new lines only, across rotation of the file.

A profile may be renamed and restarted, or copied and truncated (``copytruncate`` of logrotate). The next file continues
where the previous one ended, unless its lines belong to another run; then the state is reset::

    stat: same file, same size and time   nothing new
          same file                       read from the offset; the bytes before it differ: truncated, read from 0
          another file                    read the old one to its end first, then the next part from 0

``dynmo-train`` rotates by ``_common/log_parts.py``: numbered parts, each with a copy of the header.

A line counts once it ends with a newline, because the trainer appends each with one ``write()`` and may be killed in
the middle of it.
"""

from __future__ import annotations

import contextlib
import os
import re
import weakref
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import BinaryIO

from .._common.document import MAX_DOCUMENT_BYTES, Problem, UnreadableError, open_regular
from .._common.log_parts import next_part, part_numbers, part_path, part_paths
from ..formats.profile import Header, LineParser, Record, Step

BATCH_BYTES = 1 << 24
"""Bytes of a profile that a poll reads, apart from the end of a line; the records of one batch are in memory."""
MARK_BYTES = 64
"""Bytes before the read position that are compared, to detect a file that was truncated and has grown past it."""
_STEP = re.compile(rb'\{\s*"record"\s*:\s*"step"')
"""The begin of a step record as ``dynmo-train`` writes it."""


@dataclass(frozen=True, kw_only=True)
class TailUpdate:
    """The result of a poll.

    Attributes:
        restarted: whether the file belongs to another run, or repeats the same one from the start; earlier state is
            void.
        records: the new valid records, in order.
        problems: the problems of lines that were skipped.
        has_more: whether the next poll has more without waiting.
    """

    restarted: bool = False
    records: tuple[Record, ...] = ()
    problems: tuple[Problem, ...] = ()
    has_more: bool = False


@dataclass
class _UpdateBuilder:
    restarted: bool = False
    records: list[Record] = field(default_factory=list)
    problems: list[Problem] = field(default_factory=list)


class _OpenFile:
    """An open part, which can be read to its end after it was renamed, and the position up to which it was read.

    Args:
        handle: the file; its descriptor is duplicated.
        number: number of the part when it was opened; None without one.
    """

    def __init__(self, handle: BinaryIO, number: int | None) -> None:
        with handle:
            self.fd = os.dup(handle.fileno())
        weakref.finalize(self, os.close, self.fd)
        self.number, self.offset = number, 0
        self.is_long_line = self.is_full_batch = False
        self.last_status: tuple[int, int] | None = None
        self._mark = b""
        self._identity = _identity(os.fstat(self.fd))

    def same_file(self, status: os.stat_result) -> bool:
        return _identity(status) == self._identity

    def is_truncated(self) -> bool:
        """Whether the bytes that were read last are no longer there."""
        return os.pread(self.fd, len(self._mark), self.offset - len(self._mark)) != self._mark

    def read(self) -> tuple[list[bytes], bytes]:
        """The next complete lines, at most about ``BATCH_BYTES``, and the incomplete line after them.

        ``pread`` has its own position, so an incomplete line is simply read again by the next poll. A line above
        ``MAX_DOCUMENT_BYTES`` is dropped in parts; ``is_long_line`` until its end.
        """
        payload, self.is_full_batch = b"", False
        while part := os.pread(self.fd, BATCH_BYTES, self.offset + len(payload)):
            payload += part
            self.is_full_batch = len(part) == BATCH_BYTES
            if b"\n" in part or len(payload) > MAX_DOCUMENT_BYTES:
                break
        end = payload.rfind(b"\n") + 1
        rest = payload[end:]
        if not end and len(payload) > MAX_DOCUMENT_BYTES:
            end, rest = len(payload), b""
            lines, self.is_long_line = [] if self.is_long_line else [payload], True
        else:
            lines = payload[:end].split(b"\n")
            if self.is_long_line and end:
                self.is_long_line, lines = False, lines[1:]
        if end:
            self._mark = (self._mark + payload[max(0, end - MARK_BYTES) : end])[-MARK_BYTES:]
        self.offset += end
        return lines, rest

    def has_more(self) -> bool:
        """Whether the file had more than the last batch."""
        return self.is_full_batch

    def count_lines(self, limit: int | None) -> int:
        """Number of line ends after the position, up to ``limit``."""
        count, at = 0, self.offset
        while (limit is None or count < limit) and (part := os.pread(self.fd, BATCH_BYTES, at)):
            count += part.count(b"\n")
            at += len(part)
        return count if limit is None else min(count, limit)

    def rewind(self) -> None:
        self.offset, self._mark, self.is_long_line = 0, b"", False


def _identity(status: os.stat_result) -> tuple[int, int]:
    return status.st_dev, status.st_ino


class ProfileFollower:
    """Reads a profile incrementally, over its parts; a poll without new data costs one ``stat()``.

    A poll reads one batch of one part, so that memory does not grow with the profile; ``TailUpdate.has_more`` states
    whether there is another one.

    Args:
        path: of the profile.
        beat: called before each line, because a poll of many lines takes seconds.
        num_newest: number of newest lines that a start reads: older parts are not opened, since each part begins with
            a header, and older steps of the first part that is read are skipped. None reads all.

    Attributes:
        has_skipped: whether the start left out older lines.
    """

    def __init__(self, path: Path, *, beat: Callable[[], None] = lambda: None, num_newest: int | None = None) -> None:
        self._path, self._beat = path, beat
        self._num_newest, self._num_old, self.has_skipped = num_newest, 0, False
        self._parser = LineParser()
        self._file: _OpenFile | None = None
        self._is_undecided = False
        self._repeated: bytes | None = None

    def poll(self) -> TailUpdate:
        """The next batch of what was appended since the last poll; nothing while the file does not exist."""
        update, left, has_more = _UpdateBuilder(), BATCH_BYTES, True
        while has_more and left > 0:
            num_bytes, has_more = self._advance(update)
            left -= num_bytes
        return TailUpdate(
            restarted=update.restarted,
            records=tuple(update.records),
            problems=tuple(update.problems),
            has_more=has_more,
        )

    def _advance(self, update: _UpdateBuilder) -> tuple[int, bool]:
        """Read once; returns the number of bytes, and whether there is more to read."""
        if self._file is None:
            self._file = self._open_first()
            if self._file is None:
                return 0, False
        file, status = self._file, self._status()
        # Only when the next file has contents: until then the writer may still append to this one.
        if status is None:  # between the steps of a rotation, or renamed; a later part shows that this one is complete
            rotated = any(number > (self._number_of(file) or 0) for number in part_numbers(self._path))
        else:
            rotated = not file.same_file(status) and status.st_size > 0
        if not rotated:
            own = os.fstat(file.fd)
            if file.last_status == (own.st_size, own.st_mtime_ns):
                return 0, False
            file.last_status = own.st_size, own.st_mtime_ns
        before = file.offset
        rest = self._read(file, update)
        num_bytes = max(0, file.offset - before)
        if num_bytes and (rotated or file.has_more()):
            file.last_status = None  # what is left is read although the file does not change
            return num_bytes, True
        if not rotated:
            return num_bytes, False
        if rest.strip():
            place = f"line {self._parser.lines + 1}"
            update.problems.append(Problem(place, "json", "the file was rotated before the line was complete"))
        opened = self._open_after(self._number_of(file))
        if opened is None:
            return num_bytes, False  # rotated once more; the next poll finds the next file
        self._file = opened
        self._begin()
        return num_bytes, True

    def lines_left(self, limit: int) -> int:
        """Number of lines that the next polls will return, up to ``limit``; those of later parts are included."""
        file, count = self._file, 0
        while file is not None and count < limit:
            count += file.count_lines(limit - count)
            number = self._number_of(file)
            file = None if number is None else self._open_after(number)
        return count

    def _status(self) -> os.stat_result | None:
        """Of the document without a number; None while there is none."""
        try:
            return os.stat(self._path)
        except FileNotFoundError:
            return None

    def _number_of(self, file: _OpenFile) -> int | None:
        """The number of an open part, which its writer may have given to it since it was opened.

        None for the document without a number. A file that is gone counts as the part before the oldest one.
        """
        if file.number is None:
            for number in reversed(part_numbers(self._path)):
                with contextlib.suppress(OSError):
                    if file.same_file(os.stat(part_path(self._path, number))):
                        file.number = number
                        break
            else:
                status = self._status()
                return None if status is not None and file.same_file(status) else self._last_number
        return file.number

    @property
    def _last_number(self) -> int:
        """The highest number of a part; what follows it is the document without a number."""
        return max(part_numbers(self._path), default=0)

    def _open_first(self) -> _OpenFile | None:
        """Open the part that a start begins with, and count the older lines in it."""
        if self._num_newest is None:
            return self._open_after(0)
        later = 0  # lines of the parts after it
        number: int | None = None
        for path in reversed(part_paths(self._path)):
            number = None if path == self._path else int(path.suffix[1:])
            with contextlib.suppress(UnreadableError):
                count = _OpenFile(open_regular(path), number).count_lines(None)
                if later + count >= self._num_newest:
                    self._num_old = later + count - self._num_newest
                    break
                later += count
        else:
            return self._open_after(0)
        self.has_skipped = self._num_old > 0 or number != min(part_numbers(self._path), default=None)
        return self._open_after(self._last_number if number is None else number - 1)

    def _open_after(self, number: int | None) -> _OpenFile | None:
        if number is None:
            return None
        found = next_part(self._path, number)
        return None if found is None else _OpenFile(*found)

    def _read(self, file: _OpenFile, update: _UpdateBuilder) -> bytes:
        if file.is_truncated():
            file.rewind()
            self._begin()
        lines, rest = file.read()
        for line in lines:
            self._beat()
            is_old, self._num_old = self._num_old > 0, max(0, self._num_old - 1)
            if is_old and _STEP.match(line):
                self._parser.lines += 1
            elif line.strip():
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
        if probe.is_copy:
            self._is_undecided = False
            self._parser.lines += 1
            return
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
