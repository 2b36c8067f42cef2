"""Command lines of the evaluation and generation scripts of Megatron-LM and similar programs.

These scripts repeat the options of the training run. Model options must agree with the checkpoint; training options are
accepted for compatibility and ignored.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import typer

from .._common.console import print_message
from .._common.document import DocumentError, Problem
from .._common.errors import UsageError
from .._common.help import HelpCommand
from .compat.flag import CompatFlag, becomes, ignored, refused
from .compat.flags import FLAGS
from .compat.translate import translate
from .layer_freq import parse_no_rope_freq
from .options import OptionSpec
from .panels import TASK_PANELS
from .parse import parse_layer_types, parse_rotary_scaling, repeat_pattern
from .resolve import built_in_specs

MODEL_KEY = "dynmo.model"
# Model options with another name in the manifest of a checkpoint.
MANIFEST_NAMES = {
    "num_query_groups": "num_key_value_heads",
    "kv_channels": "head_dim",
    "moe_router_topk": "moe_top_k",
    "attention_window": "sliding_window",
}

# Options with a format of their own: the value in a manifest, from the text and the stored value.
FORMATS: Mapping[str, Callable[[str, Any], Any]] = {
    "rotary_scaling": lambda text, _stored: parse_rotary_scaling(text),
    "no_rope_freq": lambda text, stored: list(parse_no_rope_freq(text, len(stored or ()))),
    "layer_types": lambda text, stored: repeat_pattern(parse_layer_types(text), len(stored or ())),
}
_TRAINING_ONLY = "no effect without training"
TASK_FLAGS: Mapping[str, CompatFlag] = {
    **FLAGS,
    "--top_p": becomes("--top-p", values=1),
    "--top_k": becomes("--top-k", values=1),
    "--sample_input_file": becomes("--sample-input-file", values=1),
    "--checkpoint-activations": ignored(_TRAINING_ONLY),
    "--activations-checkpoint-method": ignored(_TRAINING_ONLY, 1),
    "--recompute-activations": ignored(_TRAINING_ONLY),
    "--deepspeed-activation-checkpointing": ignored(_TRAINING_ONLY),
    "--inference": ignored("these commands do nothing else"),
    "--ds-inference": ignored("device and dtype choose the implementation"),
    "--faiss-use-gpu": refused("retrieval is not supported: leave it out"),
}


def _parse_value(spec: OptionSpec, words: Sequence[str]) -> tuple[Any, int]:
    """The value of an option from the words after its flag, and the number of words used."""
    if spec.kind is bool:
        return True, 0
    if not words:
        raise UsageError(f"{spec.flag} needs a value")
    try:
        return (words[0] if spec.kind is str else spec.kind(words[0])), 1
    except ValueError as error:
        raise UsageError(f"{spec.flag} {words[0]!r}: must be {spec.value_text.lower()}") from error


def split_training_options(
    words: Sequence[str], declared: Mapping[str, int], specs: Mapping[str, OptionSpec]
) -> tuple[list[str], dict[str, Any], list[str]]:
    """Split a command line.

    Args:
        words: command line of an evaluation script.
        declared: flag of the command to its number of values.
        specs: training options by name.

    Returns:
        The arguments of the command, values of model options by name, and ignored training flags.
    """
    by_flag = {name: spec for spec in specs.values() for name in (spec.flag, spec.negative) if name}
    own: list[str] = []
    model: dict[str, Any] = {}
    dropped: list[str] = []
    at = 0
    while at < len(words):
        word = words[at]
        at += 1
        name, equals, value = word.partition("=")
        spec = by_flag.get(name) if name not in declared else None
        if spec is None:
            own.append(word)
            continue
        parsed, used = _parse_value(spec, [value, *words[at:]] if equals else words[at:])
        at += used - bool(equals)
        if spec.concern == "model":
            model[spec.name] = parsed if name == spec.flag else False
        else:
            dropped.append(name)
    return own, model, dropped


class TaskCommand(HelpCommand):
    """A command on a trained model that also accepts the flags of Megatron's scripts.

    Values of model options are in ``ctx.meta[MODEL_KEY]``.
    """

    panel_order = TASK_PANELS

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Translate Megatron's flags, then parse.

        Raises:
            DocumentError: a flag of Megatron is refused; all refused ones at once.
        """
        declared = {
            name: 0 if getattr(option, "is_flag", False) else option.nargs
            for option in self.params
            for name in (*option.opts, *option.secondary_opts)
        } | {"--help": 0, "--help-all": 0}
        if ctx.resilient_parsing:  # completion
            return super().parse_args(ctx, args)
        specs = built_in_specs()
        training = {spec.flag: 0 if spec.kind is bool else 1 for spec in specs.values()}
        training |= {spec.negative: 0 for spec in specs.values() if spec.negative}
        translation = translate(args, "gpt", training | declared, TASK_FLAGS)
        if translation.problems:
            raise DocumentError("the command line", list(translation.problems))
        own, model, dropped = split_training_options(translation.arguments, declared, specs)
        ctx.meta[MODEL_KEY] = model
        notes = list(translation.notes)
        if dropped:
            notes.append(f"{', '.join(dropped)}: {_TRAINING_ONLY}")
        if notes and os.environ.get("RANK", "0") == "0":
            print_message(f"accepted for compatibility and ignored: {'; '.join(notes)}")
        return super().parse_args(ctx, own)


def model_flags(ctx: typer.Context) -> Mapping[str, Any]:
    """Values of the model options on the command line, by name."""
    flags: Mapping[str, Any] = ctx.meta.get(MODEL_KEY, {})
    return flags


def check_model_flags(flags: Mapping[str, Any], model: Mapping[str, Any], directory: object) -> None:
    """Check model options against the checkpoint, which has the model's real shape.

    Args:
        flags: values of model options by name, as :func:`model_flags` returns them.
        model: object ``model`` of the checkpoint's manifest.
        directory: path of the checkpoint, for the message.

    Raises:
        DocumentError: options disagree with the checkpoint; all of them at once.
    """
    problems = []
    for name, value in flags.items():
        stored = model.get(MANIFEST_NAMES.get(name, name), value)
        if name in FORMATS and stored is not value:
            value = FORMATS[name](str(value), stored)
        if stored != value:
            message = f"is {value}; must be {stored}, as in the checkpoint {directory}; leave it out"
            problems.append(Problem(built_in_specs()[name].flag, "model", message))
    if problems:
        raise DocumentError("the command line", problems)
