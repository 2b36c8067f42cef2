"""Arguments of programs whose equivalents take others: harness, converter of transformers, Megatron-LM's experts."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from ..._common.errors import UsageError
from ...config.compat.translate import is_flag, values_after


class RefusedProgram(UsageError):
    """A word of a launcher or program is not supported."""


# Flags of models whose router has no bias: those without biases, and those of Megatron-DeepSpeed's gate.
_WITHOUT_ROUTER_BIAS = frozenset(
    {
        *("--disable-bias-linear", "--no-add-bias-linear", "--moe-router-bias", "--no-moe-router-bias", "--deepspeed"),
        *("--topk", "--expert-interval", "--moe-loss-coeff", "--moe-train-capacity-factor", "--create-moe-param-group"),
    }
)


def decoder_words(arguments: list[str], notes: list[str]) -> list[str]:
    """Arguments of Megatron-LM's decoder, whose router has a bias where its linear layers have one.

    Source: ``Router`` of megatron-core, ``transformer/moe/router.py``. Here a router has a bias by its own option.

    Args:
        arguments: arguments of the program.
        notes: notes for the user, which this extends.

    Raises:
        RefusedProgram: latents that are not normalized.
    """
    names = {word.partition("=")[0] for word in arguments}
    if "--multi-latent-attention" in names and "--qk-layernorm" not in names:
        raise RefusedProgram(
            "without --qk-layernorm the latents of --multi-latent-attention have no norms: not supported; add it"
        )
    if "--num-experts" not in names or names & _WITHOUT_ROUTER_BIAS:
        return arguments
    notes.append("--moe-router-bias: the router of Megatron-LM has a bias without --disable-bias-linear")
    return ["--moe-router-bias", *arguments]


def _pairs(arguments: Sequence[str]) -> list[tuple[str, list[str]]]:
    """Flags with their values; positional arguments have an empty flag."""
    found: list[tuple[str, list[str]]] = []
    at = 0
    while at < len(arguments):
        flag, equals, value = arguments[at].partition("=")
        at += 1
        if not is_flag(flag):
            found.append(("", [arguments[at - 1]]))
            continue
        values, at = ([value], at) if equals else values_after(arguments, at, None)
        found.append((flag, values))
    return found


def harness_words(arguments: Sequence[str], notes: list[str]) -> list[str]:
    """The arguments of ``evaluate lm-eval`` for those of lm-evaluation-harness.

    Args:
        arguments: arguments of its ``main.py``.
        notes: notes for the user, which this extends.
    """
    words: list[str] = []
    for flag, values in _pairs(arguments):
        text = "".join(values[:1])
        if flag == "--model":
            notes.append(f"--model {text} is ignored: the model follows from the checkpoint")
        elif flag == "--model_args":
            options = dict(pair.partition("=")[::2] for pair in text.split(","))
            for name, value in options.items():
                if name == "pretrained":
                    words += ["--load", value]
                elif name == "dtype" and value in ("float32", "bfloat16", "float16"):
                    words += ["--dtype", value]
                else:
                    notes.append(f"{name} of --model_args is ignored")
        elif flag == "--device":
            words += [flag, text.partition(":")[0]]
        else:
            words += [*([flag.replace("_", "-")] if flag else []), *values]
    return words


def converter_words(arguments: Sequence[str], notes: list[str]) -> list[str]:
    """The arguments of ``dynmo-ckpt convert`` for those of ``convert_megatron_gpt2_checkpoint.py``.

    Args:
        arguments: arguments of the converter: its options, and the checkpoint.
        notes: notes for the user, which this extends.
    """
    pairs = _pairs(arguments)
    # Its option --config_file has one value, its other option none: what follows is the checkpoint.
    paths = list(itertools.chain.from_iterable(values[flag == "--config_file" :] for flag, values in pairs))
    if any(flag == "--config_file" for flag, _ in pairs):
        notes.append("--config_file is ignored: the shapes follow from the checkpoint")
    if len(paths) != 1:
        return ["--to", "hf", *paths]
    target = f"{paths[0].rstrip('/')}-hf"
    notes.append(f"the converted checkpoint is {target}")
    return [*paths, target, "--to", "hf"]
