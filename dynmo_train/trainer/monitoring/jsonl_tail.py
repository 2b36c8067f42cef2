"""Follows a ``.jsonl`` file that another process appends to: bounded memory, and no byte is parsed twice.

A run writes hundreds of bytes per step for weeks, so that its files reach gigabytes. The first read skims everything
before the last ``tail_bytes``: it parses the lines that contain one of the ``markers``, and every 64th of the others.
From then on only appended lines are read.

The file may be replaced or truncated at any time, by a new run in the same directory. Size and inode show most of that.
A file that was truncated and has grown again between two polls is recognized by the bytes before the last position.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

from ..._common.document import MAX_DOCUMENT_BYTES, UnreadableError, open_regular, parse_json

TAIL_BYTES = 16 << 20
_CHUNK_BYTES = 1 << 20
_MARK_BYTES = 64
_SAMPLED_LINES = 64


class JsonlTail:
    """A position in a ``.jsonl`` file.

    Args:
        path: the file; it need not exist yet.
        markers: lines with one of these texts are parsed wherever they are.
        tail_bytes: number of bytes at the end of which the first read parses every line.

    Attributes:
        invalid_lines: number of lines that were not JSON objects; they are skipped.
    """

    def __init__(self, path: Path, markers: tuple[bytes, ...] = (), tail_bytes: int = TAIL_BYTES) -> None:
        self.path, self._markers, self._tail_bytes = path, markers, tail_bytes
        self._file_id: tuple[int, int] | None = None
        self._reset()

    def _reset(self) -> None:
        # The offset is the start of a line: an incomplete last line is read again, because its writer may cut it.
        self._offset, self._mark, self._line_number = 0, b"", 0
        self._state: tuple[int, int] = (0, 0)
        self.invalid_lines = 0

    def has_restarted(self) -> bool:
        """Whether the file was replaced or truncated since the last read; if so, the next read starts from scratch."""
        try:
            found = os.stat(self.path)
        except OSError:
            had_records, self._file_id = self._offset > 0, None
            self._reset()
            return had_records
        file_id = (found.st_dev, found.st_ino)
        is_same = file_id == self._file_id and found.st_size >= self._offset and self._has_mark()
        self._file_id = file_id
        if is_same or not self._offset:
            return False
        self._reset()
        return True

    def _has_mark(self) -> bool:
        """Whether the bytes before the offset are those that were read."""
        try:
            with open_regular(self.path) as handle:
                handle.seek(self._offset - len(self._mark))
                return handle.read(len(self._mark)) == self._mark
        except (OSError, UnreadableError):
            return False

    def read(self) -> Iterator[dict[str, Any]]:
        """Records of the complete lines that were appended since the last read; none of a file that cannot be read."""
        try:
            handle = open_regular(self.path)
        except UnreadableError:
            return
        with handle:
            found = os.fstat(handle.fileno())
            state = (found.st_size, found.st_mtime_ns)
            if state == self._state:
                return
            self._state = state
            yield from self._records(handle, found.st_size)

    def _records(self, handle: BinaryIO, size: int) -> Iterator[dict[str, Any]]:
        parse_all_from = size - self._tail_bytes
        handle.seek(self._offset)
        rest = b""
        # Not beyond the size at the start: a fast writer could keep this loop busy for ever.
        while self._offset + len(rest) < size and (chunk := self._chunk(handle)):
            lines = (rest + chunk).split(b"\n")
            rest = lines.pop()
            for line in lines:
                self._offset += len(line) + 1
                self._line_number += 1
                self._mark = (self._mark + line[-_MARK_BYTES:] + b"\n")[-_MARK_BYTES:]
                is_parsed = self._offset > parse_all_from or self._line_number % _SAMPLED_LINES == 0
                if (is_parsed or any(marker in line for marker in self._markers)) and line.strip():
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
