"""The order of samples in a stream of concatenated documents, as pure functions of arrays.

Two orders. ``stable`` shuffles the documents and the samples of each epoch separately, so that a longer run begins with
the samples of a shorter one. ``megatron`` is that of Megatron's ``GPTDataset``, sample for sample: all epochs but an
incomplete last one are shuffled together, so the order changes with the number of samples that a run asks for.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from ..formats.indexed import IndexedDataset
from .index_cache import cached_arrays, index_identity

VERSION = 1
# Keys of the shuffles: documents and samples of one epoch are shuffled independently.
_DOCUMENTS, _SAMPLES = 0, 1

IntArray = npt.NDArray[np.integer[Any]]
Int64Array = npt.NDArray[np.int64]


@dataclass(frozen=True, kw_only=True, eq=False)
class SampleIndex:
    """The stream of concatenated documents, and the positions of the samples in it.

    Attributes:
        pieces: sequence number of each piece of the stream, over all epochs, int32.
        ends: number of stream tokens up to and including each piece, int64.
        order: position of each sample in the stream, in units of the sequence length, uint32 or int64.
    """

    pieces: IntArray
    ends: IntArray
    order: IntArray


@dataclass(frozen=True, kw_only=True)
class SampleIndexSpec:
    """What determines an index, apart from the data set; all fields are part of the cache key.

    Attributes:
        first_document: first document of the split.
        end_document: document after the last one of the split.
        split_index: number of the split; the stable order is shuffled by it.
        seq_length: tokens that the model reads of a sample.
        seed: seed of the shuffles.
        num_samples: number of samples.
        order: ``stable`` or ``megatron``.
    """

    first_document: int
    end_document: int
    split_index: int
    seq_length: int
    seed: int
    num_samples: int
    order: str


def permutation(count: int, *key: int) -> Int64Array:
    """A permutation of ``range(count)`` for ``key``, int64 ``[count]``.

    ``RandomState`` is frozen by numpy's compatibility policy (NEP 19); ``Generator`` is not.
    """
    return np.random.RandomState(list(key)).permutation(count)


def sequences_of(documents: IntArray, chosen: IntArray) -> IntArray:
    """Sequence numbers of the ``chosen`` documents, in that order, int32.

    Args:
        documents: first sequence of each document, and the number of sequences at the end, ``[documents + 1]``.
        chosen: document numbers, ``[n]``.
    """
    begins = documents[chosen]
    counts = documents[chosen + 1] - begins
    # One sequence per document is the usual case of causal models; it needs no arrays of positions.
    if (counts == 1).all():
        return begins.astype(np.int32)
    before = np.cumsum(counts) - counts
    return (np.repeat(begins - before, counts) + np.arange(counts.sum())).astype(np.int32)


def count_tokens(source: IndexedDataset, begin: int, end: int) -> int:
    """Number of tokens of the documents ``[begin, end)``."""
    return int(source.lengths[source.documents[begin] : source.documents[end]].sum(dtype=np.int64))


def stable_index(source: IndexedDataset, spec: SampleIndexSpec) -> SampleIndex:
    """Shuffle every epoch separately. A sample belongs to the epoch of its first token."""
    tokens = count_tokens(source, spec.first_document, spec.end_document)
    order: list[IntArray] = []
    samples = epochs = 0
    while samples < max(1, spec.num_samples):
        # Rounded up: the sample that spans the end of an epoch belongs to the epoch of its first token.
        after_epoch = -(-(epochs + 1) * tokens // spec.seq_length)
        order.append(samples + permutation(after_epoch - samples, spec.seed, spec.split_index, epochs, _SAMPLES))
        samples, epochs = after_epoch, epochs + 1
    count = spec.end_document - spec.first_document

    def documents(epoch: int) -> IntArray:
        """Numbers of the split's documents in the order of ``epoch``, from 0."""
        return spec.first_document + permutation(count, spec.seed, spec.split_index, epoch, _DOCUMENTS)

    pieces = [sequences_of(source.documents, documents(epoch)) for epoch in range(epochs)]
    # The last sample may extend into the first documents of one more epoch.
    pieces.append(_leading_sequences(source, documents(epochs), spec.seq_length))
    return _make_index(source, np.concatenate(pieces), np.concatenate(order)[: spec.num_samples])


def _leading_sequences(source: IndexedDataset, documents: IntArray, tokens: int) -> IntArray:
    """Sequences of the first documents that have at least ``tokens`` tokens together, or of all documents."""
    # Few documents are enough, so the lengths of a whole epoch are not read.
    count = 64
    while True:
        sequences = sequences_of(source.documents, documents[:count])
        if count >= len(documents) or int(source.lengths[sequences].sum(dtype=np.int64)) >= tokens:
            return sequences
        count *= 4


def megatron_index(source: IndexedDataset, spec: SampleIndexSpec) -> SampleIndex:
    """The order of Megatron's ``GPTDataset``, for a data set whose documents are one sequence each.

    One generator shuffles the documents, then the samples. The last epoch is shuffled separately where less than 0.8 of
    it is used.
    """
    tokens, length = count_tokens(source, spec.first_document, spec.end_document), spec.seq_length
    epochs = 1
    while (epochs * tokens - 1) // length < spec.num_samples:
        epochs += 1
    before_last = ((epochs - 1) * tokens - 1) // length if epochs > 1 else 0
    separate = epochs > 1 and spec.num_samples - before_last < int(0.8 * ((tokens - 1) // length))
    random = np.random.RandomState(spec.seed)
    # The order of the calls of ``random`` is Megatron's: all documents first, then the samples.
    documents = [_shuffled_documents(spec, count, random) for count in ((epochs - 1, 1) if separate else (epochs,))]
    total = (epochs * tokens - 1) // length
    first = before_last if separate else total
    order = [np.arange(0, first, dtype=np.int64), np.arange(first, total, dtype=np.int64)]
    for part in order[: 2 if separate else 1]:
        random.shuffle(part)
    pieces = sequences_of(source.documents, np.concatenate(documents))
    return _make_index(source, pieces, np.concatenate(order)[: spec.num_samples])


def _shuffled_documents(spec: SampleIndexSpec, epochs: int, random: np.random.RandomState) -> IntArray:
    documents = np.tile(np.arange(spec.first_document, spec.end_document, dtype=np.int32), epochs)
    random.shuffle(documents)
    return documents


def _make_index(source: IndexedDataset, pieces: IntArray, order: IntArray) -> SampleIndex:
    # The stored lengths are int32; their sum over many epochs exceeds that.
    ends = np.cumsum(source.lengths[pieces], dtype=np.int64)
    small = order.size == 0 or int(order.max()) < 2**32
    return SampleIndex(pieces=pieces, ends=ends, order=order.astype(np.uint32) if small else order)


ORDERS: Mapping[str, Callable[[IndexedDataset, SampleIndexSpec], SampleIndex]] = {
    "stable": stable_index,
    "megatron": megatron_index,
}


def build_sample_index(source: IndexedDataset, spec: SampleIndexSpec, cache: Path | None) -> SampleIndex:
    """Read the index from the cache, or build and cache it; see ``cached_arrays``.

    Args:
        source: the data set.
        spec: what determines the index.
        cache: directory of indices; None does not cache.
    """
    cache_key = {"version": VERSION, **index_identity(source.prefix), "sequences": len(source.lengths), **vars(spec)}
    return SampleIndex(**cached_arrays(cache, cache_key, lambda: vars(ORDERS[spec.order](source, spec))))
