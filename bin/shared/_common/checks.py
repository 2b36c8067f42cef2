"""Checks of the structure of a document; each reports every problem with its path.

``NAME_fields.py`` of a format consists of these: ``bin/generate.py`` makes it from the owner's ``NAME.schema.json``.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from typing import Any

from .document import MAX_INTEGER, Problem, short_repr, type_name

Check = Callable[[Any, str, list[Problem]], None]


def string(*choices: str) -> Check:
    """A non-empty string, one of ``choices`` where any are given."""

    def check(value: Any, path: str, problems: list[Problem]) -> None:
        if not isinstance(value, str):
            problems.append(Problem(path, "type", f"must be a string, is {type_name(value)}"))
        elif not value:
            problems.append(Problem(path, "range", "must not be empty"))
        elif choices and value not in choices:
            problems.append(Problem(path, "choice", f"must be one of {', '.join(choices)}; is {short_repr(value)}"))

    return check


def integer(minimum: int = 0, maximum: int = MAX_INTEGER) -> Check:
    """An integer from ``minimum`` to ``maximum``, both allowed; booleans and floats are refused."""

    def check(value: Any, path: str, problems: list[Problem]) -> None:
        if not isinstance(value, int) or isinstance(value, bool):
            problems.append(Problem(path, "type", f"must be an integer, is {type_name(value)}"))
        elif value < minimum:
            problems.append(Problem(path, "range", f"must be at least {minimum}, is {value}"))
        elif value > maximum:
            problems.append(Problem(path, "range", f"must be at most {maximum:,}, is {value:,}"))

    return check


def number(minimum: float | None = None, maximum: float | None = None, *, above: float | None = None) -> Check:
    """A finite number from ``minimum`` to ``maximum``, both allowed, and above ``above``; None means unbounded."""

    def check(value: Any, path: str, problems: list[Problem]) -> None:
        if not isinstance(value, int | float) or isinstance(value, bool):
            problems.append(Problem(path, "type", f"must be a number, is {type_name(value)}"))
        elif isinstance(value, float) and not math.isfinite(value):  # an int may be too large for a float
            problems.append(Problem(path, "range", "must be finite"))
        elif (minimum is not None and value < minimum) or (maximum is not None and value > maximum):
            problems.append(Problem(path, "range", f"must be within [{minimum}, {maximum}], is {value}"))
        elif above is not None and value <= above:
            problems.append(Problem(path, "range", f"must be above {above}, is {value}"))

    return check


def hexadecimal(digits: int) -> Check:
    """A string of that many lower-case hexadecimal digits: 8 of a CRC-32, 64 of a SHA-256."""
    pattern, rule = re.compile(f"[0-9a-f]{{{digits}}}"), "crc32" if digits == 8 else "sha256"

    def check(value: Any, path: str, problems: list[Problem]) -> None:
        if not isinstance(value, str) or pattern.fullmatch(value) is None:
            message = f"must be {digits} lower-case hexadecimal digits, is {short_repr(value)}"
            problems.append(Problem(path, rule, message))

    return check


def scalar() -> Check:
    """A string, number, boolean or null."""

    def check(value: Any, path: str, problems: list[Problem]) -> None:
        if isinstance(value, dict | list):
            problems.append(Problem(path, "type", f"must be a single value, is {short_repr(value)}"))

    return check


def boolean() -> Check:
    """A JSON boolean."""

    def check(value: Any, path: str, problems: list[Problem]) -> None:
        if not isinstance(value, bool):
            problems.append(Problem(path, "type", f"must be a boolean, is {type_name(value)}"))

    return check


def nullable(inner: Check) -> Check:
    """null, or what ``inner`` accepts."""

    def check(value: Any, path: str, problems: list[Problem]) -> None:
        if value is not None:
            inner(value, path, problems)

    return check


def array(inner: Check, min_length: int = 0, max_length: int | None = None) -> Check:
    """An array of ``min_length`` to ``max_length`` elements, each of which ``inner`` accepts."""

    def check(value: Any, path: str, problems: list[Problem]) -> None:
        if not isinstance(value, list):
            problems.append(Problem(path, "type", f"must be an array, is {type_name(value)}"))
            return
        if len(value) < min_length:
            problems.append(Problem(path, "length", f"must have at least {min_length} elements, has {len(value)}"))
        if max_length is not None and len(value) > max_length:
            problems.append(Problem(path, "length", f"must have at most {max_length} elements, has {len(value)}"))
        for index, element in enumerate(value):
            inner(element, f"{path}[{index}]", problems)

    return check


def samples() -> Check:
    """An array of non-negative integers and nulls: the hot path of long profiles."""
    slow = array(nullable(integer()))

    def check(value: Any, path: str, problems: list[Problem]) -> None:
        is_plain = isinstance(value, list) and set(map(type, value)) <= {int, type(None)}
        if not is_plain or any(element is not None and not 0 <= element <= MAX_INTEGER for element in value):
            slow(value, path, problems)

    return check


def mapping(inner: Check) -> Check:
    """An object with free keys, whose every value ``inner`` accepts."""

    def check(value: Any, path: str, problems: list[Problem]) -> None:
        if not isinstance(value, dict):
            problems.append(Problem(path, "type", f"must be an object, is {type_name(value)}"))
            return
        for key, element in value.items():
            inner(element, f"{path}.{key}" if path else key, problems)

    return check


def anything() -> Check:
    """Any JSON value."""
    return lambda _value, _path, _problems: None


def obj(
    required: Mapping[str, Check],
    optional: Mapping[str, Check] | None = None,
    prefixes: Mapping[str, Check] | None = None,
) -> Check:
    """An object with these fields.

    Args:
        required: fields that must be there.
        optional: fields that may be there.
        prefixes: checks of all other fields whose names start so; names with ``x_`` are free, any other is refused.
    """
    known = {**required, **(optional or {})}

    def check(value: Any, path: str, problems: list[Problem]) -> None:
        if not isinstance(value, dict):
            problems.append(Problem(path, "type", f"must be an object, is {type_name(value)}"))
            return
        prefix = f"{path}." if path else ""
        problems.extend(Problem(prefix + key, "missing", "is missing") for key in required if key not in value)
        for key, element in value.items():
            if key in known:
                known[key](element, prefix + key, problems)
            elif (inner := next((c for p, c in (prefixes or {}).items() if key.startswith(p)), None)) is not None:
                inner(element, prefix + key, problems)
            elif not key.startswith("x_"):
                problems.append(Problem(prefix + key, "unknown", "is not a field of this version"))

    return check


ENVELOPE: Mapping[str, Check] = {
    "format": string(),
    "version": integer(1),
    "written_by": string(),
    "created_utc": string(),
}
