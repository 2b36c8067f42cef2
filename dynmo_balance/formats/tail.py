"""Follows a growing profile: only complete lines, only what is new; a replaced or shrunken file starts anew."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from ._document import Problem
from .profile import LineParser, Record


@dataclass(frozen=True, kw_only=True)
class News:
    """What a poll found.

    Attributes:
        restarted: the file was replaced or cut, so all earlier state is void.
        records: the new valid records, in order.
        problems: the faults of lines that were skipped.
    """

    restarted: bool = False
    records: tuple[Record, ...] = ()
    problems: tuple[Problem, ...] = ()


class ProfileTail:
    """Reads a profile bit by bit. A poll without news costs one ``stat()``."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._parser = LineParser()
        self._inode = -1
        self._offset = 0
        self._seen_size = -1

    def poll(self) -> News:
        """What was appended since the last poll; nothing while the file does not exist."""
        try:
            status = os.stat(self._path)
        except FileNotFoundError:
            return News()
        if status.st_ino == self._inode and status.st_size == self._seen_size:
            return News()
        restarted = self._inode != -1 and (status.st_ino != self._inode or status.st_size < self._offset)
        if restarted or self._inode == -1:
            self._parser, self._offset = LineParser(), 0
        self._inode, self._seen_size = status.st_ino, status.st_size
        with open(self._path, "rb") as handle:
            handle.seek(self._offset)
            payload = handle.read()
        end = payload.rfind(b"\n") + 1
        self._offset += end
        records: list[Record] = []
        problems: list[Problem] = []
        for line in payload[:end].split(b"\n"):
            if line.strip():
                record, found = self._parser.parse(line)
                problems.extend(found)
                if record is not None:
                    records.append(record)
        return News(restarted=restarted, records=tuple(records), problems=tuple(problems))
