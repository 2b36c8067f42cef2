"""Options of the commands that use a trained model: where it is, on which processes, in which type, and the task's."""

# ruff: noqa: RUF009 - option() is dataclasses.field() with a declaration

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from .._common.document import MAX_JOBS, MAX_RANKS
from .data import TokenizerType, default_tokenizer_type
from .options import option

Device = Literal["auto", "cpu", "cuda"]


@dataclass(frozen=True, kw_only=True)
class InferenceConfig:
    """A trained model and the processes that it runs on; names are Megatron's wherever it has them."""

    load: str = option(
        "Run directory, its checkpoints, one checkpoint, or a Hugging Face or Megatron directory.", refers_to="place"
    )
    tokenizer_model: str | None = option(
        "Path of a tokenizer.json or a SentencePiece model; none is the checkpoint's.", default=None, refers_to="file"
    )
    vocab_file: str | None = option(
        "Vocabulary of the GPT2, Bert and WhitespaceVocab tokenizers.", default=None, refers_to="file"
    )
    merge_file: str | None = option("Merges of GPT2BPETokenizer.", default=None, refers_to="file")
    tokenizer_type: TokenizerType = option(
        "Kind of tokenizer.",
        derive=(
            "GPT2BPETokenizer with --vocab-file and --merge-file, else HuggingFaceTokenizer",
            lambda v, _: default_tokenizer_type(v),
        ),
    )
    tensor_model_parallel_size: int = option(
        "Ranks that share each matrix product.", default=1, minimum=1, maximum=MAX_RANKS
    )
    pipeline_model_parallel_size: int | None = option(
        "Pipeline positions; none is the processes / --tensor-model-parallel-size.",
        default=None,
        minimum=1,
        maximum=MAX_RANKS,
    )
    micro_batch_size: int = option("Samples in a microbatch.", default=4, minimum=1, maximum=MAX_RANKS)
    bf16: bool = option("Compute in bfloat16.", default=False)
    fp16: bool = option("Compute in float16.", default=False)
    num_threads: int | None = option(
        "Threads of arithmetic in each process on CPU; none is torch's own choice.",
        default=None,
        minimum=1,
        maximum=MAX_JOBS,
    )
    device: Device = option("Where to compute; auto is cuda where it is present, else cpu.", default="auto")
    cache_dir: str | None = option(
        "Folder for Hugging Face input in native form; none is $XDG_CACHE_HOME/dynmo or ~/.cache/dynmo.",
        default=None,
        refers_to="place",
    )


Detokenizer = Literal["wikitext", "ptb", "none"]


@dataclass(frozen=True, kw_only=True)
class WikitextConfig:
    """Word-level perplexity of a text."""

    valid_data: str = option("Text with words between spaces, such as wiki.test.tokens.", refers_to="file")
    seq_length: int | None = option("Tokens of a window; none is the model's positions.", default=None, minimum=1)
    overlapping_eval: int | None = option(
        "Tokens by which a window goes on from the last one [default: 32, or the window where that is shorter].",
        default=None,
        minimum=1,
    )
    detokenizer: Detokenizer = option("Rules that undo the text's own tokenization.", default="wikitext")


@dataclass(frozen=True, kw_only=True)
class LambadaConfig:
    """Accuracy of the last word of a passage."""

    valid_data: str = option('JSON lines with a passage each: {"text": ...}.', refers_to="file")
    strict_lambada: bool = option("The whole last word must be right, not its last token alone.", default=False)
    predictions: str | None = option(
        "File for a JSON line an item: its number and whether it was right.", default=None, refers_to="place"
    )


@dataclass(frozen=True, kw_only=True)
class ClassifyConfig:
    """Accuracy of a fine-tuned model."""

    valid_data: str = option(
        "Data sets to measure on: TSV files of GLUE, or directories of RACE; one or more.", refers_to="files"
    )
    seq_length: int | None = option("Tokens of a sample; none is the model's positions.", default=None, minimum=1)


@dataclass(frozen=True, kw_only=True)
class FinetuneConfig:
    """A task, its data, and the model to start from; the rest are the options of ``pretrain bert``."""

    train_data: str | None = option(
        "Data sets to train on: TSV files of GLUE, or directories of RACE.", default=None, refers_to="files"
    )
    valid_data: str = option("Data sets to measure on after each epoch.", refers_to="files")
    pretrained_checkpoint: str | None = option(
        "Run, checkpoint, Hugging Face or Megatron directory of the BERT to start from; none: fresh weights.",
        default=None,
        refers_to="place",
    )
    epochs: int | None = option(
        "Times to go through the training data; 0 measures alone [default: 3; 0 without --train-data].",
        default=None,
        minimum=0,
    )


@dataclass(frozen=True, kw_only=True)
class GenerateConfig:
    """What to write, and how; names are Megatron's wherever it has them."""

    prompts: str | None = option(
        "File with a prompt on each line; - is standard input [default: that, unless --num-samples is given].",
        default=None,
        refers_to="file",
    )
    sample_input_file: str | None = option("--prompts under Megatron's name.", default=None, refers_to="file")
    genfile: str | None = option(
        'File for the samples, a JSON line each: {"prompt", "text", "length", "finished"}.',
        default=None,
        refers_to="place",
    )
    sample_output_file: str | None = option(
        "--genfile under Megatron's name for given prompts.", default=None, refers_to="place"
    )
    num_samples: int | None = option(
        "Continuations of each prompt; without prompts so many texts from nothing.", default=None, minimum=0
    )
    max_new_tokens: int | None = option(
        "Tokens to add to a prompt at most [default: 64; with --out-seq-length as many as that leaves].",
        default=None,
        minimum=1,
    )
    out_seq_length: int | None = option("Tokens of a prompt and its continuation together.", default=None, minimum=1)
    greedy: bool = option("Always take the likeliest token.", default=False)
    temperature: float | None = option(
        "Divisor of the logits; 0 always takes the likeliest token [default: 1 with --top-k or --top-p, else 0].",
        default=None,
    )
    top_k: int = option("Draw among this many likeliest tokens; 0 is all.", default=0, minimum=0)
    top_p: float | None = option(
        "Draw among the fewest tokens with this probability in all [default: 1].", default=None
    )
    stop_token: str | None = option("Text that ends a continuation, within or across tokens; left out.", default=None)
    seed: int = option("Seed of the draws.", default=1234, minimum=0)
    batch_size: int = option("Sequences that are read together.", default=8, minimum=1)
    recompute: bool = option("Read each text anew for every token, and keep no keys and values.", default=False)
    interactive: bool = option("Ask for a prompt, answer, and ask again, until the input ends.", default=False)


@dataclass(frozen=True, kw_only=True)
class HarnessConfig:
    """Tasks of lm-evaluation-harness on local data."""

    load: str = option(
        "Run directory, its checkpoints, one checkpoint, or a Hugging Face or Megatron directory.", refers_to="place"
    )
    tasks: str = option("Tasks between commas: lambada, hellaswag, piqa, mathqa, winogrande, race.")
    task_data: str = option("Folder with the tasks' data, TASK.jsonl each or as their authors publish them.")
    limit: int | None = option("Items of each task; none is all.", default=None, minimum=1)
    batch_size: int = option("Sequences that are read together.", default=8, minimum=1)
    dtype: Literal["float32", "bfloat16", "float16"] = option("Type of the arithmetic.", default="float32")
    device: Literal["cpu", "cuda"] = option("Where to compute.", default="cpu")
