"""Who takes part in a launch: a pure state machine over records and a clock.

A *node* is a place with a rank (``--node-rank``). Each start of its launcher is an *incarnation* with its own name.
Incarnations append records to the rendezvous store (``rendezvous.py``); node 0 folds them into a :class:`Membership`
(``coordinator.py``) and decides on rounds::

    joined ──> ALIVE ──(draining)──> DRAINED    its launcher received a signal
                 │ ├───────────────> FINISHED   its processes finished: the planner released them, or the run ended
                 │ ├───────────────> LOST       no heartbeat for ``node_timeout_s``
                 └─┴───────────────> REPLACED   a newer incarnation of the same node joined

An incarnation that left never returns: a node that was cut off joins as another one. Therefore:

* records of an incarnation that left, or of an earlier round, change nothing;
* two incarnations of a node are never members of one round;
* the members of a round are decided in one place and published once.

A round has at least ``min_nodes`` members, unless the planner released nodes (then the remaining ones are enough), and
at most ``target``. ``clock_s`` is the monotonic clock of node 0; the clocks of other nodes are not read.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum


class RecordKind(StrEnum):
    """What a record reports."""

    JOINED = "joined"
    ENDED = "ended"
    DRAINING = "draining"
    LEFT = "left"


class NodeState(StrEnum):
    """State of an incarnation; every state but ``ALIVE`` is final."""

    ALIVE = "alive"
    DRAINED = "drained"
    FINISHED = "finished"
    LOST = "lost"
    REPLACED = "replaced"


@dataclass(frozen=True, kw_only=True)
class Record:
    """What an incarnation reports.

    Attributes:
        kind: what happened.
        name: name of the incarnation.
        rank: rank of its node; of ``JOINED``.
        processes: number of processes of the node; of ``JOINED``.
        round: round whose processes ended on this node, or that it was too late for; of ``ENDED``.
        failures: (rank, exit code) of each failed process; of ``ENDED``.
        state: ``DRAINED`` or ``FINISHED``; of ``LEFT``.
    """

    kind: RecordKind
    name: str
    rank: int = 0
    processes: int = 0
    round: int = 0
    failures: tuple[tuple[int, int], ...] = ()
    state: NodeState = NodeState.FINISHED


@dataclass(frozen=True, kw_only=True)
class Incarnation:
    """One start of a node's launcher, as node 0 knows it.

    Attributes:
        name: name of the incarnation.
        rank: rank of the node.
        processes: number of processes of the node.
        joined_s: when it joined.
        beat: counter of its last heartbeat.
        beat_s: when the counter changed last.
        state: alive, or how it left.
        is_draining: whether its launcher received a signal; its processes may still save.
        round: latest round that it is or was a member of; 0 for none.
        ended_round: latest round that it reported: no processes of it and of earlier rounds run on the node.
        failures: (rank, exit code) of the failed processes of that round.
    """

    name: str
    rank: int
    processes: int
    joined_s: float
    beat: int
    beat_s: float
    state: NodeState = NodeState.ALIVE
    is_draining: bool = False
    round: int = 0
    ended_round: int = 0
    failures: tuple[tuple[int, int], ...] = ()

    @property
    def is_alive(self) -> bool:
        """Whether it has not left."""
        return self.state is NodeState.ALIVE

    @property
    def is_ready(self) -> bool:
        """Whether it can be a member of the next round: alive, and no processes of an earlier round run on it."""
        return self.is_alive and not self.is_draining and self.ended_round >= self.round


@dataclass(frozen=True, kw_only=True)
class Limits:
    """Sizes and times of a launch.

    Attributes:
        min_nodes: minimum number of nodes of a round.
        max_nodes: maximum number of nodes of a round.
        node_timeout_s: seconds without heartbeat after which an incarnation is lost.
        first_wait_s: seconds that the first round waits for more than the minimum.
        rejoin_s: seconds that a later round waits for nodes that have just left.
        quiet_s: seconds without a further node after which waiting nodes join a running round.
        max_wait_s: seconds after which a waiting node joins in any case.
    """

    min_nodes: int
    max_nodes: int
    node_timeout_s: float
    first_wait_s: float = 30.0
    rejoin_s: float = 30.0
    quiet_s: float = 5.0
    max_wait_s: float = 30.0


@dataclass(frozen=True, kw_only=True)
class Membership:
    """All incarnations of a launch and its current round.

    Attributes:
        limits: sizes and times.
        target: maximum number of nodes of the next rounds: that of the limits, less nodes that the planner released, or
            the number that a user requested.
        incarnations: name to incarnation, in the order in which they joined.
        current: rank to the name of the newest incarnation of that node.
        round: number of the current round, from 1; 0 before the first one.
        members: names of its members, in the order of their ranks.
    """

    limits: Limits
    target: int
    incarnations: Mapping[str, Incarnation] = field(default_factory=dict)
    current: Mapping[int, str] = field(default_factory=dict)
    round: int = 0
    members: tuple[str, ...] = ()

    @classmethod
    def start(cls, limits: Limits) -> Membership:
        """The membership before any node joined."""
        return cls(limits=limits, target=limits.max_nodes)

    @property
    def min_nodes(self) -> int:
        """Minimum number of nodes of the next round; below that of the limits only after a release by the planner."""
        return min(self.limits.min_nodes, self.target)

    def members_in(self, *states: NodeState) -> list[Incarnation]:
        """Members of the current round in one of the states, by rank."""
        found = (self.incarnations[name] for name in self.members)
        return [node for node in found if node.state in states]

    def latest(self) -> list[Incarnation]:
        """The newest incarnation of each node, by rank."""
        return [self.incarnations[self.current[rank]] for rank in sorted(self.current)]

    def waiting(self) -> list[Incarnation]:
        """Incarnations that wait for a round, by rank: ready, and not members of the current one."""
        members = set(self.members)
        return [node for node in self.latest() if node.is_ready and node.name not in members]


def _changed(membership: Membership, changes: Iterable[Incarnation]) -> Membership:
    new = {node.name: node for node in changes}
    return replace(membership, incarnations={**membership.incarnations, **new}) if new else membership


def apply_record(membership: Membership, record: Record, clock_s: float) -> Membership:
    """The membership after a record that was read at ``clock_s``, in seconds.

    A record of an incarnation that left, that never joined, or that is there twice, changes nothing.
    """
    node = membership.incarnations.get(record.name)
    if record.kind is RecordKind.JOINED:
        return membership if node is not None else _join(membership, record, clock_s)
    if node is None or not node.is_alive:
        return membership
    if record.kind is RecordKind.DRAINING:
        return _changed(membership, [replace(node, is_draining=True)])
    if record.kind is RecordKind.ENDED:
        # A node also reports rounds that it was too late for. A report of a round before its last one is stale.
        if not max(node.round, node.ended_round + 1) <= record.round <= membership.round:
            return membership
        return _changed(membership, [replace(node, ended_round=record.round, failures=record.failures)])
    left = _changed(membership, [replace(node, state=record.state, beat_s=clock_s)])
    if record.state is NodeState.FINISHED and record.name in membership.members:
        return replace(left, target=max(1, membership.target - 1))
    return left


def _join(membership: Membership, record: Record, clock_s: float) -> Membership:
    if not 0 <= record.rank < membership.limits.max_nodes:
        return membership
    changes = [
        Incarnation(
            name=record.name,
            rank=record.rank,
            processes=record.processes,
            joined_s=clock_s,
            beat=-1,
            beat_s=clock_s,
        )
    ]
    before = membership.incarnations.get(membership.current.get(record.rank, ""))
    if before is not None and before.is_alive:
        # It was drained if its launcher had received a signal, even if it was killed before it could leave.
        state = NodeState.DRAINED if before.is_draining else NodeState.REPLACED
        changes.append(replace(before, state=state, beat_s=clock_s))
    return replace(_changed(membership, changes), current={**membership.current, record.rank: record.name})


def apply_beats(membership: Membership, beats: Mapping[str, int], clock_s: float) -> Membership:
    """The membership after reading the heartbeats: an incarnation whose counter did not change in time is lost.

    Args:
        membership: the membership before.
        beats: name to counter; of incarnations without an entry only the time is known.
        clock_s: the time.
    """
    changes = []
    for node in membership.latest():
        if not node.is_alive:
            continue
        beat = beats.get(node.name, node.beat)
        if beat != node.beat:
            changes.append(replace(node, beat=beat, beat_s=clock_s))
        elif clock_s - node.beat_s > membership.limits.node_timeout_s:
            # beat_s stays: it is the last sign of life.
            changes.append(replace(node, state=NodeState.DRAINED if node.is_draining else NodeState.LOST))
    return _changed(membership, changes)


def restart_timeouts(membership: Membership, clock_s: float) -> Membership:
    """Count timeouts from ``clock_s`` on: node 0 was paused, and heartbeats of that time may still be unread."""
    return _changed(membership, [replace(node, beat_s=clock_s) for node in membership.latest() if node.is_alive])


def resize(membership: Membership, nodes: int) -> Membership:
    """The membership after a request for a number of nodes."""
    return replace(membership, target=max(1, min(nodes, membership.limits.max_nodes)))


def next_members(membership: Membership, opened_s: float, clock_s: float) -> tuple[str, ...] | None:
    """Members of the next round, by rank; None while it waits for nodes.

    The first round waits for all nodes, for at most ``first_wait_s``. A later round waits for the members of the last
    round whose processes have not ended, and for those that left less than ``rejoin_s`` ago, such as a node whose
    launcher is restarted.

    Args:
        membership: the membership.
        opened_s: when the wait began.
        clock_s: the time.
    """
    ready = [node for node in membership.latest() if node.is_ready]
    # Node 0 has the store and the stores of the processes: no round is without it.
    if len(ready) < membership.min_nodes or ready[0].rank != 0:
        return None
    if len(ready) < membership.target and _is_expected(membership, len(ready), opened_s, clock_s):
        return None
    return tuple(node.name for node in ready[: membership.target])


def _is_expected(membership: Membership, num_ready: int, opened_s: float, clock_s: float) -> bool:
    """Whether the next round should wait for a node that is not ready."""
    limits = membership.limits
    if membership.round == 0:
        return clock_s - opened_s < limits.first_wait_s
    for name in membership.members:
        node = membership.incarnations[name]
        if membership.current[node.rank] != name:
            continue  # a newer incarnation of the node is there
        # A process that cannot be killed must not keep all others waiting.
        ends_soon = clock_s - opened_s < limits.rejoin_s + limits.node_timeout_s
        if node.is_alive and not node.is_ready and ends_soon:
            return True
        has_left = node.state in (NodeState.DRAINED, NodeState.LOST, NodeState.REPLACED)
        if has_left and clock_s - node.beat_s < limits.rejoin_s:
            return True
    return False


def open_round(membership: Membership, members: tuple[str, ...]) -> Membership:
    """The membership with another round."""
    number = membership.round + 1
    nodes = [replace(membership.incarnations[name], round=number, failures=()) for name in members]
    return replace(_changed(membership, nodes), round=number, members=members)


def departed(membership: Membership) -> list[Incarnation]:
    """Members of the current round that left without a signal, by rank; the others may continue without them."""
    return membership.members_in(NodeState.LOST, NodeState.REPLACED)


def without_members(membership: Membership, names: Collection[str]) -> Membership | None:
    """The membership whose round continues without some members; None where it may not.

    A round needs node 0, which has the stores, and the minimum number of nodes.

    Args:
        membership: the membership.
        names: incarnations that left, or whose processes were killed.
    """
    remaining = tuple(name for name in membership.members if name not in names)
    nodes = [membership.incarnations[name] for name in remaining]
    if len(remaining) < membership.min_nodes or not nodes or nodes[0].rank != 0:
        return None
    return replace(membership, members=remaining)


def with_members(membership: Membership, names: Collection[str]) -> Membership | None:
    """The membership whose running round has further members; None where one of them does not wait for a round.

    Args:
        membership: the membership.
        names: incarnations that wait.
    """
    waiting = {node.name: node for node in membership.waiting()}
    if not set(names) <= set(waiting):
        return None
    # It has reported that it was too late for this round; its processes of it run from now on.
    changes = [
        replace(waiting[name], round=membership.round, ended_round=membership.round - 1, failures=()) for name in names
    ]
    grown = _changed(membership, changes)
    members = sorted((*membership.members, *names), key=lambda name: grown.incarnations[name].rank)
    return replace(grown, members=tuple(members))


def end_reason(membership: Membership, *, has_survivors: bool = False) -> str | None:
    """Why the current round must end on all nodes; None while it can continue.

    Args:
        membership: the membership.
        has_survivors: whether it may still continue without the nodes that were lost.
    """
    if has_survivors and departed(membership):
        return None
    reasons = (
        (NodeState.LOST, f"sent no heartbeat for {membership.limits.node_timeout_s:g} s"),
        (NodeState.REPLACED, "was restarted"),
        (NodeState.DRAINED, "was drained"),
    )
    for state, reason in reasons:
        if ranks := [node.rank for node in membership.members_in(state)]:
            return f"node {join_ranks(ranks)} {reason}"
    failed = [node.rank for node in map(membership.incarnations.__getitem__, membership.members) if has_ended(node)]
    return f"processes of node {join_ranks(failed)} failed" if failed else None


def has_ended(node: Incarnation) -> bool:
    """Whether the processes of a member ended before they finished."""
    return node.round > 0 and node.ended_round == node.round and node.state is not NodeState.FINISHED


def join_ranks(ranks: Iterable[int]) -> str:
    """Ranks for a message, ascending."""
    return ", ".join(map(str, sorted(ranks)))


def joining(membership: Membership, clock_s: float) -> list[Incarnation]:
    """Nodes for which a running round should save and restart at ``clock_s``, by rank; empty without such nodes.

    Nodes that return one after another join together: once no further one came for ``quiet_s``, once the first has
    waited for ``max_wait_s``, or once the round would be complete.
    """
    limits = membership.limits
    free = membership.target - len(membership.members_in(NodeState.ALIVE))
    waiting = membership.waiting()[: max(0, free)]
    if not waiting or end_reason(membership) is not None:
        return []
    is_quiet = clock_s - max(node.joined_s for node in waiting) >= limits.quiet_s
    is_late = clock_s - min(node.joined_s for node in waiting) >= limits.max_wait_s
    return waiting if is_quiet or is_late or len(waiting) == free else []


def is_complete(membership: Membership) -> bool:
    """Whether no processes of the current round run on any node: all members ended or left."""
    return all(
        not node.is_alive or node.ended_round == membership.round
        for node in map(membership.incarnations.__getitem__, membership.members)
    )
