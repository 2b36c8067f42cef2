"""Command lines of the evaluation and generation scripts of Megatron-LM and its kin.

They repeat the options of the training run. Those that shape the model must be as the checkpoint says; those that say
how to train are taken without effect.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any

import typer
from typer.core import TyperCommand

from .._common.console import say
from .._common.document import DocumentError, Problem
from .._common.errors import UsageError
from .compat import FLAGS, Known, translate
from .options import OptionSpec
from .resolve import built_in_specs

MODEL_KEY = "dynmo.model"
# Options of the model's shape that a manifest states under another name; the others have their own.
MANIFEST_NAMES = {"num_query_groups": "num_key_value_heads", "kv_channels": "head_dim", "moe_router_topk": "moe_top_k"}

_HERE = "nothing to do without training"
TASK_FLAGS: Mapping[str, Known] = {
    **{flag: known for flag, known in FLAGS.items() if known.kind != "refused" or "launcher" in known.words[0]},
    "--top_p": Known("becomes", ("--top-p",), 1),
    "--top_k": Known("becomes", ("--top-k",), 1),
    "--sample_input_file": Known("becomes", ("--sample-input-file",), 1),
    "--checkpoint-activations": Known("nothing", (_HERE,)),
    "--activations-checkpoint-method": Known("nothing", (_HERE,), 1),
    "--recompute-activations": Known("nothing", (_HERE,)),
    "--deepspeed-activation-checkpointing": Known("nothing", (_HERE,)),
    "--faiss-use-gpu": Known("refused", ("belongs to retrieval, which this version has not",)),
}


def _values(spec: OptionSpec, words: Sequence[str], at: int) -> tuple[Any, int]:
    """The value of a flag whose name stands before ``at``, and where the next word stands."""
    if spec.kind is bool:
        return True, at
    if at == len(words):
        raise UsageError(f"{spec.flag} needs a value")
    text = words[at]
    try:
        return (text if spec.kind is str else spec.kind(text)), at + 1
    except ValueError as error:
        raise UsageError(f"{spec.flag} must be {spec.value_text.lower()}, is {text!r}") from error


def split_training(
    words: Sequence[str], declared: Mapping[str, int], specs: Mapping[str, OptionSpec]
) -> tuple[list[str], dict[str, Any], list[str]]:
    """What of a command line is the command's own, what it says of the model, and flags of training without effect."""
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
        rest = [value, *words[at:]] if equals else words[at:]
        found, used = _values(spec, rest, 0)
        at += used - bool(equals)
        if spec.concern == "model":
            model[spec.name] = found if name == spec.flag else False
        else:
            dropped.append(name)
    return own, model, dropped


class TaskCommand(TyperCommand):
    """A command on a trained model that takes the flags of Megatron's scripts as well.

    What they say of the model is in ``ctx.meta[MODEL_KEY]``.
    """

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Parse the words in this package's own terms; raises ``DocumentError`` for flags that cannot be taken."""
        declared = {
            name: 0 if getattr(option, "is_flag", False) else option.nargs
            for option in self.params
            for name in (*option.opts, *option.secondary_opts)
        } | {"--help": 0}
        specs = built_in_specs()
        training = {spec.flag: 0 if spec.kind is bool else 1 for spec in specs.values()}
        training |= {spec.negative: 0 for spec in specs.values() if spec.negative}
        made = translate(args, "gpt", training | declared, TASK_FLAGS)
        if made.problems:
            raise DocumentError("the command line", list(made.problems))
        own, model, dropped = split_training(made.arguments, declared, specs)
        ctx.meta[MODEL_KEY] = model
        notes = list(made.notes)
        if dropped:
            notes.append(f"{', '.join(dropped)}: {_HERE}")
        if notes and os.environ.get("RANK", "0") == "0":
            say(f"taken without effect: {'; '.join(notes)}")
        return super().parse_args(ctx, own)


def model_flags(ctx: typer.Context) -> Mapping[str, Any]:
    """What a command line says of the model's shape."""
    told: Mapping[str, Any] = ctx.meta.get(MODEL_KEY, {})
    return told


def check_model_flags(told: Mapping[str, Any], model: Mapping[str, Any], directory: object) -> None:
    """Raise ``DocumentError`` where a command line says another shape than the checkpoint's manifest."""
    problems = []
    for name, value in told.items():
        stored = model.get(MANIFEST_NAMES.get(name, name), value)
        if stored != value:
            flag = built_in_specs()[name].flag
            problems.append(Problem(flag, "model", f"is {value}; the model of {directory} has {stored}: leave it out"))
    if problems:
        raise DocumentError("the command line", problems)
