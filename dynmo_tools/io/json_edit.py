"""Edits single values in the bytes of a JSON row and leaves all other bytes unchanged.

Decoding and encoding a row would change it silently: integers from 2^64 become floats, ``1e400`` becomes ``Infinity``,
repeated keys lose values, white space and escapes are lost. The functions here find the bytes of a value and replace
them. They expect rows that a JSON parser has accepted.

Of a repeated key, the last occurrence is replaced: Python's JSON parsers read this one.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence

from .._common.errors import DynmoError

SPACE = b" \t\r\n"
# Possessive quantifiers never backtrack, so long white space in a hostile row costs linear time only.
_KEY_BEGIN = re.compile(rb'[{,][ \t\r\n]*+"')
_COLON = re.compile(rb"[ \t\r\n]*+:[ \t\r\n]*+")
_NUMBER_OR_NAME = re.compile(rb'[^][{}" \t\r\n,]++')
_MARK = re.compile(rb'["\[\]{}]')
_SPACES = re.compile(rb"[ \t\r\n]*+")
_QUOTE, _BACKSLASH = b'"', ord("\\")


def _string_end(raw: bytes, begin: int) -> int:
    """The offset after the JSON string whose opening quote is at ``begin``.

    ``find`` scans a long text several times as fast as a regular expression.
    """
    at = begin
    while (at := raw.find(_QUOTE, at + 1)) > 0:
        first = at
        while raw[first - 1] == _BACKSLASH:
            first -= 1
        # A quote after an odd number of backslashes is escaped and does not end the string.
        if (at - first) % 2 == 0:
            return at + 1
    raise _unparsed(begin)


def _unparsed(offset: int) -> DynmoError:
    return DynmoError(f"byte {offset} of a row is not JSON; this is a bug of dynmo-prep, please report it")


def _value_end(raw: bytes, begin: int) -> int:
    """The offset after the JSON value that begins at ``begin``."""
    simple = _NUMBER_OR_NAME.match(raw, begin)
    if simple is not None:
        return simple.end()
    if raw.startswith(_QUOTE, begin):
        return _string_end(raw, begin)
    depth, at = 0, begin
    while (mark := _MARK.search(raw, at)) is not None:
        at, sign = mark.end(), mark.group()
        if sign == _QUOTE:
            at = _string_end(raw, mark.start())
        elif sign in b"[{":
            depth += 1
        else:
            depth -= 1
            if depth == 0:
                return at
    raise _unparsed(begin)


def _entries(raw: bytes, opened: int) -> Iterator[tuple[str, int, int]]:
    """The entries of the object whose brace is at ``opened``: key, offset of the value, offset after the value."""
    at = opened
    while (first := _KEY_BEGIN.match(raw, at)) is not None:
        begin, end = first.end() - 1, _string_end(raw, first.end() - 1)
        quoted = raw[begin:end]
        # A key may be written with escapes; json.loads only for those, because it takes longer than the slice.
        key: str = json.loads(quoted) if b"\\" in quoted else quoted[1:-1].decode()
        colon = _COLON.match(raw, end)
        if colon is None:
            raise _unparsed(end)
        value_end = _value_end(raw, colon.end())
        yield key, colon.end(), value_end
        spaces = _SPACES.match(raw, value_end)
        at = value_end if spaces is None else spaces.end()


def replace_value(raw: bytes, path: Sequence[str], encoded: bytes) -> bytes:
    """Replace the value under a path of keys.

    Args:
        raw: a JSON object with this value.
        path: keys from the outermost to the innermost object.
        encoded: JSON text of the new value.

    Returns:
        The row with this one change.

    Raises:
        DynmoError: the row has no such value, which is an error of the caller.
    """
    begin, end = raw.index(b"{"), len(raw)
    for key in path:
        # All entries are read, not only up to the first match: the last of repeated keys is the one to replace.
        spans = [(first, last) for name, first, last in _entries(raw, begin) if name == key]
        if not spans:
            raise _unparsed(begin)
        begin, end = spans[-1]
    return b"".join((raw[:begin], encoded, raw[end:]))


def append_entry(raw: bytes, key: str, encoded: bytes) -> bytes:
    """Append an entry to a JSON object.

    Args:
        raw: a JSON object without this key.
        key: key of the new entry.
        encoded: JSON text of its value.

    Returns:
        The row with this one change.
    """
    at = len(raw[: raw.rindex(b"}")].rstrip(SPACE))
    separator = b"" if raw[:at].lstrip(SPACE) == b"{" else b", "
    return b"".join((raw[:at], separator, json.dumps(key).encode(), b": ", encoded, raw[at:]))
