"""BERT's samples: two segments of a document in order or swapped, with words hidden, as Megatron makes them.

Each sample is a pure function of the data, the seed and its number.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from .._common.errors import UsageError
from ..formats.indexed import IndexedDataset
from .masking import positions_to_hide, sample_random
from .sentence_spans import Runs
from .vocabulary import Vocabulary

Int64Array = npt.NDArray[np.int64]
SPECIAL_TOKENS = 3
COLUMNS = ("ids", "types", "seen", "labels", "counts")


def sentence_tokens(source: IndexedDataset, begin: int, end: int, vocab_size: int) -> list[Int64Array]:
    """Token ids of some sequences that follow each other; raises ``UsageError`` for ids beyond the vocabulary."""
    first = int(source.starts[begin])
    lengths = np.asarray(source.lengths[begin:end], dtype=np.int64)
    tokens: Int64Array = np.asarray(source.tokens[first : first + int(lengths.sum())], dtype=np.int64)
    if tokens.size and not (tokens.min() >= 0 and tokens.max() < vocab_size):
        bad = tokens.max() if tokens.max() >= vocab_size else tokens.min()
        raise UsageError(
            f"{source.prefix}.bin holds the token id {bad}; the tokenizer has the ids 0 to {vocab_size - 1}:"
            " give the tokenizer that the data was made with"
        )
    return np.split(tokens, np.cumsum(lengths)[:-1])


def two_segments(random: np.random.RandomState, sentences: Sequence[Int64Array]) -> tuple[Int64Array, Int64Array, bool]:
    """The sentences cut into two segments at a random place; by chance swapped, which the third value tells."""
    cut = int(random.randint(1, len(sentences))) if len(sentences) > 2 else 1
    first, second = np.concatenate(sentences[:cut]), np.concatenate(sentences[cut:])
    if random.random_sample() < 0.5:
        return second, first, True
    return first, second, False


def truncated(
    random: np.random.RandomState, first: Int64Array, second: Int64Array, most: int
) -> tuple[Int64Array, Int64Array]:
    """Both segments without what is beyond ``most`` tokens: from either end, by chance, of whichever is longer."""
    excess = len(first) + len(second) - most
    if excess <= 0:
        return first, second
    spans = [[0, len(first)], [0, len(second)]]
    for from_front in (random.random_sample(excess) < 0.5).tolist():
        longer = spans[0] if spans[0][1] - spans[0][0] > spans[1][1] - spans[1][0] else spans[1]
        if from_front:
            longer[0] += 1
        else:
            longer[1] -= 1
    (a, b), (c, d) = spans
    return first[a:b], second[c:d]


@dataclass(frozen=True, kw_only=True, eq=False)
class MaskedDataset:
    """BERT's samples of one part of a data set.

    Attributes:
        seq_length: tokens of a sample, special ones and padding included.
        binary: whether a sample has two segments.
        share: of tokens that are hidden.
        whole_words: whether the pieces of a word are hidden together.
        part: number of the part.
    """

    source: IndexedDataset
    runs: Runs
    vocabulary: Vocabulary
    seq_length: int
    binary: bool
    share: float
    whole_words: bool
    seed: int
    part: int

    def __len__(self) -> int:
        return len(self.runs)

    def batch(self, indices: npt.ArrayLike) -> Int64Array:
        """Several samples, one a row: ``COLUMNS`` of ``seq_length`` each, then whether the segments were swapped."""
        wanted = np.asarray(indices, dtype=np.int64)
        rows_NC = np.zeros((len(wanted), len(COLUMNS) * self.seq_length + 1), dtype=np.int64)
        for row_C, index in zip(rows_NC, wanted.tolist(), strict=True):
            self._fill(row_C, index)
        return rows_NC

    def places(self, indices: npt.ArrayLike) -> list[list[dict[str, Any]]]:
        """See ``Dataset.places``."""
        return self.runs.places(self.source, indices)

    def _fill(self, row_C: Int64Array, index: int) -> None:
        random = sample_random(self.seed, self.part, index)
        begin, end = int(self.runs.begins[index]), int(self.runs.ends[index])
        sentences = sentence_tokens(self.source, begin, end, self.vocabulary.size)
        cls, sep, mask, pad = self.vocabulary.special("cls", "sep", "mask", "pad")
        most = int(self.runs.targets[index])
        if self.binary:
            first, second, swapped = two_segments(random, sentences)
            first, second = truncated(random, first, second, most)
            tokens = np.concatenate([[cls], first, [sep], second, [sep]])
        else:
            swapped = False
            first, second = np.concatenate(sentences)[:most], np.zeros(0, dtype=np.int64)
            tokens = np.concatenate([[cls], first, [sep]])
        special = np.zeros(len(tokens), dtype=np.bool_)
        special[[0, len(first) + 1, len(tokens) - 1]] = True
        continues = self.vocabulary.continues[tokens] if self.whole_words else np.zeros_like(special)
        hidden = positions_to_hide(random, special, continues, self.share)
        ids_T, types_T, seen_T, labels_T, counts_T = row_C[:-1].reshape(len(COLUMNS), self.seq_length)
        ids_T[:] = labels_T[:] = pad
        ids_T[: len(tokens)] = tokens
        ids_T[hidden] = self._in_place_of(random, tokens[hidden], mask)
        types_T[len(first) + 2 : len(tokens)] = 1
        seen_T[: len(tokens)] = 1
        labels_T[hidden] = tokens[hidden]
        counts_T[hidden] = 1
        row_C[-1] = swapped

    def _in_place_of(self, random: np.random.RandomState, true: Int64Array, mask: int) -> Int64Array:
        """Eight in ten become the mask token, one in ten stays, one in ten becomes any token."""
        drawn = random.random_sample(len(true))
        anything = random.randint(0, self.vocabulary.size, size=len(true))
        return np.where(drawn < 0.8, mask, np.where(drawn < 0.9, true, anything))


def masked_tensors(rows_NC: Int64Array) -> dict[str, Any]:
    """The named tensors of rows as ``MaskedDataset.batch`` makes them."""
    columns = torch.from_numpy(rows_NC[:, :-1].reshape(len(rows_NC), len(COLUMNS), -1))
    tensors = {name: columns[:, place].contiguous() for place, name in enumerate(COLUMNS)}
    return {**tensors, "seen": tensors["seen"].bool(), "order": torch.from_numpy(rows_NC[:, -1].copy())}
