"""Options of the commands that load a trained model: ``evaluate``, ``finetune`` and ``generate``."""

# ruff: noqa: RUF009 - option() is dataclasses.field() with a declaration

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

from ..._common.document import MAX_JOBS, MAX_RANKS
from .. import panels
from ..options import option
from ..parse import parse_fractions
from .data import TokenizerType, default_tokenizer_type

Device = Literal["auto", "cpu", "cuda"]


@dataclass(frozen=True, kw_only=True)
class InferenceConfig:
    """A trained model, its parallel layout and precision; names are Megatron's where Megatron has the flag."""

    PANEL: ClassVar[str] = panels.INFERENCE

    load: str = option("Checkpoint or run to load: native, Megatron or Hugging Face.", refers_to="place", common=True)
    tokenizer_model: str | None = option(
        "Path of tokenizer.json or a SentencePiece model; none: the checkpoint's.",
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
        "Tokenizer type.",
        derive=(
            "GPT2BPETokenizer with --vocab-file and --merge-file, else HuggingFaceTokenizer",
            lambda v, _: default_tokenizer_type(v),
        ),
    )
    tensor_model_parallel_size: int = option(
        "Tensor-parallel size in ranks.", default=1, minimum=1, maximum=MAX_RANKS, common=True
    )
    pipeline_model_parallel_size: int | None = option(
        "Pipeline-parallel size in ranks; none: world size / tensor-parallel size.",
        default=None,
        minimum=1,
        maximum=MAX_RANKS,
        common=True,
    )
    micro_batch_size: int = option("Microbatch size in samples.", default=4, minimum=1, maximum=MAX_RANKS, common=True)
    bf16: bool = option("Compute in bfloat16.", default=False, common=True)
    fp16: bool = option("Compute in float16.", default=False)
    num_threads: int | None = option(
        "CPU threads per process; none: torch's default.",
        default=None,
        minimum=1,
        maximum=MAX_JOBS,
    )
    device: Device = option("Device type; auto: cuda if available, else cpu.", default="auto", common=True)
    cache_dir: str | None = option(
        "Folder of converted checkpoints; none: $XDG_CACHE_HOME/dynmo or ~/.cache/dynmo.",
        default=None,
        refers_to="place",
    )


Detokenizer = Literal["wikitext", "ptb", "none"]


@dataclass(frozen=True, kw_only=True)
class WikitextConfig:
    """Options of ``evaluate wikitext``."""

    PANEL: ClassVar[str] = panels.TASK

    valid_data: str = option(
        "Text file with words between spaces, such as wiki.test.tokens.", refers_to="file", common=True
    )
    seq_length: int | None = option(
        "Window size in tokens; none: the model's maximum.", default=None, minimum=1, common=True
    )
    overlapping_eval: int | None = option(
        "Window stride in tokens; none: 32, or --seq-length if shorter.", default=None, minimum=1, common=True
    )
    detokenizer: Detokenizer = option("Detokenization rules of the text.", default="wikitext")


ExitKeyValues = Literal["stored", "propagate", "skip", "exact", "speculative"]


@dataclass(frozen=True, kw_only=True)
class ExitsConfig:
    """Options of ``evaluate exits``."""

    PANEL: ClassVar[str] = panels.TASK

    valid_data: str = option("Text file.", refers_to="file", common=True)
    exit_thresholds: str = option("Thresholds between 0 and 1; 1 is added.", default="0.5,0.7,0.9", common=True)
    exit_key_values: ExitKeyValues = option(
        "Keys and values of exited tokens, or drafts that the model verifies.",
        default="stored",
        common=True,
    )
    seq_length: int | None = option(
        "Window size in tokens; none: the model's maximum.", default=None, minimum=1, common=True
    )
    max_windows: int | None = option("Maximum number of scored windows; none: all.", default=None, minimum=1)
    decoded_prompts: int = option("Number of windows whose begin is continued; 0: none.", default=8, minimum=0)
    new_tokens: int = option("New tokens of each continuation.", default=32, minimum=2)
    exit_decay: float | None = option(
        "Decay of the threshold over the new tokens (arXiv:2207.07061); none: constant.", default=None, minimum=0
    )
    draft_tokens: int = option("Maximum number of drafts before they are verified.", default=6, minimum=1)

    @property
    def thresholds(self) -> tuple[float, ...]:
        """``exit_thresholds`` as numbers.

        Raises:
            UsageError: not numbers of 0 to 1.
        """
        return parse_fractions("--exit-thresholds", self.exit_thresholds)


@dataclass(frozen=True, kw_only=True)
class LambadaConfig:
    """Options of ``evaluate lambada``."""

    PANEL: ClassVar[str] = panels.TASK

    valid_data: str = option('JSON Lines file with one passage per line: {"text": ...}.', refers_to="file", common=True)
    strict_lambada: bool = option("Require the whole last word, not its last token alone.", default=False, common=True)
    predictions: str | None = option(
        "JSON Lines output file of per-item results.", default=None, refers_to="place", common=True
    )


@dataclass(frozen=True, kw_only=True)
class ClassifyConfig:
    """Options of ``evaluate mnli`` and ``evaluate race``."""

    PANEL: ClassVar[str] = panels.TASK

    valid_data: str = option("Evaluation data: TSV files (GLUE) or directories (RACE).", refers_to="files", common=True)
    seq_length: int | None = option(
        "Sequence length in tokens; none: the model's maximum.", default=None, minimum=1, common=True
    )


@dataclass(frozen=True, kw_only=True)
class FinetuneConfig:
    """Options of ``finetune`` that ``pretrain bert`` does not have."""

    PANEL: ClassVar[str] = panels.FINETUNING

    train_data: str | None = option(
        "Training data: TSV files (GLUE) or directories (RACE).", default=None, refers_to="files", common=True
    )
    valid_data: str = option("Data that is evaluated after each epoch.", refers_to="files", common=True)
    pretrained_checkpoint: str | None = option(
        "BERT checkpoint to start from; none: random weights.", default=None, refers_to="place", common=True
    )
    epochs: int | None = option(
        "Training epochs; 0: evaluate only; none: 3, or 0 without --train-data.", default=None, minimum=0, common=True
    )


@dataclass(frozen=True, kw_only=True)
class GenerateConfig:
    """Options of ``generate``; names are Megatron's where Megatron has the flag."""

    PANEL: ClassVar[str] = panels.GENERATION

    prompts: str | None = option(
        "Prompt file, one prompt per line; - or none: standard input.", default=None, refers_to="file", common=True
    )
    chat: bool = option(
        "Send each prompt as a user's message, by the tokenizer's chat template.", default=False, common=True
    )
    messages: str | None = option(
        "Conversations to answer, a JSON object per line; -: standard input.",
        default=None,
        refers_to="file",
        common=True,
    )
    system: str | None = option("System message before each prompt of --chat.", default=None)
    chat_template: str | None = option(
        "Jinja file of the chat template; none: the tokenizer's.", default=None, refers_to="file"
    )
    sample_input_file: str | None = option("Alias of --prompts.", default=None, refers_to="file")
    genfile: str | None = option(
        "Output file, one JSON object per sample.", default=None, refers_to="place", common=True
    )
    sample_output_file: str | None = option("Alias of --genfile.", default=None, refers_to="place")
    num_samples: int | None = option(
        "Samples per prompt; without prompts, the number of unconditional samples.",
        default=None,
        minimum=0,
        common=True,
    )
    max_new_tokens: int | None = option(
        "Maximum number of new tokens; none: 64, or from --out-seq-length.", default=None, minimum=1, common=True
    )
    out_seq_length: int | None = option("Maximum length of prompt and continuation in tokens.", default=None, minimum=1)
    greedy: bool = option("Always choose the most likely token.", default=False, common=True)
    temperature: float | None = option(
        "Sampling temperature; 0: greedy; none: 1 with --top-k or --top-p.", default=None, common=True
    )
    top_k: int = option("Sample from the k most likely tokens; 0: all.", default=0, minimum=0, common=True)
    top_p: float | None = option("Nucleus sampling probability; none: 1.", default=None, common=True)
    stop_token: str | None = option("Alias of --stop, for one text.", default=None)
    seed: int = option("Random seed of sampling.", default=1234, minimum=0, common=True)
    batch_size: int = option("Batch size in sequences.", default=8, minimum=1, common=True)
    recompute: bool = option("Recompute the whole sequence for each token, without a KV cache.", default=False)
    exit_threshold: float | None = option(
        "Minimum confidence of an early exit; 1: none exits; none: as trained.",
        default=None,
        minimum=0,
        maximum=1,
        common=True,
    )
    exit_key_values: ExitKeyValues = option(
        "Keys and values of exited tokens, or drafts that the model verifies.",
        default="stored",
        common=True,
    )
    exit_decay: float | None = option(
        "Decay of the threshold over the new tokens (arXiv:2207.07061); none: constant.", default=None, minimum=0
    )
    draft_tokens: int = option("Maximum number of drafts before they are verified.", default=6, minimum=1)
    interactive: bool = option("Read prompts interactively until end of input.", default=False, common=True)

    @property
    def is_chat(self) -> bool:
        """Whether prompts are conversations."""
        return self.chat or self.messages is not None

    @property
    def uses_exits(self) -> bool:
        """Whether an option of early exits is given: one sequence at a time, greedily."""
        return self.exit_threshold is not None or self.exit_key_values != "stored"

    @property
    def sampling_temperature(self) -> float:
        """The temperature that sampling uses; 0 is greedy decoding.

        As in Megatron's scripts, ``--top-p 0`` without ``--top-k`` is greedy whatever the temperature.
        """
        if self.greedy or (self.top_p == 0 and not self.top_k):
            return 0.0
        if self.temperature is not None:
            return self.temperature
        return float(self.top_k > 0 or bool(self.top_p))


@dataclass(frozen=True, kw_only=True)
class HarnessConfig:
    """Options of ``evaluate lm-eval``."""

    PANEL: ClassVar[str] = panels.TASK

    load: str = option("Checkpoint or run to load: native, Megatron or Hugging Face.", refers_to="place", common=True)
    tasks: str = option("Comma-separated tasks: lambada, hellaswag, piqa, mathqa, winogrande, race.", common=True)
    task_data: str = option("Folder of task data.", common=True)
    limit: int | None = option("Maximum number of items per task; none: all.", default=None, minimum=1, common=True)
    batch_size: int = option("Batch size in sequences.", default=8, minimum=1, common=True)
    dtype: Literal["float32", "bfloat16", "float16"] = option("Data type of computation.", default="float32")
    device: Literal["cpu", "cuda"] = option("Device type.", default="cpu", common=True)
