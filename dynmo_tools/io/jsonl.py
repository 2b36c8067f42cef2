"""JSON lines: reading slices of files in pieces, parsing lines, and classifying invalid ones."""

from __future__ import annotations

import base64
import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any, NamedTuple

from .._common.document import MAX_DEPTH, MAX_TABLE_BYTES, open_regular, parse_any_json
from .._common.errors import DynmoError, MissingExtraError, UsageError
from .codecs import PIECE_BYTES, TruncatedError, is_compressed, open_read, trailing_bytes
from .frames import bytes_after_frames

BOM = b"\xef\xbb\xbf"
EXCERPT_CHARACTERS = 200
MAX_KEYS = 20
PARQUET_BATCH_ROWS = 1024
MAX_DIGITS = 4000  # digits of an integer; Python parses at most 4300


@dataclass(frozen=True, kw_only=True)
class Slice:
    """A slice of an input file: the lines that start in ``[begin, end)`` bytes; ``end`` None is the end of the file.

    Attributes:
        path: the file.
        begin: first byte of the slice; of a zstandard file that is divided at its frames, of its text.
        end: one after its last byte.
        frame: offset of the first frame of such a slice in the file; None for other slices.
        frame_end: one after its last frame.
    """

    path: Path
    begin: int = 0
    end: int | None = None
    frame: int | None = None
    frame_end: int | None = None

    @property
    def stored(self) -> tuple[int, int | None]:
        """The bytes of the slice in the file."""
        return (self.begin, self.end) if self.frame is None else (self.frame, self.frame_end)


class Line(NamedTuple):
    """One line of an input.

    Attributes:
        number: line number within the slice, from 1.
        offset: byte offset in the decompressed file.
        raw: bytes of the line; None if it is longer than the limit.
        head: first bytes of a line longer than the limit.
        size: bytes of the line in the file, including the newline.
    """

    number: int
    offset: int
    raw: bytes | None
    head: bytes = b""
    size: int = 0


class Row(NamedTuple):
    """One document: a line and its JSON object.

    Attributes:
        line: line number within the slice, from 1.
        offset: byte offset in the decompressed file.
        raw: bytes of the line; a step that changes a row edits these (``json_edit``).
        value: parsed object, for reading texts only: its numbers may be rounded, repeated keys have their last value.
        size: bytes of the line in the input; 0 for inputs without lines.
    """

    line: int
    offset: int
    raw: bytes
    value: dict[str, Any]
    size: int = 0


class BadLineError(Exception):
    """A line that is not a document; ``reason`` is a word of the table in the README."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason


@dataclass
class DocumentCounts:
    """Document counts of a task or of a run."""

    documents_in: int = 0
    bytes_in: int = 0
    documents_out: int = 0
    bytes_out: int = 0
    blank_lines: int = 0
    lines: int = 0
    changed: int = 0
    dropped: dict[str, int] = field(default_factory=dict)
    rejected: dict[str, int] = field(default_factory=dict)

    def drop(self, reason: str) -> None:
        """Count a document that the step drops."""
        self.dropped[reason] = self.dropped.get(reason, 0) + 1

    def reject(self, reason: str) -> None:
        """Count a line that is not a document."""
        self.rejected[reason] = self.rejected.get(reason, 0) + 1

    @property
    def num_rejected(self) -> int:
        """Number of rejected lines."""
        return sum(self.rejected.values())

    def add(self, other: DocumentCounts) -> None:
        """Add the counts of ``other``."""
        for name in ("documents_in", "bytes_in", "documents_out", "bytes_out", "blank_lines", "lines", "changed"):
            setattr(self, name, getattr(self, name) + getattr(other, name))
        for mine, theirs in ((self.dropped, other.dropped), (self.rejected, other.rejected)):
            for reason, count in theirs.items():
                mine[reason] = mine.get(reason, 0) + count

    def as_json(self) -> dict[str, Any]:
        """The counts as a JSON object, reasons in alphabetical order."""
        return {
            "documents_in": self.documents_in,
            "bytes_in": self.bytes_in,
            "documents_out": self.documents_out,
            "bytes_out": self.bytes_out,
            "blank_lines": self.blank_lines,
            "lines": self.lines,
            "changed": self.changed,
            "dropped": dict(sorted(self.dropped.items())),
            "rejected": dict(sorted(self.rejected.items())),
        }


def _orjson() -> Any:
    try:
        import orjson
    except ImportError as error:
        raise MissingExtraError("orjson", "prep") from error
    return orjson


def split_lines(handle: IO[bytes], offset: int, limit_bytes: int) -> Iterator[Line]:
    """Split a stream at newlines; at most one line of ``limit_bytes`` and one piece are in memory.

    Args:
        handle: the stream, at the start of a line.
        offset: offset of this position in the file.
        limit_bytes: maximum bytes of a line; longer lines are yielded without their bytes.
    """
    # Split at newlines only. Python's file iteration would do the same, but holds a line of any length in memory.
    number, partial, skipped_bytes, head = 0, b"", 0, b""
    while piece := handle.read(PIECE_BYTES):
        lines = piece.split(b"\n")
        last = lines.pop()
        for part in lines:
            raw = partial + part if partial else part
            number += 1
            size = skipped_bytes + len(raw) + 1
            if skipped_bytes or len(raw) > limit_bytes:
                yield Line(number, offset, None, head or raw[:EXCERPT_CHARACTERS], size)
            else:
                yield Line(number, offset, raw, b"", size)
            offset += size
            partial, skipped_bytes, head = b"", 0, b""
        partial += last
        if skipped_bytes or len(partial) > limit_bytes:
            head = head or partial[:EXCERPT_CHARACTERS]
            skipped_bytes, partial = skipped_bytes + len(partial), b""
    if partial or skipped_bytes:
        yield Line(number + 1, offset, None if skipped_bytes else partial, head, skipped_bytes + len(partial))


def read_lines(part: Slice, limit_bytes: int) -> Iterator[Line]:
    """The lines of a slice.

    Args:
        part: the slice.
        limit_bytes: maximum bytes of a line; longer lines are yielded without their bytes.

    Raises:
        TruncatedError: a compressed file ends within its stream.
        DynmoError: the file is not of its compression format, or cannot be read.
    """
    done = part.begin
    try:
        with open_read(part.path, part.frame or 0) as handle:
            if part.begin and part.frame is None:
                handle.seek(part.begin)
            for line in split_lines(handle, part.begin, limit_bytes):
                # A line belongs to the slice in which it starts; its end may lie in the next one.
                if part.end is not None and line.offset >= part.end:
                    return
                done = line.offset
                # RFC 8259 allows parsers to ignore it. Files that were concatenated have one at the start of each.
                if line.raw is not None and line.raw.startswith(BOM):
                    line = line._replace(raw=line.raw[len(BOM) :])
                yield line
    except EOFError as error:
        _check_trailing(part.path, error)
        raise TruncatedError(
            f"{part.path}: the compressed stream is truncated after byte {done} of its text ({error}); "
            "download the file again; none of its documents were written"
        ) from error
    except OSError as error:
        _check_trailing(part.path, error)
        raise DynmoError(f"{part.path}: cannot read after byte {done}: {error}") from error
    # The libraries have no common base class, and some are optional: their errors are known by name only.
    except Exception as error:
        _check_trailing(part.path, error)
        if is_compressed(part.path) and type(error).__name__ in ("ZstdError", "LZMAError", "error", "IsalError"):
            raise DynmoError(f"{part.path}: damaged after byte {done} of its text: {error}") from error
        raise


def _check_trailing(path: Path, error: Exception) -> None:
    """Report bytes after a complete stream, which libraries call a truncated or damaged one."""
    find = {".gz": trailing_bytes, ".zst": bytes_after_frames}.get(path.suffix)
    found = None if find is None else find(path)
    if found is not None:
        begin, count = found
        raise DynmoError(
            f"{path}: the compressed stream is complete, but {count:,} bytes after it, from byte {begin}, are not of "
            f"its format; if they are not data, remove them: head -c {begin} {path} > OTHER{path.suffix}; "
            "none of its documents were written"
        ) from error


def read_objects(path: Path) -> Iterator[dict[str, Any]]:
    """The objects of a file of JSON lines that this program wrote.

    Raises:
        UsageError: a line is not a JSON object.
    """
    try:
        open_regular(path).close()  # a FIFO would block
        with open_read(path) as handle:
            for number, line in enumerate(handle, 1):
                value = parse_any_json(line, MAX_TABLE_BYTES)
                if not isinstance(value, dict):
                    raise UsageError(f"{path}: line {number} is not a JSON object")
                yield value
    except OSError as error:
        raise UsageError(f"{path}: cannot be read: {error}") from error
    except ValueError as error:
        raise UsageError(f"{path}: not a file of JSON lines: {error}") from error


def repair_utf8(raw: bytes) -> bytes:
    """Replace invalid UTF-8 by U+FFFD."""
    try:
        raw.decode()
    except UnicodeDecodeError:
        return raw.decode("utf-8", "replace").encode()
    return raw


def _whole_number(digits: str) -> int | float:
    """Parse an integer; a float if Python refuses this many digits, which do not make a row invalid."""
    return int(digits) if len(digits) <= MAX_DIGITS else float(digits)


def _is_too_deep(value: Any) -> bool:
    """Whether a value is nested deeper than ``MAX_DEPTH``; orjson accepts 1,024 levels."""
    level = [value]
    for _ in range(MAX_DEPTH + 1):
        level = [each for each in level if isinstance(each, dict | list)]
        if not level:
            return False
        level = [part for each in level for part in (each.values() if isinstance(each, dict) else each)]
    return True


def parse_line(raw: bytes) -> dict[str, Any]:
    """Parse the JSON object of a line.

    NaN, infinities and lone surrogates, which orjson refuses, are parsed by Python's parser.

    Raises:
        BadLineError: with ``utf8`` or ``json``.
    """
    orjson = _orjson()
    try:
        value = orjson.loads(raw)
        # The number of brackets bounds the depth and is counted fast; only a row above the limit is traversed.
        if raw.count(b"[") + raw.count(b"{") > MAX_DEPTH and _is_too_deep(value):
            raise BadLineError("json")
    except orjson.JSONDecodeError:
        try:
            text = raw.decode()
        except UnicodeDecodeError as error:
            raise BadLineError("utf8") from error
        try:
            value = parse_any_json(text, MAX_TABLE_BYTES, parse_int=_whole_number)
        except ValueError as error:
            raise BadLineError("json") from error
    if not isinstance(value, dict):
        raise BadLineError("json")
    return value


def parse_plain_line(raw: bytes) -> dict[str, Any]:
    """A line of plain text as the document ``{"text": ...}``.

    Raises:
        BadLineError: with ``utf8``.
    """
    try:
        return {"text": raw.decode().strip()}
    except UnicodeDecodeError as error:
        raise BadLineError("utf8") from error


def has_surrogates(text: str) -> bool:
    """Whether ``text`` has lone surrogates, which UTF-8 cannot encode."""
    if text.isascii():
        return False
    try:
        text.encode()
    except UnicodeEncodeError:
        return True
    return False


def contains_surrogates(value: Any) -> bool:
    """Whether any text in a JSON value, including keys, has lone surrogates."""
    if isinstance(value, dict):
        return any(has_surrogates(key) or contains_surrogates(element) for key, element in value.items())
    if isinstance(value, list):
        return any(map(contains_surrogates, value))
    return isinstance(value, str) and has_surrogates(value)


def text_of(value: dict[str, Any], key: str, *, allow_surrogates: bool = False) -> str:
    """The text under ``key``; dots address nested objects.

    Raises:
        BadLineError: with ``key``, ``type`` or ``surrogate``.
    """
    found: Any = value
    for step in path_of(value, key):
        if not isinstance(found, dict) or step not in found:
            raise BadLineError("key")
        found = found[step]
    if isinstance(found, bytes):  # of parquet, where they are not UTF-8
        raise BadLineError("utf8")
    if not isinstance(found, str):
        raise BadLineError("type")
    if not allow_surrogates and has_surrogates(found):
        raise BadLineError("surrogate")
    return found


def path_of(value: dict[str, Any], key: str) -> tuple[str, ...]:
    """The keys to the value of ``text_of``: ``key`` itself if it is present, else its parts between dots."""
    return (key,) if key in value else tuple(key.split("."))


def exact_integer(row: Row, key: str) -> int | None:
    """The integer under ``key``, of any size; orjson rounds integers of 64 bits and more to floats."""
    found = row.value.get(key)
    # Parsed a second time only for floats, which are rare as names.
    if isinstance(found, float):
        found = json.loads(row.raw, parse_int=_whole_number).get(key)
    return found if type(found) is int else None


def encode_text(text: str) -> bytes:
    """The JSON string of a text."""
    orjson = _orjson()
    try:
        encoded: bytes = orjson.dumps(text)
    except (orjson.JSONEncodeError, TypeError):  # lone surrogates, which UTF-8 cannot carry
        return json.dumps(text).encode()
    return encoded


def encode_row(value: dict[str, Any]) -> bytes:
    """The bytes of a new document, without the newline."""
    orjson = _orjson()
    try:
        encoded: bytes = orjson.dumps(value)
    except (orjson.JSONEncodeError, TypeError):
        return json.dumps(value, ensure_ascii=True, separators=(",", ":")).encode()
    # orjson writes NaN as null without an error. Most rows have no "null", so the check costs one search.
    if b"null" in encoded and not _same_nulls(value):
        return json.dumps(value, ensure_ascii=False, separators=(",", ":")).encode()
    return encoded


def _same_nulls(value: Any) -> bool:
    """Whether no float is NaN or infinite; orjson would write those as null."""
    if isinstance(value, dict):
        return all(_same_nulls(element) for element in value.values())
    if isinstance(value, list):
        return all(_same_nulls(element) for element in value)
    return not isinstance(value, float) or value - value == 0


def excerpt(raw: bytes) -> str:
    """The first characters of a line, for the rejects file."""
    # A character has at most four bytes, so a long line is not decoded completely.
    return raw[: 4 * EXCERPT_CHARACTERS].decode("utf-8", "replace")[:EXCERPT_CHARACTERS]


def _json_value(value: Any) -> Any:
    """A value of parquet that JSON does not have: bytes are base64, others are text."""
    return base64.b64encode(value).decode("ascii") if isinstance(value, bytes) else str(value)


def _decode_bytes(value: Any, *, repair: bool) -> Any:
    """A value of parquet in which bytes are text, if they are UTF-8 or ``repair`` replaces what is not."""
    if isinstance(value, bytes):
        try:
            return value.decode("utf-8", "replace" if repair else "strict")
        except UnicodeDecodeError:
            return value
    if isinstance(value, dict):
        return {key: _decode_bytes(element, repair=repair) for key, element in value.items()}
    return [_decode_bytes(element, repair=repair) for element in value] if isinstance(value, list) else value


def read_parquet(part: Slice, *, repair: bool = False) -> Iterator[Row]:
    """The rows of a parquet file as documents; the line is the row number, the offset is 0.

    Args:
        part: the file.
        repair: replace invalid UTF-8 in columns of bytes by U+FFFD.

    Raises:
        MissingExtraError: pyarrow is not installed.
        DynmoError: the file is truncated, damaged or not parquet.
    """
    try:
        import pyarrow.parquet
    except ImportError as error:
        raise MissingExtraError("pyarrow", "parquet") from error
    number = 0
    try:
        with pyarrow.parquet.ParquetFile(part.path) as table:
            has_bytes = "binary" in str(table.schema_arrow.types)
            for batch in table.iter_batches(batch_size=PARQUET_BATCH_ROWS):
                for value in batch.to_pylist():
                    number += 1
                    if has_bytes:
                        value = _decode_bytes(value, repair=repair)
                    yield Row(number, 0, json.dumps(value, ensure_ascii=False, default=_json_value).encode(), value)
    except (pyarrow.ArrowException, OSError, UnicodeDecodeError) as error:  # also texts that are not UTF-8
        raise DynmoError(f"{part.path}: damaged, or not a parquet file, after row {number}: {error}") from error
