"""Losses and hits of many token sequences, on however many processes: the same figures for every layout.

Which sequences share a microbatch, and to what length they are filled up, depends on the sequences alone.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from .._common.console import progress
from ..data.batch import Batch
from ..models.token_scores import HITS, LOSSES
from ..trainer.engine import Engine

# Sequences are filled up to multiples of this, so that few lengths occur.
LENGTH_MULTIPLE = 32
# Microbatches of a batch for each pipeline position: of a pipeline of P, a share (P - 1) / (4 P + P - 1) stands still.
MICROBATCHES_PER_STAGE = 4


@dataclass(frozen=True, kw_only=True)
class TokenRun:
    """Tokens of which those from ``scored`` on (at least 1) are asked for; the others are only read."""

    tokens: npt.NDArray[np.int64]
    scored: int

    @property
    def length(self) -> int:
        """Tokens that the model reads: all but the last."""
        return len(self.tokens) - 1


@dataclass(frozen=True, kw_only=True)
class Scores:
    """Of each sequence, in the order given: the sum of its tokens' losses in nats, and how many would be said."""

    losses: list[float]
    hits: list[int]


def padded_length(length: int, longest: int) -> int:
    """The length to which a sequence is filled up."""
    return min(-(-length // LENGTH_MULTIPLE) * LENGTH_MULTIPLE, longest)


def score(engine: Engine, sequences: Sequence[TokenRun], *, longest: int, micro_batch: int) -> Scores:
    """Score sequences of at most ``longest`` tokens to read; every process calls this with the same.

    Args:
        engine: of a ``ScoringFamily``.
        micro_batch: samples of a microbatch, as the engine was built for.
    """
    losses, hits = [0.0] * len(sequences), [0] * len(sequences)
    by_length: dict[int, list[int]] = {}
    for number, each in enumerate(sequences):
        by_length.setdefault(padded_length(each.length, longest), []).append(number)
    with progress("scoring", len(sequences) if engine.world.is_rank0 else 0, "sequences") as tick:
        for length in sorted(by_length):
            for numbers, batch in _batches(engine, sequences, by_length[length], length, micro_batch):
                told = engine.score(batch, (LOSSES, HITS))
                for at, number in enumerate(numbers):
                    losses[number], hits[number] = float(told[LOSSES][at]), int(told[HITS][at])
                if engine.world.is_rank0:
                    tick(len(numbers))
    return Scores(losses=losses, hits=hits)


def _batches(
    engine: Engine, sequences: Sequence[TokenRun], numbers: Sequence[int], length: int, micro_batch: int
) -> Iterator[tuple[Sequence[int], Batch]]:
    """Batches of the numbered sequences, filled up with samples that count for nothing."""
    dims = engine.world.dims
    most = MICROBATCHES_PER_STAGE * dims.pipeline if dims.pipeline > 1 else 1
    microbatches = min(most, -(-len(numbers) // (micro_batch * dims.data)))
    size = microbatches * micro_batch * dims.data
    for begin in range(0, len(numbers), size):
        chosen = numbers[begin : begin + size]
        ids, labels = (np.zeros((size, length), np.int64) for _ in range(2))
        counts = np.zeros((size, length), np.int64)
        for row, number in enumerate(chosen):
            one = sequences[number]
            ids[row, : one.length], labels[row, : one.length] = one.tokens[:-1], one.tokens[1:]
            counts[row, one.scored - 1 : one.length] = 1
        tensors = {
            name: torch.from_numpy(rows) for name, rows in (("ids", ids), ("labels", labels), ("counts", counts))
        }
        yield (
            chosen,
            Batch(
                inputs=tensors,
                first_microbatch=begin // micro_batch,
                step=0,
                microbatches=microbatches,
                tokens=length,
            ),
        )
