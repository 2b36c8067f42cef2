"""Options of the dataset, its samples and its tokenizer; names are Megatron's where Megatron has the flag."""

# ruff: noqa: RUF009 - option() is dataclasses.field() with a declaration

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

from .. import panels
from ..extensions import base_family
from ..options import option
from ..parse import parse_blend, parse_split

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
MAX_WORKERS = 64
WORD_PIECE_FAMILIES = ("bert", "ict", "t5")
Blend = tuple[tuple[float, str], ...]


def default_tokenizer_type(values: Mapping[str, Any]) -> str:
    """The tokenizer type that Megatron's scripts imply by the vocabulary files that they give."""
    if values["vocab_file"] and values["merge_file"]:
        return "GPT2BPETokenizer"
    if values["vocab_file"] and base_family(values.get("family") or "gpt") in WORD_PIECE_FAMILIES:
        return "BertWordPieceLowerCase"
    return "HuggingFaceTokenizer"


@dataclass(frozen=True, kw_only=True)
class DataConfig:
    """Datasets, samples and tokenizer."""

    PANEL: ClassVar[str] = panels.DATA

    data_path: str | None = option(
        "Indexed dataset prefix, or a blend: WEIGHT PREFIX WEIGHT PREFIX ...",
        default=None,
        refers_to="data",
        common=True,
    )
    train_data_path: str | None = option(
        "Training data, as --data-path; disables --split.", default=None, refers_to="data", common=True
    )
    valid_data_path: str | None = option(
        "Validation data, as --data-path.", default=None, refers_to="data", common=True
    )
    test_data_path: str | None = option("Test data, as --data-path.", default=None, refers_to="data")
    mock_data: bool = option("Random tokens instead of a dataset, made from the seed.", default=False)
    hf_dataset: str | None = option(
        "Hugging Face dataset to stream: hub name, folder or files (gpt, llama).", default=None, common=True
    )
    hf_dataset_name: str | None = option("Configuration of --hf-dataset; none: its default.", default=None)
    hf_dataset_split: str = option("Training split of --hf-dataset.", default="train")
    hf_dataset_revision: str | None = option("Branch, tag or commit of --hf-dataset; none: the latest.", default=None)
    hf_text_field: str = option("Field of --hf-dataset with the text.", default="text")
    hf_shuffle_buffer: int = option(
        "Documents of --hf-dataset shuffled together; 0 keeps their order.", default=0, minimum=0
    )
    hf_valid_split: str | None = option("Validation split of --hf-valid-dataset, else of --hf-dataset.", default=None)
    hf_valid_dataset: str | None = option("Validation data, as --hf-dataset.", default=None)
    reset_position_ids: bool = option("Restart positions after each end-of-document token (gpt, llama).", default=False)
    reset_attention_mask: bool = option(
        "Attend within documents only, which end with the end-of-document token (gpt, llama).", default=False
    )
    eod_mask_loss: bool = option("Exclude end-of-document inputs from the loss (gpt, llama).", default=False)
    sft: bool = option(
        "Train on conversations of binarize-chat: loss on the assistant's tokens (gpt, llama).",
        default=False,
        common=True,
    )
    calculate_per_token_loss: bool = option(
        "Average the loss over counted tokens of the step, not microbatches.", default=False
    )
    sft_packing: bool = option("Pack several conversations into a sample of --sft; else pad one.", default=True)
    split: str = option("Weights of the training, validation and test splits.", default="969,30,1", common=True)
    data_impl: DataImpl = option("Dataset implementation; must match the file.", default="infer")
    sample_order: SampleOrder = option(
        "Sample order: stable (independent of training length), or Megatron's.",
        default="stable",
    )
    data_cache_path: str | None = option(
        "Folder of sample indices; none: cache next to the first dataset.",
        default=None,
        refers_to="place",
    )
    num_workers: int | None = option(
        "Processes per rank that prepare batches; none: 2 on cuda, else 0.",
        default=None,
        minimum=0,
        maximum=MAX_WORKERS,
    )
    tokenizer_model: str | None = option(
        "Path of tokenizer.json or a SentencePiece model, or of its folder.",
        default=None,
        refers_to="file",
        common=True,
    )
    vocab_file: str | None = option(
        "Vocabulary file (GPT2BPE, BertWordPiece and WhitespaceVocab tokenizers).",
        default=None,
        refers_to="file",
        common=True,
    )
    merge_file: str | None = option("Merges file of GPT2BPETokenizer.", default=None, refers_to="file", common=True)
    tokenizer_type: TokenizerType = option(
        "Tokenizer type; NullTokenizer has --vocab-size ids.",
        derive=(
            "GPT2BPETokenizer with --vocab-file and --merge-file; BertWordPieceLowerCase with --vocab-file (bert, ict,"
            " t5); else HuggingFaceTokenizer",
            lambda v, _: default_tokenizer_type(v),
        ),
        common=True,
    )

    vocab_extra_ids: int = option("Number of sentinel tokens added to the vocabulary (t5).", default=0, minimum=0)
    mask_prob: float = option("Masking probability of tokens (bert, t5).", default=0.15, above=0, below=1)
    short_seq_prob: float = option("Probability of a shortened sample (bert, t5).", default=0.1, minimum=0, below=1)
    whole_word_masking: bool = option("Mask all pieces of a word together (bert, t5).", default=True)

    @property
    def split_shares(self) -> tuple[float, float, float]:
        """``split`` as three fractions with sum 1."""
        return parse_split(self.split)

    @property
    def blend(self) -> Blend:
        """``data_path`` as (weight, prefix) pairs; empty if not given."""
        return parse_blend("--data-path", self.data_path) if self.data_path else ()

    @property
    def part_blends(self) -> tuple[Blend, Blend, Blend]:
        """The blends of ``train_data_path``, ``valid_data_path`` and ``test_data_path``; each may be empty."""
        given = (
            ("--train-data-path", self.train_data_path),
            ("--valid-data-path", self.valid_data_path),
            ("--test-data-path", self.test_data_path),
        )
        first, second, third = (parse_blend(flag, text) if text else () for flag, text in given)
        return first, second, third

    @property
    def packs_documents(self) -> bool:
        """Whether the model reads where documents begin."""
        return self.resets_positions or self.resets_attention

    @property
    def resets_positions(self) -> bool:
        """Whether positions restart with each document or conversation."""
        return self.reset_position_ids or (self.sft and self.sft_packing)

    @property
    def resets_attention(self) -> bool:
        """Whether a token attends to its own document or conversation only."""
        return self.reset_attention_mask or (self.sft and self.sft_packing)

    @property
    def masks_loss(self) -> bool:
        """Whether the loss counts some tokens only."""
        return self.eod_mask_loss or self.sft

    @property
    def name(self) -> str:
        """The name of the dataset in logs and checkpoints."""
        return "mock" if self.mock_data else self.hf_dataset or self.data_path or self.train_data_path or ""
