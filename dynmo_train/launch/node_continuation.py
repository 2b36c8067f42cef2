"""The part of the nodes in continuing a round: node 0 decides, the others report which of their processes died.

Keys in the store of the round, in addition to those of ``continuation.py``::

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

from .._common.document import parse_json
from .continuation import LIMIT_S, PREFIX, Continuation, Notice, decode_notice, is_kill

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store

    from .coordinator import Coordinator, Round

# Deaths within this time are one loss: the processes of a node do not end at the same moment.
SAME_LOSS_S = 0.5
_STORE_TIMEOUT_S = 30.0


class LeadingNode:
    """On node 0, decides whether a round continues after the deaths on all nodes.

    Args:
        continuation: the generations of the round.
        coordinator: the membership.
        current: the round.
    """

    def __init__(self, continuation: Continuation, coordinator: Coordinator, current: Round) -> None:
        self.continuation = continuation
        self._coordinator, self._round = coordinator, current
        self._num_read = 0
        self._codes: dict[int, int] = {}
        self._since = 0.0
        coordinator.may_continue = True

    @property
    def ranks(self) -> Collection[int]:
        """Ranks of the current generation."""
        return self.continuation.ranks

    @property
    def pending(self) -> Mapping[int, int]:
        """Exit codes of the ranks whose loss the others did not outlive, so far."""
        return {} if self.continuation.is_training else self.continuation.pending

    @property
    def is_overdue(self) -> bool:
        """Whether the survivors did not train again in time."""
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
        codes = self._codes | dict(ended) | dict(self._reported())
        self._codes = {rank: code for rank, code in codes.items() if rank in self.ranks}
        lost = self._coordinator.departed()
        died = {rank: code for rank, code in self._codes.items() if code}
        if not died and not lost:
            return True
        self._since = self._since or time.monotonic()
        if time.monotonic() - self._since < self._same_loss_s and all(map(is_kill, died.values())):
            return True
        return self._decide(died, [node.name for node in lost])

    @property
    def _same_loss_s(self) -> float:
        return SAME_LOSS_S if len(self._round.names) > 1 and self.continuation.is_training else 0.0

    def close(self) -> None:
        """Refuse what other nodes report from now on: the processes of this node have ended."""
        self._refuse()

    def _reported(self) -> list[tuple[int, int]]:
        """Ranks of other nodes that ended since the last call, and their exit codes."""
        keys, found = self.continuation.keys, list[tuple[int, int]]()
        count = keys.add("deaths", 0)
        while self._num_read < count and keys.check([f"deaths/{self._num_read + 1}"]):
            self._num_read += 1
            codes = parse_json(keys.get(f"deaths/{self._num_read}"))
            found += [(int(rank), code) for rank, code in codes.items()]
        return found

    def _ranks_of(self, name: str) -> range:
        index = self._round.names.index(name)
        first = sum(self._round.processes[:index])
        return range(first, first + self._round.processes[index])

    def _decide(self, died: dict[int, int], lost: Sequence[str]) -> Notice | bool:
        """Continue without dead ranks and lost nodes, or refuse."""
        self._since = 0.0
        for name in lost:
            died |= {rank: -signal.SIGKILL for rank in self._ranks_of(name) if rank in self.ranks}
        finished = {rank for rank, code in self._codes.items() if not code}
        survivors = [rank for rank in self.ranks if rank not in died and rank not in finished]
        # A node without processes waits for another round; a round without a rank that finished is at its end.
        names = [name for name in self._round.names if not set(self._ranks_of(name)) & set(survivors)]
        present = [name for name in names if set(self._ranks_of(name)) & set(self.ranks)]
        if finished or not self.continuation.may_take(died, survivors):
            return self._refuse()
        if present and not self._coordinator.continue_without(present):
            return self._refuse()
        nodes = [self._round.members[self._round.names.index(name)] for name in lost]
        cause = f"lost with node {', '.join(map(str, nodes))}" if nodes else None
        return self.continuation.take(died, survivors, cause)

    def _refuse(self) -> bool:
        self.continuation.keys.set("refused", "1")
        self._coordinator.may_continue = False
        return False


class FollowingNode:
    """On another node, reports deaths to node 0 and waits for its decision.

    Args:
        connect: connects to the store of the round.
    """

    is_overdue = False
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
