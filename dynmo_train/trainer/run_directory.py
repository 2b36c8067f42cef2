"""The run directory: its files, how a run creates or resumes it, and the metrics and events logs."""

from __future__ import annotations

import contextlib
import os
import secrets
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from platform import python_version
from typing import Any

from .. import __version__
from .._common.document import DocumentError, envelope, write_whole
from .._common.errors import UsageError
from .._common.log_parts import Rotation
from ..config import Config, config_document
from ..formats.os_errors import reason
from ..formats.private_text import without_credentials
from ..formats.run import FORMAT, VERSION, read_run, write_run
from ..launch.incident_log import unrecorded_end, write_incident
from ..launch.run_lock import LOCK_NAME, hold, release
from ..launch.worker import LAUNCH_FILE_VARIABLE
from ..parallel.consensus import run_on_all_ranks
from ..parallel.process_groups import World, broadcast_object

RUNS = Path("runs")
# Network file systems show a new file on other hosts after some seconds.
SHARED_S = 10.0


@dataclass(frozen=True, kw_only=True)
class RunDirectory:
    """A run on disk.

    Attributes:
        path: the directory.
        run_id: id of the run, the same for all its starts.
        segment: number of the start, from 0.
        previous_config: on rank 0, the configuration of the previous start; None at the first one.
        lock: on rank 0, the lock of this start, see ``launch/run_lock.py``; None where there is none.
    """

    path: Path
    run_id: str
    segment: int
    previous_config: Mapping[str, Mapping[str, Any]] | None = None
    lock: int | None = None

    @property
    def run_json(self) -> Path:
        """Resolved configuration, source of each value, versions, hosts."""
        return self.path / "run.json"

    @property
    def metrics(self) -> Path:
        """One line per step or evaluation."""
        return self.path / "metrics.jsonl"

    @property
    def events(self) -> Path:
        """One line per event, for people."""
        return self.path / "events.jsonl"

    @property
    def profile(self) -> Path:
        """Measured costs of layers, for the planner."""
        return self.path / "profile.jsonl"

    @property
    def plans(self) -> Path:
        """Partition plans."""
        return self.path / "plans"

    @property
    def requests(self) -> Path:
        """Requests of a person or a scheduler."""
        return self.path / "requests"

    @property
    def checkpoints(self) -> Path:
        """Checkpoints by step."""
        return self.path / "checkpoints"

    @staticmethod
    def event_record(kind: str, message: str, *, step: int, **detail: Any) -> dict[str, Any]:
        """A line of ``events.jsonl`` with the current time.

        Args:
            kind: kind of the event, for programs.
            message: a sentence for a person.
            step: number of completed steps.
            detail: further fields, as JSON values.
        """
        # The time of the event, not of the write: with a full disk a line can wait for hours.
        dated = {"time_utc": utc_text(datetime.now(UTC)), "step": step, "kind": kind, "message": message}
        return dated | detail


def utc_text(moment: datetime) -> str:
    """``2026-01-31T12:00:00Z``."""
    return moment.astimezone(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def rotations(config: Config) -> tuple[Rotation, Rotation]:
    """Rotation of the profile, and that of metrics and of events."""
    run = config.run
    max_bytes = int(run.log_rotate_mb * 1e6) or None
    return (
        Rotation(max_bytes=max_bytes, keep=run.profile_parts),
        Rotation(max_bytes=max_bytes, keep=run.metrics_parts),
    )


def choose_path(config: Config, now: datetime, exists: Callable[[Path], bool]) -> Path:
    """The path of the run: ``--run-dir``, else ``--save``, else an unused name ``runs/UTC-model``."""
    given = config.run.run_dir or config.run.save
    if given:
        return Path(given)
    stem = f"{now.astimezone(UTC).strftime('%Y%m%dT%H%M%SZ')}-{config.model.family}"
    path, number = RUNS / stem, 1
    while exists(path):
        number += 1
        path = RUNS / f"{stem}-{number}"
    return path


def _is_resumed(path: Path, load: str | None) -> bool:
    """Whether ``--load`` is this run directory or a path inside."""
    return load is not None and Path(load).resolve().is_relative_to(path.resolve())


def open_run_directory(
    config: Config, *, world_size: int, hosts: Sequence[str], engine: Mapping[str, Any]
) -> RunDirectory:
    """Create the run directory, or open the one of ``--load`` to resume it. Only rank 0 calls this.

    Args:
        config: configuration of this start.
        world_size: number of processes.
        hosts: host names, in the order of their first ranks.
        engine: properties of the engine that determine the numerics, such as the sparse thresholds.

    Raises:
        UsageError: the directory contains another run, or cannot be created.
    """
    path = choose_path(config, datetime.now(UTC), Path.exists)
    # A random id: a plan of another run is refused by it, also if that run had the same path.
    run = RunDirectory(path=path, run_id=secrets.token_hex(8), segment=0)
    if run.run_json.exists():
        if not _is_resumed(path, config.run.load):
            raise UsageError(f"{path} already contains a run; resume it with --load {path}, or give another --run-dir")
        before = read_run(run.run_json)
        if (incident := unrecorded_end(path, before, os.environ)) is not None:
            write_incident(path, incident)
        run = RunDirectory(
            path=path, run_id=before["run_id"], segment=before["segment"] + 1, previous_config=before["config"]
        )
    try:
        for folder in (run.plans, run.requests, run.checkpoints):
            folder.mkdir(parents=True, exist_ok=True)
        run = replace(run, lock=hold(path))
        write_run(run.run_json, _run_document(config, run, world_size, hosts, engine))
    except OSError as error:
        raise UsageError(f"cannot write the run directory {path}: {reason(error)}") from error
    # The launcher reads the path from this file, to resume the run after a restart.
    if launch_file := os.environ.get(LAUNCH_FILE_VARIABLE):
        write_whole(Path(launch_file), str(path.resolve()).encode())
    return run


def open_run_directory_on_rank0(
    world: World, config: Config, *, hosts: Sequence[str], engine: Mapping[str, Any]
) -> RunDirectory:
    """Create or open the run directory on rank 0; the same result on every rank. Every rank calls this.

    Args:
        world: process groups.
        config: configuration of this start.
        hosts: host names, in the order of their first ranks.
        engine: properties of the engine that determine the numerics, such as the sparse thresholds.

    Raises:
        UsageError: on a reporting rank, where the directory contains another run, cannot be created, or is not the same
            on all nodes.
        SystemExit: on the other ranks, with the same exit code.
    """

    def open_here() -> RunDirectory | None:
        return open_run_directory(config, world_size=world.size, hosts=hosts, engine=engine) if world.is_rank0 else None

    opened = run_on_all_ranks(world, open_here)
    # Rank 0 alone chooses: the default name contains the time, and the run id is random.
    path, run_id, segment = broadcast_object(
        world, [str(opened.path), opened.run_id, opened.segment] if opened else None
    )
    previous_config, lock = (None, None) if opened is None else (opened.previous_config, opened.lock)
    run = RunDirectory(path=Path(path), run_id=run_id, segment=segment, previous_config=previous_config, lock=lock)
    try:
        run_on_all_ranks(world, lambda: check_is_shared(run, world.host))
    except BaseException:
        if world.is_rank0 and not segment:
            remove_new(run)
        raise
    return run


def check_is_shared(run: RunDirectory, host: str, patience_s: float = SHARED_S) -> None:
    """Check that this process sees the run directory which rank 0 opened; every rank writes its layers into it.

    Without the check a run would train to its end, while every save fails.

    Args:
        run: the run directory, of rank 0.
        host: name of this host.
        patience_s: seconds until the files of rank 0 are visible, which network file systems delay.

    Raises:
        UsageError: another directory, or none, is at its path.
    """
    deadline = time.monotonic() + patience_s
    while True:
        # Lists the folder, so that a network file system asks its server.
        with contextlib.suppress(OSError, DocumentError):
            if run.run_json.name in os.listdir(run.path) and read_run(run.run_json)["run_id"] == run.run_id:
                return
        if time.monotonic() > deadline:
            raise UsageError(
                f"{run.path.resolve()} on {host} is not the run directory of rank 0; every rank saves its layers there:"
                " give --run-dir (--save) as an absolute path on a file system that all nodes share"
            )
        time.sleep(0.1)


def remove_new(run: RunDirectory) -> None:
    """Remove a run directory that was created by this start and has no logs, so that its path can be given again."""
    with contextlib.suppress(OSError):
        run.run_json.unlink()
        release(run.lock)
        (run.path / LOCK_NAME).unlink(missing_ok=True)
        if launch_file := os.environ.get(LAUNCH_FILE_VARIABLE):
            Path(launch_file).unlink(missing_ok=True)
        for folder in (run.plans, run.requests, run.checkpoints, run.path):
            folder.rmdir()


def _run_document(
    config: Config, run: RunDirectory, world_size: int, hosts: Sequence[str], engine: Mapping[str, Any]
) -> dict[str, Any]:
    return {
        **envelope(FORMAT, VERSION, f"dynmo-train {__version__}"),
        "run_id": run.run_id,
        "segment": run.segment,
        "world_size": world_size,
        "hosts": list(hosts),
        "command_line": without_credentials(sys.argv),
        "versions": versions() | source_commit(),
        "engine": dict(engine),
        **config_document(config),
    }


def source_commit() -> dict[str, str]:
    """The commit of these sources as ``commit``, with ``-dirty`` after changes; empty where they are not a Git clone.

    Not one of :func:`versions`: processes of one run may be installed in different ways.
    """
    root = Path(__file__).resolve().parents[2]
    # An installed package may lie within a clone of another project, whose commit would mislead.
    if not (root / ".git").exists():
        return {}
    # ``describe --dirty`` executes what configurations name, such as ``core.fsmonitor``. Those of the environment and
    # of the user have no effect here, and that of the clone names no program. The clone may belong to another user.
    settings = ("core.fsmonitor=", "core.hooksPath=/dev/null", f"safe.directory={root}")
    options = [word for setting in settings for word in ("-c", setting)]
    command = ["git", *options, "-C", str(root), "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*"]
    environment = {name: value for name, value in os.environ.items() if not name.startswith("GIT_")}
    environment |= {"GIT_CONFIG_NOSYSTEM": "1", "GIT_CONFIG_GLOBAL": os.devnull}
    try:
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True, timeout=10)
    except (OSError, subprocess.SubprocessError):
        return {}
    return {"commit": done.stdout.strip()}


def versions() -> dict[str, str]:
    """Versions of Python and of the packages that affect the results of a run."""
    found = {"python": python_version(), "dynmo": __version__}
    for name in ("torch", "numpy", "tokenizers"):
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return found
