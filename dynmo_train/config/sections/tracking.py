"""Options of experiment trackers; those of Weights & Biases are Megatron's."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from .. import panels
from ..options import option


@dataclass(frozen=True, kw_only=True)
class TrackingConfig:
    """Weights & Biases and MLflow."""

    PANEL: ClassVar[str] = panels.LOGGING

    wandb_project: str | None = option("Weights & Biases project; none: not written.", default=None, common=True)
    wandb_exp_name: str | None = option("Name of the W&B run; none: that of the run directory.", default=None)
    wandb_entity: str | None = option("Weights & Biases user or team; none: that of the account.", default=None)
    wandb_save_dir: str | None = option(
        "Folder of Weights & Biases files; none: the run directory.", default=None, refers_to="place"
    )
    mlflow_experiment: str | None = option("MLflow experiment; none: not written.", default=None, common=True)
    mlflow_tracking_uri: str | None = option("MLflow server or folder; none: $MLFLOW_TRACKING_URI.", default=None)
    mlflow_run_name: str | None = option("Name of the MLflow run; none: that of the run directory.", default=None)
