"""Decides on node 0 who takes part in a round: reads records and heartbeats, publishes rounds and their ends.

Decisions are in ``membership.py``. Keys of the store, with the name of the launch as prefix:

=================  =============================================================================
``log``, ``log/K``  number of records, and the K-th record, by any node
``beat/NAME``       heartbeat counter of an incarnation
``changes``         counter that node 0 increments after each of the following keys
``round``, ``round/R``  number of rounds, and the members of round R
``growth``, ``growth/K``  number of attempts to take nodes into a running round, and the round with them (``growth.py``)
``stop/R``          why round R ends on all nodes
``gone/NAME``       state of an incarnation that node 0 excluded: it cannot be a member any more
``end``             exit code and message of the launch
=================  =============================================================================

A node sends one heartbeat and reads ``changes`` once per period, and node 0 reads all heartbeats in one request. So the
number of requests grows with the number of nodes, and not with its square.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING

from ..._common.checks import array, integer, nullable, obj, string
from ..._common.console import print_message
from ..._common.document import MAX_INTEGER, DocumentError
from ..store_values import decode_value
from .membership import (
    Incarnation,
    Limits,
    Membership,
    NodeState,
    Record,
    RecordKind,
    apply_beats,
    apply_record,
    departed,
    end_reason,
    is_complete,
    joining,
    next_members,
    open_round,
    resize,
    restart_timeouts,
    with_members,
    without_members,
)

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store

POLL_S = 0.1
# Each node sends a heartbeat per period; at most 1,000 nodes per second, because the store has one thread.
HEARTBEAT_S, NODES_PER_S = 1.0, 1000
_MAX_DIGITS = 18


_RECORD = obj(
    {
        "kind": string(*RecordKind),
        "name": string(),
        "rank": integer(),
        "processes": integer(),
        "round": integer(),
        "failures": array(array(integer(-MAX_INTEGER), 2, 2)),
        "state": string(*NodeState),
    }
)
_ROUND = obj(
    {
        "number": integer(),
        "members": array(integer()),
        "names": array(string()),
        "processes": array(integer()),
        "port": integer(),
        "extra_flags": array(string()),
        "attempt": integer(),
        "world_size": integer(),
        "run_dir": nullable(string()),
        "num_joining": integer(),
    }
)


def heartbeat_period_s(max_nodes: int) -> float:
    """Seconds between two heartbeats of a node, in a launch of at most ``max_nodes``."""
    return max(HEARTBEAT_S, max_nodes / NODES_PER_S)


@dataclass(frozen=True, kw_only=True)
class Round:
    """One start of the processes on all nodes.

    Attributes:
        number: number of the round, from 1.
        members: ranks of its nodes, ascending, and then those of nodes that were to join it.
        names: names of their incarnations.
        processes: number of processes of each member.
        port: port of the processes' store on node 0.
        extra_flags: flags that are appended to the command.
        attempt: number of the attempt of nodes to join it in place, from 1 in each round; 0 for its members.
        world_size: number of its ranks at its start; 0: all of ``processes``.
        run_dir: run directory; None where it is not known yet.
        num_joining: number of nodes of the attempt, which are the last ones.
    """

    number: int
    members: tuple[int, ...]
    names: tuple[str, ...]
    processes: tuple[int, ...]
    port: int
    extra_flags: tuple[str, ...]
    attempt: int = 0
    world_size: int = 0
    run_dir: str | None = None
    num_joining: int = 0

    def index_of(self, name: str) -> int:
        """Position of the newest entry of an incarnation, which may have joined more than once."""
        return len(self.names) - 1 - self.names[::-1].index(name)

    def ranks_of(self, name: str) -> set[int]:
        """All ranks that an incarnation has or had."""
        found: set[int] = set()
        first = 0
        for each, count in zip(self.names, self.processes, strict=True):
            found |= set(range(first, first + count)) if each == name else set()
            first += count
        return found


def encode_record(record: Record) -> str:
    """The value of a record in the store."""
    return json.dumps(asdict(record))


def decode_record(value: bytes) -> Record:
    """The record of a value in the store.

    Raises:
        DocumentError: it is not a record of this version.
    """
    found = decode_value(value, _RECORD, "a record")
    failures = tuple((rank, code) for rank, code in found["failures"])
    changed = {"kind": RecordKind(found["kind"]), "state": NodeState(found["state"]), "failures": failures}
    return Record(**{**found, **changed})


def append_record(store: Store, record: Record) -> None:
    """Append a record to the log of the launch."""
    number = store.add("log", 1)
    store.set(f"log/{number}", encode_record(record))


class Coordinator:
    """The membership of a launch on node 0.

    Args:
        store: a connection of its own: requests of the main thread must not delay the reading of heartbeats.
        limits: sizes and times of the launch.
        name: incarnation of node 0, which needs no heartbeat.
        on_joining: called while nodes wait that should join the running round, with these nodes.

    Attributes:
        may_continue: whether the round does not end by a lost node, until it is known whether the others continue.
    """

    def __init__(
        self, store: Store, limits: Limits, name: str, on_joining: Callable[[Sequence[Incarnation]], None]
    ) -> None:
        self._store, self._name, self._on_joining = store, name, on_joining
        self._membership = Membership.start(limits)
        self._lock = threading.Lock()
        self._stopped = threading.Event()
        self._num_read, self._unread = 0, list[int]()
        self._published: set[str] = set()
        self._is_running = False
        self.may_continue = False
        self._polls, self._polled_s, self._beats_s = 0, time.monotonic(), 0.0
        self._num_growths = 0

    @property
    def membership(self) -> Membership:
        """The membership at the last poll."""
        return self._membership

    def start(self) -> None:
        """Poll in a thread until :meth:`stop`."""
        threading.Thread(target=self._run, daemon=True).start()

    def stop(self) -> None:
        """End the thread."""
        self._stopped.set()

    def _run(self) -> None:
        try:
            while not self._stopped.wait(POLL_S):
                self.poll()
        except RuntimeError:
            return  # the store ends with this process

    def poll(self) -> Membership:
        """Read new records and heartbeats, publish what follows from them, and return the membership."""
        with self._lock:
            now_s = time.monotonic()
            limits = self._membership.limits
            membership = self._membership
            if now_s - self._polled_s > limits.node_timeout_s / 2:
                membership = restart_timeouts(membership, now_s)
            self._polled_s, self._polls = now_s, self._polls + 1
            for record in self._new_records():
                membership = apply_record(membership, record, now_s)
            if now_s - self._beats_s >= heartbeat_period_s(limits.max_nodes) / 2:
                self._beats_s = now_s
                membership = apply_beats(membership, self._read_beats(membership), now_s)
            self._membership = membership
            self._publish_exclusions(membership)
            if self._is_running:
                self._publish_reason(membership)
                if nodes := joining(membership, now_s):
                    self._on_joining(nodes)
            return membership

    def _new_records(self) -> list[Record]:
        """New records in their order; a record whose writer has only reserved its number is read at a later poll."""
        count = self._store.add("log", 0)
        self._unread += range(self._num_read + 1, count + 1)
        self._num_read = count
        present = [number for number in self._unread if self._store.check([f"log/{number}"])]
        if not present:
            return []
        self._unread = [number for number in self._unread if number not in set(present)]
        records = []
        for value in self._store.multi_get([f"log/{number}" for number in present]):
            try:
                records.append(decode_record(value))
            except DocumentError as error:
                # Its node sends no heartbeat that counts, and is lost like any other silent node.
                print_message(f"ignored: {error}")
        return records

    def _read_beats(self, membership: Membership) -> dict[str, int]:
        names = [node.name for node in membership.latest() if node.is_alive and node.name != self._name]
        # The key exists: a node sets it before it joins.
        values = self._store.multi_get([f"beat/{name}" for name in names]) if names else []
        beats = zip(names, values, strict=True)
        # What is not a number is of another version: its node is lost like any other silent node.
        return {name: int(value) for name, value in beats if value.isdigit() and len(value) < _MAX_DIGITS} | {
            self._name: self._polls
        }

    def _publish(self, key: str, value: str) -> None:
        """Write a key that never changes, once."""
        if key not in self._published:
            self._published.add(key)
            self._store.set(key, value)
            self._store.add("changes", 1)

    def _publish_exclusions(self, membership: Membership) -> None:
        for node in membership.incarnations.values():
            if node.state in (NodeState.LOST, NodeState.REPLACED, NodeState.DRAINED):
                self._publish(f"gone/{node.name}", node.state)

    def _publish_reason(self, membership: Membership) -> None:
        if (reason := end_reason(membership, has_survivors=self.may_continue)) is not None:
            self._publish(f"stop/{membership.round}", reason)

    def reason(self) -> str | None:
        """Why the current round ends; None while it runs."""
        return end_reason(self._membership, has_survivors=self.may_continue)

    def departed(self) -> list[Incarnation]:
        """Members of the round that were lost or replaced, and that it has not been continued without."""
        return departed(self._membership)

    def continue_without(self, names: Collection[str]) -> bool:
        """Let the round continue without some members; False where it may not.

        Args:
            names: their incarnations.
        """
        with self._lock:
            membership = without_members(self._membership, names)
            if membership is None:
                return False
            self._membership = membership
            return True

    def gone(self, names: Collection[str]) -> list[Incarnation]:
        """Those of these incarnations that have left, or are about to."""
        found = [self._membership.incarnations[name] for name in names]
        return [node for node in found if not node.is_alive or node.is_draining]

    def grow(self, names: Collection[str]) -> bool:
        """Add waiting nodes to the members of the running round; False where one of them has left.

        Args:
            names: their incarnations.
        """
        with self._lock:
            membership = with_members(self._membership, names)
            if membership is None:
                return False
            self._membership = membership
            return True

    def publish_growth(self, current: Round) -> None:
        """Let nodes prepare to join the running round.

        Args:
            current: the round with these nodes.
        """
        self._num_growths += 1
        self._store.set(f"growth/{self._num_growths}", json.dumps(asdict(current)))
        self._store.add("growth", 1)
        self._store.add("changes", 1)

    def wait_for_members(self, seconds: float) -> tuple[Incarnation, ...] | None:
        """Wait until the next round can begin and return its members; None after ``seconds``."""
        opened_s = time.monotonic()
        while True:
            membership = self.poll()
            now_s = time.monotonic()
            if (names := next_members(membership, opened_s, now_s)) is not None:
                return tuple(membership.incarnations[name] for name in names)
            if now_s - opened_s > seconds:
                return None
            time.sleep(POLL_S)

    def open_round(self, members: Sequence[Incarnation], port: int, extra_flags: tuple[str, ...]) -> Round:
        """Publish the members of the next round.

        Args:
            members: its members, by rank.
            port: port of the processes' store on node 0.
            extra_flags: flags that are appended to the command.
        """
        with self._lock:
            self._membership = open_round(self._membership, tuple(node.name for node in members))
            current = Round(
                number=self._membership.round,
                members=tuple(node.rank for node in members),
                names=tuple(node.name for node in members),
                processes=tuple(node.processes for node in members),
                port=port,
                extra_flags=extra_flags,
                world_size=sum(node.processes for node in members),
            )
            self._store.set(f"round/{current.number}", json.dumps(asdict(current)))
            self._store.add("round", 1)
            self._store.add("changes", 1)
            self._is_running = True
            return current

    def end_round(self, seconds: float) -> Membership:
        """Wait until no processes of the round run on any node, at most ``seconds``; the membership then."""
        self._publish_end_of_round()
        end = time.monotonic() + seconds
        while not is_complete(membership := self.poll()) and time.monotonic() < end:
            time.sleep(POLL_S)
        return membership

    def _publish_end_of_round(self) -> None:
        """Let the other nodes end the round, also where only processes of node 0 failed."""
        with self._lock:
            self._is_running = False
            reason = end_reason(self._membership) or "processes of node 0 failed"
            self._publish(f"stop/{self._membership.round}", reason)

    def wait_for_finish(self) -> Membership:
        """Wait until all other members finished or left, or until the processes of one failed; the membership then."""
        while True:
            membership = self.poll()
            others = [membership.incarnations[name] for name in membership.members if name != self._name]
            if end_reason(membership) is not None or not any(node.is_alive for node in others):
                return membership
            time.sleep(POLL_S)

    def resize(self, nodes: int) -> None:
        """Set the maximum number of nodes of the next rounds."""
        with self._lock:
            self._membership = resize(self._membership, nodes)

    def publish_end(self, code: int, message: str, seconds: float) -> None:
        """End the launch with exit code ``code``; wait at most ``seconds`` until all other nodes have read it."""
        with self._lock:
            self._publish("end", json.dumps({"code": code, "message": message}))
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            nodes = self.poll().latest()
            if not any(node.is_alive and node.name != self._name for node in nodes):
                return
            time.sleep(POLL_S)


def decode_round(value: bytes) -> Round:
    """The round of a value in the store.

    Raises:
        DocumentError: it is not a round of this version.
    """
    found = decode_value(value, _ROUND, "a round")
    return Round(**found | {name: tuple(found[name]) for name in ("members", "names", "processes", "extra_flags")})
