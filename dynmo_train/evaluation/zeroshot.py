"""The zero-shot evaluations of causal models, from a checkpoint and a file to a figure."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from .._common.console import say
from .._common.errors import UsageError
from ..config.evaluation import InferenceConfig, LambadaConfig, WikitextConfig
from ..config.task_command import check_model_flags
from ..formats.os_errors import reason
from ..models.registry import CAUSAL
from ..models.token_scores import ScoringFamily
from ..parallel.consensus import run_on_all_ranks
from ..parallel.process_groups import World
from .forward_engine import Source, forward_engine, open_source, tokenizer_of
from .lambada import Accuracy, passages_as_tokens
from .scoring import Scores, TokenRun, score
from .wikitext import Perplexity, count_words, detokenize, mean_loss, read_text, windows

# As in Megatron.
USUAL_STEP = 32


def causal_source(place: InferenceConfig, world: World, told: Mapping[str, Any]) -> Source:
    """The checkpoint of ``--load``; raises ``UsageError`` where its model does not say the next token.

    Args:
        told: what the command line says of the model, which must be so.
    """
    source = open_source(Path(place.load), place, world)
    run_on_all_ranks(world, lambda: check_model_flags(told, source.model, source.checkpoint.directory))
    if source.model["family"] not in CAUSAL:
        raise UsageError(
            f"{source.checkpoint.directory} holds a {source.model['family']} model, which does not say the next token;"
            f" models of the families {', '.join(CAUSAL)} do"
        )
    return source


def window_length(source: Source, asked: int | None) -> int:
    """Tokens of a window; raises ``UsageError`` where the model has fewer positions."""
    positions = int(source.model["max_position_embeddings"])
    if asked is not None and asked > positions:
        raise UsageError(f"--seq-length {asked}: the model of {source.checkpoint.directory} has {positions} positions")
    return asked or positions


def _score(source: Source, place: InferenceConfig, world: World, runs: list[TokenRun], longest: int) -> Scores:
    engine = forward_engine(source, place, world, tokens=longest, wrap=ScoringFamily)
    return score(engine, runs, longest=longest, micro_batch=place.micro_batch_size)


def evaluate_wikitext(
    place: InferenceConfig, task: WikitextConfig, world: World, told: Mapping[str, Any]
) -> Perplexity:
    """Word-level perplexity of a text; every process calls this and gets the same.

    Raises:
        UsageError: the text, the tokenizer or the checkpoint cannot be used.
    """
    source = causal_source(place, world, told)

    def prepare() -> tuple[int, int, list[TokenRun], int]:
        length = window_length(source, task.seq_length)
        step = task.overlapping_eval or min(USUAL_STEP, length)
        if step > length:
            raise UsageError(f"--overlapping-eval {step}: windows have {length} tokens; give at most so many")
        text = read_text(Path(task.valid_data))
        tokens = np.array(tokenizer_of(source, place).encode(detokenize(text, task.detokenizer)), np.int64)
        runs = [
            TokenRun(tokens=tokens[each.begin : each.end + 1], scored=each.scored - each.begin + 1)
            for each in windows(len(tokens), length, step)
        ]
        return count_words(text), len(tokens), runs, length

    words, num_tokens, runs, length = run_on_all_ranks(world, prepare)
    losses = _score(source, place, world, runs, length).losses
    return Perplexity(words=words, tokens=num_tokens, loss=mean_loss(losses, num_tokens))


def evaluate_lambada(place: InferenceConfig, task: LambadaConfig, world: World, told: Mapping[str, Any]) -> Accuracy:
    """The share of passages whose last word, or last token, the model says; every process gets the same.

    Raises:
        UsageError: the file, the tokenizer or the checkpoint cannot be used.
    """
    source = causal_source(place, world, told)
    longest = window_length(source, None)
    runs, shortened = run_on_all_ranks(
        world,
        lambda: passages_as_tokens(
            Path(task.valid_data), tokenizer_of(source, place), strict=task.strict_lambada, longest=longest
        ),
    )
    if shortened and world.is_rank0:
        say(f"{shortened} of {len(runs)} passages are longer than {longest} positions: the model reads their ends")
    hits = _score(source, place, world, runs, longest).hits
    right = [hit == len(run.tokens) - run.scored for hit, run in zip(hits, runs, strict=True)]
    if task.predictions is not None and world.is_rank0:
        _write_predictions(Path(task.predictions), right)
    return Accuracy(correct=sum(right), items=len(right), shortened=shortened)


def _write_predictions(path: Path, right: list[bool]) -> None:
    lines = [json.dumps({"item": number, "correct": ok}) + "\n" for number, ok in enumerate(right)]
    try:
        path.write_text("".join(lines), encoding="utf-8")
    except OSError as error:
        raise UsageError(f"--predictions {path}: cannot be written: {reason(error)}") from error
