"""The planner process: started by rank 0, supervised, and restarted a few times; training never waits for it to exit.

It can fail in two ways. An exit is visible to ``poll``. A hang (a stopped process, a deadlock, a solver that does not
terminate) looks like a planner that has nothing to decide. The planner therefore writes a line per second, a heartbeat,
to its standard output from the loop that decides, and the trainer drains this pipe whenever it reads plans.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import IO

from ...config.sections.balance import BalanceConfig
from ...launch.find_command import program_path

# A planner that has failed this often will probably fail again: the run continues without one. One that has worked for
# ``REFILL_S`` has all restarts again, so that a failure per day does not end the planning of a long run.
RESTARTS = 3
REFILL_S = 600.0
# Size of ``planner.log`` from which on its contents become ``planner.log.1``, which replaces the former one.
MAX_LOG_BYTES = 1 << 20
HEARTBEAT_S = 1.0
# Extra time for the first heartbeat: the interpreter and its imports are slow on a busy machine.
STARTUP_S = 60.0
# A busy machine delays heartbeats: a timeout is at least this number of them.
MIN_TIMEOUT_HEARTBEATS = 10
_CHUNK_BYTES = 65536


class PlannerProcess:
    """``dynmo-plan watch RUN`` as a child process. Plans are files; messages go to ``planner.log``.

    Args:
        run_dir: run directory.
        arguments: arguments of ``dynmo-plan watch``, after the run directory.
        timeout_s: seconds without a heartbeat after which the process is replaced; at least 10 heartbeats.
        restarts: maximum number of restarts after exits and hangs, within ``REFILL_S``.
        now: monotonic clock, in seconds.
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
        self._restarts, self._started_s = restarts, 0.0
        self._timeout_s, self._now = timeout_s, now
        self._process: subprocess.Popen[bytes] | None = None
        self._log: IO[bytes] | None = None
        self._silent_since = 0.0
        self.has_beaten = False

    def start(self) -> str | None:
        """Start the process; a message if it cannot be started."""
        command = program_path("dynmo-plan")
        if command is None:
            return "dynmo-plan is not installed next to dynmo-train: the partition stays as it is"
        # With the pid of this process the planner can end itself when a killed trainer does not stop it.
        supervised = ["--parent-pid", str(os.getpid()), "--heartbeat-s", str(HEARTBEAT_S)]
        try:
            self._process = subprocess.Popen(
                [command, "watch", str(self.run_dir), *supervised, *self.arguments],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=self._open_log(),
                process_group=0,  # Ctrl-C in a terminal must not end the planner before the trainer has saved
            )
        except OSError as error:
            return f"the planner cannot be started ({error.strerror}); training continues with the active partition"
        if self._process.stdout is not None:
            # The trainer reads at step boundaries, and must not wait for a planner that hangs.
            os.set_blocking(self._process.stdout.fileno(), False)
        self._silent_since, self.has_beaten, self._started_s = self._now(), False, self._now()
        # The planner is off the critical path: it yields a shared core to the trainer.
        os.setpriority(os.PRIO_PROCESS, self._process.pid, 5)
        return None

    @property
    def pid(self) -> int | None:
        """Process id, None before the start and after the end."""
        return self._process.pid if self._process is not None else None

    @property
    def heartbeats(self) -> IO[bytes] | None:
        """Pipe from which heartbeats are read."""
        return self._process.stdout if self._process is not None else None

    def check(self) -> str | None:
        """Restart the process if it exited or hangs and restarts are left; a message if so."""
        if self._process is None:
            return None
        self._read_heartbeats()
        self._rotate_log()
        code = self._process.poll()
        if code is not None:
            problem = f"the planner exited with code {code}"
        elif (silent_s := self._now() - self._silent_since) > self._timeout_now_s:
            problem = f"the planner sent no heartbeat for {silent_s:.0f} s and was killed"
        else:
            if self.has_beaten and self._now() - self._started_s >= REFILL_S:
                self.restarts_left = self._restarts
            return None
        # Killed, since a hung process may not react to SIGTERM; it has no state but the files.
        self._end(self._process, kill=True)
        if self.restarts_left == 0:
            return f"{problem}; training continues with the active partition"
        self.restarts_left -= 1
        return self.start() or f"{problem}; restarted ({self.restarts_left} restarts left)"

    def stop(self) -> None:
        """Terminate the process and close its log."""
        if self._process is not None:
            self._end(self._process, kill=False)
        if self._log is not None:
            self._log.close()
            self._log = None

    def _open_log(self) -> IO[bytes] | int:
        """The log, to which all planners of the run append; no log where it cannot be opened, as on a full disk."""
        if self._log is None:
            with contextlib.suppress(OSError):
                self._log = open(self.run_dir / "planner.log", "ab")  # noqa: SIM115 - the child writes it
        return self._log if self._log is not None else subprocess.DEVNULL

    def _rotate_log(self) -> None:
        """Begin the log again once it is full; by a copy, because the planner has it open."""
        if self._log is None or os.fstat(self._log.fileno()).st_size < MAX_LOG_BYTES:
            return
        path = self.run_dir / "planner.log"
        with contextlib.suppress(OSError):  # on a full disk the older lines are lost
            shutil.copyfile(path, path.with_name("planner.log.1"))
        with contextlib.suppress(OSError):
            os.truncate(self._log.fileno(), 0)

    @property
    def _timeout_now_s(self) -> float:
        timeout_s = max(self._timeout_s, MIN_TIMEOUT_HEARTBEATS * HEARTBEAT_S)
        return timeout_s if self.has_beaten else timeout_s + STARTUP_S

    def _read_heartbeats(self) -> None:
        """Drain the pipe. Heartbeats count from now: they may have waited in the pipe during a long step."""
        if (pipe := self.heartbeats) is None:
            return
        while True:
            try:
                received = os.read(pipe.fileno(), _CHUNK_BYTES)
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


def planner_arguments(balance: BalanceConfig) -> list[str]:
    """The arguments of ``dynmo-plan watch`` that the options of a run stand for."""
    arguments = [
        *("--balancer", balance.balancer),
        *("--policy", balance.balance_policy),
        *("--min-gain", str(balance.balance_min_gain)),
        *("--granularity", balance.granularity),
    ]
    if balance.pack_to is not None:
        arguments += ["--pack-to", str(balance.pack_to)]
    if balance.min_throughput_fraction is not None:
        arguments += ["--min-throughput-fraction", str(balance.min_throughput_fraction)]
    arguments += ["--experts"] if balance.balance_experts else []
    # A lockstep plan must follow from the record of the request's step; else the planner waits for three records.
    if balance.balance_lockstep:
        return [*arguments, "--lockstep", "--min-records", "1"]
    return [*arguments, "--every", str(balance.rebalance_interval)]
