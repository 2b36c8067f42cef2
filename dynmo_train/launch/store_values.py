"""Reads values that launchers of other nodes have put into the store of a launch.

Another node may run another version of this program, so that each value is checked before it is used.
"""

from __future__ import annotations

from typing import Any

from .._common.checks import Check
from .._common.document import DocumentError, Problem, parse_json


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
