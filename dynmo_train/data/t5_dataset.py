"""T5's samples: spans of a text hidden behind sentinels, which the decoder writes out (Raffel et al. 2020, 3.1.4).

Each sample is a pure function of the data, the seed and its number.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from ..formats.indexed import IndexedDataset
from .bert_dataset import sentence_tokens
from .masking import sample_random, spans_to_hide
from .sentence_spans import Runs
from .vocabulary import Vocabulary

Int64Array = npt.NDArray[np.int64]


def corrupted(
    tokens: Int64Array, spans: Sequence[tuple[int, int]], sentinels: Sequence[int]
) -> tuple[Int64Array, Int64Array]:
    """What the encoder reads, and what the decoder is to write without its end: each span behind its sentinel.

    ``a b c d`` with the span ``b c`` and the sentinel ``X`` gives ``a X d`` and ``X b c``.
    """
    read: list[npt.ArrayLike] = []
    written: list[npt.ArrayLike] = []
    at = 0
    for (begin, end), sentinel in zip(spans, sentinels, strict=False):
        read += [tokens[at:begin], [sentinel]]
        written += [[sentinel], tokens[begin:end]]
        at = end
    read.append(tokens[at:])
    empty = np.zeros(0, dtype=np.int64)
    return np.concatenate([empty, *read]), np.concatenate([empty, *written])


@dataclass(frozen=True, kw_only=True, eq=False)
class SpanDataset:
    """T5's samples of one part of a data set.

    Attributes:
        seq_length: tokens that the encoder reads, padding included.
        answer_length: tokens that the decoder writes, its end and padding included.
        share: of tokens that are hidden.
        whole_words: whether the pieces of a word are hidden together.
        sentinels: ids, one for each span at most.
        part: number of the part.
    """

    source: IndexedDataset
    runs: Runs
    vocabulary: Vocabulary
    seq_length: int
    answer_length: int
    share: float
    whole_words: bool
    sentinels: Sequence[int]
    seed: int
    part: int

    def __len__(self) -> int:
        return len(self.runs)

    def batch(self, indices: npt.ArrayLike) -> Int64Array:
        """Several samples, one a row: ids and seen of the encoder, ids, labels and counts of the decoder."""
        wanted = np.asarray(indices, dtype=np.int64)
        rows_NC = np.zeros((len(wanted), 2 * self.seq_length + 3 * self.answer_length), dtype=np.int64)
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
        pad, first, last = self.vocabulary.special("pad", "begin", "end")
        tokens = np.concatenate(sentences)[: int(self.runs.targets[index])]
        continues = self.vocabulary.continues[tokens] if self.whole_words else np.zeros(len(tokens), dtype=np.bool_)
        spans = spans_to_hide(random, continues, self.share, len(self.sentinels), self.answer_length - 1)
        read, written = corrupted(tokens, spans, self.sentinels)
        encoder, decoder = row_C[: 2 * self.seq_length], row_C[2 * self.seq_length :]
        ids_T, seen_T = encoder.reshape(2, -1)
        answer_T, labels_T, counts_T = decoder.reshape(3, -1)
        ids_T[:], answer_T[:], labels_T[:] = pad, pad, pad
        ids_T[: len(read)], seen_T[: len(read)] = read, 1
        size = len(written) + 1
        answer_T[0], answer_T[1:size] = first, written
        labels_T[: size - 1], labels_T[size - 1] = written, last
        counts_T[:size] = 1


def span_tensors(rows_NC: Int64Array, seq_length: int) -> dict[str, Any]:
    """The named tensors of rows as ``SpanDataset.batch`` makes them."""
    encoder = torch.from_numpy(rows_NC[:, : 2 * seq_length].reshape(len(rows_NC), 2, -1))
    decoder = torch.from_numpy(rows_NC[:, 2 * seq_length :].reshape(len(rows_NC), 3, -1))
    return {
        "encoder_ids": encoder[:, 0].contiguous(),
        "encoder_seen": encoder[:, 1].bool(),
        "decoder_ids": decoder[:, 0].contiguous(),
        "labels": decoder[:, 1].contiguous(),
        "counts": decoder[:, 2].contiguous(),
    }
