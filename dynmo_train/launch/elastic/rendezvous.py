"""Rendezvous of the nodes of a launch, seen from one node: joining, heartbeats, rounds and their ends.

One launcher runs on each node. The launchers share a key-value store on node 0. A launch is a sequence of *rounds*;
processes are restarted by another round::

    node 0 (coordinator.py)                    node N
    fold records into a membership        <-- join record, heartbeats
    publish the members of round R        --> start the processes
    publish why the round ends            <-- record: processes ended
    next round, or the end of the launch  --> start, or exit

Members are in the order of their node ranks, so that global rank 0 is on the node with the store. A launcher that finds
itself excluded, because it was cut off, joins again as another incarnation (``membership.py``). A launcher that loses
the store tries to reach node 0 again: its host may return, or the launcher of node 0 may be started again, with an
empty store, which the other nodes then join.
"""

from __future__ import annotations

import secrets
import socket
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from ..._common.checks import anything, integer, obj
from ..._common.console import print_message
from ..._common.errors import EXIT_RELAUNCH, DynmoError, UsageError
from ..options import NodeConfig
from ..store_values import decode_value
from .coordinator import POLL_S, Coordinator, Round, append_record, decode_round, heartbeat_period_s
from .membership import Incarnation, Limits, NodeState, Record, RecordKind, join_ranks

if TYPE_CHECKING:
    from torch._C._distributed_c10d import PrefixStore, Store

# Seconds that the first round waits for more than the minimum number of nodes.
FIRST_JOIN_S = 30.0
# Seconds in which node 0 must be able to resolve its own name.
OWN_NAME_S = 30.0
# Seconds after its own time limit in which torch's store raises an error, on a busy machine.
ANSWER_S = 3.0


class RendezvousLostError(DynmoError):
    """Node 0 with the store is unreachable; a scheduler should requeue the job (exit code 75)."""

    exit_code = EXIT_RELAUNCH


class ExcludedError(DynmoError):
    """Node 0 counts this incarnation as lost: this node may join again."""


@dataclass(frozen=True, kw_only=True)
class LaunchEnd:
    """The end of a launch: its exit code, and an error message or an empty string."""

    code: int
    message: str = ""


_END = obj({"code": integer(-(1 << 15), 1 << 15), "message": anything()})


def decode_end(value: bytes) -> LaunchEnd:
    """The end of a launch, as node 0 publishes it.

    Raises:
        DocumentError: it is not that of this version.
    """
    found = decode_value(value, _END, "the end of the launch")
    return LaunchEnd(code=found["code"], message=str(found["message"]))


def _call_with_timeout(action: Callable[[], Any], seconds: float) -> Any:
    """The result of ``action``; ``RuntimeError`` after a timeout: over a broken link the store never answers."""
    results: list[Any] = []
    raised: list[RuntimeError] = []

    def run() -> None:
        try:
            results.append(action())
        except RuntimeError as error:
            raised.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(seconds)
    if raised or not results:
        raise raised[0] if raised else RuntimeError(f"no answer within {seconds:g} s")
    return results[0]


def wait_for_name(
    nodes: NodeConfig, seconds: float, resolve: Callable[[str, int], Any] = socket.getaddrinfo, every_s: float = 1.0
) -> None:
    """Wait until the name of node 0 can be resolved: a cluster may publish it after the start.

    torch's store would try for minutes, with a warning of many lines each second, and signals would have no effect.

    Args:
        nodes: this node and the rendezvous.
        seconds: seconds to wait.
        resolve: resolves a host and a port.
        every_s: seconds between attempts.

    Raises:
        UsageError: it cannot be resolved.
    """
    deadline, is_reported = time.monotonic() + seconds, False
    while True:
        try:
            resolve(nodes.master_addr, nodes.master_port)
            return
        except (OSError, UnicodeError) as error:
            problem = getattr(error, "strerror", None) or str(error)
        if time.monotonic() >= deadline:
            raise UsageError(
                f"--master-addr {nodes.master_addr}: cannot be resolved ({problem}); give the address of node 0, or a"
                " name that the DNS or /etc/hosts of this host has"
            )
        if not is_reported:
            print_message(
                f"--master-addr {nodes.master_addr}: cannot be resolved ({problem}); waiting up to {seconds:g} s for it"
            )
            is_reported = True
        time.sleep(every_s)


def _connect(nodes: NodeConfig, seconds: float) -> Store:
    from torch._C._distributed_c10d import TCPStore

    is_leader = nodes.node_rank == 0
    wait_for_name(nodes, min(seconds, OWN_NAME_S) if is_leader else seconds)

    def connect() -> Store:
        return TCPStore(
            nodes.master_addr,
            nodes.master_port,
            is_master=is_leader,
            wait_for_workers=False,
            timeout=timedelta(seconds=seconds),
        )

    try:
        # In a thread: signals have no effect while the main thread is in torch's code.
        store: Store = _call_with_timeout(connect, seconds + ANSWER_S)
    except RuntimeError as error:
        first = str(error).splitlines()[0]
        place = f"{nodes.master_addr}:{nodes.master_port}"
        raise UsageError(
            f"cannot open the rendezvous store at {place}: {first}; give another --master-port"
            if is_leader
            else f"node {nodes.node_rank} cannot reach node 0 at {place} within {seconds:g} s: {first}"
        ) from error
    return store


class Rendezvous:
    """Membership of a launch, seen from one node.

    Args:
        nodes: this node and the rendezvous.
        processes: number of processes of this node.
        is_draining: whether the launcher of this node received a signal, while its processes save.
        on_joining: on node 0, called while nodes wait that should join the running round, with these nodes.
        connect_s: seconds to reach node 0; None for ``--join-timeout-s``.

    Raises:
        UsageError: the store cannot be created, or node 0 is unreachable.
    """

    def __init__(
        self,
        nodes: NodeConfig,
        processes: int,
        is_draining: Callable[[], bool] = lambda: False,
        on_joining: Callable[[Sequence[Incarnation]], None] = lambda _: None,
        connect_s: float | None = None,
    ) -> None:
        from torch._C._distributed_c10d import PrefixStore, TCPStore

        self.nodes, self.name = nodes, secrets.token_hex(4)
        store = _connect(nodes, nodes.join_timeout_s if connect_s is None else connect_s)
        self.port = store.port if isinstance(store, TCPStore) else nodes.master_port
        self.store: PrefixStore = PrefixStore(nodes.job, store)
        self._process_stores: list[Store] = []
        self._number = self._num_growths = 0
        # Round and reason: a reason of an earlier round must not end a later one.
        self._stop: tuple[int, str] | None = None
        self._is_store_lost = False
        self._answered_s = time.monotonic()
        self._is_draining = is_draining
        self._stopped = threading.Event()
        # Before the record: node 0 reads the heartbeats of all that joined.
        self._request(lambda: self.store.set(f"beat/{self.name}", "0"))
        joined = Record(kind=RecordKind.JOINED, name=self.name, rank=nodes.node_rank, processes=processes)
        self._coordinator: Coordinator | None = None
        if self.is_leader:
            limits = Limits(
                min_nodes=nodes.min_nodes,
                max_nodes=nodes.max_nodes,
                node_timeout_s=nodes.node_timeout_s,
                first_wait_s=FIRST_JOIN_S,
                rejoin_s=nodes.rejoin_s,
            )
            self._coordinator = Coordinator(self._connection(), limits, self.name, on_joining)
        self._append(joined)
        if nodes.max_nodes > 1:
            if self._coordinator is not None:
                self._coordinator.start()
            else:
                threading.Thread(target=self._send_heartbeats, daemon=True).start()

    @property
    def is_leader(self) -> bool:
        """Whether this is node 0."""
        return self.nodes.node_rank == 0

    @property
    def coordinator(self) -> Coordinator:
        """The coordinator, on node 0."""
        if self._coordinator is None:
            raise RuntimeError("only node 0 coordinates")
        return self._coordinator

    def _connection(self) -> PrefixStore:
        """A connection of its own: a request that blocks in the main thread would delay this one."""
        from torch._C._distributed_c10d import PrefixStore, TCPStore

        nodes = self.nodes
        timeout = timedelta(seconds=nodes.node_timeout_s)
        return PrefixStore(nodes.job, TCPStore(nodes.master_addr, self.port, is_master=False, timeout=timeout))

    def _append(self, record: Record) -> None:
        self._request(lambda: append_record(self.store, record))

    def _send_heartbeats(self) -> None:
        """Send heartbeats and read why the round ends; runs in a thread."""
        try:
            store, changes, count, is_draining = self._connection(), -1, 0, False
            while not self._stopped.wait(heartbeat_period_s(self.nodes.max_nodes)):
                count += 1
                store.set(f"beat/{self.name}", str(count))
                if not is_draining and self._is_draining():
                    is_draining = True
                    append_record(store, Record(kind=RecordKind.DRAINING, name=self.name))
                # An acknowledged request: ``set`` to a store that is gone returns without an error.
                found = store.add("changes", 0)
                number, self._answered_s = self._number, time.monotonic()
                if found == changes:
                    continue
                if store.check([f"stop/{number}"]):
                    self._stop = (number, str(store.get(f"stop/{number}"), "utf-8"))
                elif store.check([f"gone/{self.name}"]):
                    self._stop = (number, f"node 0 lost node {self.nodes.node_rank}")
                changes = found if number == self._number else -1
        except (RuntimeError, OSError):
            self._is_store_lost = True

    def _request(self, action: Callable[[], Any]) -> Any:
        """The result of a store operation; raises ``RendezvousLostError`` if node 0 is unreachable."""
        try:
            if self._is_store_lost:
                raise RuntimeError("an earlier request failed")
            # Node 0 has the store in its own process: no link to it can break.
            return action() if self.is_leader else _call_with_timeout(action, self.nodes.node_timeout_s)
        except RuntimeError as error:
            self._is_store_lost = True
            place = f"{self.nodes.master_addr}:{self.port}"
            raise RendezvousLostError(f"lost node 0 at {place}, which hosts the rendezvous; launch again") from error

    def _has(self, key: str) -> bool:
        return bool(self._request(lambda: self.store.check([key])))

    def _get(self, key: str) -> bytes:
        return bytes(self._request(lambda: self.store.get(key)))

    def open_round(self, members: Sequence[Incarnation], extra_flags: tuple[str, ...]) -> Round:
        """On node 0, begin a round.

        Args:
            members: its members.
            extra_flags: flags that are appended to the command.
        """
        current = self.coordinator.open_round(members, self._open_process_store(), extra_flags)
        self._number = current.number
        return current

    def wait_for_members(self) -> tuple[Incarnation, ...]:
        """On node 0, wait for the members of the next round.

        Raises:
            DynmoError: too few nodes joined in time.
        """
        seconds = self.nodes.join_timeout_s
        members = self.coordinator.wait_for_members(seconds)
        if members is None:
            membership = self.coordinator.membership
            ready = [node.rank for node in membership.latest() if node.is_ready]
            found = f"{len(ready)} of {membership.min_nodes} nodes joined within {seconds:g} s: {join_ranks(ready)}"
            raise DynmoError(found)
        return members

    def _open_process_store(self) -> int:
        """Open a store for the processes of a round, without keys of earlier rounds, and return its port."""
        from torch._C._distributed_c10d import TCPStore

        store = TCPStore(self.nodes.master_addr, 0, is_master=True, wait_for_workers=False)
        self._process_stores = [store]  # releases the previous one
        return int(store.port)

    @property
    def process_store(self) -> Store:
        """On node 0, the store of the processes of the current round."""
        return self._process_stores[0]

    def wait_for_round(self) -> Round | LaunchEnd:
        """On other nodes, wait for a round that this node starts in or joins, or for the end of the launch.

        Raises:
            ExcludedError: node 0 lost this incarnation.
            DynmoError: another launcher of this node replaced this one.
            RendezvousLostError: node 0 is unreachable.
        """
        rank, is_reported = self.nodes.node_rank, False
        changes = -1
        while True:
            found = int(self._request(lambda: self.store.add("changes", 0)))
            if found != changes:
                changes = found
                if self._has("end"):
                    return decode_end(self._get("end"))
                self._check_exclusion()
                number = int(self._request(lambda: self.store.add("round", 0)))
                if number > self._number:
                    current = decode_round(self._get(f"round/{number}"))
                    if self.name in current.names:
                        self._number = number
                        return current
                    # Also a round that this node was a member of and that ended before it could start.
                    self._append(Record(kind=RecordKind.ENDED, name=self.name, round=number))
                    self._number = number
                    if not is_reported:
                        is_reported = True
                        nodes = join_ranks(current.members)
                        print_message(
                            f"dynmo-train: node {rank} waits: round {number} runs on node {nodes} until its next save"
                        )
                if (grown := self._growth()) is not None:
                    return grown
            time.sleep(max(POLL_S, heartbeat_period_s(self.nodes.max_nodes) / 10))

    def _growth(self) -> Round | None:
        """The running round with this node, which is to join it; None without a new attempt of that."""
        count = int(self._request(lambda: self.store.add("growth", 0)))
        while self._num_growths < count:
            self._num_growths += 1
            grown = decode_round(self._get(f"growth/{self._num_growths}"))
            if grown.number == self._number and self.name in grown.names[-grown.num_joining :]:
                return grown
        return None

    def _check_exclusion(self) -> None:
        rank, key = self.nodes.node_rank, f"gone/{self.name}"
        if not self._has(key):
            return
        if str(self._get(key), "utf-8") == NodeState.REPLACED:
            raise DynmoError(f"another launcher of node {rank} joined; start one launcher per --node-rank")
        raise ExcludedError(f"node 0 lost node {rank}")

    def failure_reason(self) -> str | None:
        """Why the round ends on this node: another one was lost, drained or failed; None while it runs."""
        if self.is_leader:
            return self.coordinator.reason()
        limit_s = self.nodes.node_timeout_s + heartbeat_period_s(self.nodes.max_nodes)
        if time.monotonic() - self._answered_s > limit_s:
            self._is_store_lost = True
        if self._is_store_lost:
            return "lost node 0"
        stop = self._stop
        return stop[1] if stop is not None and stop[0] == self._number else None

    def report(self, failures: tuple[tuple[int, int], ...]) -> None:
        """Report that the processes of this node ended, with (rank, exit code) of those that failed."""
        self._append(Record(kind=RecordKind.ENDED, name=self.name, round=self._number, failures=failures))

    def leave(self, state: NodeState) -> None:
        """Leave for good; ``state`` is ``FINISHED`` or ``DRAINED``."""
        try:
            self._append(Record(kind=RecordKind.LEFT, name=self.name, state=state))
        except RendezvousLostError:
            pass  # node 0 is gone: no other node can observe this
        finally:
            self.close()

    def close(self) -> None:
        """End the threads."""
        self._stopped.set()
        if self._coordinator is not None:
            self._coordinator.stop()
