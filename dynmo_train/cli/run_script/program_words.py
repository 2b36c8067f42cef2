"""Arguments of programs whose equivalents take others: training, harness, converter of transformers."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from ..._common.errors import UsageError
from ...config.compat.project_defaults import PLACEMENT, flag_names, project_defaults, without_effect_on_experts
from ...config.compat.translate import is_flag, values_after
from ..tasks import FINE_TUNED, split_task


class RefusedProgram(UsageError):
    """A word of a launcher or program is not supported."""


def model_words(program: str, family: str, arguments: list[str], notes: list[str]) -> list[str]:
    """Arguments of a program that trains, with the defaults of its project that they leave out.

    Args:
        program: file name of the program.
        family: model family.
        arguments: arguments of the program.
        notes: notes for the user, which this extends.

    Raises:
        RefusedProgram: latents that are not normalized, or relative positions, which are those of another T5 here.
    """
    names = flag_names(arguments)
    if family == "gpt" and "--multi-latent-attention" in names and "--qk-layernorm" not in names:
        raise RefusedProgram(
            "without --qk-layernorm the latents of --multi-latent-attention have no norms: not supported; add it"
        )
    if family == "t5" and "relative" in " ".join(arguments).replace("=", " ").split():
        raise RefusedProgram(
            "--position-embedding-type relative is T5 with ReLU and RMSNorm here, unlike Megatron-LM's; use learned"
        )
    defaults = project_defaults(program, family, arguments)
    notes += [default.note for default in defaults]
    words = [word for default in defaults for word in default.words]
    return [*words, *without_effect_on_experts(arguments, notes)]


def task_words(arguments: list[str], notes: list[str]) -> list[str]:
    """Arguments of Megatron-LM's ``tasks/main.py``, which fine-tunes with replicas by default.

    Args:
        arguments: arguments of the program.
        notes: notes for the user, which this extends.
    """
    task, _ = split_task(arguments)
    if task not in FINE_TUNED:
        return arguments
    defaults = [one for one in project_defaults("main.py", "bert", arguments) if one.words[0] in PLACEMENT]
    notes += [default.note for default in defaults]
    return [*arguments, *(word for default in defaults for word in default.words)]


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
    target = f"{paths[0].removesuffix('.pt').removesuffix('.zip').rstrip('/')}-hf"
    notes.append(f"the converted checkpoint is {target}")
    return [*paths, target, "--to", "hf"]
