"""The schedule of a run as its checkpoints state it: the fields of Megatron's ``OptimizerParamScheduler``.

It counts samples, as Megatron's does, so that a checkpoint can go to Megatron and come from it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from .lr_schedule import LearningRate, WeightDecay

FIELD = "x_scheduler"


def scheduler_state(rate: LearningRate, decay: WeightDecay, advanced_samples: int) -> dict[str, Any]:
    """The fields of Megatron's scheduler; ``advanced_samples`` is how far it has come."""
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
    """How far the schedule of a checkpoint has come, in samples.

    The scheduler's own count where there is one, because skipped steps do not advance it; else the samples consumed.
    """
    stored = manifest.get(FIELD)
    samples = stored.get("num_steps") if isinstance(stored, dict) else None
    return samples if isinstance(samples, int) else int(manifest["consumed_train_samples"])


def scheduler_differences(rate: LearningRate, manifest: Mapping[str, Any]) -> list[str]:
    """What this run's options change of the learning rate that the checkpoint was trained with, a line each."""
    stored = manifest.get(FIELD)
    if not isinstance(stored, dict):
        return []
    return [
        f"the checkpoint was trained with {name} {stored[name]}; this run continues with {now}"
        for name, now in _rate_fields(rate).items()
        if name in stored and stored[name] != now
    ]
