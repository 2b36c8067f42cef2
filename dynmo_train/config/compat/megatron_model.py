"""Flags of Megatron-LM and Megatron-DeepSpeed whose meaning depends on other flags of the same command, together.

``compat.translate`` collects the flags of ``COMBINED_FLAGS`` and adds the arguments of :func:`combine`; what a single
one of them means, for ``cli/FLAGS.md`` and ``explain-flags``, is in ``COMBINED_FLAGS`` too::

    --quick-geglu --activation-func-clamp-value 7    ->  --activation clamped_swiglu --swiglu-limit 7 ...
    --window-size 127,0 --window-attn-skip-freq 2    ->  --attention-window 128 --layer-types sliding,full
    --train-tokens 300000000000                      ->  --train-samples, by --seq-length
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from fractions import Fraction

from ..._common.document import MAX_COUNT, MAX_LAYERS, Problem, short_repr
from ..layer_freq import parse_layer_list
from .flag import CompatFlag, becomes, ignored

_QUICK_SLOPE = "1.702"
# Values that ``megatron/post_training/model_builder.py`` sets for GPT-OSS.
GPT_OSS_ROTATION = (
    *("--position-embedding-type", "rotary", "--rope-type", "yarn", "--rotary-scaling-factor", "32"),
    *("--yarn-original-max-position-embeddings", "131072", "--yarn-beta-fast", "32", "--yarn-beta-slow", "1"),
    *("--mscale", "1", "--mscale-all-dim", "0", "--no-yarn-correction-range-round-to-int"),
)
_SAME_STEPS = "with a constant batch size and sequence length"

COMBINED_FLAGS: Mapping[str, CompatFlag] = {
    "--swiglu": becomes("--activation", "swiglu"),
    "--squared-relu": becomes("--activation", "squared_relu"),
    "--openai-gelu": becomes("--activation", "gelu_tanh"),
    "--quick-geglu": becomes("--activation", "quick_geglu", reason="with a clamp value: clamped_swiglu"),
    "--glu-linear-offset": becomes("--swiglu-offset", values=1, reason="no effect with --swiglu and no clamp value"),
    "--activation-func-clamp-value": becomes("--activation", "clamped_swiglu", "--swiglu-limit", values=1),
    "--no-bias-gelu-fusion": becomes("--activation", "gelu", reason="where no other activation is given"),
    "--disable-bias-linear": becomes("--no-add-bias-linear", reason="and --activation gelu, where no other is given"),
    "--window-size": becomes("--attention-window", values=1, reason="of LEFT,0 is LEFT + 1 tokens"),
    "--window-attn-skip-freq": becomes("--layer-types", values=1, reason="2 is sliding,full"),
    "--group-query-attention": becomes("--num-query-groups", "1", reason="where their number is not given"),
    "--no-position-embedding": ignored("implied by rotary embeddings", 0, "llama", "gpt"),
    "--enable-gpt-oss": becomes(*GPT_OSS_ROTATION),
    "--rotary-seq-len-interpolation-factor": becomes("--rotary-scaling", values=1, reason="of type linear"),
    "--expert-interval": becomes("--moe-layer-freq", values=1, reason="2 is [0,1] for each pair of blocks"),
    "--train-tokens": becomes("--train-samples", values=1, reason=f"divided by --seq-length, {_SAME_STEPS}"),
    "--lr-decay-tokens": becomes("--lr-decay-samples", values=1, reason=f"divided by --seq-length, {_SAME_STEPS}"),
    "--lr-warmup-tokens": becomes("--lr-warmup-samples", values=1, reason=f"divided by --seq-length, {_SAME_STEPS}"),
    "--packing": becomes("--pack-to", "2", reason="or --packed-num-gpus; with --balance online"),
    "--packed-num-gpus": becomes("--pack-to", values=1, reason="no effect without --packing"),
    "--moe-train-capacity-factor": becomes(
        "--moe-expert-capacity-factor",
        values=1,
        reason="where not given: with --moe-eval-capacity-factor 1.0 and --moe-min-capacity 4",
    ),
}


@dataclass
class Combination:
    """What the combined flags of a command become.

    Attributes:
        found: combined flag to its value; empty for a flag without one.
        others: the other flags of the command, to their last value.
        arguments: what the combined flags become.
        notes: flags without effect, and why.
        problems: flags that are refused.
    """

    found: Mapping[str, str]
    others: Mapping[str, str]
    arguments: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    problems: list[Problem] = field(default_factory=list)

    def number(self, flag: str) -> float | None:
        """The value of a flag as a finite number; None, with a problem, for another value."""
        try:
            value = float(self.found[flag])
        except ValueError:
            value = math.nan
        if math.isfinite(value):
            return value
        self.refuse(flag, f"is {short_repr(self.found[flag])}; must be a number")
        return None

    def refuse(self, flag: str, message: str) -> None:
        """Add a problem of a flag."""
        self.problems.append(Problem(flag, "unsupported", message))


def combine(found: Mapping[str, str], others: Mapping[str, str], family: str) -> Combination:
    """Translate the combined flags of a command.

    Args:
        found: flags of ``COMBINED_FLAGS`` in the command, to their values.
        others: its other flags, to their last value.
        family: model family.
    """
    combination = Combination(found, others)
    for part in (
        _activation,
        _biases,
        _attention_heads,
        _positions,
        _windows,
        _rotation,
        _expert_interval,
        _tokens,
        _capacity,
        _packing,
    ):
        part(combination, family)
    return combination


def _activation(command: Combination, family: str) -> None:
    """The activation; its fused kernel of Megatron has the tanh form of GELU, and the unfused one is exact."""
    found = command.found
    chosen = [flag for flag in ("--swiglu", "--squared-relu", "--quick-geglu", "--openai-gelu") if flag in found]
    if len(chosen) > 1:
        command.refuse(chosen[1], f"is given with {chosen[0]}; remove one")
        return
    offset = command.number("--glu-linear-offset") if "--glu-linear-offset" in found else 0.0
    clamp = command.number("--activation-func-clamp-value") if "--activation-func-clamp-value" in found else None
    if offset is None or ("--activation-func-clamp-value" in found and clamp is None):
        return
    gate = chosen[0] if chosen and chosen[0] in ("--swiglu", "--quick-geglu") else None
    if gate is None:
        for flag in ("--glu-linear-offset", "--activation-func-clamp-value"):
            if flag in found:
                command.notes.append(f"{flag}: no effect without --swiglu or --quick-geglu")
        if chosen:
            command.arguments += COMBINED_FLAGS[chosen[0]].arguments
        elif {"--no-bias-gelu-fusion", "--disable-bias-linear"} & found.keys() and "--activation" not in command.others:
            # Megatron has no fused kernel without biases.
            command.arguments += ["--activation", "gelu"]
        return
    if gate == "--swiglu" and clamp is None:
        if offset:
            command.refuse("--glu-linear-offset", "is given with --swiglu; Megatron-LM requires --quick-geglu with it")
        command.arguments += ["--activation", "swiglu"]
        return
    slope = ["--swiglu-alpha", _QUICK_SLOPE if gate == "--quick-geglu" else "1"]
    limit = [] if clamp is None else ["--swiglu-limit", f"{clamp:g}"]
    name = "quick_geglu" if clamp is None else "clamped_swiglu"
    command.arguments += ["--activation", name, *slope, *limit, "--swiglu-offset", f"{offset:g}"]


def _biases(command: Combination, _family: str) -> None:
    if "--disable-bias-linear" in command.found:
        command.arguments.append("--no-add-bias-linear")


def _has_options_elsewhere(command: Combination) -> bool:
    """Whether a file or a recipe may give the options that a command lacks."""
    return not {"--config", "--recipe"}.isdisjoint(command.others)


def _attention_heads(command: Combination, family: str) -> None:
    """Megatron-LM has one group of queries unless ``--num-query-groups`` gives their number: multi-query attention."""
    flag = "--group-query-attention"
    if flag not in command.found:
        return
    if family not in ("gpt", "llama"):
        command.refuse(flag, "is not supported by this command: leave it out")
    elif not {"--num-query-groups", "--num-key-value-heads"}.isdisjoint(command.others):
        command.notes.append(f"{flag}: implied by --num-query-groups")
    elif not _has_options_elsewhere(command):
        command.arguments += COMBINED_FLAGS[flag].arguments


def _positions(command: Combination, family: str) -> None:
    """``--no-position-embedding`` is next to rotary embeddings; a model without any positions is not supported."""
    flag, others = "--no-position-embedding", command.others
    if flag not in command.found:
        return
    is_rotary = (
        family == "llama"
        or others.get("--position-embedding-type") in ("rope", "rotary", "yarn")
        or "--use-rotary-position-embeddings" in others
        or "--enable-gpt-oss" in command.found
    )
    if family not in ("gpt", "llama"):
        command.refuse(flag, "is not supported by this command: leave it out")
    elif is_rotary or _has_options_elsewhere(command):
        command.notes.append(f"{flag}: implied by rotary embeddings")
    else:
        command.refuse(flag, "is given without rotary embeddings; add --position-embedding-type rope")


def _windows(command: Combination, _family: str) -> None:
    """``LEFT,RIGHT`` of keys before and after a token; -1 is all of them."""
    found, flag, skipped = command.found, "--window-size", "--window-attn-skip-freq"
    if flag not in found:
        if skipped in found:
            command.notes.append(f"{skipped}: no effect without {flag}")
        return
    try:
        before, after = (int(part) for part in found[flag].strip("()'\" ").split(","))
    except ValueError:
        command.refuse(flag, f"is {short_repr(found[flag])}; must be LEFT,RIGHT, such as 127,0")
        return
    if after not in (0, -1) or not -1 <= before < MAX_COUNT:
        command.refuse(flag, f"is {found[flag]}; must be LEFT,0: a token attends to earlier tokens only")
        return
    if before == -1:
        command.notes.append(f"{flag}: {found[flag]} includes all earlier tokens")
        return
    command.arguments += ["--attention-window", str(before + 1)]
    if skipped in found and (types := _layer_types(command, found[skipped])):
        command.arguments += ["--layer-types", ",".join(types)]


def _layer_types(command: Combination, text: str) -> list[str]:
    """Megatron's frequency N: every N-th layer is full; its list has 1 for each layer with a window."""
    number = text.strip()
    if number.isdecimal() and number.isascii() and 1 <= int(number[:9]) <= MAX_LAYERS:
        return ["sliding"] * (int(number) - 1) + ["full"]
    try:
        return ["sliding" if has_window else "full" for has_window in parse_layer_list(number)]
    except ValueError as error:
        command.refuse("--window-attn-skip-freq", f"is {short_repr(text)}: {error}; must be a number or a list")
        return []


def _rotation(command: Combination, _family: str) -> None:
    """YaRN and the router's bias of GPT-OSS; YaRN of ``--position-embedding-type yarn``; interpolated positions."""
    others, flag = command.others, "--rotary-seq-len-interpolation-factor"
    if "--enable-gpt-oss" in command.found:
        command.arguments += GPT_OSS_ROTATION
        has_bias = "--num-experts" in others and "--disable-bias-linear" not in command.found
        if has_bias and {"--moe-router-bias", "--no-moe-router-bias"}.isdisjoint(others):
            command.arguments.append("--moe-router-bias")
    elif others.get("--position-embedding-type") == "yarn" and "--multi-latent-attention" not in others:
        # In Megatron-LM the type of the positions decides, where attention has no latent.
        command.arguments += ["--rope-type", "yarn"]
    if flag in command.found and (factor := command.number(flag)) is not None:
        if factor == 1:
            command.notes.append(f"{flag}: 1 changes nothing")
            return
        command.arguments += ["--rotary-scaling", f'{{"rope_type": "linear", "factor": {factor!r}}}']


def _expert_interval(command: Combination, _family: str) -> None:
    """Megatron-DeepSpeed's blocks N, 2N, ... have experts, counted from 1; Megatron-LM's 0, N, 2N, ... from 0."""
    flag = "--expert-interval"
    if flag not in command.found:
        return
    interval, layers = command.found[flag], command.others.get("--num-layers", "")
    if not (interval.isdecimal() and 1 <= int(interval[:9]) <= MAX_LAYERS):
        command.refuse(flag, f"is {short_repr(interval)}; must be a number of blocks")
    elif interval == "1":
        command.notes.append(f"{flag}: 1 changes nothing")
    elif not (layers.isdecimal() and int(layers[:9]) % int(interval) == 0):
        command.refuse(flag, f"is {interval}; --num-layers must be given, and a multiple of it")
    else:
        command.arguments += ["--moe-layer-freq", f"([0]*{int(interval) - 1}+[1])*{int(layers) // int(interval)}"]


def _tokens(command: Combination, _family: str) -> None:
    """Lengths in tokens become samples, or steps where the command gives its length in steps."""
    flags = [flag for flag in command.found if flag.endswith("-tokens")]
    if not flags:
        return
    others = command.others
    in_steps = "--train-iters" in others and "--train-samples" not in others
    sizes = [others.get("--seq-length", ""), others.get("--global-batch-size", "") if in_steps else "1"]
    if not all(size.isdecimal() and int(size[:12]) for size in sizes):
        needed = "--seq-length and --global-batch-size" if in_steps else "--seq-length"
        for flag in flags:
            command.refuse(flag, f"requires {needed}, by which tokens are divided")
        return
    changing = next((name for name in ("--rampup-batch-size", "--step-batch-size-schedule") if name in others), None)
    if in_steps and changing is not None:
        for flag in flags:
            command.refuse(flag, f"is given with --train-iters and {changing}; use --train-samples")
        return
    divisor = math.prod(map(int, sizes))
    for flag in flags:
        count = command.number(flag)
        if count is None:
            continue
        quotient = int(Fraction(count) / divisor)
        ending = "iters" if in_steps else "samples"
        name = flag.replace("tokens", ending)
        if name not in ("--train-iters", "--train-samples"):
            command.arguments += [name, str(quotient)]
            continue
        # Training ends at the first of both lengths.
        given = others.get(name, "")
        length = min(quotient, int(given)) if given.isdecimal() else quotient
        command.arguments += [name, str(length)]


def _capacity(command: Combination, _family: str) -> None:
    """The factor of training, with Megatron-DeepSpeed's defaults of the other two options of the capacity."""
    flag = "--moe-train-capacity-factor"
    if flag not in command.found:
        return
    command.arguments += ["--moe-expert-capacity-factor", command.found[flag]]
    for name, default in (("--moe-eval-capacity-factor", "1.0"), ("--moe-min-capacity", "4")):
        if name not in command.others:
            command.arguments += [name, default]


def _packing(command: Combination, _family: str) -> None:
    """DynMo's release of pipeline ranks, which does not depend on its load balancing there."""
    flag, number = "--packing", "--packed-num-gpus"
    if flag not in command.found:
        if number in command.found:
            command.notes.append(f"{number}: no effect without {flag}")
        return
    command.arguments += ["--pack-to", command.found.get(number, "2")]
    if "--load-balance" not in command.others and "--balance" not in command.others:
        command.arguments += ["--balance", "online"]
