"""Rendezvous of the nodes of a launch: membership, heartbeats, results and decisions.

One launcher runs on each node. The launchers share a key-value store on node 0, which exists for the whole launch. A
launch is a sequence of *rounds*; processes are restarted by a new round::

    node 0                                   node N
    wait for min_nodes, publish members  <-- R/ready/N
    R/members                            --> start the processes
    R/result/0                               R/result/N
    R/decision: restart or exit code     --> next round, or exit

Members are in the order of their ranks, so that global rank 0 is on the node with the store. Every node increments its
heartbeat once per second. A member without heartbeat is lost, which ends the round.

Keys, with the name of the launch as prefix: ``round`` number of the current round R; ``R/ready/N`` number of processes
of node N; ``R/members``; ``R/result/N``; ``R/decision``; ``heartbeat/N`` counter; ``left/N`` node N left for good.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, field
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from .._common.errors import EXIT_RELAUNCH, DynmoError, UsageError
from .options import NodeConfig

if TYPE_CHECKING:
    from torch._C._distributed_c10d import PrefixStore, Store

POLL_S = 0.1
HEARTBEAT_S = 1.0
# Seconds to wait for more than the minimum number of nodes: in the first round, and in later ones.
FIRST_JOIN_S, RESTART_JOIN_S = 30.0, 3.0
# Why a node left: its processes finished, or its launcher received a signal.
FINISHED, SIGNALED = "finished", "signaled"


class RendezvousLostError(DynmoError):
    """Node 0 with the store is unreachable; a scheduler should requeue the job (exit code 75)."""

    exit_code = EXIT_RELAUNCH


@dataclass(frozen=True, kw_only=True)
class Round:
    """One start of the processes on all nodes.

    Attributes:
        number: number of the round, from 1.
        members: ranks of its nodes, ascending.
        processes: number of processes of each member.
        port: port of the processes' store on node 0.
        extra_flags: flags that are appended to the command.
    """

    number: int
    members: tuple[int, ...]
    processes: tuple[int, ...]
    port: int
    extra_flags: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class NodeResult:
    """Result of a round on one node: (rank, exit code) of each failed process."""

    node: int
    failures: tuple[tuple[int, int], ...]


@dataclass(frozen=True, kw_only=True)
class Decision:
    """What follows a round: another round, or the exit of the launch.

    Attributes:
        restart: whether another round follows.
        code: exit code, if not.
        processes: number of processes of the next round; only a single node can change its number.
        nodes: number of nodes of the next round.
        extra_flags: flags that are appended to the command.
        message: error message.
    """

    restart: bool
    code: int = 0
    processes: int = 0
    nodes: int = 0
    extra_flags: tuple[str, ...] = ()
    message: str = ""


@dataclass
class _Observations:
    """State of the other nodes, written by the heartbeat thread; ``results`` has (round, node)."""

    silent: set[int] = field(default_factory=set)
    signaled: set[int] = field(default_factory=set)
    results: set[tuple[int, int]] = field(default_factory=set)
    store_lost: bool = False
    answered_s: float = field(default_factory=time.monotonic)


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


def _connect(nodes: NodeConfig, *, is_leader: bool) -> Store:
    from torch._C._distributed_c10d import TCPStore
    from torch.distributed import DistNetworkError

    try:
        return TCPStore(
            nodes.master_addr,
            nodes.master_port,
            is_master=is_leader,
            wait_for_workers=False,
            timeout=timedelta(seconds=nodes.join_timeout_s),
        )
    except (DistNetworkError, RuntimeError) as error:
        first = str(error).splitlines()[0]
        place = f"{nodes.master_addr}:{nodes.master_port}"
        raise UsageError(
            f"cannot open the rendezvous store at {place}: {first}; give another --master-port"
            if is_leader
            else f"node {nodes.node_rank} cannot reach node 0 at {place} within {nodes.join_timeout_s:g} s: {first}"
        ) from error


class Rendezvous:
    """Membership and decisions of a launch, seen from one node."""

    def __init__(self, nodes: NodeConfig) -> None:
        """Create the store on node 0, or connect to it.

        Raises:
            UsageError: the store cannot be created, or node 0 is unreachable.
        """
        from torch._C._distributed_c10d import PrefixStore, TCPStore

        self.nodes = nodes
        store = _connect(nodes, is_leader=nodes.node_rank == 0)
        self.port = store.port if isinstance(store, TCPStore) else nodes.master_port
        self.store: PrefixStore = PrefixStore(nodes.job, store)
        self._process_stores: list[Store] = []
        self._observations = _Observations()
        self._members: tuple[int, ...] = ()
        self._number = 0
        self._stopped = threading.Event()
        if nodes.max_nodes > 1:
            threading.Thread(target=self._send_heartbeats, daemon=True).start()

    @property
    def is_leader(self) -> bool:
        """Whether this is node 0."""
        return self.nodes.node_rank == 0

    def _send_heartbeats(self) -> None:
        """Send heartbeats and observe the other members; runs in a thread with a separate connection."""
        from torch._C._distributed_c10d import PrefixStore, TCPStore

        nodes = self.nodes
        last_beats: dict[int, tuple[int, float]] = {}
        try:
            # A connection of its own: a request that blocks in the main thread would delay heartbeats.
            connection = TCPStore(
                nodes.master_addr, self.port, is_master=False, timeout=timedelta(seconds=nodes.node_timeout_s)
            )
            store = PrefixStore(nodes.job, connection)
            while not self._stopped.wait(HEARTBEAT_S):
                store.add(f"heartbeat/{nodes.node_rank}", 1)
                self._observations.answered_s = time.monotonic()
                now, number = time.monotonic(), self._number
                for node in self._members:
                    if store.check([f"left/{node}"]):
                        if json.loads(store.get(f"left/{node}")) == SIGNALED:
                            self._observations.signaled.add(node)
                        continue
                    if store.check([f"{number}/result/{node}"]):
                        self._observations.results.add((number, node))
                    # Adding zero reads the counter. Only whether it changes counts, because clocks of nodes differ.
                    count = store.add(f"heartbeat/{node}", 0)
                    if node not in last_beats or last_beats[node][0] != count:
                        last_beats[node] = (count, now)
                        self._observations.silent.discard(node)
                    elif now - last_beats[node][1] > nodes.node_timeout_s:
                        self._observations.silent.add(node)
        except (RuntimeError, OSError):
            self._observations.store_lost = True

    def _request(self, action: Callable[[], Any]) -> Any:
        """The result of a store operation; raises ``RendezvousLostError`` if node 0 is unreachable."""
        try:
            if self._observations.store_lost:
                raise RuntimeError("an earlier request failed")
            # Node 0 has the store in its own process: no link to it can break.
            return action() if self.is_leader else _call_with_timeout(action, self.nodes.node_timeout_s)
        except RuntimeError as error:
            self._observations.store_lost = True
            raise RendezvousLostError(
                f"lost node 0 at {self.nodes.master_addr}:{self.port}, which hosts the rendezvous; launch again"
            ) from error

    def _has(self, key: str) -> bool:
        return bool(self._request(lambda: self.store.check([key])))

    def _get(self, key: str) -> Any:
        return json.loads(self._request(lambda: self.store.get(key)))

    def _set(self, key: str, value: Any) -> None:
        self._request(lambda: self.store.set(key, json.dumps(value)))

    def _absent(self, nodes: Iterable[int]) -> set[int]:
        return {node for node in nodes if node in self._observations.silent or self._has(f"left/{node}")}

    def _wait(self, condition: Callable[[], bool], seconds: float) -> bool:
        end = time.monotonic() + seconds
        while not condition():
            if time.monotonic() > end:
                return False
            time.sleep(POLL_S)
        return True

    def next_round(
        self, processes: int, previous: Decision | None, flags_of: Callable[[int], tuple[str, ...]] | None = None
    ) -> Round:
        """Wait for the nodes of the next round.

        Args:
            processes: number of processes of this node.
            previous: decision on the previous round; None in the first round of this node.
            flags_of: maps the total number of processes to flags, if fewer nodes join than decided.

        Raises:
            DynmoError: too few nodes joined in time.
            RendezvousLostError: node 0 is unreachable.
        """
        if self.is_leader:
            self._number = int(self._request(lambda: self.store.add("round", 1)))
            current = self._open_round(processes, previous, flags_of)
        else:
            current = self._join(processes)
        self._number, self._members = current.number, current.members
        return current

    def _open_round(
        self, processes: int, previous: Decision | None, flags_of: Callable[[int], tuple[str, ...]] | None
    ) -> Round:
        """On node 0, wait for the other nodes and publish the members."""
        nodes, number = self.nodes, self._number
        target = previous.nodes if previous and previous.nodes else nodes.max_nodes
        self._set(f"{number}/ready/0", processes)

        def ready() -> list[int]:
            return [node for node in range(nodes.max_nodes) if self._has(f"{number}/ready/{node}")]

        if not self._wait(lambda: len(ready()) >= nodes.min_nodes, nodes.join_timeout_s):
            names = ", ".join(map(str, ready()))
            raise DynmoError(
                f"{len(ready())} of {nodes.min_nodes} nodes joined within {nodes.join_timeout_s:g} s: {names}"
            )
        self._wait(lambda: len(ready()) >= target, RESTART_JOIN_S if previous else FIRST_JOIN_S)
        members = tuple(ready()[:target])
        counts = tuple(self._get(f"{number}/ready/{node}") for node in members)
        extra_flags = previous.extra_flags if previous else ()
        if flags_of is not None and previous and previous.nodes and len(members) < target:
            extra_flags = flags_of(sum(counts))
        port = self._open_process_store()
        current = Round(number=number, members=members, processes=counts, port=port, extra_flags=extra_flags)
        self._set(f"{number}/members", asdict(current))
        return current

    def _open_process_store(self) -> int:
        """Open a store for the processes of a round, without keys of earlier rounds, and return its port."""
        from torch._C._distributed_c10d import TCPStore

        store = TCPStore(self.nodes.master_addr, 0, is_master=True, wait_for_workers=False)
        self._process_stores = [store]  # releases the previous one
        return int(store.port)

    def _join(self, processes: int) -> Round:
        """On other nodes, register for the current or the next round, and wait for its members."""
        rank, registered = self.nodes.node_rank, -1
        end = time.monotonic() + self.nodes.join_timeout_s
        while time.monotonic() < end:
            number = int(self._request(lambda: self.store.add("round", 0)))
            if number > self._number and number != registered:
                self._set(f"{number}/ready/{rank}", processes)
                registered = number
            if number == registered and self._has(f"{number}/members"):
                found = self._get(f"{number}/members")
                lists = {name: tuple(found[name]) for name in ("members", "processes", "extra_flags")}
                current = Round(number=number, port=found["port"], **lists)
                if rank in current.members:
                    return current
                self._number, end = number, time.monotonic() + self.nodes.join_timeout_s  # too late for this round
            time.sleep(POLL_S)
        raise DynmoError(f"node 0 opened no round for node {rank} within {self.nodes.join_timeout_s:g} s")

    def _failed_nodes(self) -> set[int]:
        """Nodes that reported a result, because processes of this round failed."""
        return {node for number, node in self._observations.results if number == self._number}

    def failure_reason(self) -> str | None:
        """Why another node ends this round: it was lost, signaled, or its processes failed; else None."""
        observed = self._observations
        if not self.is_leader and time.monotonic() - observed.answered_s > self.nodes.node_timeout_s + HEARTBEAT_S:
            observed.store_lost = True
        if observed.store_lost:
            return "lost node 0"
        if silent := sorted(observed.silent & set(self._members)):
            return f"node {', '.join(map(str, silent))} sent no heartbeat for {self.nodes.node_timeout_s:g} s"
        if signaled := sorted(observed.signaled & set(self._members)):
            return f"node {', '.join(map(str, signaled))} received a signal"
        if failed := sorted(self._failed_nodes() - {self.nodes.node_rank}):
            return f"processes of node {', '.join(map(str, failed))} failed"
        return None

    def departed_nodes(self) -> set[int]:
        """Members that left for good: their processes finished, or their launcher received a signal."""
        return {node for node in self._members if self._has(f"left/{node}")}

    def report(self, result: NodeResult) -> None:
        """Publish the result of this node."""
        self._set(f"{self._number}/result/{result.node}", asdict(result))

    def collect_results(self, wait_s: float) -> tuple[list[NodeResult], list[int]]:
        """On node 0, the results of the members and the lost nodes.

        Args:
            wait_s: maximum time to wait for results, in seconds.

        Raises:
            RendezvousLostError: the store does not answer.
        """

        def missing() -> set[int]:
            reported = {node for node in self._members if self._has(f"{self._number}/result/{node}")}
            return set(self._members) - reported - self._absent(self._members)

        self._wait(lambda: not missing(), wait_s)
        reported = [node for node in self._members if self._has(f"{self._number}/result/{node}")]
        found = [self._get(f"{self._number}/result/{node}") for node in reported]
        results = [NodeResult(node=f["node"], failures=tuple((r, c) for r, c in f["failures"])) for f in found]
        finished = {
            node for node in self._members if self._has(f"left/{node}") and self._get(f"left/{node}") == FINISHED
        }
        return results, sorted(set(self._members) - set(reported) - finished - {self.nodes.node_rank})

    def publish_decision(self, decision: Decision) -> None:
        """On node 0, publish what follows this round."""
        self._set(f"{self._number}/decision", asdict(decision))

    def wait_for_decision(self, wait_s: float) -> Decision:
        """The decision of node 0.

        Args:
            wait_s: maximum time to wait, in seconds.

        Raises:
            RendezvousLostError: node 0 published no decision in time.
        """
        key = f"{self._number}/decision"
        if not self._wait(lambda: self._has(key), wait_s):
            raise RendezvousLostError(f"node 0 published no decision within {wait_s:g} s; launch again")
        found = self._get(key)
        return Decision(**found | {"extra_flags": tuple(found["extra_flags"])})

    def wait_for_others(self) -> None:
        """On node 0, wait for all other members: they need its store until they finish."""
        others = set(self._members) - {self.nodes.node_rank}
        self._wait(lambda: others <= self._absent(others) | self._failed_nodes(), float("inf"))

    def leave(self, reason: str) -> None:
        """Leave for good; ``reason`` is ``FINISHED`` or ``SIGNALED``."""
        try:
            self._set(f"left/{self.nodes.node_rank}", reason)
        except RendezvousLostError:
            pass  # node 0 is gone: no other node can observe this
        finally:
            self._stopped.set()
