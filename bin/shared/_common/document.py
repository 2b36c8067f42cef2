"""The common rules of every document: bounded readers that report every problem at once, atomic writes.

Reading. No parser of the standard library bounds what it reads: ``json`` recurses in C and ``tomllib`` in Python, so
2 kB of ``[`` end in a ``RecursionError``, and ``open()`` of a FIFO never returns. So every document passes these steps:

1. ``open_regular`` refuses what is not a regular file, without blocking.
2. ``read_bytes`` refuses a file above ``max_bytes``, without reading it.
3. ``parse_json``, ``parse_any_json`` and ``parse_toml`` refuse a nesting deeper than ``MAX_DEPTH``. They find it by
   searches over the bytes and not by recursion.

Writing. A JSON document is replaced as a whole (``write_whole``). A ``.jsonl`` document grows by whole lines
(``append_line``); readers ignore an incomplete last line. Every writer of a format of ours checks the new document by
the rules that readers have, before the first byte, and raises ``WriterError`` where it breaks one.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import re
import reprlib
import stat
import tomllib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, BinaryIO

from .errors import DynmoError, UsageError

SHORT_CHARACTERS = 200


class _ShortRepr(reprlib.Repr):
    """Bounded in time and memory too: lists that share lists have a ``repr`` of exponential size."""

    def __init__(self) -> None:
        super().__init__()
        self.maxlevel = 3
        self.maxstring = self.maxother = SHORT_CHARACTERS

    def repr_int(self, value: int, level: int) -> str:
        """``value`` in digits, or its size: Python refuses to print more than 4,300 digits. ``level`` is unused."""
        if value.bit_length() > 4 * SHORT_CHARACTERS:
            return f"<an integer of {value.bit_length():,} bits>"
        return repr(value)

    def repr_instance(self, value: Any, level: int) -> str:
        """Scalars and strings, shortened; of anything else its type. ``level`` is the depth left for containers."""
        if isinstance(value, str):
            return self.repr_str(str(value), level)
        if isinstance(value, bytes | bytearray):
            return repr(bytes(value[:SHORT_CHARACTERS]))
        if value is None or isinstance(value, float | complex | bool):
            return repr(value)
        return f"<{type(value).__name__}>"


def short_repr(value: Any) -> str:
    """``repr`` of a value from a file, for a message; at most ``SHORT_CHARACTERS`` characters."""
    text = _ShortRepr().repr(value)
    return text if len(text) <= SHORT_CHARACTERS else text[: SHORT_CHARACTERS - 3] + "..."


@dataclass(frozen=True)
class Problem:
    """One fault of a document: where (``stages[2].items``), what kind (``missing``, ``type``, ...), and in words."""

    path: str
    kind: str
    message: str

    def __str__(self) -> str:
        """One line for a person."""
        return f"{self.path or '(document)'}: {self.message} [{self.kind}]"


class DocumentError(UsageError):
    """A document that breaks the rules of its format; carries every problem found."""

    def __init__(self, source: str, problems: list[Problem]) -> None:
        self.source = source
        self.problems = problems
        noun = "problem" if len(problems) == 1 else "problems"
        super().__init__("\n  ".join([f"{source}: {len(problems)} {noun}", *map(str, problems)]))


class WriterError(DynmoError):
    """A document that this program made and that breaks its own format; none of it was written."""

    def __init__(self, source: str, problems: list[Problem]) -> None:
        self.problems = problems
        head = f"internal error: {source}: the new document breaks its own format; nothing was written"
        super().__init__("\n  ".join([head, *map(str, problems)]))


@contextlib.contextmanager
def own_document() -> Iterator[None]:
    """Read a new document back before it is written.

    Raises:
        WriterError: a ``DocumentError`` within. The document is ours, so the fault is ours, not the user's.
    """
    try:
        yield
    except DocumentError as error:
        raise WriterError(error.source, error.problems) from error


class UnreadableError(DocumentError):
    """A document that is not there, or that the system does not let us read."""

    def __init__(self, path: Path, error: OSError) -> None:
        self.reason = error.strerror.lower() if error.strerror else str(error)
        super().__init__(str(path), [Problem("", "file", self.reason)])
        self.args = (f"{path}: {self.reason}",)


MIB = 1 << 20
MAX_DEPTH = 100
"""Objects and arrays within each other; the deepest known document (a tokenizer's) has 9."""
MAX_DOCUMENT_BYTES = 64 * MIB
"""Of a document, and of one line of a ``.jsonl`` document. A profile's header with 100,000 items has 25 MB."""
MAX_TABLE_BYTES = 1024 * MIB
"""Of documents that list every tensor, token or event: manifests, weight indexes, vocabularies, traces."""
MAX_CONFIG_BYTES = MIB
"""Of files that people write: TOML, requests to a run."""
MAX_WORD_BYTES = 200
"""Of a file that names another one; names have up to 255 bytes."""
MAX_LAYERS = 100_000
"""Blocks of a model: every one has a name, a cost and a place, so work grows with their number."""
MAX_EXPERTS = 10_000
"""Experts of a layer: each has a name and parameters of its own."""
MAX_ALL_EXPERTS = 1 << 17
"""Experts of all layers together."""
MAX_RANKS = 1 << 20
"""Processes of a run, and any product of parallel sizes."""
MAX_SIZE = 1 << 31
"""Of one dimension of a tensor: width, vocabulary, positions."""
MAX_MICROBATCHES = 1 << 16
"""Of one step: a simulated schedule has an operation for each, on each stage."""
MAX_STEPS = 1_000_000
"""Of a trajectory that a command writes or simulates."""
MAX_WIDTH = 10_000
"""Characters of a line of a drawing."""
MAX_SAMPLES = 10**12
"""Samples of a run."""
MAX_JOBS = 1024
"""Threads or processes of one command on one machine, and its devices."""
MAX_COUNT = (1 << 31) - 1
"""Of any other number on the command line: steps, restarts, seconds, process ids."""
MAX_INTEGER = (1 << 63) - 1
ESCAPED = "backslashreplace"
"""How ``str.encode`` handles the lone surrogates of JSON text, which UTF-8 cannot hold: as the escapes of JSON."""
MAX_DIGITS = 18
"""Of an integer in a text: Python refuses to convert more than 4,300, and 64 bits have 19."""
_TAIL_BYTES = 4096

_KINDS = {stat.S_IFIFO: "a FIFO", stat.S_IFSOCK: "a socket", stat.S_IFCHR: "a device", stat.S_IFBLK: "a device"}


def check_regular(path: Path) -> None:
    """Refuse what other code, which may block, would open.

    Raises:
        UnreadableError: as of ``open_regular``.
    """
    try:
        kind = _KINDS.get(stat.S_IFMT(os.stat(path).st_mode))
        if kind is not None:
            raise OSError(f"is {kind}; must be a regular file")
    except OSError as error:
        raise UnreadableError(path, error) from error
    except ValueError as error:  # a name from a file: a NUL, or a lone surrogate
        raise UnreadableError(path, OSError("is not a valid file name")) from error


def open_regular(path: Path) -> BinaryIO:
    """Open a regular file for reading; refuse anything else without waiting for it.

    ``open()`` of a FIFO blocks until somebody writes to it, and a device such as ``/dev/zero`` never ends.

    Raises:
        UnreadableError: the file does not exist, is not a regular file, or permissions forbid reading it.
    """
    check_regular(path)
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        return os.fdopen(descriptor, "rb")
    except OSError as error:
        raise UnreadableError(path, error) from error


def is_count(text: str) -> bool:
    """Whether a text is a nonnegative integer of at most ``MAX_DIGITS`` decimal digits."""
    return text.isdecimal() and len(text) <= MAX_DIGITS


def finite_number(value: Any) -> float | None:
    """A number of a document as a float; None for anything else: NaN, infinity, integers beyond the range of floats."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    try:
        number = float(value)
    except OverflowError:
        return None
    return number if math.isfinite(number) else None


def size_problem(num_bytes: int, max_bytes: int) -> str:
    """What to report about a document of ``num_bytes`` where ``max_bytes`` is the limit; empty where it fits."""
    return f"has {num_bytes:,} bytes; the limit is {max_bytes:,}" if num_bytes > max_bytes else ""


def read_bytes(path: Path, max_bytes: int = MAX_DOCUMENT_BYTES) -> bytes:
    """Read a whole file.

    Raises:
        UnreadableError: the file cannot be read or is not a regular file.
        DocumentError: it has more than ``max_bytes``; none of them is read.
    """
    with open_regular(path) as handle:
        try:
            size = os.fstat(handle.fileno()).st_size
            found = size_problem(size, max_bytes)
            # By the size of the file: ``read`` allocates what it is asked for, and limits are far above most files.
            payload = b"" if found else handle.read(size + 1)
            if len(payload) > size:  # it grows, or is a file of /proc, whose size is 0
                payload += handle.read(max_bytes + 1 - len(payload))
        except OSError as error:
            raise UnreadableError(path, error) from error
    if found := found or size_problem(len(payload), max_bytes):
        raise DocumentError(str(path), [Problem("", "size", found)])
    return payload


def read_text(path: Path, max_bytes: int = MAX_DOCUMENT_BYTES) -> str:
    """Read a whole file of UTF-8.

    Args:
        path: the file.
        max_bytes: its greatest size; a larger one is refused unread.

    Raises:
        UnreadableError: as of ``read_bytes``.
        DocumentError: it is larger, or is not UTF-8.
    """
    try:
        return read_bytes(path, max_bytes).decode()
    except UnicodeDecodeError as error:
        raise DocumentError(str(path), [Problem("", "encoding", f"is not UTF-8: {error}")]) from error


def read_word(path: Path) -> str:
    """Read a file of one word, such as the name of the newest checkpoint; raises as ``read_bytes``."""
    return read_bytes(path, MAX_WORD_BYTES).decode(errors="replace").strip()


def read_lines(path: Path, max_bytes: int = MAX_DOCUMENT_BYTES) -> Iterator[bytes]:
    """Read the complete lines of a ``.jsonl`` document one by one; skip blank ones and an incomplete last one.

    Args:
        path: the document; its total size is not bounded.
        max_bytes: the limit of one line.

    Raises:
        UnreadableError: the file cannot be read or is not a regular file.
        DocumentError: a line is longer than ``max_bytes``.
    """
    with open_regular(path) as handle:
        yield from lines_of(handle, path, max_bytes)


def lines_of(handle: BinaryIO, path: Path, max_bytes: int = MAX_DOCUMENT_BYTES) -> Iterator[bytes]:
    """Read the lines of an open ``.jsonl`` document as :func:`read_lines` does.

    Args:
        handle: the open file, at its begin.
        path: what a message names.
        max_bytes: the limit of one line.

    Raises:
        DocumentError: a line is longer than ``max_bytes``.
    """
    number = 0
    while line := handle.readline(max_bytes + 1):
        number += 1
        if len(line) > max_bytes:
            problem = f"is longer than {max_bytes:,} bytes, the limit of a line"
            raise DocumentError(str(path), [Problem(f"line {number}", "size", problem)])
        if line.endswith(b"\n") and line.strip():
            yield line


def type_name(value: Any) -> str:
    """What JSON calls the type of a value."""
    names = {dict: "object", list: "array", str: "string", bool: "boolean", int: "integer", float: "number"}
    return "null" if value is None else names.get(type(value), type(value).__name__)


def envelope(format_name: str, version: int, written_by: str) -> dict[str, Any]:
    """The first fields of a new document, dated now.

    Args:
        format_name: name of the format, such as ``dynmo.plan``.
        version: version of the format that it is written in; readers refuse a newer one than theirs.
        written_by: program and its version.
    """
    created = datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
    return {"format": format_name, "version": version, "written_by": written_by, "created_utc": created}


def envelope_problems(value: Any, format_name: str, version: int) -> list[Problem]:
    """Faults that make it pointless to look further: not an object, another format, a newer version."""
    if not isinstance(value, dict):
        return [Problem("", "type", f"must be an object, is {type_name(value)}")]
    if value.get("format") != format_name:
        return [Problem("format", "format", f"must be {format_name!r}, is {short_repr(value.get('format'))}")]
    found = value.get("version")
    if isinstance(found, int) and found > version:
        return [Problem("version", "version", f"is {found}; this program reads {format_name} up to version {version}")]
    return []


_JSON_STRINGS = re.compile(rb'"[^"\\]*+(?:\\.?+[^"\\]*+)*+"?+', re.DOTALL)
_TOML_STRINGS = re.compile(
    rb"#[^\n]*+"
    rb"|'''(?:[^']++|'(?!''))*+(?:''')?+"
    rb'|"""(?:[^"\\]++|\\.|"(?!""))*+(?:""")?+'
    rb"|'[^'\n]*+'?+"
    rb'|"(?:[^"\\\n]++|\\.)*+"?+',
    re.DOTALL,
)
_ALL_BUT_BRACKETS = bytes(set(range(256)) - set(b"[]{}"))
_ONE_KIND = bytes.maketrans(b"{}", b"[]")
_OPENING = ord("[")


def _check_depth(payload: bytes, strings: re.Pattern[bytes]) -> None:
    """Refuse brackets nested deeper than ``MAX_DEPTH``; ``strings`` matches text in which a bracket is a character.

    A bracket that is never closed counts as a level: parsers enter it before they find that out. A bracket that was
    never opened ends every parser, so what follows it does not matter.
    """
    if payload.count(b"[") + payload.count(b"{") <= MAX_DEPTH:
        return
    depth = 0
    for bracket in strings.sub(b"", payload).translate(_ONE_KIND, _ALL_BUT_BRACKETS):
        depth += 1 if bracket == _OPENING else -1
        if depth > MAX_DEPTH:
            raise ValueError(f"objects and arrays are nested deeper than {MAX_DEPTH} levels, the limit")


def _finite(digits: str) -> float:
    value = float(digits)
    if not math.isfinite(value):
        raise ValueError(f"{digits} is not a finite number")
    return value


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result = dict(pairs)
    if len(result) < len(pairs):
        raise ValueError("an object repeats a key")
    return result


def _parse(payload: bytes | str, max_bytes: int, **hooks: Any) -> Any:
    payload = payload.encode("utf-8", "surrogatepass") if isinstance(payload, str) else payload
    if found := size_problem(len(payload), max_bytes):
        raise ValueError(found)
    _check_depth(payload, _JSON_STRINGS)
    # Decoded here: json would take other encodings, in which the search for brackets finds nothing.
    return json.loads(payload.decode("utf-8-sig", "surrogatepass"), **hooks)


def parse_json(payload: bytes | str, max_bytes: int = MAX_DOCUMENT_BYTES) -> Any:
    """Parse a document of ours: at most ``max_bytes``, every number finite, no key repeated.

    Raises:
        ValueError: it breaks one of these rules, or is not JSON.
    """
    return _parse(payload, max_bytes, parse_constant=_finite, parse_float=_finite, object_pairs_hook=_unique)


def parse_any_json(
    payload: bytes | str, max_bytes: int = MAX_DOCUMENT_BYTES, parse_int: Callable[[str], Any] | None = None
) -> Any:
    """Parse a document of another program, bounded; NaN, Infinity and repeated keys pass as in ``json.loads``.

    Args:
        payload: the document.
        max_bytes: its limit.
        parse_int: as of ``json.loads``.

    Raises:
        ValueError: it is too large or nested too deeply, or is not JSON.
    """
    return _parse(payload, max_bytes, parse_int=parse_int)


def read_json(path: Path, max_bytes: int = MAX_DOCUMENT_BYTES) -> Any:
    """Read one JSON document of ours of at most ``max_bytes``.

    Raises:
        DocumentError: it cannot be read, is larger, or breaks a rule of JSON.
    """
    try:
        return parse_json(read_bytes(path, max_bytes), max_bytes)
    except ValueError as error:
        raise DocumentError(str(path), [Problem("", "json", str(error))]) from error


def read_any_json(path: Path, max_bytes: int = MAX_DOCUMENT_BYTES) -> Any:
    """Read one JSON document of another program, of at most ``max_bytes``.

    Raises:
        DocumentError: it cannot be read, is larger, or is not JSON.
    """
    try:
        return parse_any_json(read_bytes(path, max_bytes), max_bytes)
    except ValueError as error:
        raise DocumentError(str(path), [Problem("", "json", str(error))]) from error


def read_records(path: Path) -> Iterator[Any]:
    """Read the values of a ``.jsonl`` document of ours.

    Raises:
        DocumentError: as of ``read_lines``, or a line is not JSON; it names the line.
    """
    return records_of(read_lines(path), path)


def records_of(lines: Iterable[bytes], path: Path) -> Iterator[Any]:
    """The values of lines of JSON.

    Args:
        lines: one value each.
        path: what a message names.

    Raises:
        DocumentError: a line is not JSON; it names the line.
    """
    for number, line in enumerate(lines, 1):
        try:
            yield parse_json(line)
        except ValueError as error:
            raise DocumentError(str(path), [Problem(f"line {number}", "json", str(error))]) from error


def parse_toml(text: str) -> dict[str, Any]:
    """Parse TOML, bounded in size and depth.

    Raises:
        ValueError: it is too large or nested too deeply, or is not TOML.
    """
    payload = text.encode("utf-8", "surrogatepass")
    if found := size_problem(len(payload), MAX_CONFIG_BYTES):
        raise ValueError(found)
    _check_depth(payload, _TOML_STRINGS)
    document = tomllib.loads(text)
    level: list[Any] = [document]
    for _ in range(MAX_DEPTH + 1):  # dotted keys nest without brackets
        tables = [table.values() if isinstance(table, dict) else table for table in level]
        level = [value for values in tables for value in values if isinstance(value, dict | list)]
        if not level:
            return document
    raise ValueError(f"tables are nested deeper than {MAX_DEPTH} levels, the limit")


def encode_json(document: Mapping[str, Any]) -> bytes:
    """The bytes of a JSON document on disk, with lone surrogates, as file names may have, escaped."""
    return (json.dumps(document, indent=1, ensure_ascii=False, allow_nan=False) + "\n").encode("utf-8", ESCAPED)


def write_whole(path: Path, payload: bytes, *, exclusive: bool = False) -> None:
    """Put ``payload`` at ``path`` whole or not at all: temporary name, flush to disk, then one rename.

    With ``exclusive`` the file is put in place by ``link()``, which raises ``FileExistsError`` if the name exists.
    """
    temporary = path.with_name(f".{path.name}.tmp-{os.getpid()}")
    try:
        with open(temporary, "wb") as handle:
            handle.write(payload)
            handle.flush()
            os.fsync(handle.fileno())
        if exclusive:
            os.link(temporary, path)
        else:
            os.replace(temporary, path)
    finally:
        with contextlib.suppress(OSError):  # the disk refuses that, too: the first error is the one to report
            temporary.unlink(missing_ok=True)


def sync_directory(path: Path) -> None:
    """Flush the entries of a directory to disk; fsync of a file does not include its own."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def append_line(path: Path, record: Mapping[str, Any]) -> None:
    """Append one record to a ``.jsonl`` document: the whole line, or nothing.

    A disk that fills up takes a part of a line and then refuses the rest: the part is taken back, and the error raised.
    A tail without a line end, which a killed writer left, is cut off first, because readers would take it and the new
    record for one line. One process at a time appends to a document.

    Raises:
        OSError: the line could not be written; the document ends as before.
        ValueError: the record holds a number that is not finite.
    """
    append_lines(path, (record,))


def append_lines(path: Path, records: Sequence[Mapping[str, Any]]) -> None:
    """Append records to a ``.jsonl`` document: all of them or, if that fails, none; raises as ``append_line``."""
    texts = [json.dumps(record, ensure_ascii=False, allow_nan=False) + "\n" for record in records]
    line = "".join(texts).encode("utf-8", ESCAPED)
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o644)
    try:
        size = _cut_incomplete_tail(descriptor)
        try:
            rest = memoryview(line)
            while rest:
                rest = rest[os.write(descriptor, rest) :]
        except BaseException:
            with contextlib.suppress(OSError):
                os.ftruncate(descriptor, size)
            raise
    finally:
        os.close(descriptor)


def _cut_incomplete_tail(descriptor: int) -> int:
    """Cut what follows the last line end of a file; returns the size that is left."""
    end = size = os.fstat(descriptor).st_size
    while end:
        begin = max(0, end - _TAIL_BYTES)
        at = os.pread(descriptor, end - begin, begin).rfind(b"\n")
        end = begin + at + 1 if at >= 0 else begin
        if at >= 0:
            break
    if end < size:
        os.ftruncate(descriptor, end)
    return end


def complete_lines(payload: bytes) -> Iterator[bytes]:
    """The lines of a ``.jsonl`` document that are complete; an incomplete last one is left out, as are blank ones."""
    end = payload.rfind(b"\n") + 1
    for line in payload[:end].split(b"\n"):
        if line.strip():
            yield line
