"""What the launcher of node 0 knows about a failed round: its incident, the work that it lost, and the restarts left.

The processes have ended when an incident is written, so that one process at a time appends to ``events.jsonl``.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from .._common.console import print_message
from .._common.document import DocumentError, parse_json
from .._common.log_parts import last_lines
from ..formats.checkpoint.writer import STEP_NAME, read_latest
from ..formats.incident import Incident
from ..formats.run_lines import append_event
from .exit_status import Failure, describe_exit, root_causes
from .run_lock import is_locked
from .watch.watchdog import Hang
from .worker import GENERATION_VARIABLE

RESTART_VARIABLE = "DYNMO_RESTART"
_TAIL_BYTES = 1 << 16


@dataclass(frozen=True, kw_only=True)
class Progress:
    """How far a run has come, from its files.

    Attributes:
        step: last completed step; 0 before the first one.
        checkpoint: step of the newest checkpoint; 0 without one.
        saved_at: time of that checkpoint, in seconds since the epoch; None without one.
    """

    step: int
    checkpoint: int
    saved_at: float | None

    @property
    def steps_lost(self) -> int:
        """Number of completed steps after the checkpoint."""
        return max(0, self.step - self.checkpoint)


def read_progress(run_dir: Path) -> Progress:
    """The progress of the run in ``run_dir``; missing and damaged files count as no progress."""
    latest = STEP_NAME.fullmatch(read_latest(run_dir / "checkpoints"))
    saved_at = None
    if latest is not None:
        try:
            saved_at = os.stat(run_dir / "checkpoints" / latest[0] / "manifest.json").st_mtime
        except OSError:
            latest = None
    checkpoint = 0 if latest is None else int(latest[1])
    return Progress(step=_last_step(run_dir / "metrics.jsonl"), checkpoint=checkpoint, saved_at=saved_at)


def _last_step(metrics: Path) -> int:
    """Number of the last step in ``metrics.jsonl``; 0 without one."""
    for line in last_lines(metrics, _TAIL_BYTES):
        try:
            record = parse_json(line)
        except (ValueError, DocumentError):
            continue
        if isinstance(record, dict) and isinstance(step := record.get("step"), int):
            return step
    return 0


def restarts_used(restarts: int, *, checkpoint: int, checkpoint_of_restart: int | None) -> int:
    """Number of restarts that count towards ``--max-restarts``.

    A checkpoint that is newer than the one of the last restart shows that the run makes progress: the count starts
    again. A failure that repeats at the same step therefore ends the run, and one per day does not.

    Args:
        restarts: restarts since the last progress.
        checkpoint: step of the newest checkpoint.
        checkpoint_of_restart: step that the last restart resumed from; None before the first restart.
    """
    return 0 if checkpoint_of_restart is not None and checkpoint > checkpoint_of_restart else restarts


def node_of_rank(rank: int, processes: Sequence[int]) -> int:
    """Position of the node of a rank among nodes with these numbers of processes; the last one beyond them."""
    for node, count in enumerate(processes):
        if rank < count:
            return node
        rank -= count
    return len(processes) - 1


def death_incident(
    failures: Sequence[Failure], lost: Sequence[str], hosts: Mapping[int, str], progress: Progress, seconds_lost: float
) -> Incident:
    """The incident of a round that ended because processes died or nodes were lost.

    Args:
        failures: failed processes of all nodes.
        lost: hosts of lost nodes.
        hosts: rank to host.
        progress: progress of the run.
        seconds_lost: seconds of work since the last checkpoint.
    """
    if lost:
        message = f"lost {', '.join(lost)}: no heartbeat of its launcher"
        return Incident(
            incident="node_loss",
            message=f"{message}; {_loss_text(progress, seconds_lost)}",
            cause="no heartbeat of the node's launcher",
            step=progress.step,
            hosts=lost,
            seconds_lost=seconds_lost,
            steps_lost=progress.steps_lost,
        )
    roots = root_causes(failures)
    cause = describe_exit(roots[0].code).removeprefix("was ")
    ranks = [failure.rank for failure in roots]
    places = ", ".join(f"rank {rank} on {hosts.get(rank, 'an unknown host')}" for rank in ranks)
    return Incident(
        incident="process_death",
        message=f"{places} {describe_exit(roots[0].code)}; {_loss_text(progress, seconds_lost)}",
        cause=cause,
        step=progress.step,
        ranks=ranks,
        hosts=[hosts[rank] for rank in ranks if rank in hosts],
        seconds_lost=seconds_lost,
        steps_lost=progress.steps_lost,
    )


def launcher_death(host: str, step: int) -> Incident:
    """The incident of a launcher that was killed while rank 0 still saved.

    Args:
        host: host of rank 0.
        step: number of completed steps, all of which were saved.
    """
    message = f"the launcher of rank 0 on {host} was killed; the run saved step {step:,}"
    return Incident(
        incident="process_death", message=message, cause="killed with its launcher", step=step, hosts=[host]
    )


# Events after which a start writes no more: who ended it has recorded why.
_ENDS = ("process_death", "node_loss", "hang", "rollback")


def unrecorded_end(run_dir: Path, before: Mapping[str, Any], environment: Mapping[str, str]) -> Incident | None:
    """The incident of a previous start that nobody could record, because its launcher was killed with its ranks.

    Args:
        run_dir: run directory.
        before: ``run.json`` of the previous start.
        environment: environment of this process.

    Returns:
        The incident; None if the previous start ended otherwise, before its first step or after its last one.
    """
    progress, training = read_progress(run_dir), before["config"].get("training", {})
    # A start by the same launcher, or in the same process, follows what these have recorded.
    is_continued = is_locked(run_dir) or RESTART_VARIABLE in environment or GENERATION_VARIABLE in environment
    if is_continued or not progress.step or progress.step >= (training.get("train_iters") or math.inf):
        return None
    for line in last_lines(run_dir / "events.jsonl", _TAIL_BYTES):
        try:
            record = parse_json(line)
            # Both are times as text in the same form, which sorts by time.
            if record["time_utc"] < before["created_utc"]:
                break
            if record["kind"] == "stopped" or record.get("incident") in _ENDS:
                return None
        except (ValueError, DocumentError, KeyError, TypeError):
            continue
    since, until = progress.saved_at or 0.0, (run_dir / "metrics.jsonl").stat().st_mtime
    with contextlib.suppress(ValueError):
        since = max(since, datetime.fromisoformat(before["created_utc"]).timestamp())
    seconds, hosts = max(0.0, until - since), list(before["hosts"][:1])
    message = "the previous start ended without a record, as after SIGKILL of its launcher"
    return Incident(
        incident="process_death",
        message=f"{message}; {_loss_text(progress, seconds)}",
        cause="killed with its launcher",
        step=progress.step,
        hosts=hosts,
        seconds_lost=seconds,
        steps_lost=progress.steps_lost,
    )


def hang_incident(
    hang: Hang, collective: str, stacks: str, hosts: Mapping[int, str], progress: Progress, seconds_lost: float
) -> Incident:
    """The incident of a round that the watchdog ended.

    Args:
        hang: the rank that hung.
        collective: collective in which the other ranks waited; empty where unknown.
        stacks: folder of the stacks.
        hosts: rank to host.
        progress: progress of the run.
        seconds_lost: seconds of work since the last checkpoint.
    """
    state = hang.state
    place = f"rank {state.rank} on {hosts.get(state.rank, state.host)} hung in step {state.beat.step:,}"
    return Incident(
        incident="hang",
        message=f"{place}: {hang.cause}; {_loss_text(progress, seconds_lost)}",
        cause=hang.cause,
        step=progress.step,
        ranks=[state.rank],
        hosts=[state.host],
        seconds_lost=seconds_lost,
        steps_lost=progress.steps_lost,
        phase=state.beat.text,
        collective=collective,
        stacks=stacks,
    )


def _loss_text(progress: Progress, seconds_lost: float) -> str:
    steps = progress.steps_lost
    return f"lost {steps:,} step{'s'[: steps != 1]} and {seconds_lost:.1f} s since the last checkpoint"


def write_incident(run_dir: Path, incident: Incident) -> None:
    """Append an incident to ``events.jsonl`` of a run whose processes have ended; a full disk gives a warning."""
    try:
        append_event(run_dir / "events.jsonl", incident.record(datetime.now(UTC)))
    except OSError as error:
        print_message(f"warning: {run_dir}: cannot write an incident ({error}): {incident.message}")


def restart_environment(cause: str) -> dict[str, str]:
    """The environment from which rank 0 of the next round writes the incident of the restart.

    Args:
        cause: why the run is restarted.
    """
    return {RESTART_VARIABLE: json.dumps({"cause": cause, "since": time.time()})}


def restart_incident(environment: Mapping[str, str], step: int, now: float) -> Incident | None:
    """The incident of the restart that started this process; None where it is the first start.

    Args:
        environment: environment of the process.
        step: step that the run resumes from.
        now: seconds since the epoch.
    """
    try:
        found = parse_json(environment[RESTART_VARIABLE])
        cause, paused_s = str(found["cause"]), max(0.0, now - float(found["since"]))
    except (KeyError, TypeError, ValueError):
        return None
    message = f"restarted from step {step:,} in {paused_s:.1f} s: {cause}"
    return Incident(incident="restart", message=message, cause=cause, step=step, seconds_lost=paused_s)
