"""Options of the data set, its samples and its tokenizer; names are Megatron's wherever it has them."""

# ruff: noqa: RUF009 - option() is dataclasses.field() with a declaration

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from .extensions import base_family
from .options import option
from .parse import parse_blend, parse_split

TokenizerType = Literal[
    "HuggingFaceTokenizer",
    "GPT2BPETokenizer",
    "BertWordPieceLowerCase",
    "BertWordPieceCase",
    "SentencePieceTokenizer",
    "Llama2Tokenizer",
    "WhitespaceVocab",
    "NullTokenizer",
]
DataImpl = Literal["infer", "mmap", "cached", "lazy"]
SampleOrder = Literal["stable", "megatron"]
WORD_PIECE_FAMILIES = ("bert", "ict", "t5")
Blend = tuple[tuple[float, str], ...]


def default_tokenizer_type(values: Mapping[str, Any]) -> str:
    """As Megatron's scripts mean it, which leave out the type of GPT's two files and of BERT's and T5's one."""
    if values["vocab_file"] and values["merge_file"]:
        return "GPT2BPETokenizer"
    if values["vocab_file"] and base_family(values.get("family") or "gpt") in WORD_PIECE_FAMILIES:
        return "BertWordPieceLowerCase"
    return "HuggingFaceTokenizer"


@dataclass(frozen=True, kw_only=True)
class DataConfig:
    """What to train on."""

    data_path: str | None = option(
        "Indexed data set: PREFIX of PREFIX.bin and PREFIX.idx; or several, each behind its weight: 0.3 A 0.7 B.",
        default=None,
        refers_to="data",
    )
    train_data_path: str | None = option(
        "Data of the training alone, as --data-path; no --split then.", default=None, refers_to="data"
    )
    valid_data_path: str | None = option(
        "Data of the validation alone, as --data-path.", default=None, refers_to="data"
    )
    test_data_path: str | None = option("Data of the test alone, as --data-path.", default=None, refers_to="data")
    split: str = option("Shares of documents for training, validation and test: three numbers.", default="969,30,1")
    data_impl: DataImpl = option(
        "Form of the data set; the file says it, and another one here is an error.", default="infer"
    )
    sample_order: SampleOrder = option(
        "Order of samples: stable (a longer run begins with the samples of a shorter one), or exactly Megatron's.",
        default="stable",
    )
    data_cache_path: str | None = option(
        "Folder for sample indices of large data sets; none is a folder cache next to the first data set.",
        default=None,
        refers_to="place",
    )
    tokenizer_model: str | None = option(
        "Path of the tokenizer.json, or of the SentencePiece model, that made the data set.",
        default=None,
        refers_to="file",
    )
    vocab_file: str | None = option(
        "Vocabulary of the GPT2, Bert and WhitespaceVocab tokenizers.", default=None, refers_to="file"
    )
    merge_file: str | None = option("Merges of GPT2BPETokenizer.", default=None, refers_to="file")
    tokenizer_type: TokenizerType = option(
        "Kind of tokenizer; NullTokenizer is --vocab-size ids.",
        derive=(
            "GPT2BPETokenizer with --vocab-file and --merge-file, BertWordPieceLowerCase with --vocab-file alone for"
            " bert, ict and t5, else HuggingFaceTokenizer",
            lambda v, _: default_tokenizer_type(v),
        ),
    )

    vocab_extra_ids: int = option(
        "Tokens behind the tokenizer's own that stand for a T5's hidden spans.", default=0, minimum=0
    )
    mask_prob: float = option("Share of tokens that BERT and T5 hide.", default=0.15, above=0, below=1)
    short_seq_prob: float = option(
        "Share of BERT's and T5's samples that are cut short, evenly from 2 tokens on.", default=0.1, minimum=0, below=1
    )
    whole_word_masking: bool = option("Hide all pieces of a word together (bert, t5).", default=True)

    @property
    def split_shares(self) -> tuple[float, float, float]:
        """``split`` as three fractions that add up to 1."""
        return parse_split(self.split)

    @property
    def blend(self) -> Blend:
        """``data_path`` as (weight, prefix) pairs; empty without it."""
        return parse_blend("--data-path", self.data_path) if self.data_path else ()

    @property
    def part_blends(self) -> tuple[Blend, Blend, Blend]:
        """The same of the data that belong to training, validation and test alone; each may be empty."""
        given = (
            ("--train-data-path", self.train_data_path),
            ("--valid-data-path", self.valid_data_path),
            ("--test-data-path", self.test_data_path),
        )
        first, second, third = (parse_blend(flag, text) if text else () for flag, text in given)
        return first, second, third

    @property
    def name(self) -> str:
        """What the data are called in logs and checkpoints: their options' own words."""
        return self.data_path or self.train_data_path or ""
