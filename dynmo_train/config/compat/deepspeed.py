"""Option values from a DeepSpeed JSON file: batch, precision, ZeRO, optimizer, clipping and curriculum."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ..._common.document import DocumentError, Problem, finite_number, read_any_json, short_repr
from ..._common.errors import UsageError
from ...formats.os_errors import reason

_PLAIN = {
    "train_batch_size": "global_batch_size",
    "train_micro_batch_size_per_gpu": "micro_batch_size",
    "gradient_accumulation_steps": "gradient_accumulation_steps",
    "gradient_clipping": "clip_grad",
}
_HALF = {"loss_scale_window": "loss_scale_window", "hysteresis": "hysteresis", "min_loss_scale": "min_loss_scale"}
_RATES = {"lr": "lr", "weight_decay": "weight_decay"}
_ADAM = {**_RATES, "eps": "adam_eps"}
# Types of optimizers in lower case -> --optimizer, and the options of their parameters.
_OPTIMIZERS = {
    "adam": ("adam", _ADAM),
    "adamw": ("adam", _ADAM),
    "fusedadam": ("adam", _ADAM),
    "sgd": ("sgd", {**_RATES, "momentum": "sgd_momentum"}),
    "muon": (
        "muon",
        {**_ADAM, "momentum": "muon_momentum", "ns_steps": "muon_num_ns_steps", "nesterov": "muon_nesterov"},
    ),
}
# Parameters of optimizers that change the updates -> the value with which the updates are those of this package.
_NEUTRAL_PARAMETERS: Mapping[str, Any] = {
    "amsgrad": False,
    "bias_correction": True,
    "dampening": 0,
    "maximize": False,
    "nesterov": False,
}
_CURRICULUM = {"min_difficulty": "curriculum_shortest", "schedule_type": "curriculum_schedule"}
_PACE = {
    "total_curriculum_step": "curriculum_steps",
    "difficulty_step": "curriculum_multiple",
    "root_degree": "curriculum_root_degree",
}
# Defaults of DeepSpeed that differ from ours: gradients are clipped and scaled by its file alone.
_NO_CLIPPING, _INITIAL_SCALE = {"clip_grad": 0.0}, {"initial_loss_scale": 2.0**16}
# Sections that change the training and are not supported -> what to do instead; without "enabled" they are off.
_REFUSED = {
    "scheduler": "use --lr-decay-style, --lr-warmup-iters, --lr-decay-iters and --min-lr, and remove the section",
    "amp": "use bf16, or fp16",
    "compression_training": "use --sparsify of dynmo-train, or remove the section",
    "data_efficiency": "use curriculum_learning, or --mod-capacity for tokens that skip layers, and remove the section",
    "elasticity": "use --max-restarts of dynmo-train launch, and remove the section",
    "hybrid_engine": "use dynmo-train generate after the training, and remove the section",
    "progressive_layer_drop": "use --mod-capacity, or remove the section",
    "quantize_training": "use --fp8, or remove the section",
    "sparse_attention": "use --sparse-attention, or --attention-window, and remove the section",
    "torch_autocast": "use bf16, or fp16, and remove the section",
    "tensor_parallel": "use --tensor-model-parallel-size, and remove the section",
}
_OFFLOADING = "offloading is not supported: remove it; a higher stage shards more"
# Keys of zero_optimization that change results or memory, and are not supported unless they are off.
_ZERO_REFUSED = {
    "cpu_offload": _OFFLOADING,
    "cpu_offload_params": _OFFLOADING,
    "offload_optimizer": _OFFLOADING,
    "offload_param": _OFFLOADING,
    "zero_quantized_weights": "weights are gathered in their own type: remove it",
    "zero_quantized_nontrainable_weights": "weights are gathered in their own type: remove it",
    "zero_quantized_gradients": "use --grad-reduce-in-bf16 or --grad-comp: remove it",
    "mics_shard_size": "use --hsdp: remove it",
    "zero_hpz_partition_size": "use --hsdp: remove it",
}


@dataclass(frozen=True)
class DeepSpeedOptions:
    """Contents of a DeepSpeed file.

    Attributes:
        values: option name to value.
        ignored: keys without effect.
        problems: unsupported settings.
        defaults: option name to DeepSpeed's default where it differs from ours, of options that the file leaves out.
    """

    values: Mapping[str, Any]
    ignored: tuple[str, ...]
    problems: tuple[Problem, ...]
    defaults: Mapping[str, Any] = field(default_factory=dict)


def parse_deepspeed(document: Mapping[str, Any]) -> DeepSpeedOptions:
    """Convert a DeepSpeed configuration to option values; ``auto`` leaves the value to other options."""
    values: dict[str, Any] = {}
    ignored: list[str] = []
    problems: list[Problem] = []
    sections = {
        "fp16": _half,
        "bf16": _bfloat,
        "bfloat16": _bfloat,
        "zero_optimization": _zero,
        "optimizer": _optimizer,
        "curriculum_learning": _curriculum,
    }
    for key, content in document.items():
        if key in _PLAIN:
            values[_PLAIN[key]] = content
        elif key in sections and content is not None and not isinstance(content, Mapping):
            problems.append(_invalid(key, content, "an object"))
        elif key in sections and isinstance(content, Mapping):
            for name, found in sections[key](content):
                if name.startswith("?"):
                    ignored.append(f"{key}.{name[1:]}")
                elif isinstance(found, Problem):
                    problems.append(found)
                else:
                    values[name] = found
        elif key in _REFUSED and _is_enabled(key, content):
            problems.append(Problem(key, "unsupported", f"is not supported: {_REFUSED[key]}"))
        else:
            ignored.append(key)
    given = {name: value for name, value in values.items() if value != "auto"}
    defaults = _NO_CLIPPING | (_INITIAL_SCALE if given.get("fp16") and "loss_scale" not in given else {})
    # ``auto`` is the value of another option.
    defaults = {name: value for name, value in defaults.items() if name not in values}
    return DeepSpeedOptions(given, tuple(ignored), tuple(problems), defaults)


Found = Iterator[tuple[str, Any]]


def _is_enabled(key: str, content: Any) -> bool:
    """Whether a section is on: most have ``enabled``, and parts of the compression have one each."""
    if not isinstance(content, Mapping):
        return content not in (None, False, "auto")
    if key == "compression_training":
        return any(_has_enabled(part) for part in content.values())
    if key == "tensor_parallel":
        return content.get("autotp_size", 0) not in (0, 1, "auto")
    if key in ("scheduler", "sparse_attention"):
        return content.get("type", content.get("mode")) is not None
    return content.get("enabled", False) is not False


def _is_off(value: Any) -> bool:
    """Whether the value of a key of ``zero_optimization`` leaves it out."""
    if isinstance(value, Mapping):
        return value.get("device") in (None, "none")
    return value is None or value is False or value == "auto" or (type(value) is int and value in (-1, 0, 1))


def _has_enabled(part: Any) -> bool:
    """Whether an object, or one within it to the depth of DeepSpeed's files, is enabled."""
    return isinstance(part, Mapping) and (
        part.get("enabled", False) is not False
        or any(isinstance(inner, Mapping) and inner.get("enabled", False) is not False for inner in part.values())
    )


def _mapped(content: Mapping[str, Any], names: Mapping[str, str]) -> Found:
    for key, value in content.items():
        yield (names[key], value) if key in names else (f"?{key}", value)


MAX_SCALE_POWER = 127
"""float32 ends at 2**128."""
POWERS = f"a number from 0 to {MAX_SCALE_POWER}"


def _invalid(path: str, value: Any, rule: str) -> Problem:
    return Problem(path, "type", f"must be {rule}, is {short_repr(value)}")


def _number(path: str, value: Any) -> float | Problem:
    number = finite_number(value)
    return _invalid(path, value, "a number") if number is None else number


def _half(content: Mapping[str, Any]) -> Found:
    content = dict(content)
    enabled = content.pop("enabled", False)
    if not _is_switch(enabled):
        yield "fp16", _invalid("fp16.enabled", enabled, "true or false")
    if enabled not in (True, "auto"):
        return
    if enabled is True:
        yield "fp16", True
    if (scale := content.pop("loss_scale", 0)) not in (0, "auto"):
        yield "loss_scale", _number("fp16.loss_scale", scale)
    if (power := content.pop("initial_scale_power", "auto")) != "auto":
        exponent = finite_number(power)
        is_valid = exponent is not None and 0 <= exponent <= MAX_SCALE_POWER
        yield "initial_loss_scale", 2.0**power if is_valid else _invalid("fp16.initial_scale_power", power, POWERS)
    yield from _mapped(content, _HALF)


def _is_switch(value: Any) -> bool:
    """Whether a value is true, false or ``auto``; DeepSpeed also reads text such as "true"."""
    return value is None or isinstance(value, bool) or value == "auto"


def _bfloat(content: Mapping[str, Any]) -> Found:
    if not _is_switch(content.get("enabled")):
        yield "bf16", _invalid("bf16.enabled", content["enabled"], "true or false")
    if content.get("enabled") is True:
        yield "bf16", True
    yield from _mapped({key: value for key, value in content.items() if key != "enabled"}, {})


def _zero(content: Mapping[str, Any]) -> Found:
    yield "zero_stage", content.get("stage", 0)
    for key, value in content.items():
        if key in _ZERO_REFUSED and not _is_off(value):
            yield key, Problem(f"zero_optimization.{key}", "unsupported", f"is not supported: {_ZERO_REFUSED[key]}")
    yield from _mapped({key: value for key, value in content.items() if key != "stage"}, {})


def _optimizer(content: Mapping[str, Any]) -> Found:
    kind, stated = content.get("type", "Adam"), content.get("params", {})
    if not isinstance(stated, Mapping):
        yield "optimizer", _invalid("optimizer.params", stated, "an object")
        return
    given = dict(stated)
    if str(kind).lower() not in _OPTIMIZERS:
        rule = "must be Adam, AdamW, SGD or Muon: change it, or remove the section and give --optimizer"
        message = f"is {kind if isinstance(kind, str) else short_repr(kind)}; {rule}"
        yield "optimizer", Problem("optimizer.type", "unsupported", message)
        return
    name, options = _OPTIMIZERS[str(kind).lower()]
    if name != "adam":
        yield "optimizer", name
    for key in ("muon_lr", "adam_lr"):
        if given.pop(key, None) is not None:
            message = "is not supported: give lr for both, and --decoupled-lr for embeddings and output layer"
            yield "optimizer", Problem(f"optimizer.params.{key}", "unsupported", message)
    if given.get("adam_w_mode", True) is False:
        message = "is false: weight decay is decoupled from the gradient; remove it, or set weight_decay to 0"
        yield "optimizer", Problem("optimizer.params.adam_w_mode", "unsupported", message)
    for key, neutral in _NEUTRAL_PARAMETERS.items():
        if key not in options and given.pop(key, neutral) not in (neutral, None, "auto"):
            message = f"is not supported: remove it, or set it to {str(neutral).lower()}"
            yield "optimizer", Problem(f"optimizer.params.{key}", "unsupported", message)
    betas = given.pop("betas", "auto")
    if betas != "auto":
        is_pair = isinstance(betas, list) and len(betas) == 2
        pair = betas if is_pair else [_invalid("optimizer.params.betas", betas, "a list of two numbers")] * 2
        yield from zip(("adam_beta1", "adam_beta2"), pair[: 2 if is_pair else 1], strict=False)
    yield from ((name.replace("?", "?params."), value) for name, value in _mapped(given, options))


def _curriculum(content: Mapping[str, Any]) -> Found:
    content = dict(content)
    if not _is_switch(enabled := content.pop("enabled", False)):
        yield "curriculum", _invalid("curriculum_learning.enabled", enabled, "true or false")
    if not enabled:
        return
    kind = content.pop("curriculum_type", "seqlen")
    if kind != "seqlen":
        message = f"is {kind if isinstance(kind, str) else short_repr(kind)}; must be seqlen"
        yield "curriculum", Problem("curriculum_learning.curriculum_type", "unsupported", message)
    content.pop("max_difficulty", None)  # --seq-length
    pace = content.pop("schedule_config", {})
    if not isinstance(pace, Mapping):
        yield "curriculum", _invalid("curriculum_learning.schedule_config", pace, "an object")
        return
    yield from _mapped(pace, _PACE)
    yield from _mapped(content, _CURRICULUM)


def read_deepspeed(path: Path) -> DeepSpeedOptions:
    """Read a DeepSpeed JSON file.

    Raises:
        UsageError: the file cannot be read.
        DocumentError: not a JSON object, or unsupported settings.
    """
    try:
        document = read_any_json(path)
    except DocumentError as error:
        raise UsageError(f"--deepspeed-config {path}: {reason(error)}; give a DeepSpeed JSON file") from error
    if not isinstance(document, Mapping):
        raise DocumentError(str(path), [Problem("", "type", "must be a JSON object")])
    found = parse_deepspeed(document)
    if found.problems:
        raise DocumentError(str(path), list(found.problems))
    return found
