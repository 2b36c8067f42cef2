"""Samples for causal language models: documents, shuffled and strung together, cut into pieces of equal length.

The order of samples is a pure function of the documents, the split, the sample length and the seed. It does not depend
on the number of workers, and asking for more samples never changes the first ones: every epoch shuffles its documents
and its samples by itself.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from ..errors import UsageError
from ..formats.indexed import IndexedDataset

Part = Literal["train", "valid", "test"]
PARTS: tuple[Part, ...] = ("train", "valid", "test")
_DOCUMENTS, _SAMPLES = 0, 1

Int64Array = npt.NDArray[np.int64]


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


def shuffled(count: int, *key: int) -> Int64Array:
    """A permutation of ``range(count)`` drawn for ``key``; numpy keeps this generator's stream for ever."""
    return np.random.RandomState(list(key)).permutation(count)


def sequences_of(documents: Int64Array, chosen: Int64Array) -> Int64Array:
    """The sequences of the ``chosen`` documents, in that order; ``documents`` is the document index."""
    counts = documents[chosen + 1] - documents[chosen]
    before = np.cumsum(counts) - counts
    return np.repeat(documents[chosen] - before, counts) + np.arange(counts.sum())


@dataclass(frozen=True, kw_only=True, eq=False)
class GptDataset:
    """The samples of one part of a data set, in the order in which a run consumes them.

    ``pieces`` are sequence numbers, strung together over the epochs; ``ends[k]`` is the number of tokens up to and with
    piece ``k``; ``order[i]`` is the place of sample ``i`` in the stream, in units of ``seq_length`` tokens.
    """

    source: IndexedDataset
    seq_length: int
    vocab_size: int
    pieces: Int64Array
    ends: Int64Array
    order: Int64Array

    def __len__(self) -> int:
        return len(self.order)

    def sample(self, index: int) -> Int64Array:
        """Token ids of sample ``index``: [seq_length + 1]; the last id is only a label."""
        sample_T: Int64Array = self.batch([index])[0]
        return sample_T

    def batch(self, indices: npt.ArrayLike) -> Int64Array:
        """Token ids of several samples: [samples, seq_length + 1].

        Raises:
            UsageError: an id of the data set is not in the vocabulary.
        """
        wanted = np.asarray(indices, dtype=np.int64)
        places_BT = self.order[wanted][:, None] * self.seq_length + np.arange(self.seq_length + 1)
        piece_BT = np.searchsorted(self.ends, places_BT, side="right")
        sequence_BT = self.pieces[piece_BT]
        after_BT = self.source.starts[sequence_BT] + self.source.lengths[sequence_BT]
        tokens_BT: Int64Array = self.source.tokens[after_BT - (self.ends[piece_BT] - places_BT)].astype(np.int64)
        if tokens_BT.size and not (tokens_BT.min() >= 0 and tokens_BT.max() < self.vocab_size):
            bad = tokens_BT.max() if tokens_BT.max() >= self.vocab_size else tokens_BT.min()
            raise UsageError(
                f"{self.source.prefix}.bin holds the token id {bad}; the vocabulary has the ids 0 to"
                f" {self.vocab_size - 1}: give the --tokenizer-model or --vocab-size that the data was made with"
            )
        return tokens_BT


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
) -> GptDataset:
    """The first ``num_samples`` samples of a part, over as many epochs as they take.

    Args:
        source: the data set.
        part: which part of the documents.
        shares: fractions of the documents for training, validation and test.
        seq_length: tokens that a sample feeds to the model.
        seed: seed of both shuffles.
        num_samples: how many samples are wanted.
        batch_size: samples that one epoch must hold at least.
        vocab_size: ids must be below it.

    Raises:
        UsageError: an epoch has fewer samples than a batch.
    """
    number = PARTS.index(part)
    bounds = split_bounds(source.num_documents, shares)
    low, high = bounds[number], bounds[number + 1]
    first, last = source.documents[low], source.documents[high]
    epoch_tokens = int(source.lengths[first:last].sum(dtype=np.int64))
    if max(0, epoch_tokens - 1) // seq_length < max(1, batch_size):
        raise _too_few(source, part, epoch_tokens, high - low, seq_length, max(1, batch_size))
    order: list[Int64Array] = []
    placed = epochs = 0
    while placed < max(1, num_samples):
        # A sample belongs to the epoch in which its first token lies.
        beyond = -(-(epochs + 1) * epoch_tokens // seq_length)
        order.append(placed + shuffled(beyond - placed, seed, number, epochs, _SAMPLES))
        placed, epochs = beyond, epochs + 1
    # One epoch more: the last sample may run over the end.
    pieces = np.concatenate(
        [
            sequences_of(source.documents, low + shuffled(high - low, seed, number, epoch, _DOCUMENTS))
            for epoch in range(epochs + 1)
        ]
    )
    ends: npt.NDArray[Any] = np.cumsum(source.lengths[pieces], dtype=np.int64)
    return GptDataset(
        source=source,
        seq_length=seq_length,
        vocab_size=vocab_size,
        pieces=pieces,
        ends=ends,
        order=np.concatenate(order)[:num_samples],
    )
