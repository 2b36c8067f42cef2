"""Arguments of programs whose equivalents take others: lm-evaluation-harness, and the converter of transformers."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from ...config.compat.translate import is_flag, values_after


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
