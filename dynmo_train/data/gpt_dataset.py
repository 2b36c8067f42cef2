"""Samples for causal language models: documents, shuffled and strung together, cut into pieces of equal length.

The order of samples is a pure function of the documents, the split, the sample length and the seed. It does not depend
on the number of workers.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from .._common.errors import UsageError
from ..formats.indexed import IndexedDataset
from .sample_index import Int64Array, SampleIndex, Wanted, build_index, epoch_tokens

Part = Literal["train", "valid", "test"]
PARTS: tuple[Part, ...] = ("train", "valid", "test")


class TokenError(UsageError):
    """A token id outside the vocabulary; every process reads every batch, so all meet it at once."""


def split_bounds(num_documents: int, shares: tuple[float, float, float]) -> tuple[int, int, int, int]:
    """Boundaries of the three parts over the documents: part ``p`` is ``[bounds[p], bounds[p + 1])``.

    Megatron's rounding: each part is rounded by itself, and what that leaves over is taken from every boundary.
    """
    bounds = [0]
    for share in shares:
        bounds.append(bounds[-1] + round(share * num_documents))
    excess = bounds[-1] - num_documents
    first, second, third = (max(0, bound - excess) for bound in bounds[1:])
    return 0, first, second, third


@dataclass(frozen=True, kw_only=True, eq=False)
class GptDataset:
    """The samples of one part of a data set, in the order in which a run consumes them."""

    source: IndexedDataset
    seq_length: int
    vocab_size: int
    index: SampleIndex

    def __len__(self) -> int:
        return len(self.index.order)

    def sample(self, index: int) -> Int64Array:
        """Token ids of sample ``index``: [seq_length + 1]; the last id is only a label."""
        sample_T: Int64Array = self.batch([index])[0]
        return sample_T

    def batch(self, indices: npt.ArrayLike) -> Int64Array:
        """Token ids of several samples: [samples, seq_length + 1].

        Raises:
            TokenError: an id of the data set is not in the vocabulary.
        """
        wanted = np.asarray(indices, dtype=np.int64)
        index, source = self.index, self.source
        places_BT = index.order[wanted].astype(np.int64)[:, None] * self.seq_length + np.arange(self.seq_length + 1)
        piece_BT = np.searchsorted(index.ends, places_BT, side="right")
        sequence_BT = index.pieces[piece_BT]
        after_BT = source.starts[sequence_BT] + source.lengths[sequence_BT]
        tokens_BT: Int64Array = source.tokens[after_BT - (index.ends[piece_BT] - places_BT)].astype(np.int64)
        if tokens_BT.size and not (tokens_BT.min() >= 0 and tokens_BT.max() < self.vocab_size):
            bad = tokens_BT.max() if tokens_BT.max() >= self.vocab_size else tokens_BT.min()
            raise TokenError(
                f"{source.prefix}.bin holds the token id {bad}; the vocabulary has the ids 0 to"
                f" {self.vocab_size - 1}: give the --tokenizer-model or --vocab-size that the data was made with"
            )
        return tokens_BT

    def places(self, indices: npt.ArrayLike) -> list[list[dict[str, Any]]]:
        """See ``Dataset.places``; the last token of a sample is only a label."""
        return [self._pieces(int(self.index.order[index])) for index in np.asarray(indices, dtype=np.int64)]

    def _pieces(self, order: int) -> list[dict[str, Any]]:
        index, source = self.index, self.source
        begin, pieces = order * self.seq_length, []
        end = begin + self.seq_length + 1
        number = int(np.searchsorted(index.ends, begin, side="right"))
        while begin < end:
            sequence, until = int(index.pieces[number]), int(index.ends[number])
            after = int(source.starts[sequence]) + int(source.lengths[sequence])
            tokens = [after - (until - begin), after - (until - min(end, until))]
            if until > begin:
                pieces.append({"prefix": str(source.prefix), "sequences": [sequence, sequence + 1], "tokens": tokens})
            begin, number = max(begin, until), number + 1
        return pieces


def _too_few(
    source: IndexedDataset, part: Part, tokens: int, documents: int, seq_length: int, needed: int
) -> UsageError:
    have = max(0, tokens - 1) // seq_length
    return UsageError(
        f"the {part} part of {source.prefix} is too small: {documents} documents with {tokens} tokens make {have}"
        f" samples of --seq-length {seq_length}, and a batch needs {needed}; add text, lower --seq-length or the batch"
        " size, or change --split" + ("" if part == "train" else ", or write --eval-iters 0")
    )


def build_gpt_dataset(
    source: IndexedDataset,
    *,
    part: Part,
    shares: tuple[float, float, float],
    seq_length: int,
    seed: int,
    num_samples: int,
    batch_size: int,
    vocab_size: int,
    order: str = "stable",
    cache: Path | None = None,
) -> GptDataset:
    """The first ``num_samples`` samples of a part, over as many epochs as they take.

    Args:
        source: the data set.
        part: which part of the documents.
        shares: fractions of the documents for training, validation and test.
        seq_length: tokens that a sample feeds to the model.
        seed: seed of the shuffles.
        num_samples: how many samples are wanted.
        batch_size: samples that one epoch must hold at least.
        vocab_size: ids must be below it.
        order: ``stable`` or ``megatron``, see ``indices``.
        cache: folder of indices; None keeps them in memory.

    Raises:
        UsageError: an epoch has fewer samples than a batch.
    """
    number = PARTS.index(part)
    bounds = split_bounds(source.num_documents, shares)
    low, high = bounds[number], bounds[number + 1]
    tokens = epoch_tokens(source, low, high)
    if max(0, tokens - 1) // seq_length < max(1, batch_size):
        raise _too_few(source, part, tokens, high - low, seq_length, max(1, batch_size))
    wanted = Wanted(low=low, high=high, part=number, seq_length=seq_length, seed=seed, samples=num_samples, order=order)
    index = build_index(source, wanted, cache)
    return GptDataset(source=source, seq_length=seq_length, vocab_size=vocab_size, index=index)
