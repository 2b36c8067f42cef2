"""The contents of a checkpoint that the engine does not know: the run, its progress, its data."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ...config import Config


def data_properties(config: Config) -> dict[str, Any]:
    """What determines the order of the samples, as in the manifest."""
    return {
        "seed": config.training.seed,
        "split": config.data.split,
        "sequence_length": config.model.seq_length,
        "prefix": config.data.name,
    }


@dataclass(frozen=True, kw_only=True)
class CheckpointMetadata:
    """The contents of a checkpoint that the engine does not know.

    Attributes:
        run_id: id of the run.
        step: number of completed steps.
        consumed_train_samples: number of consumed training samples.
        data: what determines the order of the samples, as in the manifest.
        tokenizer: tokenizer files to copy: name in the checkpoint -> source path.
        keep: maximum number of checkpoints to keep; None keeps all.
        consumed_valid_samples: number of consumed validation samples.
        data_position: where streams of documents continue: split -> position; empty for indexed data.
        source: origin of the model, from the manifest of the loaded checkpoint; None without one.
        class_names: class names of a classifier, in the order of its logits.
        moments: whether the optimizer state is stored.
        loss_spikes: losses of the last steps and skipped samples; empty without.
        options: option name to value of what the run is made of; see ``run_options``.
        base: directory and digest of the checkpoint whose weights are not stored again; empty where all are stored.
    """

    run_id: str
    step: int
    consumed_train_samples: int
    data: Mapping[str, Any]
    tokenizer: Mapping[str, Path]
    keep: int | None
    consumed_valid_samples: int = 0
    data_position: Mapping[str, Any] = field(default_factory=dict)
    source: Mapping[str, Any] | None = None
    class_names: tuple[str, ...] = ()
    moments: bool = True
    loss_spikes: Mapping[str, Any] = field(default_factory=dict)
    options: Mapping[str, str] = field(default_factory=dict)
    base: Mapping[str, str] = field(default_factory=dict)
