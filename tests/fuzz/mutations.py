"""Mutations of valid inputs: bytes, numbers of a text, structure of JSON, and lengths in binary headers."""

from __future__ import annotations

import json
import random
import re
from collections.abc import Callable, Sequence
from typing import Any

NUMBER = re.compile(rb"-?\d+(?:\.\d+)?(?:[eE][+-]?\d+)?")
WORDS = re.compile(rb'"[^"\\\n]{0,60}"')
NUMBERS = (
    b"0", b"-0", b"1", b"-1", b"2", b"0.5", b"-1.5", b"1e-400", b"1e308", b"1e400", b"-1e400", b"NaN", b"Infinity",
    b"-Infinity", b"2147483647", b"2147483648", b"4294967296", b"9223372036854775807", b"9223372036854775808",
    b"-9223372036854775809", b"18446744073709551616", b"1152921504606846976", b"9" * 30, b"9" * 400, b"9" * 5000,
)  # fmt: skip
VALUES = (b"null", b"true", b"false", b'""', b"[]", b"{}", b'"\\ud800"', b'"\\u0000"', b'"x"', b"[[]]", b'{"":null}')
TEXTS = (
    b"\n", b"\r", b"\x00", b"\xff", b"\xef\xbb\xbf", "\u2028".encode(), "\u0130".encode(), "\U0001f600".encode(),
    b"=", b"==", b",", b",,", b":", b"::", b"-", b"--", b"*", b"/", b"..", b"../", b"%", b"$", b"#", b";", b'"', b"'",
    b"'''", b'"""', b"\\", b"(", b")", b"[", b"]", b"{", b"}", b"<", b">", b"&", b" ", b"\t", b"1", b"0x", b"1_0",
    "\u0663".encode(), "\u00b2".encode(), b"nan", b"inf", b"e", b"--x=", b"@", b"slots=", b"[[", b"]]",
)  # fmt: skip
WIDE = (0, 1, 2, 255, (1 << 15) - 1, 1 << 16, (1 << 31) - 1, 1 << 31, (1 << 32) - 1, 1 << 60, (1 << 63) - 1, 1 << 63)
Mutation = Callable[[bytes, Sequence[bytes], random.Random], bytes]


def _flip(data: bytes, _corpus: Sequence[bytes], numbers: random.Random) -> bytes:
    if not data:
        return b"\0"
    at = numbers.randrange(len(data))
    return data[:at] + bytes([data[at] ^ (1 << numbers.randrange(8))]) + data[at + 1 :]


def _delete(data: bytes, _corpus: Sequence[bytes], numbers: random.Random) -> bytes:
    at = numbers.randrange(len(data) + 1)
    return data[:at] + data[at + numbers.randrange(1, 40) :]


def _repeat(data: bytes, _corpus: Sequence[bytes], numbers: random.Random) -> bytes:
    at = numbers.randrange(len(data) + 1)
    return data[:at] + data[max(0, at - numbers.randrange(1, 200)) :]


def _splice(data: bytes, corpus: Sequence[bytes], numbers: random.Random) -> bytes:
    other = corpus[numbers.randrange(len(corpus))]
    return data[: numbers.randrange(len(data) + 1)] + other[numbers.randrange(len(other) + 1) :]


def _cut(data: bytes, _corpus: Sequence[bytes], numbers: random.Random) -> bytes:
    return data[: numbers.randrange(len(data) + 1)]


def _insert(data: bytes, _corpus: Sequence[bytes], numbers: random.Random) -> bytes:
    at = numbers.randrange(len(data) + 1)
    return data[:at] + TEXTS[numbers.randrange(len(TEXTS))] * (1 << numbers.randrange(4)) + data[at:]


def _change_number(data: bytes, _corpus: Sequence[bytes], numbers: random.Random) -> bytes:
    # From a random place on: a search through all of a large document would take longer than the parser.
    start = numbers.randrange(len(data) + 1)
    match = NUMBER.search(data, start) or NUMBER.search(data)
    if match is None:
        return _insert(data, _corpus, numbers)
    value = (NUMBERS + VALUES)[numbers.randrange(len(NUMBERS) + len(VALUES))]
    return data[: match.start()] + value + data[match.end() :]


def _change_string(data: bytes, corpus: Sequence[bytes], numbers: random.Random) -> bytes:
    start = numbers.randrange(len(data) + 1)
    match = WORDS.search(data, start) or WORDS.search(data)
    if match is None:
        return _splice(data, corpus, numbers)
    value = (NUMBERS + VALUES)[numbers.randrange(len(NUMBERS) + len(VALUES))]
    return data[: match.start()] + value + data[match.end() :]


def _wide_integer(data: bytes, _corpus: Sequence[bytes], numbers: random.Random) -> bytes:
    """A length, count or offset of a binary header that is not true."""
    width = (1, 2, 4, 8, 8)[numbers.randrange(5)]
    value = WIDE[numbers.randrange(len(WIDE))] % (1 << 8 * width)
    at = numbers.randrange(min(len(data), 256) + 1) if numbers.randrange(2) else numbers.randrange(len(data) + 1)
    order = "little" if numbers.randrange(4) else "big"
    return data[:at] + value.to_bytes(width, order) + data[at + width :]


def _small_integer(data: bytes, _corpus: Sequence[bytes], numbers: random.Random) -> bytes:
    if not data:
        return b"\1"
    at = numbers.randrange(len(data))
    return data[:at] + bytes([(data[at] + numbers.choice((-2, -1, 1, 2))) % 256]) + data[at + 1 :]


def _nest(data: bytes, _corpus: Sequence[bytes], numbers: random.Random) -> bytes:
    depth = (2, 50, 101, 1000, 20_000)[numbers.randrange(5)]
    opening, closing = ((b"[", b"]"), (b'{"a":', b"}"), (b"(", b")"))[numbers.randrange(3)]
    at = numbers.randrange(len(data) + 1)
    inner = data[at:] if numbers.randrange(2) else b"0"
    return data[:at] + opening * depth + inner + closing * (depth if numbers.randrange(3) else 0)


def _repeat_key(data: bytes, _corpus: Sequence[bytes], numbers: random.Random) -> bytes:
    """A line or a member of an object twice."""
    parts = data.split(b"\n" if numbers.randrange(2) else b",")
    at = numbers.randrange(len(parts))
    parts.insert(numbers.randrange(len(parts) + 1), parts[at])
    return (b"\n" if b"\n" in data else b",").join(parts)


def _change_json(data: bytes, _corpus: Sequence[bytes], numbers: random.Random) -> bytes:
    """Another value, or none, at a random place of a JSON document or of one of its lines."""
    lines = data.splitlines(keepends=True) if data.count(b"}\n{") else [data]
    at = numbers.randrange(len(lines)) if lines else 0
    try:
        document = json.loads(lines[at])
    except (ValueError, IndexError, RecursionError):
        return _change_string(data, _corpus, numbers)
    places: list[tuple[Any, Any]] = []
    _list_places(document, places, 0)
    if not places:
        return NUMBERS[numbers.randrange(len(NUMBERS))]
    holder, key = places[numbers.randrange(len(places))]
    kind = numbers.randrange(6)
    if kind == 0:
        del holder[key]
    elif kind == 1 and isinstance(holder, dict):
        holder[str(numbers.choice(("", "x", "x_", "\ud800", "0", f"{key} ", f"{key}s", "\u0000")))] = holder.pop(key)
    elif kind == 2:
        other, name = places[numbers.randrange(len(places))]
        holder[key] = other[name]
    else:
        choices = (
            None, True, "", "x", "\ud800", [], {}, 0, -1, 1, 2, 0.5, 1 << 31, 1 << 53, 1 << 60, (1 << 63) - 1, 1 << 63,
            1 << 70, -(1 << 63), 10**400, float("nan"), float("inf"), 1e308, [[]], [None], {"": None}, "9" * 400,
            "../x", [0] * 1000,
        )  # fmt: skip
        holder[key] = choices[numbers.randrange(len(choices))]
    try:
        text = json.dumps(document).encode()
    except (ValueError, RecursionError):  # a value within itself
        return data
    lines[at] = text + (b"\n" if lines[at].endswith(b"\n") else b"")
    return b"".join(lines)


def _list_places(value: Any, places: list[tuple[Any, Any]], depth: int) -> None:
    if depth > 50 or len(places) > 5000:
        return
    members = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, member in members:
        places.append((value, key))
        _list_places(member, places, depth + 1)


MUTATIONS: tuple[Mutation, ...] = (
    _flip, _delete, _repeat, _splice, _cut, _insert, _insert, _change_number, _change_number, _change_string,
    _wide_integer, _small_integer, _repeat_key,
)  # fmt: skip
MAX_BYTES = 200_000


def mutate(corpus: Sequence[bytes], numbers: random.Random, data: bytes | None = None) -> bytes:
    """A damaged copy of one of the documents of a corpus.

    Args:
        corpus: valid documents.
        numbers: decides everything.
        data: the document that is damaged; default: one of the corpus.
    """
    data = corpus[numbers.randrange(len(corpus))] if data is None else data
    is_structured = data[:1] in b"{[" and numbers.randrange(2)
    for _ in range((1, 1, 1, 2, 4, 8)[numbers.randrange(6)]):
        if is_structured:
            data = _change_json(data, corpus, numbers)
        elif not numbers.randrange(40):
            data = _nest(data, corpus, numbers)
        else:
            data = MUTATIONS[numbers.randrange(len(MUTATIONS))](data, corpus, numbers)
    return data[:MAX_BYTES]
