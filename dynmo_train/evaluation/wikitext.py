"""Word-level perplexity of WikiText-103, as Megatron computes it: one long text in overlapping windows.

    text --detokenize--> natural text --tokenizer--> tokens --windows--> sequences --score--> loss per token
                                                                                               -> perplexity per word

WikiText separates words and punctuation by spaces; the detokenizer undoes that before the model's tokenizer runs. The
loss per token times the tokens per word is the loss per word.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from .._common import document
from .._common.errors import UsageError
from ..config.sections.evaluation import InferenceConfig, WikitextConfig
from ..formats.os_errors import reason
from ..parallel.consensus import run_on_all_ranks
from ..parallel.process_groups import World
from .model_checkpoint import model_tokenizer, open_causal_model
from .scoring import ScoredSequence, score_model

# Losses are clamped here before the exponential, as in Megatron.
MAX_LOSS = 20.0
# Megatron's default of --overlapping-eval.
DEFAULT_STEP = 32

# A string or a regular expression, and its replacement.
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
        # Copied from Megatron, which writes a pattern as the replacement. WikiText does not contain the pattern.
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
    """Apply the rules ``wikitext``, ``ptb`` (both Megatron's, in its order) or ``none`` to ``text``."""
    for pattern, replacement in DETOKENIZERS[rules]:
        text = text.replace(pattern, replacement) if isinstance(pattern, str) else pattern.sub(replacement, text)
    return text


def count_words(text: str) -> int:
    """Number of words between single spaces, as Megatron counts them: a line break does not separate words."""
    return len(text.strip().split(" "))


@dataclass(frozen=True, kw_only=True)
class Window:
    """The model reads tokens ``[begin, end)`` of a text, and the targets ``[scored, end)`` are scored.

    Target ``t`` is the token after token ``t``.
    """

    begin: int
    end: int
    scored: int


def windows(num_tokens: int, length: int, step: int) -> Iterator[Window]:
    """Windows of ``length`` targets every ``step`` tokens; each target is scored once, in the first window with it.

    Args:
        num_tokens: tokens of the text.
        length: tokens of a window.
        step: tokens between windows, at most ``length``. The first window scores all its targets, each later one its
            last ``step``.
    """
    targets = num_tokens - 1
    begin = scored = 0
    while scored < targets:
        end = min(begin + length, targets)
        yield Window(begin=begin, end=end, scored=scored)
        begin, scored = begin + step, end


@dataclass(frozen=True, kw_only=True)
class Perplexity:
    """Result of the evaluation; ``loss`` is the mean over all tokens but the first, in nats."""

    words: int
    tokens: int
    loss: float

    @property
    def token_ratio(self) -> float:
        """Tokens per word."""
        return (self.tokens - 1) / (self.words - 1)

    def document(self) -> dict[str, Any]:
        """The object that ``--format json`` prints."""
        return {
            "original_words": self.words,
            "tokens": self.tokens,
            "token_ratio": self.token_ratio,
            "loss": self.loss,
            "perplexity": math.exp(min(MAX_LOSS, self.loss)),
            "adjusted_perplexity": math.exp(min(MAX_LOSS, self.loss * self.token_ratio)),
        }

    def line(self) -> str:
        """The log line, in Megatron's format."""
        values = self.document()
        return (
            f" validation results on WIKITEXT103 | avg loss: {self.loss:.4E} | ppl: {values['perplexity']:.4E}"
            f" | adjusted ppl: {values['adjusted_perplexity']:.4E} | token ratio: {self.token_ratio} |"
        )


def read_text(path: Path) -> str:
    """Read a text file.

    Raises:
        UsageError: it cannot be read, or has fewer than two words; the first word has no context to predict it from.
    """
    try:
        text = document.read_text(path, document.MAX_TABLE_BYTES)
    except document.DocumentError as error:
        raise UsageError(f"--valid-data {path}: cannot be read: {reason(error)}") from error
    if count_words(text) < 2:
        raise UsageError(f"--valid-data {path}: has fewer than two words; give a text to evaluate")
    return text


def evaluate_wikitext(
    inference: InferenceConfig, task: WikitextConfig, world: World, model_flags: Mapping[str, Any]
) -> Perplexity:
    """Word-level perplexity of a text; all ranks call this and get the same result.

    Args:
        inference: the model and the ranks that run it.
        task: the text and its windows.
        world: the process groups.
        model_flags: the model's shape as the command line states it.

    Raises:
        UsageError: the text, the tokenizer or the checkpoint cannot be used.
    """
    source = open_causal_model(inference, world, model_flags)

    def prepare() -> tuple[int, int, list[ScoredSequence], int]:
        """Number of words, number of tokens, windows, and tokens per window of the text.

        Raises:
            UsageError: the step is longer than a window.
        """
        length = source.window_length(task.seq_length)
        step = task.overlapping_eval or min(DEFAULT_STEP, length)
        if step > length:
            raise UsageError(f"--overlapping-eval {step}: must be at most {length}, the tokens of a window")
        text = read_text(Path(task.valid_data))
        tokens = np.array(model_tokenizer(source, inference).encode(detokenize(text, task.detokenizer)), np.int64)
        sequences = [
            ScoredSequence(tokens=tokens[each.begin : each.end + 1], first_scored=each.scored - each.begin + 1)
            for each in windows(len(tokens), length, step)
        ]
        return count_words(text), len(tokens), sequences, length

    words, num_tokens, sequences, length = run_on_all_ranks(world, prepare)
    losses = score_model(source, inference, world, sequences, length).losses
    return Perplexity(words=words, tokens=num_tokens, loss=math.fsum(losses) / (num_tokens - 1))
