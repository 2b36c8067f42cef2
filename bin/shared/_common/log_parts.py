"""The parts of a ``.jsonl`` document that is rotated: how a writer rotates it, and how readers read over the parts.

::

    profile.jsonl.4  profile.jsonl.5  profile.jsonl      oldest to newest; the writer appends to the last one

A full document is renamed to the next number, and the next line creates a new one. Numbers are never used twice and
never change, so that one rename is the whole rotation: after a crash there may be no document without a number, which
readers take for an empty one. The oldest parts may be missing, because the writer deleted them.

A reader that has read part N continues with the lowest number above N, or else with the document without a number. It
opens that before it looks for part N + 1 once more: if there is none, what it opened follows part N.
"""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from .document import MAX_DOCUMENT_BYTES, UnreadableError, lines_of, open_regular, records_of

_NUMBER = re.compile(r"\.([1-9][0-9]{0,17})")


@dataclass(frozen=True, kw_only=True)
class Rotation:
    """When a writer starts a new part, and how many it keeps.

    Attributes:
        max_bytes: size from which on the next line starts a new part; None never.
        keep: number of older parts to keep; None all.
    """

    max_bytes: int | None = None
    keep: int | None = None


NO_ROTATION = Rotation()


def part_numbers(path: Path) -> list[int]:
    """The numbers of the older parts of a document, oldest first."""
    try:
        names = os.listdir(path.parent)
    except OSError:
        return []
    found = (_NUMBER.fullmatch(name[len(path.name) :]) for name in names if name.startswith(path.name))
    return sorted(int(match[1]) for match in found if match)


def part_path(path: Path, number: int) -> Path:
    """The path of an older part.

    Args:
        path: the newest file.
        number: of the part, from 1.
    """
    return path.with_name(f"{path.name}.{number}")


def part_paths(path: Path) -> list[Path]:
    """The parts that exist, oldest first."""
    older = [part_path(path, number) for number in part_numbers(path)]
    return [*older, path] if path.exists() else older


def rotate(path: Path, rotation: Rotation, min_bytes: int = 0) -> bool:
    """Start a new part if the document is full; returns whether it did.

    Args:
        path: the document.
        rotation: when to rotate, and what to keep.
        min_bytes: size below which the document is not full, whatever ``rotation`` states.

    Raises:
        OSError: the document cannot be renamed.
    """
    if rotation.max_bytes is None:
        return False
    try:
        size = os.stat(path).st_size
    except FileNotFoundError:
        return False
    if size < max(1, rotation.max_bytes, min_bytes):
        return False
    numbers = part_numbers(path)
    last = numbers[-1] if numbers else 0
    os.rename(path, part_path(path, last + 1))
    numbers.append(last + 1)
    if rotation.keep is not None:
        for number in numbers[: max(0, len(numbers) - rotation.keep)]:
            with contextlib.suppress(OSError):  # the next rotation tries again
                part_path(path, number).unlink(missing_ok=True)
    return True


def next_part(path: Path, number: int) -> tuple[BinaryIO, int | None] | None:
    """Open the part after part ``number``; 0 opens the oldest one.

    Returns:
        The file, and its number, None for the document without a number; None if there is no such part.

    Raises:
        UnreadableError: a part is not a regular file, or permissions forbid reading it.
    """
    while True:
        later = [each for each in part_numbers(path) if each > number]
        try:
            handle = open_regular(part_path(path, later[0]) if later else path)
        except UnreadableError as error:
            if not isinstance(error.__cause__, FileNotFoundError):
                raise
            # Deleted or renamed since it was listed.
            if later or any(each > number for each in part_numbers(path)):
                continue
            return None
        if later:
            return handle, later[0]
        if not any(each > number for each in part_numbers(path)):
            return handle, None
        handle.close()


def read_part_lines(path: Path, max_bytes: int = MAX_DOCUMENT_BYTES) -> Iterator[bytes]:
    """Read the complete lines of all parts, one by one; skip blank ones and an incomplete last one of a part.

    Args:
        path: the document.
        max_bytes: the limit of one line.

    Raises:
        UnreadableError: no part can be read, or one is not a regular file.
        DocumentError: a line is longer than ``max_bytes``.
    """
    number: int | None = 0
    is_first = True
    while number is not None:
        found = next_part(path, number)
        if found is None:
            if is_first:
                open_regular(path).close()  # raises what is wrong with it
            return
        is_first = False
        handle, number = found
        with handle:
            yield from lines_of(handle, path if number is None else part_path(path, number), max_bytes)


def read_part_records(path: Path) -> Iterator[Any]:
    """Read the values of all parts.

    Raises:
        DocumentError: as of ``read_part_lines``, or a line is not JSON; it names the line.
    """
    return records_of(read_part_lines(path), path)


def last_lines(path: Path, max_bytes: int) -> Iterator[bytes]:
    """Read complete lines of all parts from the newest to the oldest.

    Args:
        path: the document.
        max_bytes: number of bytes at the end to which the search is limited.
    """
    left = max_bytes
    for part in reversed(part_paths(path)):
        try:
            handle = open_regular(part)
        except UnreadableError:
            continue
        with handle:
            end = os.fstat(handle.fileno()).st_size
            yield from _lines_backward(handle, max(0, end - left), end)
            left -= end
        if left <= 0:
            return


def _lines_backward(handle: BinaryIO, begin: int, end: int, chunk_bytes: int = 1 << 18) -> Iterator[bytes]:
    """Complete lines between two positions, last first; an incomplete line at either end is left out."""
    tail: Sequence[bytes] = ()  # the pieces of the line that continues after ``end``, last first
    is_last, at = True, end
    while at > begin:
        start = max(begin, at - chunk_bytes)
        handle.seek(start)
        first, *lines = handle.read(at - start).split(b"\n")
        at = start
        if not lines:
            tail = [*tail, first]
            continue
        lines[-1] = b"".join([lines[-1], *reversed(tail)])
        tail = [first]
        for position in range(len(lines) - 1, -1, -1):
            if is_last:  # after the last line end
                is_last = False
            elif lines[position].strip():
                yield lines[position]
    if begin == 0 and not is_last and (line := b"".join(reversed(tail))).strip():
        yield line
