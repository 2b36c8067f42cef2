"""Defaults of other projects that differ from ours, for what comes from their scripts.

``dynmo-train run`` and ``explain-flags`` add those of Megatron-LM, Megatron-DeepSpeed and Optimus-CC to the arguments
of a program, ``pretrain`` those of torchtitan to a command line with torchtitan's flags; ``deepspeed.py`` has those of
a DeepSpeed file. Each one that is set is printed. An option that is not here has the same default in all of them, no
effect on results, or no default here.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from .torchtitan import TORCHTITAN

MEGATRON, DEEPSPEED, OPTIMUS = "Megatron-LM", "Megatron-DeepSpeed", "Optimus-CC"
# Flags whose defaults are those of every program of a project, not only of pre-training.
PLACEMENT = frozenset({"--pipeline-model-parallel-size"})
_ENCODERS = frozenset({"bert", "ict", "t5"})
_EXPERTS = frozenset({"--num-experts"})
_NO_DROPPING = "--disable-moe-token-dropping"
# Flags that only Megatron-DeepSpeed has.
_OF_DEEPSPEED = frozenset(
    {
        *("--deepspeed", "--deepspeed-config", "--no-pipeline-parallel"),
        *("--topk", "--expert-interval", "--mlp-type", "--moe-expert-parallel-size", "--moe-loss-coeff"),
        *("--moe-train-capacity-factor", "--moe-eval-capacity-factor", "--moe-min-capacity"),
        *("--create-moe-param-group", "--disable-moe-token-dropping", "--use-tutel"),
    }
)


@dataclass(frozen=True, kw_only=True)
class ProjectDefault:
    """A default of another project.

    Attributes:
        project: the project.
        words: flags of that project, or options of this one, that give its default.
        unless: flags of which each gives another value.
        needs: flags of which one must be given; empty: none.
        families: model families that have the option; empty: all.
        programs: file names of programs; empty: all.
        reason: what the default is, where its name does not state it.
    """

    project: str
    words: tuple[str, ...]
    unless: frozenset[str]
    needs: frozenset[str] = frozenset()
    families: frozenset[str] = frozenset()
    programs: frozenset[str] = frozenset()
    reason: str = ""

    @property
    def note(self) -> str:
        """The default for the user."""
        return f"{' '.join(self.words)}: {self.reason or f'the default of {self.project}'}"


_DEFAULTS = (
    ProjectDefault(
        project=MEGATRON,
        words=("--pipeline-model-parallel-size", "1"),
        unless=frozenset({"--pipeline-model-parallel-size", "--no-pipeline-parallel"}),
    ),
    ProjectDefault(
        project=MEGATRON,
        words=("--activation", "gelu_tanh"),
        unless=frozenset({"--activation", "--no-bias-gelu-fusion", "--openai-gelu"}),
        families=_ENCODERS,
        reason="the function of Megatron-LM's fused kernel of bias and GELU",
    ),
    ProjectDefault(
        project=MEGATRON,
        words=("--moe-router-bias",),
        unless=frozenset(
            {"--disable-bias-linear", "--no-add-bias-linear", "--moe-router-bias", "--no-moe-router-bias"}
        ),
        needs=_EXPERTS,
        families=frozenset({"gpt"}),
        # Source: ``Router`` of megatron-core, ``transformer/moe/router.py``.
        reason="the router of Megatron-LM has a bias without --disable-bias-linear",
    ),
    ProjectDefault(
        project=MEGATRON,
        words=("--fp8-recipe", "tensorwise"),
        unless=frozenset({"--fp8-recipe", "--no-fp8-wgrad", "--disable-fp8-wgrad"}),
        needs=frozenset({"--fp8-format", "--fp8-hybrid", "--fp8-e4m3"}),
        reason="in place of Megatron-LM's default, delayed scaling, which is not supported",
    ),
    ProjectDefault(
        project=MEGATRON,
        words=("--lr-warmup-fraction", "0.01"),
        unless=frozenset({"--warmup", "--lr-warmup-fraction", "--lr-warmup-iters", "--lr-warmup-samples"}),
        programs=frozenset({"pretrain_gpt2.py"}),
        reason="the default of --warmup of Megatron-LM 1",
    ),
    ProjectDefault(
        project=OPTIMUS,
        words=("--grad-comp-rank", "4"),
        unless=frozenset({"--grad-comp-rank"}),
        needs=frozenset({"--grad-comp"}),
    ),
    ProjectDefault(
        project=OPTIMUS,
        words=("--selective-grad-comp-way", "2"),
        unless=frozenset({"--selective-grad-comp-way"}),
        needs=frozenset({"--selective-grad-comp"}),
    ),
    ProjectDefault(
        project=DEEPSPEED,
        words=("--topk", "1"),
        unless=frozenset({"--topk", "--moe-router-topk"}),
        needs=_EXPERTS,
    ),
    ProjectDefault(
        project=DEEPSPEED,
        words=("--expert-interval", "2"),
        unless=frozenset({"--expert-interval", "--moe-layer-freq"}),
        needs=_EXPERTS,
    ),
    ProjectDefault(
        project=DEEPSPEED,
        words=("--moe-loss-coeff", "0.1"),
        unless=frozenset({"--moe-loss-coeff", "--moe-aux-loss-coeff"}),
        needs=_EXPERTS,
    ),
    ProjectDefault(
        project=DEEPSPEED,
        words=("--moe-train-capacity-factor", "1.0"),
        unless=frozenset({"--moe-train-capacity-factor", "--moe-expert-capacity-factor", _NO_DROPPING}),
        needs=_EXPERTS,
    ),
)
# Flags of a capacity, which --disable-moe-token-dropping turns off; and those without effect on a model of one expert.
_CAPACITIES = frozenset({"--moe-train-capacity-factor", "--moe-eval-capacity-factor", "--moe-min-capacity"})
_OF_EXPERTS = _CAPACITIES | {
    *("--num-experts", "--topk", "--expert-interval", "--moe-loss-coeff", "--mlp-type", "--moe-expert-parallel-size"),
    *("--create-moe-param-group", _NO_DROPPING, "--disable-moe-top2-2nd-expert-sampling", "--use-tutel"),
}


def flag_names(arguments: Iterable[str]) -> set[str]:
    """The flags of a command line, with dashes for underscores."""
    return {word.partition("=")[0].replace("_", "-") for word in arguments if word.startswith("--")}


def project_defaults(program: str, family: str, arguments: Sequence[str]) -> list[ProjectDefault]:
    """The defaults of other projects that a command line of one of their programs leaves out.

    Args:
        program: file name of the program.
        family: model family that it trains.
        arguments: its arguments.
    """
    names = flag_names(arguments) - (_EXPERTS if _is_dense(arguments) else frozenset())
    is_deepspeed = not names.isdisjoint(_OF_DEEPSPEED)
    # The gate of DeepSpeed has no bias.
    other = "--moe-router-bias" if is_deepspeed else None
    return [
        one
        for one in _DEFAULTS
        if (one.project != DEEPSPEED or is_deepspeed)
        and one.words[0] != other
        and names.isdisjoint(one.unless)
        and (not one.needs or not names.isdisjoint(one.needs))
        and (not one.families or family in one.families)
        and (not one.programs or program in one.programs)
    ]


def _is_dense(arguments: Sequence[str]) -> bool:
    """Whether a command line has one expert per layer, which is Megatron-DeepSpeed's model without experts."""
    return re.search(r"--num[-_]experts 1(?= --|$)", " ".join(arguments).replace("=", " ")) is not None


def without_effect_on_experts(arguments: Sequence[str], notes: list[str]) -> list[str]:
    """Megatron-DeepSpeed's arguments without flags of experts that another flag turns off.

    Args:
        arguments: arguments of the program.
        notes: notes for the user, which this extends.
    """
    if _is_dense(arguments):
        notes.append("--num-experts 1: a model without experts")
        return without_flags(arguments, _OF_EXPERTS)
    if _NO_DROPPING in flag_names(arguments):
        notes.append(f"{_NO_DROPPING}: no expert has a capacity")
        return without_flags(arguments, {*_CAPACITIES, _NO_DROPPING})
    return list(arguments)


def without_flags(arguments: Sequence[str], flags: Collection[str]) -> list[str]:
    """The arguments without some flags and their values."""
    remaining: list[str] = []
    is_left_out = False
    for word in arguments:
        if word.startswith("--"):
            is_left_out = not flag_names([word]).isdisjoint(flags)
        if not is_left_out:
            remaining.append(word)
    return remaining


def has_torchtitan_flags(arguments: Iterable[str]) -> bool:
    """Whether a command line has flags of torchtitan, such as ``--training.steps``."""
    return any("." in name and name.removeprefix("--") in TORCHTITAN for name in _raw_names(arguments))


def _raw_names(arguments: Iterable[str]) -> set[str]:
    return {word.partition("=")[0] for word in arguments if word.startswith("--")}


def torchtitan_defaults(
    arguments: Sequence[str], given: Mapping[str, Any], family: str, processes: int
) -> dict[str, Any]:
    """Torchtitan's defaults, of releases 0.2 and later, that a command line with its flags leaves out.

    Args:
        arguments: the command line.
        given: option name to value of the command line and of files; None means not given.
        family: model family.
        processes: world size.

    Returns:
        Option name to value.
    """
    if not has_torchtitan_flags(arguments):
        return {}
    names = {name.removeprefix("--") for name in _raw_names(arguments)}
    set_options = {name: value for name, value in given.items() if value is not None}
    steps = int(set_options.get("train_iters") or 10_000)
    pipeline = int(set_options.get("pipeline_model_parallel_size") or 1)
    tensor = int(set_options.get("tensor_model_parallel_size") or 1)
    replicas = processes // max(1, pipeline * tensor * int(set_options.get("context_parallel_size") or 1))
    found: dict[str, Any] = {
        "seq_length": 2048,
        "micro_batch_size": 8,
        "lr": 8e-4,
        "lr_warmup_iters": min(200, steps),
        "adam_beta2": 0.95,
        "weight_decay": 0.1,
        "bf16": True,
        "pipeline_model_parallel_size": 1,
        "recompute_granularity": "selective",
        "log_interval": 10,
    }
    if not {"train_iters", "train_samples"} & set_options.keys():
        found["train_iters"] = steps
    if {"lr_warmup_fraction", "lr_warmup_samples"} & set_options.keys():
        del found["lr_warmup_iters"]
    if set_options.get("fp16") or "training.mixed_precision_param" in names:
        del found["bf16"]
    if family == "gpt":
        found |= {"attention_dropout": 0.0, "hidden_dropout": 0.0}
    if pipeline > 1:
        # A replica's batch of 8 samples is cut into microbatches of one sample.
        found["micro_batch_size"] = 1
        if not {"global_batch_size", "gradient_accumulation_steps", "micro_batch_size"} & set_options.keys():
            found["gradient_accumulation_steps"] = 8
    if tensor > 1:
        found["sequence_parallel"] = True
    if replicas > 1 and "parallelism.data_parallel_shard_degree" not in names:
        found["zero_stage"] = 3
    if any(name.startswith(("validation.", "validator.")) for name in names):
        found["eval_interval"] = 10
    else:
        found["eval_iters"] = 0
    if {"checkpoint.enable", "checkpoint.enable_checkpoint"} & names:
        found |= {"save_interval": 500, "keep_checkpoints": 10}
    return {name: value for name, value in found.items() if name not in set_options}
