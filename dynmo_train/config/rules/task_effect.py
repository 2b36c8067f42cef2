"""Options without effect of ``evaluate``, ``finetune`` and ``generate``: a table as in :mod:`effect`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from ..fields import specs_of
from ..options import DefaultContext, OptionSpec
from ..sections.evaluation import ExitsConfig, FinetuneConfig, GenerateConfig, InferenceConfig

MODEL_TOKENIZERS = ("HuggingFaceTokenizer", "SentencePieceTokenizer", "Llama2Tokenizer")


@dataclass(frozen=True, kw_only=True)
class TaskEffect:
    """The condition under which options have an effect; ``without`` continues the message "has no effect"."""

    options: tuple[str, ...]
    when: Callable[[Any], bool]
    without: str


def _has_tokenizer_file(config: InferenceConfig) -> bool:
    """Whether a file of the tokenizer type is given; else the tokenizer of the checkpoint is used."""
    return bool(config.tokenizer_model if config.tokenizer_type in MODEL_TOKENIZERS else config.vocab_file)


TASK_EFFECTS: Mapping[type, tuple[TaskEffect, ...]] = {
    InferenceConfig: (
        TaskEffect(
            options=("tokenizer_type",), when=_has_tokenizer_file, without="without --tokenizer-model or --vocab-file"
        ),
        TaskEffect(
            options=("tokenizer_model",),
            when=lambda c: c.tokenizer_type in MODEL_TOKENIZERS,
            without="with a tokenizer type that reads --vocab-file",
        ),
        TaskEffect(
            options=("vocab_file",),
            # Without --tokenizer-model, HuggingFaceTokenizer reports a missing file.
            when=lambda c: (
                c.tokenizer_type not in (*MODEL_TOKENIZERS, "NullTokenizer")
                or (c.tokenizer_type == "HuggingFaceTokenizer" and not c.tokenizer_model)
            ),
            without="with a tokenizer type that reads --tokenizer-model",
        ),
        TaskEffect(
            options=("merge_file",),
            when=lambda c: c.tokenizer_type == "GPT2BPETokenizer",
            without="without GPT2BPETokenizer, which also needs --vocab-file",
        ),
        TaskEffect(options=("fp16",), when=lambda c: not c.bf16, without="with --bf16"),
    ),
    ExitsConfig: (
        TaskEffect(
            options=("draft_tokens",),
            when=lambda c: c.exit_key_values == "speculative",
            without="without --exit-key-values speculative",
        ),
        TaskEffect(
            options=("new_tokens", "exit_decay"),
            when=lambda c: c.decoded_prompts > 0,
            without="with --decoded-prompts 0",
        ),
    ),
    FinetuneConfig: (
        TaskEffect(options=("epochs",), when=lambda c: c.train_data is not None, without="without --train-data"),
    ),
    GenerateConfig: (
        TaskEffect(
            options=("top_k", "seed"),
            when=lambda c: c.sampling_temperature > 0,
            without="with greedy decoding (--greedy, --temperature 0 or --top-p 0)",
        ),
        # --top-p 0 itself requests greedy decoding.
        TaskEffect(
            options=("top_p",),
            when=lambda c: c.sampling_temperature > 0 or (c.top_p == 0 and not c.greedy),
            without="with greedy decoding (--greedy or --temperature 0)",
        ),
        TaskEffect(options=("temperature",), when=lambda c: not c.greedy, without="with --greedy"),
        TaskEffect(
            options=("genfile", "sample_output_file"), when=lambda c: not c.interactive, without="with --interactive"
        ),
        TaskEffect(options=("sample_output_file",), when=lambda c: not c.genfile, without="with --genfile"),
        TaskEffect(options=("sample_input_file",), when=lambda c: not c.prompts, without="with --prompts"),
        TaskEffect(
            options=("exit_decay",),
            when=lambda c: c.uses_exits,
            without="without --exit-threshold or --exit-key-values",
        ),
        TaskEffect(
            options=("draft_tokens",),
            when=lambda c: c.exit_key_values == "speculative",
            without="without --exit-key-values speculative",
        ),
        TaskEffect(
            options=("batch_size",),
            when=lambda c: not c.uses_exits,
            without="with --exit-threshold or --exit-key-values, which decode one sequence at a time",
        ),
    ),
}


def _specs(config: object) -> tuple[OptionSpec, ...]:
    kind: Any = type(config)
    return specs_of(kind)


def _default(spec: OptionSpec, config: object) -> Any:
    derive = spec.declaration.derive
    return spec.default if derive is None else derive(vars(config), DefaultContext())


def task_warnings(*configs: object) -> list[str]:
    """One message per option that differs from its default and has no effect."""
    return [
        f"{spec.flag} has no effect {effect.without}"
        for config in configs
        for effect in TASK_EFFECTS.get(type(config), ())
        if not effect.when(config)
        for spec in _specs(config)
        if spec.name in effect.options and getattr(config, spec.name) != _default(spec, config)
    ]
