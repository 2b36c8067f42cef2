"""Run the processes of one round on this node with torch's elastic agent.

The agent is overridden in six places. Membership comes from :class:`~.rendezvous.Rendezvous`. Ranks follow from it, so
that no agent waits for others, of which one may have left since. There is no exit barrier, so that nodes with released
ranks can leave. Shutdown waits for processes that save a checkpoint. A killed process does not end the others where
these continue (``continuation.py``). Processes are forked by a server that has imported torch (``worker_start.py``).
"""

from __future__ import annotations

import contextlib
import fcntl
import logging
import math
import os
import signal
import socket
import struct
import sys
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

from ..._common.console import print_message
from ..._common.errors import DynmoError
from ..._common.streams import printable
from ..exit_status import Failure, with_causal_codes
from ..failure_record import QuietLines, failure_of
from ..signal_files import create_file, remove_file
from ..worker import (
    GRACE_VARIABLE,
    JOIN_FILE_VARIABLE,
    LAUNCH_FILE_VARIABLE,
    LAUNCHER_PID_VARIABLE,
    SAVE_VARIABLE,
    SHUTDOWN_FILE_VARIABLE,
)
from ..worker_start import WorkerServer, forked_by
from .continuation import Notice, is_kill
from .node_continuation import NodeContinuation

if TYPE_CHECKING:
    from torch.distributed.elastic.agent.server.api import RunResult, WorkerGroup
    from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
    from torch.distributed.elastic.multiprocessing import LogsDest
    from torch.distributed.elastic.rendezvous import RendezvousInfo

MONITOR_INTERVAL_S = 0.1
_SIOCGIFADDR = 0x8915
# Signals that the agent handles while its workers run.
_HANDLED = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)


class PeerFailureError(DynmoError):
    """Another node ended the round; the processes of this node have been terminated."""


@dataclass(frozen=True, kw_only=True)
class WorkerGroupConfig:
    """The processes of one round on this node.

    Attributes:
        name: name of the round, in the paths of logs.
        processes: number of processes of each member.
        world_size: number of ranks at the start of the round.
        command: command of each process.
        log_dir: folder of process logs.
        grace_s: seconds that processes have to exit.
        save_s: seconds that processes have to exit if the launcher received a signal.
        shutdown_file: file that exists once the launcher received a signal.
        is_verbose: whether to print the stack of rank 0, with C++ frames.
        index: index of this node among the members.
        host: host of the processes' store.
        port: port of the processes' store.
        failure_reason: returns why another node ended the round, else None.
        continuation: decides whether the other processes continue after a death; None where they never do.
        server: forks the processes; None where each is executed by itself.
    """

    name: str
    processes: tuple[int, ...]
    world_size: int
    command: tuple[str, ...]
    log_dir: Path
    grace_s: float
    save_s: float
    shutdown_file: Path
    is_verbose: bool
    index: int
    host: str
    port: int
    failure_reason: Callable[[], str | None]
    continuation: NodeContinuation | None = None
    server: WorkerServer | None = None

    @property
    def nproc(self) -> int:
        """Number of processes on this node."""
        return self.processes[self.index]


# glibc returns large freed blocks to the kernel, which zeroes their pages again at the next access. Measured with two
# stages, hidden size 256 and vocabulary size 8,192: 8 to 12 % of the CPU time of the busier stage.
KEEP_MEMORY = {"MALLOC_MMAP_THRESHOLD_": str(32 << 20), "MALLOC_TRIM_THRESHOLD_": str(8 << 30)}


def worker_environment(
    present: Mapping[str, str],
    *,
    launcher: int,
    launch_file: Path,
    grace_s: float,
    save_s: float,
    shutdown_file: Path,
    join_file: Path,
    interface: str | None,
) -> dict[str, str]:
    """Environment variables of workers in addition to those of the launcher; existing values are kept.

    One thread per process, because processes share the cores. gloo on the interface towards the other nodes, or
    loopback, because the host name may resolve to an unreachable address. glibc keeps freed blocks, which the next
    microbatch allocates again.

    Args:
        present: environment of the launcher.
        launcher: process id of the launcher.
        launch_file: file in which rank 0 records the run directory.
        grace_s: seconds that processes have to exit.
        save_s: seconds that processes have to exit if the launcher received a signal.
        shutdown_file: file that exists once the launcher received a signal.
        join_file: file by which node 0 asks rank 0 to save and exit with 75.
        interface: network interface for gloo.
    """
    defaults = {"OMP_NUM_THREADS": "1", **KEEP_MEMORY} | ({"GLOO_SOCKET_IFNAME": interface} if interface else {})
    return {name: value for name, value in defaults.items() if name not in present} | {
        LAUNCHER_PID_VARIABLE: str(launcher),
        LAUNCH_FILE_VARIABLE: str(launch_file),
        GRACE_VARIABLE: str(grace_s),
        SAVE_VARIABLE: str(save_s),
        SHUTDOWN_FILE_VARIABLE: str(shutdown_file),
        JOIN_FILE_VARIABLE: str(join_file),
    }


def interface_towards(host: str) -> str | None:
    """The network interface with the route to ``host``; None if there is none."""
    try:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            probe.connect((host, 9))  # sends nothing
            address = probe.getsockname()[0]
            for _, name in socket.if_nameindex():
                request = struct.pack("256s", name.encode()[:15])
                try:
                    found = fcntl.ioctl(probe.fileno(), _SIOCGIFADDR, request)
                except OSError:
                    continue  # an interface without an address
                if socket.inet_ntoa(found[20:24]) == address:
                    return name
    except OSError:
        return None
    return None


class _Tail(threading.Thread):
    """A thread that copies what is appended to a file to a stream.

    Args:
        find: returns the path once it is known.
        stream: where to write.
        quiet: what to leave out; None copies everything.
        begin: first byte.
    """

    def __init__(
        self, find: Callable[[], str | None], stream: TextIO, quiet: QuietLines | None = None, begin: int = 0
    ) -> None:
        super().__init__(daemon=True)
        self.find, self.stream, self.quiet, self.begin = find, stream, quiet, begin
        self.finished = threading.Event()

    def run(self) -> None:
        """Copy until ``finish``, and once more after it; up to a log that can no longer be read."""
        with contextlib.suppress(OSError):
            self._copy()

    def _copy(self) -> None:
        is_last = False
        while not ((path := self.find()) and os.path.exists(path)):
            if is_last:
                return
            is_last = self.finished.wait(MONITOR_INTERVAL_S)
        with open(path, encoding="utf-8", errors="replace") as source:
            source.seek(self.begin)
            while True:
                while text := source.read(1 << 16):
                    self._print(text if self.quiet is None else self.quiet.feed(text))
                if is_last:
                    if self.quiet is not None:
                        self._print(self.quiet.finish())
                    return
                is_last = self.finished.wait(MONITOR_INTERVAL_S)

    def _print(self, text: str) -> None:
        self.stream.write(printable(text, self.stream))
        self.stream.flush()

    def finish(self) -> None:
        """Copy the rest and return."""
        self.finished.set()
        self.join()


class _FirstRankOutput:
    """Prints the output of the process that is rank 0.

    Args:
        log_paths: paths of the logs, empty until the processes start.
        is_verbose: whether stacks and C++ frames are printed.
    """

    def __init__(self, log_paths: list[LogsDest], *, is_verbose: bool) -> None:
        self._log_paths, self._local_rank, self._is_verbose = log_paths, -1, is_verbose
        self._tails: list[_Tail] = []

    def follow(self, local_rank: int) -> None:
        """Print what a process writes from now on; no effect for the one that is followed already."""
        if local_rank == self._local_rank:
            return
        self._local_rank = local_rank

        def find(stream: str) -> str | None:
            return getattr(self._log_paths[0], stream)[local_rank] if self._log_paths else None

        for name, stream in (("stdouts", sys.stdout), ("stderrs", sys.stderr)):
            path = find(name)
            begin = os.path.getsize(path) if path and os.path.exists(path) else 0
            quiet = None if self._is_verbose or stream is sys.stdout else QuietLines()
            tail = _Tail(partial(find, name), stream, quiet, begin)
            tail.start()
            self._tails.append(tail)

    def finish(self) -> None:
        """Print the rest."""
        for tail in self._tails:
            tail.finish()


def _rendezvous_handler(group: WorkerGroupConfig) -> type:
    """The class from which the elastic agent gets the members of a round; imports torch."""
    from torch._C._distributed_c10d import HashStore
    from torch.distributed.elastic.rendezvous import RendezvousHandler, RendezvousInfo, RendezvousStoreInfo

    class FixedMembers(RendezvousHandler):
        """Returns members that the launchers have already agreed on."""

        def __init__(self) -> None:
            self.since: float | None = None

        use_agent_store = True

        def get_backend(self) -> str:
            return "dynmo"

        def next_rendezvous(self) -> RendezvousInfo:
            # The agents exchange nothing, so their store is a local one; the processes use that of node 0.
            place = RendezvousStoreInfo(group.host, group.port)
            return RendezvousInfo(HashStore(), group.index, len(group.processes), place)

        def num_nodes_waiting(self) -> int:
            """Called at every check of the processes, which may exit within the grace period.

            Raises:
                PeerFailureError: another node failed longer ago than the grace period.
            """
            # Zero waiting nodes: torch would restart the workers for a positive number. The raise ends the round.
            reason = group.failure_reason()
            if reason is None:
                return 0
            self.since = self.since or time.monotonic()
            if time.monotonic() - self.since > group.grace_s:
                raise PeerFailureError(reason)
            return 0

        def is_closed(self) -> bool:
            return False

        def set_closed(self) -> None:
            """No effect: the launchers decide on further rounds."""

        def get_run_id(self) -> str:
            return group.name

        def shutdown(self) -> bool:
            return True

    return FixedMembers


def _build_agent(
    group: WorkerGroupConfig, on_continue: Callable[[Notice], None]
) -> tuple[LocalElasticAgent, list[LogsDest]]:
    """The agent, and a list to which it appends the log paths when its workers have started.

    Args:
        group: the processes.
        on_continue: called when the other processes continue after a death.
    """
    from torch.distributed.elastic.agent.server.api import RunResult, Worker, WorkerSpec, WorkerState
    from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
    from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, Std

    log_paths: list[LogsDest] = []

    class Logs(DefaultLogsSpecs):
        def reify(self, envs: dict[int, dict[str, str]]) -> LogsDest:
            log_paths.append(super().reify(envs))
            return log_paths[-1]

    class Agent(LocalElasticAgent):
        def _assign_worker_ranks(self, *_: Any) -> list[Worker]:
            """Ranks of this node's workers. torch's agents ask each other, and would wait 5 minutes for a lost node."""
            first, world = sum(group.processes[: group.index]), group.world_size
            return [
                Worker(
                    local_rank=local_rank,
                    global_rank=first + local_rank,
                    role_rank=first + local_rank,
                    world_size=world,
                    role_world_size=world,
                )
                for local_rank in range(group.nproc)
            ]

        def _start_workers(self, worker_group: WorkerGroup) -> dict[int, Any]:
            """Start the workers, by fork where that is possible."""
            with forked_by(group.server):
                pids: dict[int, Any] = super()._start_workers(worker_group)
            return pids

        def _monitor_workers(self, worker_group: WorkerGroup) -> RunResult:
            """The state of the workers; those that continue without a killed one are healthy."""
            # torch ends all workers as soon as it finds that one has failed, so that it must not look before.
            if self._pcontext is not None and _continue_without_killed(group, self._pcontext, on_continue):
                return RunResult(state=WorkerState.HEALTHY)
            if group.continuation is not None and group.continuation.is_overdue:
                return RunResult(state=WorkerState.FAILED)
            result: RunResult = super()._monitor_workers(worker_group)
            return result

        def _exit_barrier(self) -> None:
            """Do not wait: a node whose processes finished leaves; torch's barrier would block it."""

        def _shutdown(self, *signals: Any, **_timeouts: Any) -> None:
            """Terminate the workers, with the signal of the launcher if it received one.

            Waits for the workers here, because ``_shutdown`` of torch 2.11 has no timeout parameter.
            """
            received = signals[0] if signals else _received_signal(sys.exc_info()[1])
            number = received or signal.SIGTERM
            may_save = received in (signal.SIGTERM, signal.SIGINT)
            if may_save:
                create_file(group.shutdown_file)
            else:  # a second signal while the workers save cancels the time to save
                remove_file(group.shutdown_file)
            if self._pcontext is not None:
                self._pcontext.close(number, math.ceil(max(group.grace_s, group.save_s if may_save else 0.0)) + 2)
            super()._shutdown(number)

    spec = WorkerSpec(
        role="worker",
        local_world_size=group.nproc,
        entrypoint=group.command[0],
        args=group.command[1:],
        rdzv_handler=_rendezvous_handler(group)(),
        max_restarts=0,
        monitor_interval=MONITOR_INTERVAL_S,
        local_addr=group.host,
    )
    agent = Agent(
        spec=spec,
        logs_specs=Logs(log_dir=str(group.log_dir), redirects=Std.ALL),
    )
    return agent, log_paths


def _continue_without_killed(group: WorkerGroupConfig, context: Any, on_continue: Callable[[Notice], None]) -> bool:
    """Whether processes run and no failure ends them: none has failed, or the others continue.

    Args:
        group: the processes.
        context: torch's context of the processes.
        on_continue: called when the others continue.

    Raises:
        PeerFailureError: only other nodes have ranks that continue.
    """
    continuation, first = group.continuation, sum(group.processes[: group.index])
    if continuation is None:
        return False
    running: set[int] = context._running_local_ranks
    codes = {first + local: context.subprocess_handlers[local].proc.poll() for local in running}
    found = continuation.poll({rank: code for rank, code in codes.items() if code is not None})
    if found is False:
        return False
    if isinstance(found, Notice):
        running.intersection_update(rank - first for rank in found.ranks)
        on_continue(found)
        if not running:
            raise PeerFailureError("all were killed; the other nodes continue without restart")
    # A killed process whose loss is not decided yet has not failed.
    return any(codes[first + local] != 0 for local in running)


def _received_signal(error: BaseException | None) -> signal.Signals | None:
    """The signal that led to an exception; None if there is none.

    torch raises ``SignalException`` in a handler. If that happens in its decorator of timed functions, an
    ``UnboundLocalError`` replaces it.
    """
    from torch.distributed.elastic.multiprocessing import SignalException

    while error is not None and not isinstance(error, SignalException):
        error = error.__context__
    return None if error is None else signal.Signals(error.sigval)


def run_worker_group(group: WorkerGroupConfig) -> list[Failure]:
    """Start the processes, print the output of rank 0, wait for all, and return the failures.

    Raises:
        SystemExit: this process received a signal; the workers have been terminated.
        PeerFailureError: another node was lost, or its processes failed; the workers have been terminated.
    """
    from torch.distributed.elastic.multiprocessing import SignalException

    # The agent logs the exit of each rank on several lines; the launcher prints one message instead.
    first_rank = sum(group.processes[: group.index])

    def on_continue(notice: Notice) -> None:
        if group.index > 0:
            return
        lost, joined, ranks = (", ".join(map(str, each)) for each in (notice.lost, notice.joined, notice.ranks))
        what = f"rank {joined} joined" if joined else f"rank {lost} was {notice.cause}"
        print_message(f"dynmo-train: {what}; continuing without restart on rank {ranks}")
        # Node 0 always has the first rank: it is in every round.
        output.follow(notice.ranks[0])

    agent, log_paths = _build_agent(group, on_continue)
    for name in list(logging.root.manager.loggerDict):
        if name.startswith("torch.distributed.elastic"):  # each module has its own level
            logging.getLogger(name).setLevel(logging.CRITICAL)
    output = _FirstRankOutput(log_paths, is_verbose=group.is_verbose)
    handlers = {number: signal.getsignal(number) for number in _HANDLED}
    if group.index == 0:
        output.follow(0)
    try:
        result = agent.run()
    except (SignalException, UnboundLocalError) as error:
        if (received := _received_signal(error)) is None:
            raise
        print_message(f"dynmo-train: {received.name}: terminated | processes: {group.nproc}")
        raise SystemExit(128 + received) from error
    finally:
        output.finish()
        # torch replaces the handlers when it starts the workers, and does not restore them.
        for number, handler in handlers.items():
            signal.signal(number, handler)
        remove_file(group.shutdown_file)
    codes = {rank: failure.exitcode for rank, failure in result.failures.items()}
    if group.continuation is not None and group.continuation.is_pending:
        pending = group.continuation.pending
        # What the others failed of follows from these deaths; a survivor's code 2 would end the launch.
        print_message("dynmo-train: the ranks could not continue; their logs have the reason")
        codes = {**pending, **{rank: code for rank, code in codes.items() if is_kill(code)}}
        codes = {rank: code for rank, code in codes.items() if rank - first_rank in range(group.nproc)}
        if not codes:
            raise PeerFailureError("the ranks could not continue after another node lost or gained some")
    logs = {rank: log_paths[0].stderrs[rank - first_rank] for rank in sorted(codes)}
    return with_causal_codes(
        [
            Failure(rank=rank, code=codes[rank], log=log, record=failure_of(Path(log), os.environ, rank, group.name))
            for rank, log in logs.items()
        ]
    )
