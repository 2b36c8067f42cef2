"""Losses and hits of token sequences, with the same values in every parallel layout.

    sequences --pad to multiples of 32--> batches of equal length --forward engine--> loss and hits per sequence

Padding and the grouping into microbatches depend on the sequences alone, never on the number of ranks.
Shapes in names: N samples of a batch, T tokens.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch

from .._common.console import progress
from ..config.sections.evaluation import InferenceConfig
from ..data.batch import Batch
from ..models.vocabulary.token_scores import HITS, LOSSES, ScoringFamily
from ..parallel.dims import ParallelDims
from ..parallel.process_groups import World
from .forward_engine import load_forward_engine
from .model_checkpoint import ModelCheckpoint

# Sequences are padded to multiples of this, so that few batch shapes occur.
LENGTH_MULTIPLE = 32
# Microbatches per pipeline rank in a batch: with P ranks the bubble is (P - 1) / (4 P + P - 1) of the time.
MICROBATCHES_PER_STAGE = 4


class SampleScorer(Protocol):
    """An engine that evaluates a batch: the forward engine, or the training engine during training."""

    world: World

    def score(self, batch: Batch, names: Sequence[str]) -> dict[str, torch.Tensor]:
        """Metric name -> float64 ``[samples]`` on CPU, the same on all ranks."""


@dataclass(frozen=True, kw_only=True)
class ScoredSequence:
    """A token sequence of which the tail is scored.

    Attributes:
        tokens: token ids, int64 ``[T + 1]``; the model reads the first T.
        first_scored: index of the first scored token, at least 1; the tokens before it are context.
    """

    tokens: npt.NDArray[np.int64]
    first_scored: int

    @property
    def length(self) -> int:
        """Number of tokens that the model reads, T."""
        return len(self.tokens) - 1


@dataclass(frozen=True, kw_only=True)
class Scores:
    """Per sequence, in input order: the sum of the scored tokens' losses (nats), and how many were predicted."""

    losses: list[float]
    hits: list[int]


def padded_length(length: int, longest: int) -> int:
    """``length`` rounded up to a multiple of ``LENGTH_MULTIPLE``, at most ``longest`` tokens."""
    return min(-(-length // LENGTH_MULTIPLE) * LENGTH_MULTIPLE, longest)


def microbatches_per_replica(dims: ParallelDims, samples: int, micro_batch: int) -> int:
    """Microbatches of a batch on each replica: enough to fill the pipeline, and no more than ``samples`` need.

    Args:
        dims: the parallel sizes.
        samples: number of samples to evaluate, over all replicas.
        micro_batch: samples per microbatch.
    """
    limit = MICROBATCHES_PER_STAGE * dims.pipeline if dims.pipeline > 1 else 1
    return min(limit, -(-samples // (micro_batch * dims.data)))


def score_model(
    source: ModelCheckpoint,
    inference: InferenceConfig,
    world: World,
    sequences: Sequence[ScoredSequence],
    longest: int,
) -> Scores:
    """Load a causal model and score sequences; all ranks call this.

    Args:
        source: the checkpoint.
        inference: the model's dtype, and samples per microbatch.
        world: the process groups.
        sequences: what to score.
        longest: maximum number of tokens that the model reads of a sequence.

    Raises:
        UsageError: the model cannot be partitioned over these ranks.
        CheckpointError: a tensor is missing or damaged.
    """
    engine = load_forward_engine(source, inference, world, tokens=longest, wrap=ScoringFamily)
    return score(engine, sequences, longest=longest, micro_batch=inference.micro_batch_size)


def score(engine: SampleScorer, sequences: Sequence[ScoredSequence], *, longest: int, micro_batch: int) -> Scores:
    """Score sequences; all ranks call this with the same ones.

    Args:
        engine: runs a ``ScoringFamily``.
        sequences: what to score.
        longest: tokens of the longest sequence that the model reads.
        micro_batch: samples per microbatch, as the engine was built for.
    """
    losses, hits = [0.0] * len(sequences), [0] * len(sequences)
    by_length: dict[int, list[int]] = {}
    for number, each in enumerate(sequences):
        by_length.setdefault(padded_length(each.length, longest), []).append(number)
    with progress("scoring", len(sequences) if engine.world.is_rank0 else 0, "sequences") as tick:
        for length in sorted(by_length):
            for numbers, batch in _batches(engine.world.dims, sequences, by_length[length], length, micro_batch):
                scores = engine.score(batch, (LOSSES, HITS))
                for row, number in enumerate(numbers):
                    losses[number], hits[number] = float(scores[LOSSES][row]), int(scores[HITS][row])
                if engine.world.is_rank0:
                    tick(len(numbers))
    return Scores(losses=losses, hits=hits)


def _batches(
    dims: ParallelDims, sequences: Sequence[ScoredSequence], numbers: Sequence[int], length: int, micro_batch: int
) -> Iterator[tuple[Sequence[int], Batch]]:
    """Batches of the numbered sequences, padded with samples that have no scored token."""
    # The number of microbatches follows the layout, their contents do not: each has the next ``micro_batch`` samples.
    microbatches = microbatches_per_replica(dims, len(numbers), micro_batch)
    size = microbatches * micro_batch * dims.data
    for begin in range(0, len(numbers), size):
        chosen = numbers[begin : begin + size]
        ids_NT, labels_NT, counts_NT = (np.zeros((size, length), np.int64) for _ in range(3))
        for row, number in enumerate(chosen):
            sequence = sequences[number]
            end = sequence.length
            ids_NT[row, :end], labels_NT[row, :end] = sequence.tokens[:-1], sequence.tokens[1:]
            # Label ``t`` is token ``t + 1``, so the first scored token is label ``first_scored - 1``.
            counts_NT[row, sequence.first_scored - 1 : end] = 1
        inputs = {"ids": ids_NT, "labels": labels_NT, "loss_mask": counts_NT}
        yield (
            chosen,
            Batch(
                inputs={name: torch.from_numpy(rows) for name, rows in inputs.items()},
                first_microbatch=begin // micro_batch,
                step=0,
                microbatches=microbatches,
                tokens=length,
            ),
        )
