"""Where the scalars of the training log are written: TensorBoard, Weights & Biases, MLflow."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

from ...config import Config, config_document
from ...parallel.consensus import run_on_all_ranks
from ...parallel.process_groups import World
from ..run_directory import RunDirectory
from .tensorboard import EventWriter
from .tracking.mlflow_client import MlflowClient, MlflowRun, check_mlflow
from .tracking.tracker_thread import TrackerThread
from .tracking.wandb_client import WandbClient, WandbRun, check_wandb


class ScalarWriter(Protocol):
    """Writes scalars of steps; no method raises or waits for a network."""

    def scalars(self, step: int, scalars: Mapping[str, float]) -> None:
        """Write the scalars of ``step``."""

    def close(self, exit_code: int | None = None) -> None:
        """End the writer; ``exit_code`` of the training is None after an error."""


def check_clients(config: Config) -> None:
    """Import the clients of the trackers that the options name.

    Raises:
        UsageError: a client is not installed.
    """
    if config.tracking.wandb_project is not None:
        check_wandb()
    if config.tracking.mlflow_experiment is not None:
        check_mlflow(config.tracking.mlflow_tracking_uri)


def scalar_writers_on_rank0(world: World, config: Config, directory: RunDirectory, step: int) -> list[ScalarWriter]:
    """The writers that the options name on rank 0, none on the other ranks. Every rank calls this.

    Args:
        world: process groups.
        config: configuration of the run.
        directory: run directory.
        step: number of completed steps.

    Raises:
        UsageError: on a reporting rank, if the TensorBoard file cannot be written.
        SystemExit: on the other ranks, with the same exit code.
    """
    return run_on_all_ranks(world, lambda: _scalar_writers(config, directory, step) if world.is_rank0 else [])


def _scalar_writers(config: Config, directory: RunDirectory, step: int) -> list[ScalarWriter]:
    tracking, writers = config.tracking, list[ScalarWriter]()
    if config.run.tensorboard_dir is not None:
        writers.append(EventWriter(Path(config.run.tensorboard_dir), step))
    options = named_options(config)
    default_name = directory.path.resolve().name
    if tracking.wandb_project is not None:
        names = WandbRun(
            project=tracking.wandb_project,
            name=tracking.wandb_exp_name or default_name,
            entity=tracking.wandb_entity,
            run_id=directory.run_id,
            folder=Path(tracking.wandb_save_dir) if tracking.wandb_save_dir else directory.path,
        )
        writers.append(TrackerThread(WandbClient(names, options), directory.events))
    if tracking.mlflow_experiment is not None:
        place = MlflowRun(
            tracking_uri=tracking.mlflow_tracking_uri,
            experiment=tracking.mlflow_experiment,
            name=tracking.mlflow_run_name or default_name,
            tags={"dynmo.run_id": directory.run_id, "dynmo.segment": str(directory.segment)},
            id_file=directory.path / "mlflow.json",
        )
        writers.append(TrackerThread(MlflowClient(place, options, directory.events), directory.events))
    return writers


def named_options(config: Config) -> dict[str, Any]:
    """Every option with its value, without their tables, as in Megatron: names are unique."""
    options: dict[str, Any] = {}
    for values in config_document(config)["config"].values():
        options.update(values)
    return options
