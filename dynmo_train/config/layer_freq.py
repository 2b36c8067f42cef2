"""The form of ``--moe-layer-freq`` and ``--no-rope-freq``: every N-th layer, or Megatron-LM's list expression.

The expression is never evaluated.
"""

from __future__ import annotations

import re

from .._common.document import MAX_LAYERS, short_repr
from .._common.errors import UsageError

MAX_CHARACTERS, MAX_NESTING = 4_096, 32
_TOKEN = re.compile(r"\s*(\d{1,7}|[][()+*,])")
_FLAG, _NO_ROPE = "--moe-layer-freq", "--no-rope-freq"


def parse_layer_freq(text: str, num_layers: int) -> tuple[int, ...]:
    """Parse ``2`` (blocks 0, 2, 4, ...) or ``[0]*3+[1]*58`` into 1 for each block with experts, 0 for each without.

    Args:
        text: a number, or lists of 0 and 1 with ``+``, ``*`` and parentheses.
        num_layers: number of blocks.

    Raises:
        UsageError: another form, another number of entries than ``num_layers``, or no block with experts.
    """
    pattern = _parse_freq(_FLAG, text, num_layers, first=0)
    if not any(pattern):
        raise UsageError(f"{_FLAG} {short_repr(text)}: no block has experts; leave --num-experts out")
    return pattern


def parse_no_rope_freq(text: str, num_layers: int) -> tuple[int, ...]:
    """Parse ``4`` (layers 3, 7, 11, ...) or ``[0]*3+[1]`` into 1 for each layer without rotation, 0 for each with it.

    Args:
        text: a number, or lists of 0 and 1 with ``+``, ``*`` and parentheses.
        num_layers: number of layers.

    Raises:
        UsageError: another form, or another number of entries than ``num_layers``.
    """
    return _parse_freq(_NO_ROPE, text, num_layers, first=-1)


def _parse_freq(flag: str, text: str, num_layers: int, first: int) -> tuple[int, ...]:
    """0 or 1 for each layer; a number N means 1 for every N-th, from ``first`` modulo N."""
    example = "such as 1, 2 or [0]*3+[1]*58"
    number = text.strip()
    if number.isdecimal() and number.isascii() and 1 <= int(number[:9]) <= MAX_LAYERS:
        return tuple(int((layer - first) % int(number) == 0) for layer in range(num_layers))
    try:
        pattern = parse_layer_list(text)
    except ValueError as error:
        raise UsageError(f"{flag} {short_repr(text)}: {error}; must be a number or a list, {example}") from error
    if len(pattern) != num_layers:
        raise UsageError(
            f"{flag} {short_repr(text)}: has {len(pattern)} entries; must have --num-layers {num_layers}, one each"
        )
    return pattern


def parse_layer_list(text: str) -> tuple[int, ...]:
    """Parse ``[0]*3+[1]*58`` into 0 or 1 for each layer.

    Args:
        text: lists of 0 and 1 with ``+``, ``*`` and parentheses.

    Raises:
        ValueError: another form.
    """
    return _Lists(text).pattern()


class _Lists:
    """A recursive-descent parser of ``sum := product (+ product)*``, ``product := lists (* number)*``."""

    def __init__(self, text: str) -> None:
        if len(text) > MAX_CHARACTERS:
            raise ValueError(f"has more than {MAX_CHARACTERS:,} characters")
        self._tokens: list[str] = []
        at = 0
        while at < len(text.rstrip()):
            found = _TOKEN.match(text, at)
            if found is None:
                raise ValueError(f"unexpected {short_repr(text[at:].strip()[:1])}")
            self._tokens.append(found[1])
            at = found.end()
        self._at = self._depth = 0

    def pattern(self) -> tuple[int, ...]:
        found = self._sum()
        if self._at < len(self._tokens):
            raise ValueError(f"unexpected {self._tokens[self._at]!r}")
        return found

    def _next(self) -> str:
        return self._tokens[self._at] if self._at < len(self._tokens) else ""

    def _take(self, expected: str = "") -> str:
        token = self._next()
        if not token or (expected and token != expected):
            raise ValueError(f"expected {expected or 'a list'!r}, found {token or 'the end'!r}")
        self._at += 1
        return token

    def _sum(self) -> tuple[int, ...]:
        self._depth += 1
        if self._depth > MAX_NESTING:
            raise ValueError(f"is nested more than {MAX_NESTING} times")
        found = self._product()
        while self._next() == "+":
            self._take()
            found = self._bounded(found, 1) + self._product()
        self._depth -= 1
        return self._bounded(found, 1)

    def _product(self) -> tuple[int, ...]:
        found = self._lists()
        while self._next() == "*":
            self._take()
            number = self._take()
            if not number.isdecimal():
                raise ValueError(f"expected a number after '*', found {number!r}")
            found = self._bounded(found, int(number)) * int(number)
        return found

    @staticmethod
    def _bounded(found: tuple[int, ...], times: int) -> tuple[int, ...]:
        if len(found) * times > MAX_LAYERS:
            raise ValueError(f"has more than {MAX_LAYERS:,} entries")
        return found

    def _lists(self) -> tuple[int, ...]:
        if self._take() == "(":
            found = self._sum()
            self._take(")")
            return found
        if self._tokens[self._at - 1] != "[":
            raise ValueError(f"expected '[' or '(', found {self._tokens[self._at - 1]!r}")
        entries: list[int] = []
        while self._next() != "]":
            if entries:
                self._take(",")
            entry = self._take()
            if entry not in ("0", "1"):
                raise ValueError(f"entries must be 0 or 1, found {entry!r}")
            entries.append(int(entry))
        self._take("]")
        return tuple(entries)
