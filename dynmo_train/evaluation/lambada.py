"""LAMBADA: accuracy of the last word of a passage (Paperno et al. 2016, arXiv:1606.06031).

As in Megatron, a passage counts as correct where every token of the answer is the most likely one.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from .._common.console import print_message
from .._common.document import MAX_TABLE_BYTES, DocumentError, parse_any_json, read_text
from .._common.errors import UsageError
from ..config.sections.evaluation import InferenceConfig, LambadaConfig
from ..data.tokenizer import Tokenizer
from ..formats.os_errors import reason
from ..parallel.consensus import run_on_all_ranks
from ..parallel.process_groups import World
from .model_checkpoint import model_tokenizer, open_causal_model
from .scoring import ScoredSequence, score_model


@dataclass(frozen=True, kw_only=True)
class Accuracy:
    """Number of correct passages; ``shortened`` of them exceed the model's positions and lose their beginning."""

    correct: int
    items: int
    shortened: int = 0

    def document(self) -> dict[str, Any]:
        """The object that ``--format json`` prints."""
        values = {"correct": self.correct, "items": self.items, "accuracy": self.correct / self.items}
        return {**values, "shortened": self.shortened} if self.shortened else values

    def line(self, task: str) -> str:
        """The log line, in Megatron's format."""
        return (
            f" validation results on {task} | number correct: {self.correct:.4E} | total examples: {self.items:.4E}"
            f" | avg accuracy: {self.correct / self.items:.4E}"
        )


def read_passages(path: Path) -> list[str]:
    """Read the texts of a JSON lines file.

    Raises:
        UsageError: it cannot be read, has no passages, or an invalid one; names its line.
    """
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
        raise UsageError(f'--valid-data {path}: contains no passages; give JSON lines such as {{"text": "..."}}')
    return passages


def split_passage(text: str) -> tuple[str, str]:
    """The context of a passage, and its last word."""
    word = text.split()[-1]
    # The last occurrence, as the word may occur earlier too.
    return text[: text.rfind(word)].strip(), word


def encode_passage(text: str, tokenizer: Tokenizer, *, strict: bool) -> ScoredSequence:
    """Tokens of a passage; the answer is the last word with ``strict``, else the last token."""
    if not strict:
        tokens = tokenizer.encode_prompt(text)
        return ScoredSequence(tokens=np.array(tokens), first_scored=len(tokens) - 1)
    context, word = split_passage(text)
    # The context is tokenized alone, as in Megatron: the answer must not merge with it.
    context_ids, answer_ids = tokenizer.encode_prompt(context), tokenizer.encode(f" {word}")
    return ScoredSequence(tokens=np.array(context_ids + answer_ids), first_scored=len(context_ids))


def truncate_left(sequence: ScoredSequence, longest: int) -> ScoredSequence:
    """Drop leading tokens so that the model reads at most ``longest``, as lm-evaluation-harness does."""
    excess = sequence.length - longest
    if excess <= 0:
        return sequence
    return ScoredSequence(tokens=sequence.tokens[excess:], first_scored=sequence.first_scored - excess)


def encode_passages(
    path: Path, tokenizer: Tokenizer, *, strict: bool, longest: int
) -> tuple[list[ScoredSequence], int]:
    """The passages of a file, truncated to ``longest`` tokens, and how many of them were truncated.

    Raises:
        UsageError: a passage has no context, or its last word fills all positions.
    """
    sequences, shortened = [], 0
    for number, text in enumerate(read_passages(path), 1):
        whole = encode_passage(text, tokenizer, strict=strict)
        if not 1 <= whole.first_scored < len(whole.tokens):
            raise UsageError(f"--valid-data {path}: passage {number} has no tokens before its last word; remove it")
        sequence = truncate_left(whole, longest)
        if sequence.first_scored < 1:
            raise UsageError(
                f"--valid-data {path}: the last word of passage {number} has {len(whole.tokens) - whole.first_scored}"
                f" tokens, but the model has {longest} positions; remove the passage"
            )
        sequences.append(sequence)
        shortened += sequence is not whole
    return sequences, shortened


def evaluate_lambada(
    inference: InferenceConfig, task: LambadaConfig, world: World, model_flags: Mapping[str, Any]
) -> Accuracy:
    """The fraction of passages whose answer the model predicts; all ranks call this and get the same result.

    Args:
        inference: the model and the ranks that run it.
        task: the passages.
        world: the process groups.
        model_flags: the model's shape as the command line states it.

    Raises:
        UsageError: the file, the tokenizer or the checkpoint cannot be used.
    """
    source = open_causal_model(inference, world, model_flags)
    longest = source.window_length(None)
    sequences, shortened = run_on_all_ranks(
        world,
        lambda: encode_passages(
            Path(task.valid_data), model_tokenizer(source, inference), strict=task.strict_lambada, longest=longest
        ),
    )
    if shortened and world.is_rank0:
        print_message(
            f"{shortened} of {len(sequences)} passages exceed {longest} positions; their beginning is truncated"
        )
    hits = score_model(source, inference, world, sequences, longest).hits
    correct = [hit == len(each.tokens) - each.first_scored for hit, each in zip(hits, sequences, strict=True)]
    if task.predictions is not None and world.is_rank0:
        _write_predictions(Path(task.predictions), correct)
    return Accuracy(correct=sum(correct), items=len(correct), shortened=shortened)


def _write_predictions(path: Path, correct: list[bool]) -> None:
    lines = [json.dumps({"item": number, "correct": ok}) + "\n" for number, ok in enumerate(correct)]
    try:
        path.write_text("".join(lines), encoding="utf-8")
    except OSError as error:
        raise UsageError(f"--predictions {path}: cannot be written: {reason(error)}") from error
