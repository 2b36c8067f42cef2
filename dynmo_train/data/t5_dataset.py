"""T5's samples: spans of a text are replaced by sentinels, and the decoder writes the spans.

Raffel et al. 2020 (arXiv:1910.10683, section 3.1.4). Each sample is a function of the data, the seed and its number.
Shapes in names: N samples, C columns, T tokens of the encoder, U tokens of the decoder.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from .._common.errors import UsageError
from ..config import Config
from .masking import masked_spans, sample_random
from .sample_format import Dataset, Int64Array, SampleFormat, SplitBuilder, SplitRequest, columns_to_tensors
from .sentence_spans import SentenceDataset, SpanSettings, build_sentence_spans
from .vocabulary import run_vocabulary

ENCODER_COLUMNS = ("encoder_ids", "encoder_attention_mask")
DECODER_COLUMNS = ("decoder_ids", "labels", "loss_mask")


def corrupt_spans(
    tokens: Int64Array, spans: Sequence[tuple[int, int]], sentinels: Sequence[int]
) -> tuple[Int64Array, Int64Array]:
    """Encoder input and decoder output (without its end) of a text with masked spans, int64.

    ``a b c d`` with the span ``b c`` and the sentinel ``X`` gives ``a X d`` and ``X b c``.

    Args:
        tokens: the text, int64 ``[n]``.
        spans: ``(begin, end)`` positions, ascending.
        sentinels: one id per span.
    """
    encoder: list[npt.ArrayLike] = []
    decoder: list[npt.ArrayLike] = []
    at = 0
    # Not strict: there are usually fewer spans than sentinels.
    for (begin, end), sentinel in zip(spans, sentinels, strict=False):
        encoder += [tokens[at:begin], [sentinel]]
        decoder += [[sentinel], tokens[begin:end]]
        at = end
    encoder.append(tokens[at:])
    empty = np.zeros(0, dtype=np.int64)
    return np.concatenate([empty, *encoder]), np.concatenate([empty, *decoder])


@dataclass(frozen=True, kw_only=True, eq=False)
class T5Dataset(SentenceDataset):
    """T5's samples of one split; see ``Dataset``.

    Attributes:
        seq_length: tokens that the encoder reads, with padding.
        decoder_seq_length: tokens that the decoder writes, with its end and padding.
        mask_prob: share of the tokens that are masked.
        whole_words: whether all tokens of a word are masked together.
        sentinels: sentinel ids; their number limits that of masked spans.
    """

    decoder_seq_length: int
    mask_prob: float
    whole_words: bool
    sentinels: Sequence[int]

    @property
    def num_columns(self) -> int:
        """Columns of a row."""
        return _num_columns(self.seq_length, self.decoder_seq_length)

    def fill(self, row_C: Int64Array, index: int) -> None:
        """Write the sample ``index`` to ``row_C``: ``ENCODER_COLUMNS``, then ``DECODER_COLUMNS``."""
        # One generator for all draws of a sample: no sample depends on which others a rank has built.
        random = sample_random(self.seed, self.split_index, index)
        sentences = self.sentences(index)
        pad, bos, eos = self.vocabulary.special("pad", "begin", "end")
        tokens = np.concatenate(sentences)[: int(self.spans.targets[index])]
        continues = self.vocabulary.continues[tokens] if self.whole_words else np.zeros(len(tokens), dtype=np.bool_)
        # One decoder position is reserved for the end token.
        masked = masked_spans(random, continues, self.mask_prob, len(self.sentinels), self.decoder_seq_length - 1)
        encoder, decoder = corrupt_spans(tokens, masked, self.sentinels)
        border = len(ENCODER_COLUMNS) * self.seq_length
        ids_T, attention_mask_T = row_C[:border].reshape(len(ENCODER_COLUMNS), -1)
        decoder_ids_U, labels_U, loss_mask_U = row_C[border:].reshape(len(DECODER_COLUMNS), -1)
        ids_T[:], decoder_ids_U[:], labels_U[:] = pad, pad, pad
        ids_T[: len(encoder)], attention_mask_T[: len(encoder)] = encoder, 1
        size = len(decoder) + 1
        decoder_ids_U[0], decoder_ids_U[1:size] = bos, decoder
        labels_U[: size - 1], labels_U[size - 1] = decoder, eos
        loss_mask_U[:size] = 1


def _num_columns(seq_length: int, decoder_seq_length: int) -> int:
    return len(ENCODER_COLUMNS) * seq_length + len(DECODER_COLUMNS) * decoder_seq_length


def t5_tensors(rows_NC: Int64Array, seq_length: int) -> dict[str, torch.Tensor]:
    """Split rows into the tensors that the model reads.

    Args:
        rows_NC: rows of :meth:`T5Dataset.batch`, int64 ``[N, C]``.
        seq_length: tokens of the encoder T.

    Returns:
        ``ENCODER_COLUMNS``, ``[N, T]``, and ``DECODER_COLUMNS``, ``[N, U]``; int64, the attention mask bool.
    """
    border = len(ENCODER_COLUMNS) * seq_length
    return columns_to_tensors(rows_NC[:, :border], ENCODER_COLUMNS) | columns_to_tensors(
        rows_NC[:, border:], DECODER_COLUMNS
    )


def _builder(config: Config) -> SplitBuilder:
    vocabulary = run_vocabulary(config)
    vocabulary.special("pad", "begin", "end")
    if not config.data.vocab_extra_ids:
        raise UsageError("--vocab-extra-ids 0: pretrain t5 needs a sentinel token for each masked span; give 100")
    sentinels = vocabulary.sentinels(config.data.vocab_extra_ids)

    def build(request: SplitRequest) -> Dataset:
        settings = SpanSettings(
            # As in Megatron, two tokens fewer than fit.
            tokens=config.model.seq_length - 2,
            min_sentences=1,
            short_probability=config.data.short_seq_prob,
            seed=config.training.seed,
            split_index=request.split_index,
        )
        return T5Dataset(
            source=request.source,
            spans=build_sentence_spans(request, settings),
            vocabulary=vocabulary,
            seq_length=config.model.seq_length,
            decoder_seq_length=config.model.decoder_seq_length,
            mask_prob=config.data.mask_prob,
            whole_words=config.data.whole_word_masking,
            sentinels=sentinels,
            seed=config.training.seed,
            split_index=request.split_index,
        )

    return build


FORMAT = SampleFormat(
    builder=_builder,
    to_tensors=lambda config, rows: t5_tensors(rows, config.model.seq_length),
    num_columns=lambda config: _num_columns(config.model.seq_length, config.model.decoder_seq_length),
)
