"""Processes on this machine: torch's elastic agent, built here so that nothing waits long for what is over."""

from __future__ import annotations

import logging
import os
import signal
import socket
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import IO, TYPE_CHECKING

from ..console import say
from ..errors import EXIT_RELAUNCH, EXIT_USAGE, UsageError
from ..rundir import LAUNCH_FILE_VARIABLE, take_grow_request
from .outcome import Failure, causes, failure_message, last_lines, shell_code
from .worker import GRACE_VARIABLE, LAUNCHER_PID_VARIABLE

if TYPE_CHECKING:
    from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
    from torch.distributed.elastic.multiprocessing import LogsDest

WORKER = (sys.executable, "-m", "dynmo_train")
MONITOR_INTERVAL_S = 0.1
EXIT_BARRIER_S = 5.0
# The signals that the agent takes over while its workers run.
_HANDLED = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)


@dataclass(frozen=True, kw_only=True)
class LocalLaunch:
    """What to start: ``nproc`` processes of ``command`` with ``arguments``; logs by rank under ``log_dir``.

    ``grace_s`` is how long a process may take to end after it was told to.
    """

    nproc: int
    arguments: tuple[str, ...]
    log_dir: Path
    grace_s: float = 5.0
    command: tuple[str, ...] = WORKER


# glibc gives large freed blocks back to the kernel, which zeroes each page again when it is next touched. Measured on
# two stages, hidden size 256 and a vocabulary of 8,192: 8 to 12 % of the busier stage's processor time.
KEEP_MEMORY = {"MALLOC_MMAP_THRESHOLD_": str(32 << 20), "MALLOC_TRIM_THRESHOLD_": str(8 << 30)}


def worker_environment(
    present: Mapping[str, str], *, launcher: int, launch_file: Path, grace_s: float
) -> dict[str, str]:
    """Variables that workers get beside the launcher's own; what a person has set stays.

    One thread a process, because the processes share the cores; gloo on the loopback interface, because the machine's
    name may resolve to an address that leads nowhere; blocks that glibc's malloc got back stay with the process, which
    needs them again in the next microbatch.
    """
    loopback = next((name for _, name in socket.if_nameindex() if name.startswith("lo")), None)
    defaults = {"OMP_NUM_THREADS": "1", **KEEP_MEMORY} | ({"GLOO_SOCKET_IFNAME": loopback} if loopback else {})
    return {name: value for name, value in defaults.items() if name not in present} | {
        LAUNCHER_PID_VARIABLE: str(launcher),
        LAUNCH_FILE_VARIABLE: str(launch_file),
        GRACE_VARIABLE: str(grace_s),
    }


class _Tail(threading.Thread):
    """Copies what is appended to a file to a stream of ours; ``find`` says where the file is once that is known."""

    def __init__(self, find: Callable[[], str | None], stream: IO[str]) -> None:
        super().__init__(daemon=True)
        self.find, self.stream = find, stream
        self.over = threading.Event()

    def run(self) -> None:
        """Wait for the file, then copy and look again a little later; once more after the end."""
        over = False
        while not ((path := self.find()) and os.path.exists(path)):
            if over:
                return
            over = self.over.wait(MONITOR_INTERVAL_S)
        with open(path, encoding="utf-8", errors="replace") as source:
            while True:
                while text := source.read(1 << 16):
                    self.stream.write(text)
                    self.stream.flush()
                if over:
                    return
                over = self.over.wait(MONITOR_INTERVAL_S)

    def finish(self) -> None:
        """Copy the rest and return."""
        self.over.set()
        self.join()


def _build_agent(launch: LocalLaunch, start: int) -> tuple[LocalElasticAgent, list[LogsDest]]:
    """The agent, and a list into which it puts where the logs are once its workers have started."""
    from torch.distributed.elastic.agent.server.api import WorkerSpec
    from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
    from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, Std
    from torch.distributed.elastic.rendezvous import RendezvousParameters
    from torch.distributed.elastic.rendezvous.registry import get_rendezvous_handler

    places: list[LogsDest] = []

    class Logs(DefaultLogsSpecs):
        def reify(self, envs: dict[int, dict[str, str]]) -> LogsDest:
            places.append(super().reify(envs))
            return places[-1]

    rendezvous = RendezvousParameters(
        backend="c10d",
        endpoint="127.0.0.1:0",
        run_id=f"start-{start}",
        min_nodes=1,
        max_nodes=1,
        local_addr="127.0.0.1",
        is_host=True,
    )
    spec = WorkerSpec(
        role="worker",
        local_world_size=launch.nproc,
        entrypoint=launch.command[0],
        args=(*launch.command[1:], *launch.arguments),
        rdzv_handler=get_rendezvous_handler(rendezvous),
        max_restarts=0,
        monitor_interval=MONITOR_INTERVAL_S,
        local_addr="127.0.0.1",
    )
    agent = LocalElasticAgent(
        spec=spec,
        logs_specs=Logs(log_dir=str(launch.log_dir), redirects=Std.ALL),
        exit_barrier_timeout=EXIT_BARRIER_S,
        # The workers end themselves after their grace; the agent kills what is left.
        shutdown_timeout=int(launch.grace_s) + 2,
    )
    return agent, places


def run_once(launch: LocalLaunch, start: int) -> list[Failure]:
    """Start the processes, show what rank 0 says, wait for the end of all; returns the ones that failed.

    Raises:
        SystemExit: this process was told to end; the workers are gone.
    """
    from torch.distributed.elastic.multiprocessing import SignalException

    # The agent tells each rank's end on several lines; the one message at the end says it all.
    logging.getLogger("torch.distributed.elastic").setLevel(logging.CRITICAL)
    agent, places = _build_agent(launch, start)
    tails = (
        _Tail(lambda: places[0].stdouts[0] if places else None, sys.stdout),
        _Tail(lambda: places[0].stderrs[0] if places else None, sys.stderr),
    )
    handlers = {number: signal.getsignal(number) for number in _HANDLED}
    for tail in tails:
        tail.start()
    try:
        result = agent.run()
    except SignalException as received:
        say(f"dynmo-train: {signal.Signals(received.sigval).name}: the {launch.nproc} processes have ended")
        raise SystemExit(128 + received.sigval) from received
    finally:
        for tail in tails:
            tail.finish()
        agent.get_worker_group().spec.rdzv_handler.shutdown()
        for number, handler in handlers.items():
            signal.signal(number, handler)
    return [
        Failure(rank=rank, code=failure.exitcode, log=places[0].stderrs[failure.local_rank])
        for rank, failure in sorted(result.failures.items())
    ]


def _tell(failures: Sequence[Failure]) -> None:
    """Say what failed. Rank 0's log has been shown already, and so has what others say in the same words.

    A usage error that rank 0 has told in full needs no more words.
    """
    logs = {f.rank: Path(f.log).read_text(encoding="utf-8", errors="replace") for f in failures}
    shown = set(last_lines(logs.get(0, "")))
    tails = {rank: tail for rank, log in logs.items() if not shown.issuperset(tail := last_lines(log))}
    roots = causes(failures)
    if roots[0].code == EXIT_USAGE and not any(failure.rank in tails for failure in roots):
        return
    say(f"dynmo-train: error: {failure_message(failures, tails)}")


def again(launch: LocalLaunch, run_dir: Path, workers: int | None) -> LocalLaunch:
    """The start that goes on with a run, on another number of processes where one was asked for."""
    place = ("--run-dir", str(run_dir), "--save", str(run_dir), "--load", str(run_dir))
    if workers is None:
        return replace(launch, arguments=(*launch.arguments, *place))
    size = ("--pipeline-model-parallel-size", str(workers))
    return replace(launch, nproc=workers, arguments=(*launch.arguments, *place, *size))


def launch_local(launch: LocalLaunch, *, max_restarts: int) -> int:
    """Run to the end, starting again where a worker asks for it (75) or, ``max_restarts`` times, after a failure.

    Returns:
        0, or the exit code of the process that failed.

    Raises:
        UsageError: the log directory cannot be made.
    """
    try:
        launch.log_dir.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UsageError(f"cannot make the log directory {launch.log_dir}: {error}") from error
    launch_file = launch.log_dir / "run_dir"
    launch_file.unlink(missing_ok=True)
    os.environ.update(
        worker_environment(os.environ, launcher=os.getpid(), launch_file=launch_file, grace_s=launch.grace_s)
    )
    current, start, restarts = launch, 0, 0
    workers: int | None = None
    while failures := run_once(current, start):
        code = causes(failures)[0].code
        run_dir = Path(launch_file.read_text(encoding="utf-8")) if launch_file.exists() else None
        if code != EXIT_RELAUNCH:
            _tell(failures)
            if run_dir is None or code == EXIT_USAGE or restarts == max_restarts:
                return shell_code(code)
            restarts += 1
        if run_dir is None:
            say("dynmo-train: error: a worker asks to be started again, but had not begun a run")
            return EXIT_RELAUNCH
        start += 1
        workers = take_grow_request(run_dir) or workers
        current = again(launch, run_dir, workers)
        say(f"dynmo-train: starting again with {current.nproc} processes from {run_dir}")
    return 0
