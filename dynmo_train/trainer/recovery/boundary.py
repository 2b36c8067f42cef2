"""What a trainer does for ``--peer-checkpoint-interval`` at the boundaries of steps."""

from __future__ import annotations

import os
import time
from collections.abc import Callable

from ...launch.incident_log import restart_incident
from ...launch.watch.heartbeat import Phase
from ..checkpoint.metadata import CheckpointMetadata
from ..engine import Engine
from ..monitoring.profile_writer import RunLogger
from .survivor import Survivor


class RecoveryBoundary:
    """Copies, and ranks that join, at boundaries.

    Args:
        survivor: makes the copies; None without ``--peer-checkpoint-interval``.
        engine: engine of this rank.
        logger: writer of events.
        line: prints a line of the log on rank 0.
        metadata: returns the contents of a checkpoint that the engine does not know.
        collect: waits for the result of the step that was launched last.
        finish_saves: waits for a checkpoint that is being written.
    """

    def __init__(
        self,
        survivor: Survivor | None,
        engine: Engine,
        logger: RunLogger,
        line: Callable[[str], None],
        metadata: Callable[[], CheckpointMetadata],
        collect: Callable[[], None],
        finish_saves: Callable[[], None],
    ) -> None:
        self._survivor, self._engine, self._logger, self._line = survivor, engine, logger, line
        self._metadata, self._collect, self._finish_saves = metadata, collect, finish_saves

    @property
    def is_joined(self) -> bool:
        """Whether this rank knows of ranks that wait to join."""
        return self._survivor is not None and self._survivor.proposals.pending is not None

    def begin(self, step: int) -> None:
        """Start the first copy of this generation of ranks, and log what it follows. Every rank calls this.

        Args:
            step: number of completed steps.
        """
        survivor = self._survivor
        if survivor is not None:
            survivor.copy(self._engine, self._metadata(), time.time())
            survivor.confirm(self._engine.world)
        if survivor is not None and survivor.continued is not None:
            incident = survivor.continued.incident(time.time())
            self._logger.log_incident(incident)
            self._line(f" {incident.message}")
        elif (restart := restart_incident(os.environ, step, time.time())) is not None:
            self._logger.log_incident(restart)

    def at_boundary(self, step: int, *, grow: bool, is_over: bool) -> None:
        """Start a copy where one is due, and let ranks join that wait. Every rank calls this.

        Args:
            step: number of completed steps.
            grow: whether ranks wait to join; equal on all ranks.
            is_over: whether the run ends here; equal on all ranks.

        Raises:
            GenerationEndedError: on every rank, if they join.
        """
        survivor, heartbeat = self._survivor, self._engine.heartbeat
        if survivor is None:
            return
        for problem in survivor.proposals.take_refusals():
            message = f"waiting nodes cannot join, training continues without them: {problem}"
            self._logger.log_event("resize_refused", message, step=step)
        if is_over or step % survivor.copies.interval:
            return
        self._collect()
        heartbeat.enter(Phase.SAVE)
        if grow:
            # The checkpoint that is being written would be lost with this generation.
            self._finish_saves()
        survivor.copy(self._engine, self._metadata(), time.time(), is_needed=grow)
        if grow:
            reason = survivor.grow(self._engine.world)
            self._line(f" ranks that waited do not join after iteration {step}: {reason}")
        heartbeat.enter(Phase.BOUNDARY)
