"""The run directory: what lies where, how a run is begun or gone on with, and its two logs."""

from __future__ import annotations

import os
import secrets
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from platform import python_version
from typing import Any

from .. import __version__
from .._common.document import envelope, write_whole
from .._common.errors import UsageError
from ..config import Config, config_document
from ..formats.os_errors import reason
from ..formats.run import FORMAT, VERSION, read_run, write_run
from ..formats.run_lines import append_metrics
from ..launch.worker import LAUNCH_FILE_VARIABLE

RUNS = Path("runs")


@dataclass(frozen=True, kw_only=True)
class RunDirectory:
    """A run on disk. ``segment`` counts its starts from 0; ``run_id`` stays for life."""

    path: Path
    run_id: str
    segment: int

    @property
    def run_json(self) -> Path:
        """Resolved configuration, where each value came from, versions, hosts."""
        return self.path / "run.json"

    @property
    def metrics(self) -> Path:
        """One line per logged step."""
        return self.path / "metrics.jsonl"

    @property
    def events(self) -> Path:
        """One line per event, for people."""
        return self.path / "events.jsonl"

    @property
    def profile(self) -> Path:
        """Costs of layers, for the planner."""
        return self.path / "profile.jsonl"

    @property
    def plans(self) -> Path:
        """Partition plans."""
        return self.path / "plans"

    @property
    def requests(self) -> Path:
        """What a person or scheduler asks of the run."""
        return self.path / "requests"

    @property
    def checkpoints(self) -> Path:
        """Checkpoints by step."""
        return self.path / "checkpoints"

    def log_metrics(self, record: Mapping[str, Any]) -> None:
        """Append one line to the metrics; numbers that are not finite become null."""
        append_metrics(self.metrics, record)

    @staticmethod
    def event_record(kind: str, message: str, *, step: int, **detail: Any) -> dict[str, Any]:
        """A line of the events, dated now; ``message`` is a sentence for a person."""
        dated = {"time_utc": utc_text(datetime.now(UTC)), "step": step, "kind": kind, "message": message}
        return dated | detail


def utc_text(moment: datetime) -> str:
    """``2026-01-31T12:00:00Z``."""
    return moment.astimezone(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def choose_path(config: Config, now: datetime, exists: Callable[[Path], bool]) -> Path:
    """Where the run lies: ``--run-dir``, else ``--save``, else a free name ``runs/UTC-model``."""
    named = config.run.run_dir or config.run.save
    if named:
        return Path(named)
    stem = f"{now.astimezone(UTC).strftime('%Y%m%dT%H%M%SZ')}-{config.model.family}"
    path, number = RUNS / stem, 1
    while exists(path):
        number += 1
        path = RUNS / f"{stem}-{number}"
    return path


def _goes_on(path: Path, load: str | None) -> bool:
    """Whether ``--load`` names this run, or something in it."""
    return load is not None and Path(load).resolve().is_relative_to(path.resolve())


def open_run_directory(
    config: Config, *, world_size: int, hosts: Sequence[str], engine: Mapping[str, Any]
) -> RunDirectory:
    """Make the run directory, or resume in the one that ``--load`` names; for rank 0 alone.

    Args:
        config: of this start.
        world_size: processes.
        hosts: names of the machines, by rank of their first process.
        engine: facts of the engine that fix the run's arithmetic, such as the table of sparse thresholds.

    Raises:
        UsageError: the directory holds another run, or cannot be made.
    """
    path = choose_path(config, datetime.now(UTC), Path.exists)
    run = RunDirectory(path=path, run_id=secrets.token_hex(8), segment=0)
    if run.run_json.exists():
        if not _goes_on(path, config.run.load):
            raise UsageError(f"{path} holds a run already; resume it with --load {path}, or give another --run-dir")
        before = read_run(run.run_json)
        run = RunDirectory(path=path, run_id=before["run_id"], segment=before["segment"] + 1)
    try:
        for folder in (run.plans, run.requests, run.checkpoints):
            folder.mkdir(parents=True, exist_ok=True)
        write_run(run.run_json, _run_document(config, run, world_size, hosts, engine))
    except OSError as error:
        raise UsageError(f"cannot write the run directory {path}: {reason(error)}") from error
    if told := os.environ.get(LAUNCH_FILE_VARIABLE):
        write_whole(Path(told), str(path.resolve()).encode())
    return run


def _run_document(
    config: Config, run: RunDirectory, world_size: int, hosts: Sequence[str], engine: Mapping[str, Any]
) -> dict[str, Any]:
    return {
        **envelope(FORMAT, VERSION, f"dynmo-train {__version__}"),
        "run_id": run.run_id,
        "segment": run.segment,
        "world_size": world_size,
        "hosts": list(hosts),
        "command_line": list(sys.argv),
        "versions": versions(),
        "engine": dict(engine),
        **config_document(config),
    }


def versions() -> dict[str, str]:
    """Versions of what a run's results depend on."""
    found = {"python": python_version(), "dynmo": __version__}
    for name in ("torch", "numpy", "tokenizers"):
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return found
