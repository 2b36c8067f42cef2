"""The schedules of a run in its checkpoints: the fields of Megatron's ``OptimizerParamScheduler``.

They count samples, as in Megatron, so that checkpoints can be converted to and from Megatron.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

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


def scheduler_differences(rate: LearningRate, manifest: Mapping[str, Any]) -> list[str]:
    """Return a line for each learning-rate option that differs from the checkpoint's."""
    stored = manifest.get(FIELD)
    if not isinstance(stored, dict):
        return []
    return [
        f"the checkpoint was trained with {name} {stored[name]}; this run continues with {now}"
        for name, now in _rate_fields(rate).items()
        if name in stored and stored[name] != now
    ]
