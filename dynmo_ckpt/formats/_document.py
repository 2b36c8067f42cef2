"""The common rules of every document: envelope, checks that report every problem at once, whole-file writes.

This file is byte-identical in the four packages (``tests/arch`` holds that). A format module states its fields with
the checks below; ``NAME.schema.json`` of the format's owner states the same in JSON Schema.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from ..errors import UsageError


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


class UnreadableError(DocumentError):
    """A document that is not there, or that the system does not let us read."""

    def __init__(self, path: Path, error: OSError) -> None:
        reason = (error.strerror or str(error)).lower()
        super().__init__(str(path), [Problem("", "file", reason)])
        self.args = (f"{path}: {reason}",)


def read_bytes(path: Path) -> bytes:
    """The content of a file; raises ``UnreadableError`` where there is none."""
    try:
        return path.read_bytes()
    except OSError as error:
        raise UnreadableError(path, error) from error


Check = Callable[[Any, str, list[Problem]], None]


def _type_name(value: Any) -> str:
    names = {dict: "object", list: "array", str: "string", bool: "boolean", int: "integer", float: "number"}
    return "null" if value is None else names.get(type(value), type(value).__name__)


def string(*choices: str) -> Check:
    """A non-empty string, one of ``choices`` where any are given."""

    def check(value: Any, path: str, problems: list[Problem]) -> None:
        if not isinstance(value, str):
            problems.append(Problem(path, "type", f"must be a string, is {_type_name(value)}"))
        elif not value:
            problems.append(Problem(path, "range", "must not be empty"))
        elif choices and value not in choices:
            problems.append(Problem(path, "choice", f"must be one of {', '.join(choices)}; is {value!r}"))

    return check


def integer(minimum: int = 0) -> Check:
    """An integer of at least ``minimum``; booleans and floats are refused."""

    def check(value: Any, path: str, problems: list[Problem]) -> None:
        if not isinstance(value, int) or isinstance(value, bool):
            problems.append(Problem(path, "type", f"must be an integer, is {_type_name(value)}"))
        elif value < minimum:
            problems.append(Problem(path, "range", f"must be at least {minimum}, is {value}"))

    return check


def number(minimum: float | None = None, maximum: float | None = None) -> Check:
    """A finite number within the bounds."""

    def check(value: Any, path: str, problems: list[Problem]) -> None:
        if not isinstance(value, int | float) or isinstance(value, bool):
            problems.append(Problem(path, "type", f"must be a number, is {_type_name(value)}"))
        elif not math.isfinite(value):
            problems.append(Problem(path, "range", "must be finite"))
        elif (minimum is not None and value < minimum) or (maximum is not None and value > maximum):
            problems.append(Problem(path, "range", f"must be within [{minimum}, {maximum}], is {value}"))

    return check


def boolean() -> Check:
    """A JSON boolean."""

    def check(value: Any, path: str, problems: list[Problem]) -> None:
        if not isinstance(value, bool):
            problems.append(Problem(path, "type", f"must be a boolean, is {_type_name(value)}"))

    return check


def nullable(inner: Check) -> Check:
    """null, or what ``inner`` accepts."""

    def check(value: Any, path: str, problems: list[Problem]) -> None:
        if value is not None:
            inner(value, path, problems)

    return check


def array(inner: Check, min_length: int = 0) -> Check:
    """An array whose every element ``inner`` accepts."""

    def check(value: Any, path: str, problems: list[Problem]) -> None:
        if not isinstance(value, list):
            problems.append(Problem(path, "type", f"must be an array, is {_type_name(value)}"))
            return
        if len(value) < min_length:
            problems.append(Problem(path, "length", f"must have at least {min_length} elements, has {len(value)}"))
        for index, element in enumerate(value):
            inner(element, f"{path}[{index}]", problems)

    return check


def mapping(inner: Check) -> Check:
    """An object with free keys, whose every value ``inner`` accepts."""

    def check(value: Any, path: str, problems: list[Problem]) -> None:
        if not isinstance(value, dict):
            problems.append(Problem(path, "type", f"must be an object, is {_type_name(value)}"))
            return
        for key, element in value.items():
            inner(element, f"{path}.{key}" if path else key, problems)

    return check


def anything() -> Check:
    """Any JSON value."""
    return lambda _value, _path, _problems: None


def obj(required: Mapping[str, Check], optional: Mapping[str, Check] | None = None) -> Check:
    """An object with these fields; unknown keys are refused unless they start with ``x_``."""
    known = {**required, **(optional or {})}

    def check(value: Any, path: str, problems: list[Problem]) -> None:
        if not isinstance(value, dict):
            problems.append(Problem(path, "type", f"must be an object, is {_type_name(value)}"))
            return
        prefix = f"{path}." if path else ""
        problems.extend(Problem(prefix + key, "missing", "is missing") for key in required if key not in value)
        for key, element in value.items():
            if key in known:
                known[key](element, prefix + key, problems)
            elif not key.startswith("x_"):
                problems.append(Problem(prefix + key, "unknown", "is not a field of this version"))

    return check


ENVELOPE: Mapping[str, Check] = {
    "format": string(),
    "version": integer(1),
    "written_by": string(),
    "created_utc": string(),
}


def envelope(format_name: str, version: int, written_by: str) -> dict[str, Any]:
    """The first fields of a new document, dated now."""
    created = datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
    return {"format": format_name, "version": version, "written_by": written_by, "created_utc": created}


def envelope_problems(value: Any, format_name: str, version: int) -> list[Problem]:
    """Faults that make it pointless to look further: not an object, another format, a newer version."""
    if not isinstance(value, dict):
        return [Problem("", "type", f"must be an object, is {_type_name(value)}")]
    if value.get("format") != format_name:
        return [Problem("format", "format", f"must be {format_name!r}, is {value.get('format')!r}")]
    met = value.get("version")
    if isinstance(met, int) and met > version:
        return [Problem("version", "version", f"is {met}; this program reads {format_name} up to version {version}")]
    return []


def parse_json(text: str | bytes) -> Any:
    """``json.loads`` that refuses NaN, Infinity and repeated keys, with a ``ValueError`` that says so."""

    def refuse_constant(name: str) -> Any:
        raise ValueError(f"{name} is not a finite number")

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        result = dict(pairs)
        if len(result) < len(pairs):
            raise ValueError("an object repeats a key")
        return result

    return json.loads(text, parse_constant=refuse_constant, object_pairs_hook=unique)


def read_json(path: Path) -> Any:
    """Read one JSON document; raises ``DocumentError`` where it cannot be read or is not JSON."""
    try:
        return parse_json(read_bytes(path))
    except ValueError as error:
        raise DocumentError(str(path), [Problem("", "json", str(error))]) from error


def encode_json(document: Mapping[str, Any]) -> bytes:
    """The bytes of a JSON document on disk."""
    return (json.dumps(document, indent=1, ensure_ascii=False, allow_nan=False) + "\n").encode()


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
        temporary.unlink(missing_ok=True)


def append_line(path: Path, record: Mapping[str, Any]) -> None:
    """Append one record to a ``.jsonl`` document with a single ``write()``."""
    line = (json.dumps(record, ensure_ascii=False, allow_nan=False) + "\n").encode()
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    try:
        os.write(descriptor, line)
    finally:
        os.close(descriptor)


def complete_lines(payload: bytes) -> Iterator[bytes]:
    """The lines of a ``.jsonl`` document that are complete; an incomplete last one is left out, as are blank ones."""
    end = payload.rfind(b"\n") + 1
    for line in payload[:end].split(b"\n"):
        if line.strip():
            yield line
