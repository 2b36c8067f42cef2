"""When a run's checkpoints are written: at a step boundary, or beside the training from a copy of the state."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from ..._common.errors import DynmoError
from ..engine import Engine
from .engine_checkpoint import CheckpointMetadata, HostBuffers, PendingSave, sizes_of_copies


@dataclass(frozen=True, kw_only=True)
class Saved:
    """A checkpoint in place: how long it took from its begin, and how long training stood still for it."""

    path: Path
    step: int
    seconds: float
    stalled_s: float


class Checkpointer:
    """Saves the engine's state; every process calls the same methods at the same boundaries.

    Args:
        aside: whether checkpoints are written while training continues, from a copy in host memory that is kept for the
            next one; that waits for the last.
        on_saved: called with each checkpoint that is in place.
        on_failure: called with the step of each checkpoint that could not be written, and why. Training continues; the
            next save is the next attempt.

    ``failure`` is why the last checkpoint could not be written, None where it could.
    """

    def __init__(
        self,
        engine: Engine,
        checkpoints: Path,
        *,
        aside: bool,
        on_saved: Callable[[Saved], None],
        on_failure: Callable[[int, str], None],
    ) -> None:
        self._on_failure = on_failure
        self.failure: str | None = None
        self._engine, self._checkpoints, self._aside, self._on_saved = engine, checkpoints, aside, on_saved
        self._copies = HostBuffers() if aside else None
        self._preparing: threading.Thread | None = None
        self._pending: PendingSave | None = None
        self._begun, self._stalled_s = 0.0, 0.0

    def save(self, run: CheckpointMetadata) -> None:
        """Begin a checkpoint of the state now; without ``aside`` it is in place when this returns."""
        self.wait()
        self._begun = time.perf_counter()
        if self._preparing is not None:
            self._preparing.join()
        self._pending = PendingSave(self._engine, self._checkpoints, run, copies=self._copies)
        if self._aside:
            self._pending.write_aside()
            self._stalled_s = time.perf_counter() - self._begun
        else:
            self._pending.write()
            self.wait()

    def at_boundary(self) -> None:
        """Continue a checkpoint that is under way; every process asks at the same boundary."""
        if self._copies is not None and self._preparing is None:
            self._preparing = threading.Thread(
                target=self._copies.prepare, args=(sizes_of_copies(self._engine),), daemon=True
            )
            self._preparing.start()
        if self._pending is None:
            return
        begun = time.perf_counter()
        is_done = self._pending.advance()
        self._stalled_s += time.perf_counter() - begun
        if is_done:
            self.wait()

    def wait(self) -> None:
        """Put the checkpoint that is being written in place, once it is written."""
        if self._pending is None:
            return
        waited = time.perf_counter()
        pending, self._pending = self._pending, None
        try:
            path = pending.finish()
        except DynmoError as error:
            self.failure = str(error)
            self._on_failure(pending.run.step, self.failure)
            return
        self.failure = None
        now = time.perf_counter()
        stalled = self._stalled_s + now - waited if self._aside else now - self._begun
        self._on_saved(Saved(path=path, step=pending.run.step, seconds=now - self._begun, stalled_s=stalled))
