"""Reads values that launchers of other nodes have put into the store of a launch.

Another node may run another version of this program, so that each value is checked before it is used.
"""

from __future__ import annotations

from typing import Any

from .._common.checks import Check, mapping
from .._common.document import DocumentError, Problem, parse_json

MAX_RANK_DIGITS = 9


def by_rank(inner: Check) -> Check:
    """An object by rank, whose every value ``inner`` accepts."""
    values = mapping(inner)

    def check(value: Any, path: str, problems: list[Problem]) -> None:
        values(value, path, problems)
        names = value if isinstance(value, dict) else ()
        if not all(name.isascii() and name.isdecimal() and len(name) <= MAX_RANK_DIGITS for name in names):
            problems.append(Problem(path, "type", "must have ranks as names"))

    return check


def decode_value(value: bytes | str, rule: Check, what: str) -> Any:
    """The JSON value of a key of the store.

    Args:
        value: the bytes.
        rule: check of its structure.
        what: what it is, for messages.

    Raises:
        DocumentError: it breaks the rule.
    """
    source = f"{what} of another node (does it run another version of dynmo-train?)"
    try:
        found = parse_json(value)
    except ValueError as error:
        raise DocumentError(source, [Problem("", "json", str(error))]) from error
    problems: list[Problem] = []
    rule(found, "", problems)
    if problems:
        raise DocumentError(source, problems)
    return found
