"""Samples of the inverse cloze task: a sentence, and the block of sentences that it is from, as Megatron makes them.

Each sample is a pure function of the data, the seed and its number.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from .._common.errors import UsageError
from ..formats.indexed import IndexedDataset
from .bert_dataset import sentence_tokens
from .masking import sample_random
from .sentence_spans import Runs
from .vocabulary import Vocabulary

Int64Array = npt.NDArray[np.int64]
# [CLS] title [SEP] block [SEP]
SPECIAL_TOKENS = 3
COLUMNS = ("query_ids", "query_seen", "context_ids", "context_seen")


def check_titles(source: IndexedDataset, titles: IndexedDataset) -> None:
    """Raise ``UsageError`` unless there is one title for each document."""
    if len(titles.lengths) != source.num_documents:
        raise UsageError(
            f"{titles.prefix} has {len(titles.lengths)} titles, and {source.prefix} {source.num_documents} documents:"
            " --titles-data-path needs one sequence for each document"
        )


@dataclass(frozen=True, kw_only=True, eq=False)
class BlockDataset:
    """Pairs of a query and its block, of one part of a data set.

    Attributes:
        seq_length: tokens of a query and of a block, special ones and padding included.
        titles: one sequence for each document; None puts no title before a block.
        stay: share of the queries that stay in their block.
        part: number of the part.
    """

    source: IndexedDataset
    titles: IndexedDataset | None
    runs: Runs
    vocabulary: Vocabulary
    seq_length: int
    stay: float
    seed: int
    part: int

    def __len__(self) -> int:
        return len(self.runs)

    def batch(self, indices: npt.ArrayLike) -> Int64Array:
        """Several samples, one a row: ``COLUMNS`` of ``seq_length`` each."""
        wanted = np.asarray(indices, dtype=np.int64)
        rows_NC = np.zeros((len(wanted), len(COLUMNS) * self.seq_length), dtype=np.int64)
        for row_C, index in zip(rows_NC, wanted.tolist(), strict=True):
            self._fill(row_C.reshape(len(COLUMNS), self.seq_length), index)
        return rows_NC

    def places(self, indices: npt.ArrayLike) -> list[list[dict[str, Any]]]:
        """See ``Dataset.places``."""
        return self.runs.places(self.source, indices)

    def _fill(self, columns_4T: Int64Array, index: int) -> None:
        random = sample_random(self.seed, self.part, index)
        begin, end = int(self.runs.begins[index]), int(self.runs.ends[index])
        sentences = sentence_tokens(self.source, begin, end, self.vocabulary.size)
        chosen = int(random.randint(0, len(sentences)))
        query = sentences[chosen]
        if random.random_sample() >= self.stay:
            del sentences[chosen]
        cls, sep, pad = self.vocabulary.special("cls", "sep", "pad")
        head = [cls] if self.titles is None else [cls, *self._title(begin), sep]
        # Blocks end with the sentence that makes them long enough: what is beyond is cut off.
        room = self.seq_length - len(head) - 1
        block = np.concatenate([*sentences, np.zeros(0, dtype=np.int64)])[:room]
        texts = ([cls, *query[: self.seq_length - 2], sep], [*head, *block, sep])
        for place, tokens in enumerate(texts):
            ids_T, seen_T = columns_4T[2 * place], columns_4T[2 * place + 1]
            ids_T[:] = pad
            ids_T[: len(tokens)] = tokens
            seen_T[: len(tokens)] = 1

    def _title(self, sequence: int) -> list[int]:
        if self.titles is None:
            return []
        document = int(np.searchsorted(self.source.documents, sequence, side="right")) - 1
        title = sentence_tokens(self.titles, document, document + 1, self.vocabulary.size)[0]
        kept: list[int] = title[: self.seq_length - SPECIAL_TOKENS].tolist()
        return kept


def block_tensors(rows_NC: Int64Array) -> dict[str, torch.Tensor]:
    """The named tensors of rows as ``BlockDataset.batch`` makes them."""
    columns = torch.from_numpy(rows_NC.reshape(len(rows_NC), len(COLUMNS), -1))
    tensors = {name: columns[:, place].contiguous() for place, name in enumerate(COLUMNS)}
    return {name: each.bool() if name.endswith("_seen") else each for name, each in tensors.items()}
