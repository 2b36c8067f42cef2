"""LAMBADA: does the model say the last word of a passage (Paperno et al. 2016, arXiv:1606.06031)?

As Megatron asks it: a passage is right where each token of its answer is the likeliest one.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from .._common.document import MAX_TABLE_BYTES, DocumentError, parse_any_json, read_text
from .._common.errors import UsageError
from ..data.tokenizer import Tokenizer
from ..formats.os_errors import reason
from .scoring import TokenRun


@dataclass(frozen=True, kw_only=True)
class Accuracy:
    """How many of the passages are right; of ``shortened`` ones the model read the end alone."""

    correct: int
    items: int
    shortened: int = 0

    def document(self) -> dict[str, Any]:
        """For ``--format json``."""
        found = {"correct": self.correct, "items": self.items, "accuracy": self.correct / self.items}
        return {**found, "shortened": self.shortened} if self.shortened else found

    def line(self, task: str) -> str:
        """In Megatron's words."""
        return (
            f" validation results on {task} | number correct: {self.correct:.4E} | total examples: {self.items:.4E}"
            f" | avg accuracy: {self.correct / self.items:.4E}"
        )


def read_passages(path: Path) -> list[str]:
    """The texts of a file of JSON lines; raises ``UsageError`` naming the line where one has no text."""
    try:
        lines = read_text(path, MAX_TABLE_BYTES).split("\n")
    except DocumentError as error:
        raise UsageError(f"--valid-data {path}: cannot be read: {reason(error)}") from error
    passages = []
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            document = parse_any_json(line)
        except ValueError as error:
            raise UsageError(f"--valid-data {path}:{number}: is not JSON: {error}") from error
        text = document.get("text") if isinstance(document, dict) else None
        if not isinstance(text, str) or len(text.split()) < 2:
            raise UsageError(f'--valid-data {path}:{number}: must be an object with a "text" of two words or more')
        passages.append(text)
    if not passages:
        raise UsageError(f"--valid-data {path}: holds no passage")
    return passages


def split_passage(text: str) -> tuple[str, str]:
    """What comes before the last word, and that word."""
    word = text.split()[-1]
    return text[: text.rfind(word)].strip(), word


def passage_tokens(text: str, tokenizer: Tokenizer, *, strict: bool) -> TokenRun:
    """A passage as tokens, of which the answer counts: with ``strict`` the last word, else the last token."""
    if not strict:
        tokens = tokenizer.encode(text)
        return TokenRun(tokens=np.array(tokens), scored=len(tokens) - 1)
    context, word = split_passage(text)
    read, answer = tokenizer.encode(context), tokenizer.encode(f" {word}")
    return TokenRun(tokens=np.array(read + answer), scored=len(read))


def shorten(run: TokenRun, longest: int) -> TokenRun:
    """The end of a passage that fits into ``longest`` positions, as lm-evaluation-harness reads it."""
    cut = run.length - longest
    return TokenRun(tokens=run.tokens[cut:], scored=run.scored - cut) if cut > 0 else run


def passages_as_tokens(path: Path, tokenizer: Tokenizer, *, strict: bool, longest: int) -> tuple[list[TokenRun], int]:
    """All passages of a file, and how many were shortened on the left to ``longest`` positions.

    Raises:
        UsageError: a passage has no tokens before its last word, or none are left before it.
    """
    runs, shortened = [], 0
    for number, text in enumerate(read_passages(path), 1):
        run = passage_tokens(text, tokenizer, strict=strict)
        if not 1 <= run.scored < len(run.tokens):
            raise UsageError(f"--valid-data {path}: passage {number} has no tokens before its last word")
        short = shorten(run, longest)
        if short.scored < 1:
            raise UsageError(
                f"--valid-data {path}: the last word of passage {number} has {len(run.tokens) - run.scored} tokens; the"
                f" model has {longest} positions"
            )
        runs.append(short)
        shortened += short is not run
    return runs, shortened
