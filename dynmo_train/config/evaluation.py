"""Options of the commands that use a trained model: where it is, on which processes, in which type, and the task's."""

# ruff: noqa: RUF009 - option() is dataclasses.field() with a declaration

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from .data import TokenizerType, default_tokenizer_type
from .options import option

Device = Literal["auto", "cpu", "cuda"]


@dataclass(frozen=True, kw_only=True)
class PlaceConfig:
    """A trained model and the processes that it runs on; names are Megatron's wherever it has them."""

    load: str = option("Run directory, its checkpoints, one checkpoint, or a Hugging Face directory.")
    tokenizer_model: str | None = option(
        "Path of a tokenizer.json or a SentencePiece model; none is the checkpoint's.", default=None
    )
    vocab_file: str | None = option("Vocabulary of the GPT2, Bert and WhitespaceVocab tokenizers.", default=None)
    merge_file: str | None = option("Merges of GPT2BPETokenizer.", default=None)
    tokenizer_type: TokenizerType = option(
        "Kind of tokenizer.",
        derive=(
            "GPT2BPETokenizer with --vocab-file and --merge-file, else HuggingFaceTokenizer",
            lambda v, _: default_tokenizer_type(v),
        ),
    )
    tensor_model_parallel_size: int = option("Ranks that share each matrix product.", default=1, minimum=1)
    pipeline_model_parallel_size: int | None = option(
        "Pipeline positions; none is the processes / --tensor-model-parallel-size.", default=None, minimum=1
    )
    micro_batch_size: int = option("Samples in a microbatch.", default=4, minimum=1)
    bf16: bool = option("Compute in bfloat16.", default=False)
    fp16: bool = option("Compute in float16.", default=False)
    num_threads: int | None = option(
        "Threads of arithmetic in each process on CPU; none is torch's own choice.", default=None, minimum=1
    )
    device: Device = option("Where to compute; auto is cuda where it is present, else cpu.", default="auto")
    cache_dir: str | None = option(
        "Folder for Hugging Face input in native form; none is $XDG_CACHE_HOME/dynmo or ~/.cache/dynmo.", default=None
    )


Detokenizer = Literal["wikitext", "ptb", "none"]


@dataclass(frozen=True, kw_only=True)
class WikitextConfig:
    """Word-level perplexity of a text."""

    valid_data: str = option("Text with words between spaces, such as wiki.test.tokens.")
    seq_length: int | None = option("Tokens of a window; none is the model's positions.", default=None, minimum=1)
    overlapping_eval: int = option("Tokens by which a window goes on from the last one.", default=32, minimum=1)
    detokenizer: Detokenizer = option("Rules that undo the text's own tokenization.", default="wikitext")


@dataclass(frozen=True, kw_only=True)
class LambadaConfig:
    """Accuracy of the last word of a passage."""

    valid_data: str = option('JSON lines with a passage each: {"text": ...}.')
    strict_lambada: bool = option("The whole last word must be right, not its last token alone.", default=False)
    predictions: str | None = option("File for a JSON line an item: its number and whether it was right.", default=None)


@dataclass(frozen=True, kw_only=True)
class ClassifyConfig:
    """Accuracy of a fine-tuned model."""

    valid_data: str = option("Data sets to measure on: TSV files of GLUE, or directories of RACE; one or more.")
    seq_length: int | None = option("Tokens of a sample; none is the model's positions.", default=None, minimum=1)


@dataclass(frozen=True, kw_only=True)
class FinetuneConfig:
    """A task, its data, and the model to start from; the rest are the options of ``pretrain bert``."""

    train_data: str | None = option("Data sets to train on: TSV files of GLUE, or directories of RACE.", default=None)
    valid_data: str = option("Data sets to measure on after each epoch.")
    pretrained_checkpoint: str | None = option(
        "Run, checkpoint or Hugging Face directory of the BERT to start from; none starts with fresh weights.",
        default=None,
    )
    epochs: int | None = option(
        "Times to go through the training data; 0 measures alone [default: 3; 0 without --train-data].",
        default=None,
        minimum=0,
    )
