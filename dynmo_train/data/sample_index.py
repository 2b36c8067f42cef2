"""Which tokens make which sample: the documents strung together, and the order of the samples. Values in, values out.

Two orders. ``stable`` shuffles the documents and the samples of each epoch by themselves, so that a longer run begins
with the samples of a shorter one. ``megatron`` is Megatron's ``GPTDataset`` to the last sample: all epochs but a short
last one are shuffled together, so that the order changes with the number of samples that a run asks for.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from ..formats.indexed import IndexedDataset
from .index_cache import cached_arrays, file_facts

VERSION = 1
_DOCUMENTS, _SAMPLES = 0, 1

IntArray = npt.NDArray[np.integer[Any]]
Int64Array = npt.NDArray[np.int64]


@dataclass(frozen=True, kw_only=True, eq=False)
class SampleIndex:
    """The documents strung together, and the places of the samples in them.

    ``pieces`` are sequence numbers, over all epochs; ``ends[k]`` is the number of tokens up to and with piece ``k``;
    ``order[i]`` is the place of sample ``i`` in the stream, in units of the sample length.
    """

    pieces: IntArray
    ends: IntArray
    order: IntArray

    @property
    def nbytes(self) -> int:
        """Bytes of the three arrays."""
        return self.pieces.nbytes + self.ends.nbytes + self.order.nbytes


@dataclass(frozen=True, kw_only=True)
class Wanted:
    """What an index is built for.

    Attributes:
        low, high: the documents, ``[low, high)``.
        part: number of the part of the data set; the stable order is shuffled by it.
        seq_length: tokens that a sample feeds to the model.
        samples: how many are wanted.
    """

    low: int
    high: int
    part: int
    seq_length: int
    seed: int
    samples: int
    order: str


def shuffled(count: int, *key: int) -> Int64Array:
    """A permutation of ``range(count)`` drawn for ``key``; numpy keeps this generator's stream for ever."""
    return np.random.RandomState(list(key)).permutation(count)


def sequences_of(documents: IntArray, chosen: IntArray) -> IntArray:
    """The sequences of the ``chosen`` documents, in that order; ``documents`` is the document index."""
    begins = documents[chosen]
    counts = documents[chosen + 1] - begins
    if (counts == 1).all():
        return begins.astype(np.int32)
    before = np.cumsum(counts) - counts
    return (np.repeat(begins - before, counts) + np.arange(counts.sum())).astype(np.int32)


def epoch_tokens(source: IndexedDataset, low: int, high: int) -> int:
    """Tokens of the documents ``[low, high)``."""
    return int(source.lengths[source.documents[low] : source.documents[high]].sum(dtype=np.int64))


def stable_index(source: IndexedDataset, wanted: Wanted) -> SampleIndex:
    """Every epoch shuffled by itself. A sample belongs to the epoch in which its first token lies."""
    tokens = epoch_tokens(source, wanted.low, wanted.high)
    order: list[IntArray] = []
    placed = epochs = 0
    while placed < max(1, wanted.samples):
        beyond = -(-(epochs + 1) * tokens // wanted.seq_length)
        order.append(placed + shuffled(beyond - placed, wanted.seed, wanted.part, epochs, _SAMPLES))
        placed, epochs = beyond, epochs + 1
    count = wanted.high - wanted.low

    def documents(epoch: int) -> IntArray:
        return wanted.low + shuffled(count, wanted.seed, wanted.part, epoch, _DOCUMENTS)

    pieces = [sequences_of(source.documents, documents(epoch)) for epoch in range(epochs)]
    # The last sample may run over the end: into the first documents of one epoch more.
    pieces.append(_first_tokens(source, documents(epochs), wanted.seq_length))
    return _index(source, np.concatenate(pieces), np.concatenate(order)[: wanted.samples])


def _first_tokens(source: IndexedDataset, documents: IntArray, tokens: int) -> IntArray:
    """The sequences of so many of the first documents that they hold ``tokens``, or all of them."""
    count = 64
    while True:
        sequences = sequences_of(source.documents, documents[:count])
        if count >= len(documents) or int(source.lengths[sequences].sum(dtype=np.int64)) >= tokens:
            return sequences
        count *= 4


def megatron_index(source: IndexedDataset, wanted: Wanted) -> SampleIndex:
    """The order of Megatron's ``GPTDataset`` for a data set whose documents are one sequence each.

    One generator draws the documents, then the samples. The last epoch is shuffled apart where less than 0.8 of it is
    used.
    """
    tokens, length = epoch_tokens(source, wanted.low, wanted.high), wanted.seq_length
    epochs = 1
    while (epochs * tokens - 1) // length < wanted.samples:
        epochs += 1
    before_last = ((epochs - 1) * tokens - 1) // length if epochs > 1 else 0
    apart = epochs > 1 and wanted.samples - before_last < int(0.8 * ((tokens - 1) // length))
    random = np.random.RandomState(wanted.seed)
    documents = (
        [_tiled(wanted, epochs - 1, random), _tiled(wanted, 1, random)] if apart else [_tiled(wanted, epochs, random)]
    )
    total = (epochs * tokens - 1) // length
    first = before_last if apart else total
    order = [np.arange(0, first, dtype=np.int64), np.arange(first, total, dtype=np.int64)]
    for part in order[: 2 if apart else 1]:
        random.shuffle(part)
    pieces = sequences_of(source.documents, np.concatenate(documents))
    return _index(source, pieces, np.concatenate(order)[: wanted.samples])


def _tiled(wanted: Wanted, epochs: int, random: np.random.RandomState) -> IntArray:
    documents = np.tile(np.arange(wanted.low, wanted.high, dtype=np.int32), epochs)
    random.shuffle(documents)
    return documents


def _index(source: IndexedDataset, pieces: IntArray, order: IntArray) -> SampleIndex:
    ends = np.cumsum(source.lengths[pieces], dtype=np.int64)
    small = order.size == 0 or int(order.max()) < 2**32
    return SampleIndex(pieces=pieces, ends=ends, order=order.astype(np.uint32) if small else order)


BUILDERS: Mapping[str, Callable[[IndexedDataset, Wanted], SampleIndex]] = {
    "stable": stable_index,
    "megatron": megatron_index,
}


def build_index(source: IndexedDataset, wanted: Wanted, cache: Path | None) -> SampleIndex:
    """The index, out of the cache where it lies there, else built and put there; see ``cached_arrays``.

    Args:
        cache: folder of indices; None keeps them in memory.
    """
    facts = {"version": VERSION, **file_facts(source.prefix), "sequences": len(source.lengths), **vars(wanted)}
    return SampleIndex(**cached_arrays(cache, facts, lambda: vars(BUILDERS[wanted.order](source, wanted))))
