"""The part of the nodes in continuing a round: node 0 decides, the others report which of their processes died.

Nodes that join a round in place are in ``node_growth.py``. Keys in the store of the round, in addition to those of
``continuation.py``::

    node N                                    node 0
    deaths, deaths/K: codes by rank       --> with its own deaths and with the ranks of lost nodes: the deaths of
                                              half a second are one loss
    next/G+1: Notice                      <-- the others continue
    refused                               <-- they do not: node N reports a failure, which ends the round
"""

from __future__ import annotations

import json
import signal
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from datetime import timedelta
from typing import TYPE_CHECKING

from ..._common.checks import integer
from ..._common.console import print_message
from ..._common.document import DocumentError
from ..store_values import by_rank, decode_value
from .continuation import LIMIT_S, PREFIX, Continuation, Notice, decode_notice, is_kill
from .node_growth import LeadingGrowth

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store

    from .coordinator import Coordinator

# Deaths within this time are one loss: the processes of a node do not end at the same moment.
SAME_LOSS_S = 0.5
_STORE_TIMEOUT_S = 30.0
# Exit codes of processes by rank; negative for signals.
_DEATHS = by_rank(integer(-(1 << 15), 1 << 15))


def decode_deaths(value: bytes) -> dict[int, int]:
    """The exit codes of processes of another node, by rank.

    Raises:
        DocumentError: it is not a report of this version.
    """
    return {int(rank): code for rank, code in decode_value(value, _DEATHS, "a report of ended processes").items()}


class LeadingNode:
    """On node 0, decides whether a round continues after the deaths on all nodes, and with nodes that join.

    Args:
        continuation: the generations of the round.
        coordinator: the membership.
        growth: nodes that join, and the round with these.
    """

    def __init__(self, continuation: Continuation, coordinator: Coordinator, growth: LeadingGrowth) -> None:
        self.continuation, self.growth = continuation, growth
        self._coordinator = coordinator
        self._num_read, self._is_reported = 0, False
        self._codes: dict[int, int] = {}
        self._since = 0.0
        coordinator.may_continue = True

    @property
    def ranks(self) -> Collection[int]:
        """Ranks of the current generation."""
        return self.continuation.ranks

    def nodes(self, count: int) -> Collection[int]:
        """Positions of the nodes with ranks of the current generation; the first ``count`` began the round."""
        return self.continuation.nodes

    @property
    def pending(self) -> Mapping[int, int]:
        """Exit codes of the ranks whose loss the others did not outlive, so far."""
        return {} if self.continuation.is_training else self.continuation.pending

    @property
    def is_pending(self) -> bool:
        """Whether ranks left or joined and the others do not train yet."""
        return self.continuation.is_pending

    @property
    def is_overdue(self) -> bool:
        """Whether the ranks of another generation did not train in time."""
        return self.continuation.is_overdue

    def poll(self, ended: Mapping[int, int]) -> Notice | bool:
        """What follows from the processes of all nodes.

        Args:
            ended: rank to exit code of the processes of this node that ended.

        Returns:
            The notice of another generation, whether no failure ends the round otherwise.
        """
        if self.is_overdue:
            return self._refuse()
        codes = self._codes | dict(ended) | self._reported()
        self.growth.record_ended(codes)
        self._codes = {rank: code for rank, code in codes.items() if rank in self.ranks}
        lost = self._coordinator.departed()
        died = {rank: code for rank, code in self._codes.items() if code}
        if not died and not lost:
            return self.growth.poll(has_finished=bool(self._codes)) or True
        self._since = self._since or time.monotonic()
        if time.monotonic() - self._since < self._same_loss_s and all(map(is_kill, died.values())):
            return True
        return self._decide(died, [node.name for node in lost])

    @property
    def _same_loss_s(self) -> float:
        return SAME_LOSS_S if len(self.growth.round.names) > 1 and self.continuation.is_training else 0.0

    def close(self) -> None:
        """Refuse what other nodes report from now on: the processes of this node have ended."""
        self._refuse()

    def _reported(self) -> dict[int, int]:
        """Ranks of other nodes that ended since the last call, and their exit codes; an invalid report is ignored."""
        keys, found = self.continuation.keys, dict[int, int]()
        count = keys.add("deaths", 0)
        while self._num_read < count and keys.check([f"deaths/{self._num_read + 1}"]):
            self._num_read += 1
            try:
                found |= decode_deaths(keys.get(f"deaths/{self._num_read}"))
            except DocumentError as error:
                if not self._is_reported:
                    print_message(f"ignored: {error}")
                self._is_reported = True
        return found

    def _decide(self, died: dict[int, int], lost: Sequence[str]) -> Notice | bool:
        """Continue without dead ranks and lost nodes, or refuse."""
        self._since = 0.0
        self.growth.cancel("other ranks were lost at the same time")
        current = self.growth.round
        for name in lost:
            died |= {rank: -signal.SIGKILL for rank in current.ranks_of(name) if rank in self.ranks}
        finished = {rank for rank, code in self._codes.items() if not code}
        survivors = [rank for rank in self.ranks if rank not in died and rank not in finished]
        # A node without processes waits for another round; a round without a rank that finished is at its end.
        names = [name for name in dict.fromkeys(current.names) if not current.ranks_of(name) & set(survivors)]
        present = [name for name in names if current.ranks_of(name) & set(self.ranks)]
        if finished or not self.continuation.may_take(died, survivors):
            return self._refuse()
        if present and not self._coordinator.continue_without(present):
            return self._refuse()
        nodes = [current.members[current.names.index(name)] for name in lost]
        cause = f"lost with node {', '.join(map(str, nodes))}" if nodes else None
        return self.continuation.take(died, survivors, cause)

    def _refuse(self) -> bool:
        self.growth.cancel("the round ends")
        self.continuation.keys.set("refused", "1")
        self._coordinator.may_continue = False
        return False


class FollowingNode:
    """On another node, reports deaths to node 0 and waits for its decision.

    Args:
        connect: connects to the store of the round.
    """

    is_overdue = is_pending = False
    pending: Mapping[int, int] = {}

    def __init__(self, connect: Callable[[], Store]) -> None:
        self._connect = connect
        self._keys: Store | None = None
        self._reported: dict[int, int] = {}
        self._undecided: set[int] = set()
        self._since = 0.0
        self._generation = 0

    @property
    def ranks(self) -> Collection[int] | None:
        """Unknown: node 0 watches the ranks of all nodes."""
        return None

    def nodes(self, count: int) -> Collection[int]:
        """All ``count`` nodes: node 0 watches the ranks of all nodes."""
        return range(count)

    def close(self) -> None:
        """No effect: node 0 decides."""

    def poll(self, ended: Mapping[int, int]) -> Notice | bool:
        """What node 0 has decided after the deaths on this node; see :meth:`LeadingNode.poll`."""
        new = {rank: code for rank, code in ended.items() if rank not in self._reported}
        try:
            if new:
                self._report(new)
            if any(code and not is_kill(code) for code in new.values()):
                return False
            return self._decision() if self._undecided and self._keys is not None else True
        except RuntimeError:
            return False  # node 0 is lost, which ends the round

    def _report(self, new: Mapping[int, int]) -> None:
        if self._keys is None:
            self._keys = self._connect()
        number = self._keys.add("deaths", 1)
        self._keys.set(f"deaths/{number}", json.dumps(new))
        self._reported |= new
        killed = {rank for rank, code in new.items() if is_kill(code)}
        if killed:
            self._undecided |= killed
            self._since = time.monotonic()

    def _decision(self) -> Notice | bool:
        keys = self._keys
        if keys is None or keys.check(["refused"]) or time.monotonic() - self._since > LIMIT_S:
            return False
        notice = None
        while keys.check([f"next/{self._generation + 1}"]):
            self._generation += 1
            notice = decode_notice(keys.get(f"next/{self._generation}"))
        if notice is None:
            return True
        self._undecided &= set(notice.ranks)
        return notice


NodeContinuation = LeadingNode | FollowingNode


def connect_store(host: str, port: int) -> Store:
    """A connection to the keys of a round's store.

    Args:
        host: host of the store.
        port: port of the store.
    """
    from torch._C._distributed_c10d import PrefixStore, TCPStore

    timeout = timedelta(seconds=_STORE_TIMEOUT_S)
    return PrefixStore(PREFIX, TCPStore(host, port, is_master=False, wait_for_workers=False, timeout=timeout))
