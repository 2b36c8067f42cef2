"""The schedules of a run in its checkpoints: the fields of Megatron's ``OptimizerParamScheduler``.

They count samples, as in Megatron, so that checkpoints can be converted to and from Megatron.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, get_args

from .._common.document import finite_number, short_repr
from ..config.sections.optimizer import DecayStyle, IncrementStyle
from ..formats.checkpoint import CheckpointError
from .lr_schedule import LearningRate, WeightDecay

FIELD = "x_scheduler"


def scheduler_state(rate: LearningRate, decay: WeightDecay, advanced_samples: int) -> dict[str, Any]:
    """Return the fields of Megatron's scheduler; ``advanced_samples`` is its position in samples."""
    return {
        **_rate_fields(rate),
        "num_steps": advanced_samples,
        "start_wd": decay.start,
        "end_wd": decay.end,
        "wd_incr_style": decay.style,
        "wd_incr_steps": decay.steps,
    }


def _rate_fields(rate: LearningRate) -> dict[str, Any]:
    return {
        "max_lr": rate.peak,
        "min_lr": rate.floor,
        "lr_decay_style": rate.style,
        "lr_warmup_steps": rate.warmup_steps,
        "lr_decay_steps": rate.decay_steps,
    }


def samples_done(manifest: Mapping[str, Any]) -> int:
    """Return the position of a checkpoint's schedules, in samples.

    The scheduler's own count where there is one, because skipped steps do not advance it; else the samples consumed.
    """
    stored = manifest.get(FIELD)
    samples = stored.get("num_steps") if isinstance(stored, dict) else None
    return samples if isinstance(samples, int) else int(manifest["consumed_train_samples"])


def scheduler_differences(rate: LearningRate, manifest: Mapping[str, Any]) -> list[tuple[str, Any, Any]]:
    """Return the fields of the learning rate that differ: name, value of the checkpoint, value of ``rate``."""
    stored = manifest.get(FIELD)
    if not isinstance(stored, dict):
        return []
    return [
        (name, stored[name], value)
        for name, value in _rate_fields(rate).items()
        if name in stored and stored[name] != value
    ]


def with_stored_schedules(
    rate: LearningRate, decay: WeightDecay, manifest: Mapping[str, Any]
) -> tuple[LearningRate, WeightDecay]:
    """Return the schedules with the fields that a checkpoint records, as Megatron's scheduler loads them.

    The fields of a WSD decay and the initial rate of the warm-up are not recorded, and stay.

    Args:
        rate: learning-rate schedule of the options, in samples.
        decay: weight-decay schedule of the options, in samples.
        manifest: of the checkpoint; without schedules nothing changes.

    Raises:
        CheckpointError: a field has an invalid value.
    """
    stored = manifest.get(FIELD)
    if not isinstance(stored, dict):
        return rate, decay

    def read(name: str, check: Callable[[Any], Any], current: Any) -> Any:
        if name not in stored:
            return current
        value = check(stored[name])
        if value is None:
            raise CheckpointError(f"the checkpoint's {FIELD} has an invalid {name}: {short_repr(stored[name])}")
        return value

    style = read("lr_decay_style", lambda value: value if value in get_args(DecayStyle) else None, rate.style)
    growth = read("wd_incr_style", lambda value: value if value in get_args(IncrementStyle) else None, decay.style)
    return (
        replace(
            rate,
            peak=read("max_lr", _amount, rate.peak),
            floor=read("min_lr", _amount, rate.floor),
            style=style,
            warmup_steps=read("lr_warmup_steps", _amount, rate.warmup_steps),
            decay_steps=read("lr_decay_steps", _count, rate.decay_steps),
        ),
        replace(
            decay,
            start=read("start_wd", _amount, decay.start),
            end=read("end_wd", _amount, decay.end),
            style=growth,
            steps=read("wd_incr_steps", _count, decay.steps),
        ),
    )


def _amount(value: Any) -> float | None:
    number = finite_number(value)
    return number if number is not None and number >= 0 else None


def _count(value: Any) -> int | None:
    number = _amount(value)
    return int(number) if number is not None and number >= 1 and number.is_integer() else None
