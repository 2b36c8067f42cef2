"""Saves the checkpoints of a run, synchronously or (``--async-save``) while training continues.

An asynchronous save over the boundaries of the steps::

    boundary of the save    copy tensors to host buffers           training is paused
                            thread of each rank: write its shards  |
    each later boundary     all_reduce: have all ranks written?    | training continues
      yes, first time       gather the reports on rank 0           |
                            thread of rank 0: commit               |
      yes, second time      the checkpoint is in place -> SavedCheckpoint
    next save, or end       wait for all of this

Every rank makes the same calls at the same boundaries, since the calls contain collectives. The threads do not use
torch.distributed: collectives of two threads could be matched in a different order on each rank.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from ..._common.errors import DynmoError
from ..engine import Engine
from .engine_checkpoint import HostBuffers, PendingSave, host_buffer_shapes
from .metadata import CheckpointMetadata


@dataclass(frozen=True, kw_only=True)
class SavedCheckpoint:
    """A checkpoint that is in place.

    Attributes:
        path: its directory.
        step: number of completed steps.
        duration_s: seconds from the start of the save.
        stalled_s: seconds for which training was paused.
    """

    path: Path
    step: int
    duration_s: float
    stalled_s: float


class Checkpointer:
    """Saves the state of the engine. Every rank calls the same methods at the same boundaries.

    Args:
        engine: engine of this rank.
        checkpoints: folder of the checkpoints.
        async_save: whether a checkpoint is written while training continues, from a copy in host memory. The memory is
            reused by the next save, which waits for the previous one.
        on_saved: called with each checkpoint that is in place.
        on_failure: called with the step and the error of each checkpoint that could not be written. Training
            continues, and the next save is the next attempt.

    Attributes:
        failure: error of the last checkpoint; None where it was written.
        buffers: host memory of asynchronous saves; None without ``async_save``.
    """

    def __init__(
        self,
        engine: Engine,
        checkpoints: Path,
        *,
        async_save: bool,
        on_saved: Callable[[SavedCheckpoint], None],
        on_failure: Callable[[int, str], None],
    ) -> None:
        self._engine, self._checkpoints, self._async_save = engine, checkpoints, async_save
        self._on_saved, self._on_failure = on_saved, on_failure
        self.failure: str | None = None
        self.buffers = HostBuffers() if async_save else None
        self.allocation: threading.Thread | None = None
        self._pending: PendingSave | None = None
        self._start_s, self._stalled_s = 0.0, 0.0

    def save(self, metadata: CheckpointMetadata) -> None:
        """Start a checkpoint of the current state; without ``async_save`` it is in place on return."""
        # One save at a time: the next one overwrites the host buffers from which the previous one is written.
        self.wait()
        self._start_s = time.perf_counter()
        if self.allocation is not None:
            self.allocation.join()
        self._pending = PendingSave(self._engine, self._checkpoints, metadata, buffers=self.buffers)
        if self._async_save:
            self._pending.write_async()
            self._stalled_s = time.perf_counter() - self._start_s
        else:
            self._pending.write()
            self.wait()

    def at_boundary(self) -> None:
        """Advance a save in progress. Every rank calls this at the same boundary."""
        if self.buffers is not None and self.allocation is None:
            # In a thread, before the first save: touching fresh memory takes longer than the copy.
            self.allocation = threading.Thread(
                target=self.buffers.allocate, args=(host_buffer_shapes(self._engine),), daemon=True
            )
            self.allocation.start()
        if self._pending is None:
            return
        start_s = time.perf_counter()
        is_done = self._pending.advance()
        self._stalled_s += time.perf_counter() - start_s
        if is_done:
            self.wait()

    def abandon(self) -> None:
        """Give up the save in progress, if any, after an error: other ranks may be gone."""
        pending, self._pending = self._pending, None
        if pending is not None:
            pending.join_threads()

    def wait(self) -> None:
        """Complete the save in progress, if any."""
        if self._pending is None:
            return
        wait_start_s = time.perf_counter()
        pending, self._pending = self._pending, None
        try:
            path = pending.finish()
        # Raised on all ranks alike. A full disk does not end the run: the next save may find space.
        except DynmoError as error:
            self.failure = str(error)
            self._on_failure(pending.metadata.step, self.failure)
            return
        self.failure = None
        now_s = time.perf_counter()
        stalled_s = self._stalled_s + now_s - wait_start_s if self._async_save else now_s - self._start_s
        duration_s = now_s - self._start_s
        step = pending.metadata.step
        self._on_saved(SavedCheckpoint(path=path, step=step, duration_s=duration_s, stalled_s=stalled_s))
