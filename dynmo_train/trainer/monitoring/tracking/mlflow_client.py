"""MLflow, through its own client.

The id of the MLflow run is in ``RUN/mlflow.json``, so that each start of a run continues it.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any
from urllib.parse import urlparse

from ...._common.document import DocumentError, encode_json, read_any_json, write_whole
from ...._common.errors import EXIT_OK, EXIT_RELAUNCH, MissingExtraError, UsageError
from .tracker_thread import ScalarRecord

MODULE, EXTRA = "mlflow", "mlflow"
# Limits of MLflow's API.
MAX_PARAMS, MAX_PARAM_LENGTH, MAX_METRICS = 100, 6_000, 1_000
_NOT_IN_NAMES = re.compile(r"[^\w.\-/ ]")
# Exit codes above are those of a program that a signal ended.
SIGNALS = 128
# Shown on the page of the run.
_NOTED_EVENTS = 20
_DATABASES = ("sqlite", "mysql", "postgresql", "mssql")


def check_mlflow(tracking_uri: str | None) -> None:
    """Import the client, and what the store needs.

    Args:
        tracking_uri: URI of the store; None: that of ``MLFLOW_TRACKING_URI``, or MLflow's default.

    Raises:
        UsageError: the client is not installed, or the store needs more than the client.
    """
    try:
        mlflow = import_module(MODULE)
    except ImportError as error:
        raise MissingExtraError(MODULE, EXTRA) from error
    uri = str(tracking_uri or mlflow.get_tracking_uri())
    # mysql+pymysql: a database and its driver.
    if urlparse(uri).scheme.partition("+")[0] in _DATABASES:
        try:
            import_module("sqlalchemy")
        except ImportError as error:
            raise UsageError(
                f"--mlflow-tracking-uri {uri}: a database needs the whole of MLflow; run: pip install mlflow, or give"
                " the URL of a server or a folder"
            ) from error


@dataclass(frozen=True, kw_only=True)
class MlflowRun:
    """What identifies a run on MLflow.

    Attributes:
        tracking_uri: URI of the store; None: that of ``MLFLOW_TRACKING_URI``, or MLflow's default.
        experiment: name of the experiment.
        name: name of the run.
        tags: tag -> value.
        id_file: file of the run directory that has the id of the MLflow run.
    """

    tracking_uri: str | None
    experiment: str
    name: str
    tags: Mapping[str, str]
    id_file: Path


class MlflowClient:
    """Writes a run to MLflow.

    Args:
        run: names and place of the id.
        config: option name -> value.
        events: ``events.jsonl`` of the run.
    """

    name = "MLflow"

    def __init__(self, run: MlflowRun, config: Mapping[str, Any], events: Path) -> None:
        self._mlflow = import_module(MODULE)
        self._run, self._events = run, events
        self._config = {name: str(value)[:MAX_PARAM_LENGTH] for name, value in config.items()}
        self._tracking_uri = run.tracking_uri or str(self._mlflow.get_tracking_uri())
        if urlparse(self._tracking_uri).scheme in ("", "file"):
            # MLflow 3 refuses folders without it.
            os.environ.setdefault("MLFLOW_ALLOW_FILE_STORE", "true")
        # The thread repeats what failed; seven attempts of the client for each request take four minutes.
        os.environ.setdefault("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "2")
        self._client: Any = None
        self._run_id = ""

    def start(self) -> None:
        """Open the run of the earlier starts, or a new one."""
        self._client = self._mlflow.MlflowClient(tracking_uri=self._tracking_uri)
        found = self._earlier_run()
        if found is None:
            info = self._client.create_run(self._experiment_id(), run_name=self._run.name).info
            self._run_id, params = info.run_id, {}
            document = {"tracking_uri": self._tracking_uri, "experiment": self._run.experiment, "run_id": self._run_id}
            write_whole(self._run.id_file, encode_json(document))
        else:
            self._run_id, params = found.info.run_id, found.data.params
            self._client.update_run(self._run_id, status="RUNNING")
        for name, value in self._run.tags.items():
            self._client.set_tag(self._run_id, name, value)
        self._write_config(params)

    def _experiment_id(self) -> str:
        experiment = self._client.get_experiment_by_name(self._run.experiment)
        return str(experiment.experiment_id if experiment else self._client.create_experiment(self._run.experiment))

    def _earlier_run(self) -> Any:
        """The MLflow run of the earlier starts; None without one in this store and experiment."""
        try:
            document = read_any_json(self._run.id_file)
            place = (document["tracking_uri"], document["experiment"])
            run_id = str(document["run_id"])
        except (DocumentError, KeyError, TypeError):
            return None
        if place != (self._tracking_uri, self._run.experiment):
            return None
        try:
            found = self._client.get_run(run_id)
        except self._mlflow.MlflowException as error:
            # A server that cannot be reached is another error, and must not begin a second run.
            if error.error_code == "RESOURCE_DOES_NOT_EXIST":
                return None
            raise
        return found if found.info.lifecycle_stage == "active" else None

    def _write_config(self, params: Mapping[str, str]) -> None:
        """Log the configuration as parameters; MLflow refuses new values of them, so that those become tags."""
        entities = self._mlflow.entities
        new = [entities.Param(name, value) for name, value in self._config.items() if name not in params]
        for at in range(0, len(new), MAX_PARAMS):
            self._client.log_batch(self._run_id, params=new[at : at + MAX_PARAMS])
        for name, value in self._config.items():
            if params.get(name, value) != value:
                self._client.set_tag(self._run_id, f"resumed.{name}", value)

    def write(self, records: Sequence[ScalarRecord]) -> None:
        """Send scalars."""
        metrics = [
            self._mlflow.entities.Metric(
                _NOT_IN_NAMES.sub("_", name), value, timestamp=int(record.time_s * 1e3), step=record.step
            )
            for record in records
            for name, value in record.scalars.items()
        ]
        for at in range(0, len(metrics), MAX_METRICS):
            self._client.log_batch(self._run_id, metrics=metrics[at : at + MAX_METRICS])

    def write_events(self, events: Sequence[Mapping[str, Any]]) -> None:
        """Write the last events to the notes of the run, and all to an artifact."""
        lines = [f"* step {event.get('step')}: {event.get('message')}" for event in events[-_NOTED_EVENTS:]]
        self._client.set_tag(self._run_id, "mlflow.note.content", "\n".join(reversed(lines)))
        self._client.log_artifact(self._run_id, str(self._events))

    def finish(self, exit_code: int | None) -> None:
        """End the run as finished, as killed if a signal or a new number of workers ended the start, else as failed.

        Args:
            exit_code: exit code of the training; None after an error.
        """
        is_stopped = exit_code is not None and (exit_code > SIGNALS or exit_code == EXIT_RELAUNCH)
        status = "FINISHED" if exit_code == EXIT_OK else "KILLED" if is_stopped else "FAILED"
        self._client.set_terminated(self._run_id, status)
