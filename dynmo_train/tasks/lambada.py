"""LAMBADA: does the model say the last word of a passage (Paperno et al. 2016, arXiv:1606.06031)?

As Megatron asks it: a passage is right where each token of its answer is the likeliest one.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from ..data.tokenizer import Tokenizer
from ..errors import UsageError
from .scoring import TokenRun


@dataclass(frozen=True, kw_only=True)
class Accuracy:
    """How many of the passages are right."""

    correct: int
    items: int

    def document(self) -> dict[str, Any]:
        """For ``--format json``."""
        return {"correct": self.correct, "items": self.items, "accuracy": self.correct / self.items}

    def line(self, task: str) -> str:
        """In Megatron's words."""
        return (
            f" validation results on {task} | number correct: {self.correct:.4E} | total examples: {self.items:.4E}"
            f" | avg accuracy: {self.correct / self.items:.4E}"
        )


def read_passages(path: Path) -> list[str]:
    """The texts of a file of JSON lines; raises ``UsageError`` naming the line where one has no text."""
    try:
        lines = path.read_text(encoding="utf-8").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"--valid-data {path}: cannot be read as UTF-8 text: {error}") from error
    passages = []
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            document = json.loads(line)
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


def passages_as_tokens(path: Path, tokenizer: Tokenizer, *, strict: bool, longest: int) -> list[TokenRun]:
    """All passages of a file; raises ``UsageError`` where one does not fit into ``longest`` positions."""
    runs = []
    for number, text in enumerate(read_passages(path), 1):
        run = passage_tokens(text, tokenizer, strict=strict)
        if not 1 <= run.scored < len(run.tokens):
            raise UsageError(f"--valid-data {path}: passage {number} has no tokens before its last word")
        if run.length > longest:
            raise UsageError(
                f"--valid-data {path}: passage {number} has {run.length} tokens before its last; the model has"
                f" {longest} positions"
            )
        runs.append(run)
    return runs
