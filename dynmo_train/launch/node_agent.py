"""The processes of one start on this node: torch's elastic agent, built so that nothing waits long for what is over."""

from __future__ import annotations

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
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

from .._common.console import say
from .._common.errors import DynmoError
from .exit_status import Failure
from .worker import GRACE_VARIABLE, LAUNCH_FILE_VARIABLE, LAUNCHER_PID_VARIABLE, SAVE_VARIABLE, TOLD_FILE_VARIABLE

if TYPE_CHECKING:
    from torch._C._distributed_c10d import PrefixStore
    from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
    from torch.distributed.elastic.multiprocessing import LogsDest
    from torch.distributed.elastic.rendezvous import RendezvousInfo

MONITOR_INTERVAL_S = 0.1
_SIOCGIFADDR = 0x8915
# The signals that the agent takes over while its workers run.
_HANDLED = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)


class PeerTroubleError(DynmoError):
    """A start is over because of another node; the processes here have been ended."""


@dataclass(frozen=True, kw_only=True)
class Work:
    """What runs on a node in one start.

    ``nproc`` processes of ``command``, which get ``grace_s`` seconds to end, and ``save_s`` where the launcher was told
    to end, which ``told_file`` says; this is member ``index`` of ``count``; the processes meet in the store at ``host``
    and ``port``; ``trouble`` says why the start cannot go on, seen from other nodes, else None.
    """

    name: str
    nproc: int
    command: tuple[str, ...]
    log_dir: Path
    grace_s: float
    save_s: float
    told_file: Path
    index: int
    count: int
    host: str
    port: int
    trouble: Callable[[], str | None]


# glibc gives large freed blocks back to the kernel, which zeroes each page again when it is next touched. Measured on
# two stages, hidden size 256 and a vocabulary of 8,192: 8 to 12 % of the busier stage's processor time.
KEEP_MEMORY = {"MALLOC_MMAP_THRESHOLD_": str(32 << 20), "MALLOC_TRIM_THRESHOLD_": str(8 << 30)}


def worker_environment(
    present: Mapping[str, str],
    *,
    launcher: int,
    launch_file: Path,
    grace_s: float,
    save_s: float,
    told_file: Path,
    interface: str | None,
) -> dict[str, str]:
    """Variables that workers get beside the launcher's own; what a person has set stays.

    One thread a process, because the processes share the cores; gloo on the interface that leads to the other nodes, or
    on loopback, because the machine's name may resolve to an address that leads nowhere; blocks that glibc's malloc got
    back stay with the process, which needs them again in the next microbatch.
    """
    defaults = {"OMP_NUM_THREADS": "1", **KEEP_MEMORY} | ({"GLOO_SOCKET_IFNAME": interface} if interface else {})
    return {name: value for name, value in defaults.items() if name not in present} | {
        LAUNCHER_PID_VARIABLE: str(launcher),
        LAUNCH_FILE_VARIABLE: str(launch_file),
        GRACE_VARIABLE: str(grace_s),
        SAVE_VARIABLE: str(save_s),
        TOLD_FILE_VARIABLE: str(told_file),
    }


def interface_towards(host: str) -> str | None:
    """The network interface by which this machine reaches ``host``, or that has its address; None where none does."""
    try:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            probe.connect((host, 9))  # sends nothing
            own = probe.getsockname()[0]
            for _, name in socket.if_nameindex():
                request = struct.pack("256s", name.encode()[:15])
                try:
                    found = fcntl.ioctl(probe.fileno(), _SIOCGIFADDR, request)
                except OSError:
                    continue  # an interface without an address
                if socket.inet_ntoa(found[20:24]) == own:
                    return name
    except OSError:
        return None
    return None


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


def _meeting_point(work: Work) -> type:
    """The class by which the elastic agent hears of a start; loads torch."""
    from torch._C._distributed_c10d import PrefixStore, TCPStore
    from torch.distributed.elastic.rendezvous import RendezvousHandler, RendezvousInfo, RendezvousStoreInfo

    class Known(RendezvousHandler):
        """Members and their order are known already."""

        def __init__(self) -> None:
            self.store: PrefixStore | None = None
            self.since: float | None = None

        use_agent_store = True

        def get_backend(self) -> str:
            return "dynmo"

        def next_rendezvous(self) -> RendezvousInfo:
            store = TCPStore(work.host, work.port, is_master=False)
            self.store = PrefixStore("agents", store)
            return RendezvousInfo(self.store, work.index, work.count, RendezvousStoreInfo(work.host, work.port))

        def num_nodes_waiting(self) -> int:
            """Asked by the agent at each look at its processes: they get a grace to end by themselves."""
            reason = work.trouble()
            if reason is None:
                return 0
            self.since = self.since or time.monotonic()
            if time.monotonic() - self.since > work.grace_s:
                raise PeerTroubleError(reason)
            return 0

        def is_closed(self) -> bool:
            return False

        def set_closed(self) -> None:
            """Nothing to tell: the meeting of the nodes decides."""

        def get_run_id(self) -> str:
            return work.name

        def shutdown(self) -> bool:
            return True

    return Known


def _build_agent(work: Work) -> tuple[LocalElasticAgent, list[LogsDest]]:
    """The agent, and a list into which it puts where the logs are once its workers have started."""
    from torch.distributed.elastic.agent.server.api import WorkerSpec
    from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
    from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, Std

    places: list[LogsDest] = []

    class Logs(DefaultLogsSpecs):
        def reify(self, envs: dict[int, dict[str, str]]) -> LogsDest:
            places.append(super().reify(envs))
            return places[-1]

    class Agent(LocalElasticAgent):
        def _exit_barrier(self) -> None:
            """None: a node whose processes are done leaves, and the meeting knows it; torch's would hold it."""

        def _shutdown(self, *signals: Any, **_patience: Any) -> None:
            """End the workers: with a signal where the launcher got that signal itself, else because of others.

            torch 2.11 takes no time to wait, so the workers are waited for here.
            """
            number = signals[0] if signals else signal.SIGTERM
            may_save = bool(signals) and number in (signal.SIGTERM, signal.SIGINT)
            if may_save:
                work.told_file.touch()
            else:  # a second signal, while the workers save, takes that time from them
                work.told_file.unlink(missing_ok=True)
            if self._pcontext is not None:
                self._pcontext.close(number, math.ceil(max(work.grace_s, work.save_s if may_save else 0.0)) + 2)
            super()._shutdown(number)

    spec = WorkerSpec(
        role="worker",
        local_world_size=work.nproc,
        entrypoint=work.command[0],
        args=work.command[1:],
        rdzv_handler=_meeting_point(work)(),
        max_restarts=0,
        monitor_interval=MONITOR_INTERVAL_S,
        local_addr=work.host,
    )
    agent = Agent(
        spec=spec,
        logs_specs=Logs(log_dir=str(work.log_dir), redirects=Std.ALL),
    )
    return agent, places


def run_once(work: Work) -> list[Failure]:
    """Start the processes, show what rank 0 says, wait for the end of all; returns the ones that failed.

    Raises:
        SystemExit: this process was told to end; the workers are gone.
        PeerTroubleError: another node was lost, or its processes failed; the workers are gone.
    """
    from torch.distributed.elastic.multiprocessing import SignalException

    # The agent tells each rank's end on several lines; the one message at the end says it all.
    agent, places = _build_agent(work)
    for name in list(logging.root.manager.loggerDict):
        if name.startswith("torch.distributed.elastic"):  # each of its modules has a level of its own
            logging.getLogger(name).setLevel(logging.CRITICAL)
    tails = (
        _Tail(lambda: places[0].stdouts[0] if places else None, sys.stdout),
        _Tail(lambda: places[0].stderrs[0] if places else None, sys.stderr),
    )
    shown = tails if work.index == 0 else ()
    handlers = {number: signal.getsignal(number) for number in _HANDLED}
    for tail in shown:
        tail.start()
    try:
        result = agent.run()
    except SignalException as received:
        say(f"dynmo-train: {signal.Signals(received.sigval).name}: the {work.nproc} processes have ended")
        raise SystemExit(128 + received.sigval) from received
    finally:
        for tail in shown:
            tail.finish()
        for number, handler in handlers.items():
            signal.signal(number, handler)
        work.told_file.unlink(missing_ok=True)
    workers = agent.get_worker_group().workers
    first = workers[0].global_rank if workers else 0
    return [
        Failure(rank=rank, code=failure.exitcode, log=places[0].stderrs[rank - first])
        for rank, failure in sorted(result.failures.items())
    ]
