"""BERT's samples: two segments of a document, in order or swapped, with masked tokens, as Megatron makes them.

    sentences --split in two, swap by chance, truncate--> [CLS] A [SEP] B [SEP] --mask--> ids, labels

Each sample is a function of the data, the seed and its number. Shapes in names: N samples, C columns, T tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from ..config import Config
from .masking import masked_positions, sample_random
from .sample_format import Dataset, Int64Array, SampleFormat, SplitBuilder, SplitRequest, columns_to_tensors
from .sentence_spans import SentenceDataset, SpanSettings, build_sentence_spans
from .vocabulary import run_vocabulary

NUM_SPECIAL_TOKENS = 3
COLUMNS = ("ids", "types", "attention_mask", "labels", "loss_mask")


def split_segments(
    random: np.random.RandomState, sentences: Sequence[Int64Array]
) -> tuple[Int64Array, Int64Array, bool]:
    """Split the sentences into two segments at a random sentence, and swap them with probability 1/2.

    Args:
        random: generator of the sample.
        sentences: token ids of each sentence, int64 ``[length]``; at least two sentences.

    Returns:
        First segment, second segment, int64 ``[length]`` each, and whether they are swapped.
    """
    cut = int(random.randint(1, len(sentences))) if len(sentences) > 2 else 1
    first, second = np.concatenate(sentences[:cut]), np.concatenate(sentences[cut:])
    if random.random_sample() < 0.5:
        return second, first, True
    return first, second, False


def truncate_segments(
    random: np.random.RandomState, first: Int64Array, second: Int64Array, max_tokens: int
) -> tuple[Int64Array, Int64Array]:
    """Drop tokens until both segments have ``max_tokens`` together: of the longer one, from a random end.

    Args:
        random: generator of the sample.
        first: token ids of the first segment, int64 ``[length]``.
        second: token ids of the second segment, int64 ``[length]``.
        max_tokens: maximum number of tokens of both segments.

    Returns:
        Both segments, shortened; slices of the arguments.
    """
    excess = len(first) + len(second) - max_tokens
    if excess <= 0:
        return first, second
    bounds = [[0, len(first)], [0, len(second)]]
    # Token by token, because the longer segment changes; the bounds move, and no array is copied.
    for from_front in (random.random_sample(excess) < 0.5).tolist():
        longer = bounds[0] if bounds[0][1] - bounds[0][0] > bounds[1][1] - bounds[1][0] else bounds[1]
        if from_front:
            longer[0] += 1
        else:
            longer[1] -= 1
    (a, b), (c, d) = bounds
    return first[a:b], second[c:d]


@dataclass(frozen=True, kw_only=True, eq=False)
class BertDataset(SentenceDataset):
    """BERT's samples of one split; see ``Dataset``.

    Attributes:
        is_pair: whether a sample has two segments.
        mask_prob: share of the tokens that are masked.
        whole_words: whether all tokens of a word are masked together.
    """

    is_pair: bool
    mask_prob: float
    whole_words: bool

    @property
    def num_columns(self) -> int:
        """Columns of a row."""
        return len(COLUMNS) * self.seq_length + 1

    def fill(self, row_C: Int64Array, index: int) -> None:
        """Write the sample ``index``: ``COLUMNS``, ``seq_length`` wide each, then 1 where the segments are swapped."""
        # One generator for all draws of a sample: the order of the draws below is a part of the data's definition.
        random = sample_random(self.seed, self.split_index, index)
        sentences = self.sentences(index)
        cls, sep, mask, pad = self.vocabulary.special("cls", "sep", "mask", "pad")
        max_tokens = int(self.spans.targets[index])
        if self.is_pair:
            first, second, swapped = split_segments(random, sentences)
            first, second = truncate_segments(random, first, second, max_tokens)
            tokens = np.concatenate([[cls], first, [sep], second, [sep]])
        else:
            swapped = False
            first = np.concatenate(sentences)[:max_tokens]
            tokens = np.concatenate([[cls], first, [sep]])
        special = np.zeros(len(tokens), dtype=np.bool_)
        special[[0, len(first) + 1, len(tokens) - 1]] = True
        continues = self.vocabulary.continues[tokens] if self.whole_words else np.zeros_like(special)
        masked = masked_positions(random, special, continues, self.mask_prob)
        ids_T, types_T, attention_mask_T, labels_T, loss_mask_T = row_C[:-1].reshape(len(COLUMNS), self.seq_length)
        ids_T[:] = labels_T[:] = pad
        ids_T[: len(tokens)] = tokens
        ids_T[masked] = self._replacements(random, tokens[masked], mask)
        types_T[len(first) + 2 : len(tokens)] = 1
        attention_mask_T[: len(tokens)] = 1
        labels_T[masked] = tokens[masked]
        loss_mask_T[masked] = 1
        row_C[-1] = swapped

    def _replacements(self, random: np.random.RandomState, tokens: Int64Array, mask: int) -> Int64Array:
        """Replace 80 % by the mask token, keep 10 %, replace 10 % by a random token."""
        # All are drawn, also where they are not used: the number of draws must not depend on their values.
        drawn = random.random_sample(len(tokens))
        random_tokens = random.randint(0, self.vocabulary.size, size=len(tokens))
        return np.where(drawn < 0.8, mask, np.where(drawn < 0.9, tokens, random_tokens))


def bert_tensors(rows_NC: Int64Array) -> dict[str, torch.Tensor]:
    """Split rows into the tensors that the model reads.

    Args:
        rows_NC: rows of :meth:`BertDataset.batch`, int64 ``[N, C]``.

    Returns:
        ``COLUMNS``, ``[N, T]``, and ``order``, ``[N]``, 1 where the segments are swapped; int64, attention mask bool.
    """
    return {**columns_to_tensors(rows_NC[:, :-1], COLUMNS), "order": torch.from_numpy(rows_NC[:, -1].copy())}


def _builder(config: Config) -> SplitBuilder:
    vocabulary = run_vocabulary(config)
    vocabulary.special("cls", "sep", "mask", "pad")
    is_pair = not config.model.bert_no_binary_head

    def build(request: SplitRequest) -> Dataset:
        settings = SpanSettings(
            tokens=config.model.seq_length - NUM_SPECIAL_TOKENS,
            min_sentences=2 if is_pair else 1,
            short_probability=config.data.short_seq_prob,
            seed=config.training.seed,
            split_index=request.split_index,
        )
        return BertDataset(
            source=request.source,
            spans=build_sentence_spans(request, settings),
            vocabulary=vocabulary,
            seq_length=config.model.seq_length,
            is_pair=is_pair,
            mask_prob=config.data.mask_prob,
            whole_words=config.data.whole_word_masking,
            seed=config.training.seed,
            split_index=request.split_index,
        )

    return build


FORMAT = SampleFormat(
    builder=_builder,
    to_tensors=lambda _config, rows: bert_tensors(rows),
    num_columns=lambda config: len(COLUMNS) * config.model.seq_length + 1,
)
