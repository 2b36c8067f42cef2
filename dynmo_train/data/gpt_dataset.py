"""Samples of causal language models: documents shuffled, concatenated and cut into sequences of equal length.

    documents --shuffle, concatenate--> token stream --cut at multiples of T--> samples --shuffle--> order of the run

A sample has T + 1 tokens: the model reads the first T, and token ``t + 1`` is the label of token ``t``. In the stream
each sample begins with the last token of the one before. The order is a function of the documents, the split, the
sequence length and the seed; it does not depend on the number of ranks.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from .._common.errors import UsageError
from ..config import Config
from ..formats.dataset import read_sidecar
from ..formats.indexed import IndexedDataset, prefix_of
from .sample_format import Dataset, Int64Array, SampleError, SampleFormat, SplitBuilder, SplitRequest
from .sample_index import SampleIndex, SampleIndexSpec, build_sample_index, count_tokens
from .tokenizer import TokenizerFiles, open_tokenizer


class TokenError(SampleError):
    """A token id outside the vocabulary."""


@dataclass(frozen=True, kw_only=True, eq=False)
class GptDataset:
    """The samples of one split of a data set; see ``Dataset``."""

    source: IndexedDataset
    seq_length: int
    vocab_size: int
    index: SampleIndex

    def __len__(self) -> int:
        return len(self.index.order)

    def batch(self, indices: npt.ArrayLike) -> Int64Array:
        """Token ids of several samples, int64 ``[n, seq_length + 1]``.

        Args:
            indices: sample numbers, ``[n]``.

        Raises:
            TokenError: an id of the data set is not in the vocabulary.
        """
        return self.batch_columns(indices, np.arange(self.seq_length + 1))

    def batch_columns(self, indices: npt.ArrayLike, columns: Int64Array) -> Int64Array:
        """Some token ids of several samples, int64 ``[n, c]``.

        Args:
            indices: sample numbers, ``[n]``.
            columns: places in the sample, ``[c]``.

        Raises:
            TokenError: an id that was read is not in the vocabulary.
        """
        index, source = self.index, self.source
        # int64 before the product: positions in the stream exceed the uint32 of the stored order.
        starts_B = index.order[np.asarray(indices, dtype=np.int64)].astype(np.int64) * self.seq_length
        stream_BT = starts_B[:, None] + columns
        # ``right``: a token at the end of a piece belongs to the next piece, and pieces without tokens are skipped.
        piece_BT = np.searchsorted(index.ends, stream_BT, side="right")
        sequence_BT = index.pieces[piece_BT]
        after_BT = source.starts[sequence_BT] + source.lengths[sequence_BT]
        tokens_BT: Int64Array = source.tokens[after_BT - (index.ends[piece_BT] - stream_BT)].astype(np.int64)
        check_ids(tokens_BT, source.prefix, self.vocab_size)
        return tokens_BT

    def token_ranges(self, indices: npt.ArrayLike) -> list[list[dict[str, Any]]]:
        """See ``Dataset``; ``indices`` are sample numbers, ``[n]``. The last token of a sample is only a label."""
        return [self._ranges(int(self.index.order[index])) for index in np.asarray(indices, dtype=np.int64)]

    def _ranges(self, position: int) -> list[dict[str, Any]]:
        index, source = self.index, self.source
        begin, ranges = position * self.seq_length, []
        end = begin + self.seq_length + 1
        piece = int(np.searchsorted(index.ends, begin, side="right"))
        while begin < end:
            sequence, until = int(index.pieces[piece]), int(index.ends[piece])
            after = int(source.starts[sequence]) + int(source.lengths[sequence])
            tokens = [after - (until - begin), after - (until - min(end, until))]
            if until > begin:
                ranges.append({"prefix": str(source.prefix), "sequences": [sequence, sequence + 1], "tokens": tokens})
            begin, piece = max(begin, until), piece + 1
        return ranges


def check_ids(ids: Int64Array, prefix: str, vocab_size: int) -> None:
    """Refuse token ids outside the vocabulary.

    Args:
        ids: token ids of any shape.
        prefix: the data set.
        vocab_size: upper bound of the ids.

    Raises:
        TokenError: an id is not in the vocabulary.
    """
    if ids.size and not (ids.min() >= 0 and ids.max() < vocab_size):
        bad = ids.max() if ids.max() >= vocab_size else ids.min()
        raise TokenError(
            f"{prefix}.bin contains the token id {bad}; the vocabulary has the ids 0 to"
            f" {vocab_size - 1}: give the --tokenizer-model or --vocab-size that the data was made with"
        )


def build_gpt_dataset(
    request: SplitRequest, *, seq_length: int, seed: int, vocab_size: int, order: str = "stable"
) -> GptDataset:
    """Build the samples of a split, over the epochs that they need.

    Args:
        request: which samples.
        seq_length: tokens that the model reads of a sample.
        seed: seed of the shuffles.
        vocab_size: upper bound of the token ids.
        order: ``stable`` or ``megatron``, see ``sample_index``.

    Raises:
        UsageError: an epoch has fewer samples than a batch.
    """
    source, (begin, end) = request.source, request.documents
    tokens, needed = count_tokens(source, begin, end), max(1, request.batch_size)
    samples = max(0, tokens - 1) // seq_length
    if samples < needed:
        raise UsageError(
            f"the {request.split} split of {source.prefix} is too small: {end - begin:,} documents with {tokens:,}"
            f" tokens make {samples:,} samples of --seq-length {seq_length}, and a batch needs {needed:,}; add text,"
            " lower --seq-length or the batch size, or change --split"
            + ("" if request.split == "train" else ", or give --eval-iters 0")
        )
    spec = SampleIndexSpec(
        first_document=begin,
        end_document=end,
        split_index=request.split_index,
        seq_length=seq_length,
        seed=seed,
        num_samples=request.num_samples,
        order=order,
    )
    index = build_sample_index(source, spec, request.cache)
    return GptDataset(source=source, seq_length=seq_length, vocab_size=vocab_size, index=index)


def end_of_document(config: Config) -> int | None:
    """The id of the end-of-document token: the tokenizer's, else that in the sidecar of the first data set."""
    named = TokenizerFiles.of(vars(config.data))
    if named is not None:
        return _tokenizer_eod(named.kind, tuple(sorted(named.files.items())))
    # Megatron's NullTokenizer adds this id to those of the data.
    if config.data.mock_data or config.data.tokenizer_type == "NullTokenizer":
        return config.model.vocab_size - 1
    blends = (config.data.blend, *config.data.part_blends)
    prefixes = [prefix for blend in blends for _, prefix in blend]
    sidecar = read_sidecar(prefix_of(prefixes[0])) if prefixes else None
    eod: int | None = None if sidecar is None else sidecar["eod_id"]
    return eod


@functools.lru_cache(maxsize=1)
def _tokenizer_eod(kind: str, files: tuple[tuple[str, Path], ...]) -> int | None:
    return open_tokenizer(TokenizerFiles(kind=kind, files=dict(files))).eod


def _builder(config: Config) -> SplitBuilder:
    data = config.data
    flags = {
        "--reset-position-ids": data.reset_position_ids,
        "--reset-attention-mask": data.reset_attention_mask,
        "--eod-mask-loss": data.eod_mask_loss,
    }
    given = [flag for flag, on in flags.items() if on]
    if given and end_of_document(config) is None:
        raise UsageError(
            f"{', '.join(given)}: the end-of-document token is unknown; give the tokenizer (--tokenizer-model,"
            " --vocab-file), or make the data set with dynmo-prep binarize --append-eod, which states it"
        )

    def build(request: SplitRequest) -> Dataset:
        """See ``build_gpt_dataset``, which raises ``UsageError``."""
        return build_gpt_dataset(
            request,
            seq_length=config.model.seq_length,
            seed=config.training.seed,
            vocab_size=config.model.vocab_size,
            order=config.data.sample_order,
        )

    return build


def causal_tensors(rows_NC: Int64Array) -> dict[str, torch.Tensor]:
    """``ids`` and the next tokens as ``labels``, int64 ``[N, C - 1]``, from token ids ``rows_NC``, int64 ``[N, C]``."""
    tokens = torch.from_numpy(rows_NC)
    return {"ids": tokens[:, :-1].contiguous(), "labels": tokens[:, 1:].contiguous()}


def document_starts(ids_BT: torch.Tensor, eod: int) -> torch.Tensor:
    """Where the document of each token begins; a document ends with ``eod``, which belongs to it.

    Args:
        ids_BT: int64 token ids, ``[B, T]``.
        eod: id of the end-of-document token.

    Returns:
        int64 ``[B, T]``.
    """
    places_T = torch.arange(ids_BT.shape[1], device=ids_BT.device)
    starts_BT = torch.zeros_like(ids_BT)
    starts_BT[:, 1:] = torch.where(ids_BT[:, :-1] == eod, places_T[1:], 0)
    return starts_BT.cummax(1).values


def packed_tensors(config: Config, rows_NC: Int64Array) -> dict[str, torch.Tensor]:
    """``causal_tensors``, and what the run reads of documents.

    Args:
        config: the run's options.
        rows_NC: token ids, int64 ``[N, C]``.

    Returns:
        int64 ``[N, C - 1]`` each: ``ids``, ``labels``, ``document_starts``, and ``loss_mask``, 0 for tokens that are an
        end of document, whose label is the first token of another one.
    """
    tensors, data = causal_tensors(rows_NC), config.data
    if not data.packs_documents and not data.eod_mask_loss:
        return tensors
    eod = end_of_document(config)
    # A dry run has no data set: its samples are one document each.
    eod = -1 if eod is None else eod
    if data.packs_documents:
        tensors["document_starts"] = document_starts(tensors["ids"], eod)
    if data.eod_mask_loss:
        tensors["loss_mask"] = (tensors["ids"] != eod).long()
    return tensors


FORMAT = SampleFormat(
    builder=_builder,
    to_tensors=packed_tensors,
    num_columns=lambda config: config.model.seq_length + 1,
    # Where documents begin is known from the start of the sample only.
    is_local=lambda config: not config.data.packs_documents and not config.data.eod_mask_loss,
)
