"""Follows a ``.jsonl`` file that another process appends to, over its parts, in bounded memory.

A run writes hundreds of bytes per step for weeks, so that its files reach gigabytes. The first read does not read them
all. In this order, so that records come oldest first::

    before the tail    SAMPLED_LINES lines at equal distances
                       the first line of each part, which of a profile is a header
                       of the last ``marked_bytes``, lines with one of the ``markers``
    tail               every line of the last ``tail_bytes``

From then on only appended lines are read. When the file is rotated, the rest of the part is read first, by its inode.

The file may be replaced or truncated at any time, by a new run in the same directory. Size and inode show most of that.
A file that was truncated and has grown again between two polls is recognized by the bytes before the last position.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

from ..._common.document import MAX_DOCUMENT_BYTES, UnreadableError, open_regular, parse_json
from ..._common.log_parts import next_part, part_numbers, part_path, part_paths

TAIL_BYTES = 1 << 18
MARKED_BYTES = 32 << 20
SAMPLED_LINES = 512
_CHUNK_BYTES = 1 << 20
_MARK_BYTES = 64


class JsonlTail:
    """A position in a ``.jsonl`` file.

    Args:
        path: the file without a number; it need not exist yet.
        markers: lines with one of these texts are parsed within the last ``marked_bytes``.
        tail_bytes: number of bytes at the end of which the first read parses every line.
        marked_bytes: number of bytes at the end in which the first read searches for markers; None all.
        samples: number of lines before the tail that the first read parses.

    Attributes:
        invalid_lines: number of lines that were not JSON objects; they are skipped.
        is_partial: whether the first read left out lines that may have a marker.
    """

    def __init__(
        self,
        path: Path,
        markers: tuple[bytes, ...] = (),
        tail_bytes: int = TAIL_BYTES,
        marked_bytes: int | None = MARKED_BYTES,
        samples: int = SAMPLED_LINES,
    ) -> None:
        self.path, self._markers, self._tail_bytes = path, markers, tail_bytes
        self._marked_bytes, self._samples = marked_bytes, samples
        self._file_id: tuple[int, int] | None = None
        self._reset()

    def _reset(self) -> None:
        # The offset is the start of a line: an incomplete last line is read again, because its writer may cut it.
        self._offset, self._mark, self._has_read = 0, b"", False
        self._state: tuple[int, int] = (0, 0)
        self.invalid_lines, self.is_partial = 0, False

    def has_restarted(self) -> bool:
        """Whether the file was replaced or truncated since the last read; if so, the next read starts from scratch."""
        if self._file_id is None:
            return False
        current = self._current_path()
        if current is not None and self._has_mark(current):
            return False
        had_records, self._file_id = self._has_read, None
        self._reset()
        return had_records

    def _current_path(self) -> Path | None:
        """The path of the part that was read last, which the writer may have given a number; None if it is gone."""
        numbered = (part_path(self.path, number) for number in reversed(part_numbers(self.path)))
        return next((path for path in (self.path, *numbered) if _file_id(path) == self._file_id), None)

    def _has_mark(self, path: Path) -> bool:
        """Whether the bytes before the offset are those that were read."""
        try:
            with open_regular(path) as handle:
                handle.seek(self._offset - len(self._mark))
                return handle.read(len(self._mark)) == self._mark
        except (OSError, UnreadableError):
            return False

    def read(self) -> Iterator[dict[str, Any]]:
        """Records of the complete lines that were appended since the last read; none of a file that cannot be read."""
        if self._file_id is None:
            yield from self._skim()
        while (current := self._current_path()) is not None:
            yield from self._read_part(current)
            if current == self.path:
                return
            number = int(current.name.rpartition(".")[2])
            try:
                found = next_part(self.path, number)
            except UnreadableError:
                return
            if found is None:
                return
            with found[0] as handle:
                status = os.fstat(handle.fileno())
            self._file_id = status.st_dev, status.st_ino
            self._offset, self._mark, self._state = 0, b"", (0, 0)

    def _skim(self) -> Iterator[dict[str, Any]]:
        """The records before the tail that the first read parses; sets the position to the begin of the tail."""
        parts = [(path, size) for path in part_paths(self.path) if (size := _size(path)) is not None]
        if not parts:
            return
        total = sum(size for _, size in parts)
        tail_begin = max(0, total - self._tail_bytes)
        marked_begin = 0 if self._marked_bytes is None else max(0, tail_begin - self._marked_bytes)
        self.is_partial = marked_begin > 0
        every = max(1, tail_begin // max(1, self._samples))
        begin = 0
        for path, size in parts:
            end = begin + size
            # The last part is the position that following reads continue from, also where the tail began before it.
            stop = min(size, max(0, tail_begin - begin))
            try:
                handle = open_regular(path)
            except UnreadableError:
                begin = end
                continue
            with handle:
                status = os.fstat(handle.fileno())
                if stop:
                    first = -(-begin // every) * every - begin
                    begins = {0, *(_line_begin(handle, at, stop) for at in range(first, stop, every))}
                    begins |= set(self._marked(handle, max(0, marked_begin - begin), stop))
                    for at in sorted(begins):
                        if at < stop:
                            yield from self._line_at(handle, at)
                if stop < size or path == parts[-1][0]:
                    self._file_id = status.st_dev, status.st_ino
                    self._offset, self._mark = _line_begin(handle, stop, size) if stop else 0, b""
                    if path != parts[-1][0]:
                        return  # ``read`` follows the parts from here on
            begin = end

    def _marked(self, handle: BinaryIO, begin: int, end: int) -> Iterator[int]:
        """Begins of the lines between two positions that contain a marker."""
        if not self._markers or begin >= end:
            return
        handle.seek(at := _line_begin(handle, begin, end) if begin else 0)
        rest = b""
        while at + len(rest) < end and (chunk := handle.read(_CHUNK_BYTES)):
            text = rest + chunk
            stop = text.rfind(b"\n") + 1
            for marker in self._markers:
                found = text.find(marker, 0, stop)
                while found >= 0:
                    yield at + text.rfind(b"\n", 0, found) + 1
                    found = text.find(marker, text.find(b"\n", found, stop), stop)
            at, rest = at + stop, text[stop:]
            if len(rest) > MAX_DOCUMENT_BYTES:
                at, rest = at + len(rest), b""

    def _line_at(self, handle: BinaryIO, at: int) -> Iterator[dict[str, Any]]:
        handle.seek(at)
        line = handle.readline(MAX_DOCUMENT_BYTES)
        if line.endswith(b"\n") and line.strip():
            self._has_read = True
            yield from self._parsed(line)

    def _read_part(self, path: Path) -> Iterator[dict[str, Any]]:
        try:
            handle = open_regular(path)
        except UnreadableError:
            return
        with handle:
            found = os.fstat(handle.fileno())
            state = (found.st_size, found.st_mtime_ns)
            if state == self._state or (found.st_dev, found.st_ino) != self._file_id:
                return
            self._state = state
            yield from self._records(handle, found.st_size)

    def _records(self, handle: BinaryIO, size: int) -> Iterator[dict[str, Any]]:
        handle.seek(self._offset)
        rest = b""
        # Not beyond the size at the start: a fast writer could keep this loop busy for ever.
        while self._offset + len(rest) < size and (chunk := self._chunk(handle)):
            lines = (rest + chunk).split(b"\n")
            rest = lines.pop()
            for line in lines:
                self._offset += len(line) + 1
                self._mark = (self._mark + line[-_MARK_BYTES:] + b"\n")[-_MARK_BYTES:]
                self._has_read = True
                if line.strip():
                    yield from self._parsed(line)
            if len(rest) > MAX_DOCUMENT_BYTES:
                # No line of ours: the rest of it is skipped up to its end.
                self._offset, self._mark, rest = self._offset + len(rest), rest[-_MARK_BYTES:], b""

    @staticmethod
    def _chunk(handle: BinaryIO) -> bytes:
        try:
            return handle.read(_CHUNK_BYTES)
        except OSError:
            return b""

    def _parsed(self, line: bytes) -> Iterator[dict[str, Any]]:
        try:
            record = parse_json(line)
        except ValueError:
            record = None
        if isinstance(record, dict):
            yield record
        else:
            self.invalid_lines += 1


def _size(path: Path) -> int | None:
    try:
        return os.stat(path).st_size
    except OSError:
        return None


def _file_id(path: Path) -> tuple[int, int] | None:
    try:
        found = os.stat(path)
    except OSError:
        return None
    return found.st_dev, found.st_ino


def _line_begin(handle: BinaryIO, at: int, end: int) -> int:
    """Begin of the first line at or after a position; ``end`` if there is none before it."""
    if at == 0:
        return 0
    handle.seek(at - 1)
    at -= 1
    while at < end and (chunk := handle.read(min(_CHUNK_BYTES >> 8, end - at))):
        found = chunk.find(b"\n")
        if found >= 0:
            return at + found + 1
        at += len(chunk)
    return end
