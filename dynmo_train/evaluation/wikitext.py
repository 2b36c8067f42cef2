"""Word-level perplexity of WikiText-103, as Megatron measures it: one long text in overlapping windows.

The text has words between spaces; it is first written as people write, then cut into the model's tokens. The loss per
token becomes the loss per word by the ratio of their numbers.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .._common import document
from .._common.errors import UsageError
from ..formats.os_errors import reason

# Losses above this are taken for it, so that the exponential stays a number.
HIGHEST_LOSS = 20.0

# A string, or a regular expression, and what takes its place.
_Rule = tuple[str | re.Pattern[str], str]
_INSIDE = (
    (re.compile(r"\(\s*([^\)]*?)\s*\)"), r"(\1)"),
    (re.compile(r"\[\s*([^\]]*?)\s*\]"), r"[\1]"),
    (re.compile(r"{\s*([^}]*?)\s*}"), r"{\1}"),
    (re.compile(r"\"\s*([^\"]*?)\s*\""), r'"\1"'),
    (re.compile(r"'\s*([^']*?)\s*'"), r"'\1'"),
)
_LINES = ((" \n", "\n"), ("\n ", "\n"))
DETOKENIZERS: Mapping[str, tuple[_Rule, ...]] = {
    "none": (),
    "wikitext": (
        ("s '", "s'"),
        # Megatron's own slip, kept: its replacement is no pattern. It changes nothing in WikiText.
        (re.compile("/' [0-9]/"), "/'[0-9]/"),
        *((f" @{mark}@ ", mark) for mark in "-,."),
        *((f" {mark} ", f"{mark} ") for mark in ":;.!?,"),
        *_INSIDE,
        *(("= " * count + "=", "=" * (count + 1)) for count in (3, 2, 1)),
        (" \N{DEGREE SIGN} ", "\N{DEGREE SIGN}"),
        *_LINES,
        (" N ", " 1 "),
        (" 's", "'s"),
    ),
    "ptb": (
        (" '", "'"),
        *_LINES,
        (" n't", "n't"),
        (" N ", "1 "),
        ("$ 1", "$1"),
        ("# 1", "#1"),
    ),
}


def detokenize(text: str, rules: str) -> str:
    """The text as people write it, by the rules ``wikitext``, ``ptb`` (Megatron's, in their order) or ``none``."""
    for pattern, replacement in DETOKENIZERS[rules]:
        text = text.replace(pattern, replacement) if isinstance(pattern, str) else pattern.sub(replacement, text)
    return text


def count_words(text: str) -> int:
    """Words between single spaces, as Megatron counts them: line ends stay with the words beside them."""
    return len(text.strip().split(" "))


@dataclass(frozen=True, kw_only=True)
class Window:
    """Tokens ``begin`` to ``end`` of a text are read, and the targets from ``scored`` on count.

    A target is the token behind the one that is read: target ``t`` is token ``t + 1``.
    """

    begin: int
    end: int
    scored: int


def windows(num_tokens: int, length: int, step: int) -> Iterator[Window]:
    """Windows of ``length`` targets at every ``step``; each target counts once, in the first window that has it.

    Args:
        num_tokens: of the text.
        step: at most ``length``; the first window scores all of its targets, each later one its last ``step``.
    """
    targets = num_tokens - 1
    begin = scored = 0
    while scored < targets:
        end = min(begin + length, targets)
        yield Window(begin=begin, end=end, scored=scored)
        begin, scored = begin + step, end


@dataclass(frozen=True, kw_only=True)
class Perplexity:
    """What was measured. ``loss`` is in nats, the mean over all tokens but the first."""

    words: int
    tokens: int
    loss: float

    @property
    def token_ratio(self) -> float:
        """Tokens of a word."""
        return (self.tokens - 1) / (self.words - 1)

    def document(self) -> dict[str, Any]:
        """For ``--format json``."""
        return {
            "original_words": self.words,
            "tokens": self.tokens,
            "token_ratio": self.token_ratio,
            "loss": self.loss,
            "perplexity": math.exp(min(HIGHEST_LOSS, self.loss)),
            "adjusted_perplexity": math.exp(min(HIGHEST_LOSS, self.loss * self.token_ratio)),
        }

    def line(self) -> str:
        """In Megatron's words."""
        found = self.document()
        return (
            f" validation results on WIKITEXT103 | avg loss: {self.loss:.4E} | ppl: {found['perplexity']:.4E}"
            f" | adjusted ppl: {found['adjusted_perplexity']:.4E} | token ratio: {self.token_ratio} |"
        )


def read_text(path: Path) -> str:
    """The text of a file; raises ``UsageError`` where it cannot be read or has fewer than two words."""
    try:
        text = document.read_text(path, document.MAX_TABLE_BYTES)
    except document.DocumentError as error:
        raise UsageError(f"--valid-data {path}: cannot be read: {reason(error)}") from error
    if count_words(text) < 2:
        raise UsageError(f"--valid-data {path}: holds fewer than two words")
    return text


def mean_loss(losses: Sequence[float], num_tokens: int) -> float:
    """Of the sums of all windows' losses."""
    return math.fsum(losses) / (num_tokens - 1)
