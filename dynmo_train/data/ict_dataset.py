"""Samples of the inverse cloze task: a sentence as the query, and its block of sentences, as Megatron makes them.

Each sample is a function of the data, the seed and its number. Shapes in names: N samples, C columns, T tokens.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from .._common.errors import UsageError
from ..config import Config
from ..formats.indexed import IndexedDataset, open_indexed
from .masking import sample_random
from .provenance import check_vocabulary
from .sample_format import Dataset, Int64Array, SampleFormat, SplitBuilder, SplitRequest, columns_to_tensors
from .sentence_spans import SentenceDataset, SpanSettings, build_sentence_spans, sentence_tokens
from .vocabulary import run_vocabulary

# [CLS] title [SEP] block [SEP]
NUM_SPECIAL_TOKENS = 3
COLUMNS = ("query_ids", "query_attention_mask", "context_ids", "context_attention_mask")


def check_titles(source: IndexedDataset, titles: IndexedDataset) -> None:
    """Check that there is one title for each document.

    Raises:
        UsageError: the numbers differ.
    """
    if len(titles.lengths) != source.num_documents:
        raise UsageError(
            f"--titles-data-path {titles.prefix}: must have one sequence per document; it has {len(titles.lengths):,},"
            f" and {source.prefix} has {source.num_documents:,} documents"
        )


@dataclass(frozen=True, kw_only=True, eq=False)
class IctDataset(SentenceDataset):
    """Pairs of a query and its block, of one split; see ``Dataset``.

    Attributes:
        titles: one sequence per document; None puts no title before a block.
        seq_length: tokens of a query and of a block, with special tokens and padding.
        query_in_block_prob: probability that the query stays in its block.
    """

    titles: IndexedDataset | None
    query_in_block_prob: float

    @property
    def num_columns(self) -> int:
        """Columns of a row."""
        return len(COLUMNS) * self.seq_length

    def fill(self, row_C: Int64Array, index: int) -> None:
        """Write the sample ``index`` to ``row_C``: ``COLUMNS``, ``seq_length`` wide each."""
        columns_4T = row_C.reshape(len(COLUMNS), self.seq_length)
        random = sample_random(self.seed, self.split_index, index)
        sentences = self.sentences(index)
        chosen = int(random.randint(0, len(sentences)))
        query = sentences[chosen]
        if random.random_sample() >= self.query_in_block_prob:
            del sentences[chosen]
        cls, sep, pad = self.vocabulary.special("cls", "sep", "pad")
        head = [cls] if self.titles is None else [cls, *self._title(int(self.spans.begins[index])), sep]
        # A span ends with the sentence that reaches its target, so its last tokens may not fit.
        room = self.seq_length - len(head) - 1
        block = np.concatenate([*sentences, np.zeros(0, dtype=np.int64)])[:room]
        texts = ([cls, *query[: self.seq_length - 2], sep], [*head, *block, sep])
        for position, tokens in enumerate(texts):
            ids_T, attention_mask_T = columns_4T[2 * position], columns_4T[2 * position + 1]
            ids_T[:] = pad
            ids_T[: len(tokens)] = tokens
            attention_mask_T[: len(tokens)] = 1

    def _title(self, sequence: int) -> list[int]:
        if self.titles is None:
            return []
        document = int(np.searchsorted(self.source.documents, sequence, side="right")) - 1
        title = sentence_tokens(self.titles, document, document + 1, self.vocabulary.size)[0]
        truncated: list[int] = title[: self.seq_length - NUM_SPECIAL_TOKENS].tolist()
        return truncated


def ict_tensors(rows_NC: Int64Array) -> dict[str, torch.Tensor]:
    """``COLUMNS`` as tensors ``[N, T]`` from ``rows_NC``, int64 ``[N, C]``: ids int64, attention masks bool."""
    return columns_to_tensors(rows_NC, COLUMNS)


def _builder(config: Config) -> SplitBuilder:
    vocabulary = run_vocabulary(config)
    vocabulary.special("cls", "sep", "pad")
    options = config.ict
    if options.titles_data_path is not None:
        check_vocabulary(config, options.titles_data_path)
    titles = open_indexed(options.titles_data_path) if options.titles_data_path is not None else None
    min_sentences = 1 if options.use_one_sent_docs else 2

    def build(request: SplitRequest) -> Dataset:
        # For each data set of a blend: titles are found by document number.
        if titles is not None:
            check_titles(request.source, titles)
        settings = SpanSettings(
            tokens=config.model.seq_length - NUM_SPECIAL_TOKENS,
            min_sentences=min_sentences,
            short_probability=0.0,
            seed=config.training.seed,
            split_index=request.split_index,
            min_remaining=min_sentences,
        )
        return IctDataset(
            source=request.source,
            titles=titles,
            spans=build_sentence_spans(request, settings, titles),
            vocabulary=vocabulary,
            seq_length=config.model.seq_length,
            query_in_block_prob=options.query_in_block_prob,
            seed=config.training.seed,
            split_index=request.split_index,
        )

    return build


FORMAT = SampleFormat(
    builder=_builder,
    to_tensors=lambda _config, rows: ict_tensors(rows),
    num_columns=lambda config: len(COLUMNS) * config.model.seq_length,
)
