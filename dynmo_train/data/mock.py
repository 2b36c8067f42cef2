"""A data set of random tokens, for runs that measure speed or test a cluster (Megatron's ``--mock-data``).

It is made in memory from the seed, the same on every rank, and read by the same code as one on disk: documents of
several sequences, lengths that vary, every token id of the vocabulary, whose last one ends each document.
"""

from __future__ import annotations

from functools import cache

import numpy as np

from ..formats.indexed import IndexedDataset

PREFIX = "mock"
DOCUMENTS = 4096
# Sequences of a document, and tokens of a sequence: two million tokens in all, 8 MB.
SEQUENCES = (2, 16)
TOKENS = (8, 112)


@cache
def mock_dataset(vocab_size: int, seed: int) -> IndexedDataset:
    """Return ``DOCUMENTS`` documents of random tokens; an epoch of them repeats as that of any data set does.

    Args:
        vocab_size: number of token ids, at least 1.
        seed: seed of the run.
    """
    random = np.random.default_rng([seed, DOCUMENTS])
    sequences = random.integers(*SEQUENCES, DOCUMENTS)
    lengths = random.integers(*TOKENS, int(sequences.sum())).astype(np.int32)
    ends, documents = lengths.cumsum(dtype=np.int64), np.concatenate([[0], sequences.cumsum()]).astype(np.int64)
    tokens = random.integers(0, vocab_size, int(ends[-1])).astype(np.int32)
    # The last id stands for the end of a document, as in ``end_of_document``.
    tokens[ends[documents[1:] - 1] - 1] = vocab_size - 1
    return IndexedDataset(
        prefix=PREFIX,
        tokens=tokens,
        lengths=lengths,
        starts=ends - lengths.astype(np.int64),
        documents=documents,
    )
