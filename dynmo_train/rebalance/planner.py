"""The planner's process: started beside the trainer, watched, started again a few times, and never waited for."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import IO

from ..programs import program_path

RESTARTS = 3


class PlannerProcess:
    """``dynmo-plan watch RUN`` as a child. It talks through files alone; its own talk goes to ``planner.log``.

    Args:
        arguments: of ``dynmo-plan watch``, after the run directory.
        restarts: how often it is started again after it died.
    """

    def __init__(self, run_dir: Path, arguments: Sequence[str], restarts: int = RESTARTS) -> None:
        self.run_dir, self.arguments, self.restarts_left = run_dir, list(arguments), restarts
        self._process: subprocess.Popen[bytes] | None = None
        self._log: IO[bytes] | None = None

    def start(self) -> str | None:
        """Start it; returns what went wrong, if anything."""
        command = program_path("dynmo-plan")
        if command is None:
            return "dynmo-plan is not installed beside dynmo-train: no plans will come"
        self._log = self._log or open(self.run_dir / "planner.log", "ab")  # noqa: SIM115 - the child writes it
        self._process = subprocess.Popen(
            [command, "watch", str(self.run_dir), "--parent-pid", str(os.getpid()), *self.arguments],
            stdin=subprocess.DEVNULL,
            stdout=self._log,
            stderr=self._log,
        )
        # The planner is off the critical path: it yields the processor to the trainer wherever they share one.
        os.setpriority(os.PRIO_PROCESS, self._process.pid, 5)
        return None

    @property
    def pid(self) -> int | None:
        """The child's process id while it is known to live."""
        return self._process.pid if self._process is not None else None

    def check(self) -> str | None:
        """Look after it: start it again where it died and restarts are left; returns what happened, if anything."""
        if self._process is None or (code := self._process.poll()) is None:
            return None
        self._process = None
        if self.restarts_left == 0:
            return f"the planner ended with code {code}; training goes on with the partition that it has"
        self.restarts_left -= 1
        problem = self.start()
        return problem or f"the planner ended with code {code}; started again ({self.restarts_left} restarts left)"

    def stop(self) -> None:
        """End it."""
        if self._process is not None:
            self._process.terminate()
            try:
                self._process.wait(timeout=5)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait()
            self._process = None
        if self._log is not None:
            self._log.close()
            self._log = None
