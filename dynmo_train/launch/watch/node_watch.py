"""Watches the ranks of a round from the launchers, and ends a rank that hangs.

A thread in each launcher reads the heartbeats of its own ranks. The nodes share them through the store of the round;
node 0 decides::

    node N   heartbeats, /proc --> states/N ---.
    node 0   states/0 ... states/N --> find_hang --> suspect --.
    node N   stacks of its ranks by signal <-------------------'
             traces of torch's flight recorder, where it is on
             --> log folder, stacks/N: collective of each rank --.
    node 0   refine --> abort: rank <----------------------------'
    node N   SIGKILL to that rank, if it is here

The other ranks then lose a connection, all nodes end the round, and the launchers decide on a restart as after a death.
Every node compares ages on its own clock only.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import threading
import time
from collections.abc import Callable, Collection, Iterator
from dataclasses import asdict, dataclass, field, replace
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..._common.checks import anything, array, boolean, integer, mapping, number, obj, string
from ..._common.console import print_message
from ..._common.document import DocumentError, Problem
from ..store_values import by_rank, decode_value
from .flight_recorder import NO_RECORDER, LastCollective, absent_ranks, parse_trace, request_trace, trace_path
from .heartbeat import STACK_SIGNAL, Heartbeat, Phase, read_heartbeat, stack_path
from .watchdog import Hang, HangSettings, RankState, collective_in, find_hang, refine

if TYPE_CHECKING:
    from torch._C._distributed_c10d import PrefixStore

POLL_S = 1.0
# Seconds that ranks have to write their stacks, and the other nodes to report theirs.
STACK_S, REPORT_S = 2.0, 10.0
# Seconds that ranks have to write their traces: torch resolves the names of all frames in the first one.
TRACE_S = 5.0
_STORE_TIMEOUT_S = 10.0


@dataclass(frozen=True, kw_only=True)
class WatchedRound:
    """The ranks of this node in a round, and the store of the round.

    Attributes:
        name: name of the round, as in ``TORCHELASTIC_RUN_ID``.
        folder: folder of the heartbeats.
        log_dir: folder to which stacks are written.
        first_rank: first rank of this node.
        nproc: number of its ranks.
        index: index of this node among the members.
        count: number of members.
        store_host: host of the store.
        store_port: port of the store.
    """

    name: str
    folder: Path
    log_dir: Path
    first_rank: int
    nproc: int
    index: int
    count: int
    store_host: str
    store_port: int


@dataclass(kw_only=True)
class WatchResult:
    """What the watch of a round found, on node 0.

    Attributes:
        hosts: rank to host.
        hang: the rank that was ended; None without one.
        collective: collective in which the other ranks waited.
        stacks: folder of the stacks.
    """

    hosts: dict[int, str] = field(default_factory=dict)
    hang: Hang | None = None
    collective: str = ""
    stacks: str = ""


def process_state(pid: int) -> str:
    """State of the process ``pid``, as in ``/proc``: R, S, D, T, Z; empty where unknown."""
    try:
        return Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()[0]
    except (OSError, IndexError):
        return ""


def encode_states(states: list[RankState], num_unknown: int) -> str:
    """The states of a node for the store, and ``num_unknown``, its number of ranks without a heartbeat."""
    return json.dumps([num_unknown, *(asdict(state) for state in states)])


_STATE = obj(
    {
        "rank": integer(),
        "host": string(),
        "age_s": number(0),
        "process": anything(),
        "beat": obj(
            {
                **dict.fromkeys(("pid", "step", "microbatch", "since_ns"), integer()),
                "phase": integer(0, max(Phase)),
                "is_cold": boolean(),
                **dict.fromkeys(("limit_s", "median_step_s"), number(0)),
            }
        ),
    }
)


def _states(value: Any, path: str, problems: list[Problem]) -> None:
    """Check what :func:`encode_states` writes: a number, and then an object per rank."""
    before = len(problems)
    array(anything(), 1)(value, path, problems)
    if len(problems) == before:
        integer()(value[0], f"{path}[0]", problems)
        array(_STATE)(value[1:], path, problems)


def decode_states(text: str) -> tuple[list[RankState], int]:
    """The states of another node; the inverse of :func:`encode_states`.

    Raises:
        DocumentError: they are not those of this version.
    """
    num_unknown, *rows = decode_value(text, _states, "the states of ranks")
    beats = [Heartbeat(**row["beat"] | {"phase": Phase(row["beat"]["phase"])}) for row in rows]
    return [RankState(**row | {"beat": beat}) for row, beat in zip(rows, beats, strict=True)], num_unknown


def encode_traces(traces: dict[int, dict[str, LastCollective]]) -> str:
    """The last collectives of the ranks of a node for the store."""
    return json.dumps({rank: {group: asdict(each) for group, each in of.items()} for rank, of in traces.items()})


_LAST = obj({"number": integer(), "name": string(), "sizes": string(), "members": array(integer())})


def decode_traces(text: str) -> dict[int, dict[str, LastCollective]]:
    """The last collectives of another node; the inverse of :func:`encode_traces`.

    Raises:
        DocumentError: they are not those of this version.
    """
    found = decode_value(text, mapping(mapping(_LAST)), "the last collectives of ranks")
    return {
        int(rank): {group: LastCollective(**each | {"members": tuple(each["members"])}) for group, each in of.items()}
        for rank, of in found.items()
        if rank.isdecimal() and len(rank) < 10
    }


def _collective(value: Any, path: str, problems: list[Problem]) -> None:
    """The name of a collective; empty outside of one."""
    if not isinstance(value, str):
        problems.append(Problem(path, "type", "must be a string"))


def decode_collectives(value: bytes) -> dict[int, str]:
    """The collectives of the ranks of another node, by rank.

    Raises:
        DocumentError: they are not those of this version.
    """
    found = decode_value(value, by_rank(_collective), "the collectives of ranks")
    return {int(rank): name for rank, name in found.items()}


class NodeWatch:
    """Watches the ranks of this node; on node 0 it decides for all nodes.

    Args:
        watched: the round.
        settings: when a rank hangs.
        members: on node 0, returns the ranks that still run, which others may have outlived; None: all.
        nodes: on node 0, returns the positions of their nodes; None: all of ``watched``.
    """

    def __init__(
        self,
        watched: WatchedRound,
        settings: HangSettings,
        members: Callable[[], Collection[int] | None] = lambda: None,
        nodes: Callable[[], Collection[int]] | None = None,
    ) -> None:
        self.watched, self._settings, self._members = watched, settings, members
        self._nodes = nodes or (lambda: range(watched.count))
        self.result = WatchResult()
        self._stopped = threading.Event()
        self._store: PrefixStore | None = None
        self._latest: dict[int, tuple[str, float]] = {}
        # Hangs that have been handled: the others may have continued after them.
        self._num_hangs, self._has_dumped = 0, False
        self._thread = threading.Thread(target=self._run, daemon=True)

    @contextlib.contextmanager
    def watching(self) -> Iterator[WatchResult]:
        """Watch while the round runs."""
        if self._settings.factor:
            self._thread.start()
        try:
            yield self.result
        finally:
            self._stopped.set()
            if self._thread.is_alive():
                self._thread.join(_STORE_TIMEOUT_S)
            self._remove_pages()

    @property
    def _is_leader(self) -> bool:
        return self.watched.index == 0

    def _remove_pages(self) -> None:
        for path in self.watched.folder.glob(f"{self.watched.name}-*"):
            path.unlink(missing_ok=True)

    def _run(self) -> None:
        try:
            self._connect()
            while not self._stopped.wait(POLL_S):
                if self._poll() and self._is_over():
                    return
        # The store ends with the round, or its node is lost: the launchers notice that themselves.
        except (RuntimeError, OSError):
            return

    def _is_over(self) -> bool:
        """After a hang: whether the round ends, instead of continuing on the other ranks, which are then watched."""
        self._num_hangs, self._has_dumped = self._num_hangs + 1, False
        # They notice the death and begin another phase within this time; until then they are late, too.
        return self._stopped.wait(REPORT_S if self._is_leader else 0.0)

    def _connect(self) -> None:
        if self._store is not None or (self.watched.count == 1 and not self._others()):
            return
        from torch._C._distributed_c10d import PrefixStore, TCPStore

        # A connection of its own: a request that blocks elsewhere would delay this thread.
        connection = TCPStore(
            self.watched.store_host,
            self.watched.store_port,
            is_master=False,
            wait_for_workers=False,
            timeout=timedelta(seconds=_STORE_TIMEOUT_S),
        )
        self._store = PrefixStore("watchdog", connection)

    def _others(self) -> list[int]:
        """Positions of the other nodes with ranks that run; a node may have joined since the start."""
        return [node for node in self._nodes() if node != self.watched.index]

    def _local_states(self) -> tuple[list[RankState], int]:
        """The running ranks of this node, and the number of those without a heartbeat."""
        watched, host, num_unknown = self.watched, socket.gethostname(), 0
        states = []
        for rank in range(watched.first_rank, watched.first_rank + watched.nproc):
            beat = read_heartbeat(watched.folder, watched.name, rank)
            num_unknown += beat is None
            # A rank that has ended was released, or the agent ends the round.
            if beat is not None and (process := process_state(beat.pid)) not in ("", "Z", "X"):
                age_s = max(0, time.monotonic_ns() - beat.since_ns) / 1e9
                states.append(RankState(rank=rank, host=host, beat=beat, age_s=age_s, process=process))
        return states, num_unknown

    def _poll(self) -> bool:
        """Share and compare the heartbeats once; whether a hang was handled."""
        self._connect()
        states, num_unknown = self._local_states()
        if self._store is not None and not self._is_leader:
            self._store.set(f"states/{self.watched.index}", encode_states(states, num_unknown))
            return self._follow(states)
        others, others_unknown = self._remote_states()
        members = self._members()
        everyone = [state for state in (*states, *others) if members is None or state.rank in members]
        self.result.hosts.update({state.rank: state.host for state in everyone})
        hang = find_hang(everyone, self._settings, num_unknown=num_unknown + others_unknown)
        if hang is None:
            return False
        self._lead(hang, states)
        return True

    def _remote_states(self) -> tuple[list[RankState], int]:
        """The states of the other nodes, aged by the time since they changed, and the number of unknown ranks."""
        found: list[RankState] = []
        num_unknown, now = 0, time.monotonic()
        if self._store is None:
            return found, 0
        for node in self._others():
            key = f"states/{node}"
            if not self._store.check([key]):
                num_unknown += 1
                continue
            text = self._store.get(key).decode()
            if self._latest.get(node, ("", 0.0))[0] != text:
                self._latest[node] = (text, now)
            waited = now - self._latest[node][1]
            try:
                states, unknown = decode_states(text)
            except DocumentError:
                states, unknown = [], 1  # a launcher of another version, whose ranks are not judged
            found += [replace(state, age_s=state.age_s + waited) for state in states]
            num_unknown += unknown
        return found, num_unknown

    def _lead(self, hang: Hang, states: list[RankState]) -> None:
        """On node 0, collect the stacks of all ranks, decide which rank hangs, and let its node end it."""
        if self._store is not None:
            self._store.set(f"suspect/{self._num_hangs}", str(hang.state.rank))
        collectives, traces = self._dump_stacks(states), self._dump_traces(states)
        if self._store is not None:
            collectives |= self._remote_collectives()
            traces |= self._remote_traces()
        hang, collective = refine(hang, collectives)
        self.result.hang, self.result.collective = hang, collective
        self.result.stacks = str(self._stack_folder())
        waiting = f"; the others wait in {collective}" if collective else ""
        print_message(
            f"dynmo-train: rank {hang.state.rank} on {hang.state.host} hangs in step {hang.state.beat.step:,}:"
            f" {hang.cause}{waiting}; stacks: {self.result.stacks}"
        )
        self._report_absent(traces)
        if self._store is not None:
            self._store.set(f"abort/{self._num_hangs}", str(hang.state.rank))
        self._end_rank(hang.state.rank, states)

    def _remote_collectives(self) -> dict[int, str]:
        found: dict[int, str] = {}
        missing, end = set(self._others()), time.monotonic() + REPORT_S
        while missing and time.monotonic() < end and self._store is not None:
            for node in sorted(missing):
                key = f"stacks/{self._num_hangs}/{node}"
                if self._store.check([key]):
                    # Of a launcher of another version there are none.
                    with contextlib.suppress(DocumentError):
                        found |= decode_collectives(self._store.get(key))
                    missing.discard(node)
            time.sleep(0.1)
        return found

    def _remote_traces(self) -> dict[int, dict[str, LastCollective]]:
        found: dict[int, dict[str, LastCollective]] = {}
        for node in self._others():
            key = f"traces/{self._num_hangs}/{node}"
            if self._store is not None and self._store.check([key]):
                # Of a launcher of another version there are none.
                with contextlib.suppress(DocumentError):
                    found |= decode_traces(self._store.get(key).decode())
        return found

    def _report_absent(self, traces: dict[int, dict[str, LastCollective]]) -> None:
        """On node 0, print which ranks did not enter a collective, by the flight recorders of all ranks."""
        lines = [each.text for each in absent_ranks(traces)]
        if not traces:
            lines = [NO_RECORDER]
        elif not lines:
            lines = ["all ranks entered the same collectives"]
        for line in lines:
            print_message(f"dynmo-train: flight recorder: {line}" if traces else f"dynmo-train: {line}")
        if traces:
            with contextlib.suppress(OSError):
                (self._stack_folder() / "collectives.txt").write_text("\n".join(lines) + "\n", encoding="utf-8")

    def _follow(self, states: list[RankState]) -> bool:
        """On the other nodes, report stacks and end a rank when node 0 asks for it."""
        if self._store is None:
            return False
        number = self._num_hangs
        if not self._has_dumped and self._store.check([f"suspect/{number}"]):
            self._has_dumped = True
            stacks = json.dumps(self._dump_stacks(states))
            # Before the stacks: node 0 reads the traces once it has these.
            self._store.set(f"traces/{number}/{self.watched.index}", encode_traces(self._dump_traces(states)))
            self._store.set(f"stacks/{number}/{self.watched.index}", stacks)
        if not self._store.check([f"abort/{number}"]):
            return False
        self._end_rank(int(self._store.get(f"abort/{number}")), states)
        return True

    def _stack_folder(self) -> Path:
        return self.watched.log_dir / "stacks" / self.watched.name

    def _dump_stacks(self, states: list[RankState]) -> dict[int, str]:
        """Write the stacks of the local ranks to the log folder; rank to the collective that it is in.

        A stopped process cannot write its stack. Its file has the state and the kernel function that it is in.
        """
        folder = self._stack_folder()
        for state in states:
            if not state.is_stopped:
                _signal(state.beat.pid, STACK_SIGNAL)
        end = time.monotonic() + STACK_S
        running = [state.rank for state in states if not state.is_stopped]
        while time.monotonic() < end and any(not self._stack_of(rank) for rank in running):
            time.sleep(0.05)
        time.sleep(0.1)  # the last threads of a stack
        collectives: dict[int, str] = {}
        with contextlib.suppress(OSError):
            folder.mkdir(parents=True, exist_ok=True)
            for state in states:
                stack = self._stack_of(state.rank)
                if stack:
                    collectives[state.rank] = collective_in(stack)
                kernel = _read(Path(f"/proc/{state.beat.pid}/wchan"))
                head = (
                    f"rank {state.rank} on {state.host} | step {state.beat.step:,} | {state.beat.text} for"
                    f" {state.age_s:.1f} s | process {state.beat.pid}, state {state.process}, kernel {kernel or '-'}\n"
                )
                (folder / f"rank-{state.rank}.txt").write_text(f"{head}{stack}", encoding="utf-8")
        return collectives

    def _dump_traces(self, states: list[RankState]) -> dict[int, dict[str, LastCollective]]:
        """Write the flight recorders' traces of the local ranks next to the stacks; rank to its last collectives."""
        watched, found = self.watched, dict[int, dict[str, LastCollective]]()
        waiting = {
            state.rank
            for state in states
            if request_trace(watched.folder, watched.name, state.rank) and not state.is_stopped
        }
        end = time.monotonic() + TRACE_S
        while waiting and time.monotonic() < end:
            for rank in sorted(waiting):
                path = trace_path(watched.folder, watched.name, rank)
                with contextlib.suppress(OSError):
                    content = path.read_bytes()
                    found[rank] = parse_trace(content)
                    waiting.discard(rank)
                    (self._stack_folder() / f"rank-{rank}.flight.json").write_bytes(content)
            time.sleep(0.05)
        return found

    def _stack_of(self, rank: int) -> str:
        return _read(stack_path(self.watched.folder, self.watched.name, rank))

    @staticmethod
    def _end_rank(rank: int, states: list[RankState]) -> None:
        for state in states:
            if state.rank == rank:
                _signal(state.beat.pid, signal.SIGKILL)


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace").strip()
    except OSError:
        return ""


def _signal(pid: int, number: int) -> None:
    """Send a signal to a process that may have ended."""
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, number)
