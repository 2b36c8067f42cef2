"""Which samples each model family trains on, and how rows of numbers become the tensors that its items read.

Every kind of data set gives a batch as rows of int64, so that blends mix them whatever they are.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from .._common.errors import UsageError
from ..config import Config
from ..formats.indexed import IndexedDataset, open_indexed
from .bert_dataset import COLUMNS as MASKED_COLUMNS
from .bert_dataset import SPECIAL_TOKENS, MaskedDataset, masked_tensors
from .blend import Dataset
from .gpt_dataset import PARTS, Part, build_gpt_dataset
from .ict_dataset import COLUMNS as BLOCK_COLUMNS
from .ict_dataset import SPECIAL_TOKENS as BLOCK_SPECIAL_TOKENS
from .ict_dataset import BlockDataset, block_tensors, check_titles
from .provenance import check_vocabulary
from .sentence_spans import Runs, RunSettings, build_runs
from .t5_dataset import SpanDataset, span_tensors
from .tokenizer import TokenizerFiles, open_tokenizer
from .vocabulary import Vocabulary, make_vocabulary

Int64Array = npt.NDArray[np.int64]
Tensors = Callable[[Int64Array], dict[str, torch.Tensor]]


@dataclass(frozen=True, kw_only=True)
class PartWanted:
    """A part of one data set.

    Attributes:
        shares: fractions of the documents for training, validation and test.
        num_samples: how many samples are wanted.
        batch_size: samples that an epoch must hold at least.
        cache: folder of indices.
    """

    source: IndexedDataset
    part: Part
    shares: tuple[float, float, float]
    num_samples: int
    batch_size: int
    cache: Path


BuildPart = Callable[[PartWanted], Dataset]


def vocabulary_of(config: Config) -> Vocabulary:
    """The vocabulary of the run's tokenizer.

    Raises:
        UsageError: none is given, or ``--vocab-size`` is too small for it.
    """
    named = TokenizerFiles.of(vars(config.data))
    if named is None:
        raise UsageError(
            f"pretrain {config.model.family} hides words, and must know the tokenizer's special tokens: give"
            " --tokenizer-model or --vocab-file"
        )
    tokenizer = open_tokenizer(named)
    source = ", ".join(str(path) for path in named.files.values())
    vocabulary = make_vocabulary(source, tokenizer.vocabulary(), tokenizer.vocab_size)
    highest = max([vocabulary.size - 1, *vocabulary.sentinels(config.data.vocab_extra_ids)])
    if highest >= config.model.vocab_size:
        raise UsageError(
            f"--vocab-size {config.model.vocab_size} is too small: {source} and --vocab-extra-ids"
            f" {config.data.vocab_extra_ids} take {highest + 1} ids"
        )
    return vocabulary


def _causal(config: Config) -> BuildPart:
    def build(wanted: PartWanted) -> Dataset:
        return build_gpt_dataset(
            wanted.source,
            part=wanted.part,
            shares=wanted.shares,
            seq_length=config.model.seq_length,
            seed=config.training.seed,
            num_samples=wanted.num_samples,
            batch_size=wanted.batch_size,
            vocab_size=config.model.vocab_size,
            order=config.data.sample_order,
            cache=wanted.cache,
        )

    return build


def _runs(config: Config, wanted: PartWanted, tokens: int, min_sentences: int) -> Runs:
    return build_runs(
        wanted.source,
        part=wanted.part,
        shares=wanted.shares,
        settings=RunSettings(
            tokens=tokens,
            min_sentences=min_sentences,
            short_probability=config.data.short_seq_prob,
            seed=config.training.seed,
            part=PARTS.index(wanted.part),
        ),
        num_samples=wanted.num_samples,
        batch_size=wanted.batch_size,
        cache=wanted.cache,
    )


def _common(config: Config, wanted: PartWanted, vocabulary: Vocabulary) -> dict[str, Any]:
    return {
        "source": wanted.source,
        "vocabulary": vocabulary,
        "seq_length": config.model.seq_length,
        "share": config.data.mask_prob,
        "whole_words": config.data.whole_word_masking,
        "seed": config.training.seed,
        "part": PARTS.index(wanted.part),
    }


def _masked(config: Config) -> BuildPart:
    vocabulary = vocabulary_of(config)
    vocabulary.special("cls", "sep", "mask", "pad")
    binary = not config.model.bert_no_binary_head
    tokens = config.model.seq_length - SPECIAL_TOKENS

    def build(wanted: PartWanted) -> Dataset:
        runs = _runs(config, wanted, tokens, 2 if binary else 1)
        return MaskedDataset(runs=runs, binary=binary, **_common(config, wanted, vocabulary))

    return build


def _spans(config: Config) -> BuildPart:
    vocabulary = vocabulary_of(config)
    vocabulary.special("pad", "begin", "end")
    if not config.data.vocab_extra_ids:
        raise UsageError("pretrain t5 needs a token for each hidden span: give --vocab-extra-ids, such as 100")
    sentinels = vocabulary.sentinels(config.data.vocab_extra_ids)

    def build(wanted: PartWanted) -> Dataset:
        # As Megatron: room for two tokens more than a text has.
        runs = _runs(config, wanted, config.model.seq_length - 2, 1)
        return SpanDataset(
            runs=runs,
            answer_length=config.model.decoder_seq_length,
            sentinels=sentinels,
            **_common(config, wanted, vocabulary),
        )

    return build


def _blocks(config: Config) -> BuildPart:
    vocabulary = vocabulary_of(config)
    vocabulary.special("cls", "sep", "pad")
    given, seed = config.ict, config.training.seed
    if given.titles_data_path is not None:
        check_vocabulary(config, given.titles_data_path)
    titles = open_indexed(given.titles_data_path) if given.titles_data_path is not None else None
    sentences = 1 if given.use_one_sent_docs else 2

    def build(wanted: PartWanted) -> Dataset:
        if titles is not None:
            check_titles(wanted.source, titles)
        part = PARTS.index(wanted.part)
        runs = build_runs(
            wanted.source,
            part=wanted.part,
            shares=wanted.shares,
            settings=RunSettings(
                tokens=config.model.seq_length - BLOCK_SPECIAL_TOKENS,
                min_sentences=sentences,
                short_probability=0.0,
                seed=seed,
                part=part,
                min_left=sentences,
            ),
            num_samples=wanted.num_samples,
            batch_size=wanted.batch_size,
            cache=wanted.cache,
            titles=titles,
        )
        return BlockDataset(
            source=wanted.source,
            titles=titles,
            runs=runs,
            vocabulary=vocabulary,
            seq_length=config.model.seq_length,
            stay=given.query_in_block_prob,
            seed=seed,
            part=part,
        )

    return build


def causal_tensors(rows_NC: Int64Array) -> dict[str, torch.Tensor]:
    """``ids`` and, one token on, ``labels``."""
    tokens = torch.from_numpy(rows_NC)
    return {"ids": tokens[:, :-1].contiguous(), "labels": tokens[:, 1:].contiguous()}


BUILDERS: Mapping[str, Callable[[Config], BuildPart]] = {
    "gpt": _causal,
    "llama": _causal,
    "bert": _masked,
    "ict": _blocks,
    "t5": _spans,
}


def part_builder(config: Config) -> BuildPart:
    """What builds the samples of a part for the family of a run; raises ``UsageError`` where options do not fit."""
    return BUILDERS[config.model.base_family](config)


def shapes_of(config: Config) -> dict[str, torch.Tensor]:
    """The named tensors of a microbatch, of the types and shapes that the run has; their values mean nothing."""
    model = config.model
    widths = {
        "bert": len(MASKED_COLUMNS) * model.seq_length + 1,
        "ict": len(BLOCK_COLUMNS) * model.seq_length,
        "t5": 2 * model.seq_length + 3 * model.decoder_seq_length,
    }
    columns = widths.get(model.base_family, model.seq_length + 1)
    return tensors_of(config)(np.zeros((config.training.micro_batch_size, columns), dtype=np.int64))


def tensors_of(config: Config) -> Tensors:
    """What makes named tensors of a batch's rows, for the family of a run."""
    makers: dict[str, Tensors] = {
        "bert": masked_tensors,
        "ict": block_tensors,
        "t5": partial(span_tensors, seq_length=config.model.seq_length),
    }
    return makers.get(config.model.base_family, causal_tensors)
