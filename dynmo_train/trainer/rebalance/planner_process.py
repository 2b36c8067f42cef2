"""The planner's process: started next to the trainer, supervised, restarted a few times, and never waited for.

It can fail in two ways. It ends: ``poll`` shows it. It hangs (a stopped process, a deadlock, a solver without end):
then it is alive and silent, as a planner without anything to decide is. So it writes a line to its standard output
every second, from the loop that decides, and the trainer empties that pipe whenever it looks for plans.
"""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import IO

from ...launch.find_command import program_path

RESTARTS = 3
HEARTBEAT_S = 1.0
# An interpreter and its imports on a busy machine: before the first heartbeat a planner has this much longer.
STARTUP_S = 60.0
# A busy machine delays heartbeats: no timeout below this many of them kills a planner.
PATIENCE_HEARTBEATS = 10
_CHUNK_BYTES = 65536


class PlannerProcess:
    """``dynmo-plan watch RUN`` as a child. Plans are files; its messages go to ``planner.log``.

    Args:
        run_dir: the run.
        arguments: of ``dynmo-plan watch``, after the run directory.
        timeout_s: without a heartbeat for this long it is replaced; 10 heartbeats at least.
        restarts: how often it is started again after it ended or hung.
        now: the clock, in seconds.
    """

    def __init__(
        self,
        run_dir: Path,
        arguments: Sequence[str],
        *,
        timeout_s: float,
        restarts: int = RESTARTS,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        self.run_dir, self.arguments, self.restarts_left = run_dir, list(arguments), restarts
        self._timeout_s, self._now = timeout_s, now
        self._process: subprocess.Popen[bytes] | None = None
        self._log: IO[bytes] | None = None
        self._silent_since = 0.0
        self.has_beaten = False

    def start(self) -> str | None:
        """Start it; returns what went wrong, if anything."""
        command = program_path("dynmo-plan")
        if command is None:
            return "dynmo-plan is not installed beside dynmo-train: no plans will come"
        self._log = self._log or open(self.run_dir / "planner.log", "ab")  # noqa: SIM115 - the child writes it
        supervised = ["--parent-pid", str(os.getpid()), "--heartbeat-s", str(HEARTBEAT_S)]
        self._process = subprocess.Popen(
            [command, "watch", str(self.run_dir), *supervised, *self.arguments],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=self._log,
            process_group=0,  # Ctrl-C in a terminal is for the trainer, which saves first
        )
        if self._process.stdout is not None:
            os.set_blocking(self._process.stdout.fileno(), False)
        self._silent_since, self.has_beaten = self._now(), False
        # The planner is off the critical path: it yields the processor to the trainer wherever they share one.
        os.setpriority(os.PRIO_PROCESS, self._process.pid, 5)
        return None

    @property
    def pid(self) -> int | None:
        """The child's process id while it is known to live."""
        return self._process.pid if self._process is not None else None

    @property
    def heartbeats(self) -> IO[bytes] | None:
        """The pipe of the heartbeats."""
        return self._process.stdout if self._process is not None else None

    def check(self) -> str | None:
        """Restart it where it ended or hangs and restarts are left; returns what happened, if anything."""
        if self._process is None:
            return None
        self._read_heartbeats(self._process)
        code = self._process.poll()
        if code is not None:
            problem = f"the planner ended with code {code}"
        elif (silent_s := self._now() - self._silent_since) > self._patience_s:
            problem = f"the planner gave no heartbeat for {silent_s:.0f} s and was killed"
        else:
            return None
        self._end(self._process, kill=True)
        if self.restarts_left == 0:
            return f"{problem}; training continues with the active partition"
        self.restarts_left -= 1
        return self.start() or f"{problem}; started again ({self.restarts_left} restarts left)"

    def stop(self) -> None:
        """End it."""
        if self._process is not None:
            self._end(self._process, kill=False)
        if self._log is not None:
            self._log.close()
            self._log = None

    @property
    def _patience_s(self) -> float:
        patience_s = max(self._timeout_s, PATIENCE_HEARTBEATS * HEARTBEAT_S)
        return patience_s if self.has_beaten else patience_s + STARTUP_S

    def _read_heartbeats(self, process: subprocess.Popen[bytes]) -> None:
        """Empty the pipe; lines of any age count as of now, so that a trainer in a long step suspects nobody."""
        if process.stdout is None:
            return
        while True:
            try:
                received = os.read(process.stdout.fileno(), _CHUNK_BYTES)
            except BlockingIOError:
                return
            if not received:
                return
            self._silent_since, self.has_beaten = self._now(), True

    def _end(self, process: subprocess.Popen[bytes], *, kill: bool) -> None:
        self._process = None
        if kill:
            process.kill()
        else:
            process.terminate()
            process.send_signal(signal.SIGCONT)  # a stopped process does not see SIGTERM
        try:
            process.wait(timeout=5)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        if process.stdout is not None:
            process.stdout.close()
