"""Where the nodes of a launch meet: who takes part in a start, in which order, and what becomes of it.

One launcher runs on each node. They meet in a key-value store that node 0 holds for the whole launch. A launch is a
sequence of *starts*. For each, node 0 waits for enough nodes and publishes them in the order of their numbers, so that
rank 0 is always where the store is; every node reports how its processes ended; node 0 gives one verdict for all. Nodes
tell each other that they live once a second; one that falls silent is lost, and the start is over.

Keys, each behind the name of the launch: ``start`` the number of the start; ``S/here/N`` node N is ready for start S;
``S/members`` its members; ``S/ended/N`` how it ended on node N; ``S/verdict``; ``beat/N`` a counter; ``gone/N`` node N
left and does not come back.
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

if TYPE_CHECKING:
    from torch._C._distributed_c10d import PrefixStore, Store

POLL_S = 0.1
BEAT_S = 1.0
# How long a start waits for more nodes once it has enough: the first, and later ones, whose nodes are known.
FIRST_CALL_S, LAST_CALL_S = 30.0, 3.0
# Why a node left: its work is done, or somebody told it to end.
DONE, CALLED = "done", "called"


class MeetingLostError(DynmoError):
    """The node that holds the store cannot be reached; a scheduler should launch again (exit code 75)."""

    exit_code = EXIT_RELAUNCH


@dataclass(frozen=True, kw_only=True)
class Nodes:
    """The nodes of a launch, as one of them sees it.

    ``rank`` counts from 0; ``least`` to ``most`` nodes take part. ``host`` and ``port`` are node 0's; port 0 is a free
    one, for a launch of one node. Times in seconds.
    """

    rank: int = 0
    least: int = 1
    most: int = 1
    host: str = "127.0.0.1"
    port: int = 0
    name: str = "dynmo"
    join_timeout_s: float = 600.0
    node_timeout_s: float = 30.0

    def __post_init__(self) -> None:
        if not 1 <= self.least <= self.most:
            raise UsageError(f"--nnodes must be N or LEAST:MOST with 1 <= LEAST <= MOST, is {self.least}:{self.most}")
        if not 0 <= self.rank < self.most:
            raise UsageError(f"--node-rank must be from 0 to {self.most - 1} with --nnodes {self.most}, is {self.rank}")


@dataclass(frozen=True, kw_only=True)
class Start:
    """One start: its number, its nodes in order and the processes of each, the store of these, flags behind theirs."""

    number: int
    members: tuple[int, ...]
    processes: tuple[int, ...]
    port: int
    more: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class Ending:
    """How a start ended on one node: the exit codes of the ranks that failed; none where all ended well."""

    node: int
    failures: tuple[tuple[int, int], ...]


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """What follows a start: another with ``more`` flags on so many ``nodes``, or the end with ``code``.

    ``processes`` is for a launch of one node, which can have any number; nodes of several keep theirs.
    """

    again: bool
    code: int = 0
    processes: int = 0
    nodes: int = 0
    more: tuple[str, ...] = ()
    why: str = ""


@dataclass
class _Watch:
    """What the heart-beat thread saw; ``ended`` holds (start, node)."""

    silent: set[int] = field(default_factory=set)
    called: set[int] = field(default_factory=set)
    ended: set[tuple[int, int]] = field(default_factory=set)
    store_lost: bool = False
    answered_s: float = field(default_factory=time.monotonic)


def _within(action: Callable[[], Any], seconds: float) -> Any:
    """What ``action`` gives; ``RuntimeError`` where it takes longer: over a cut cable an answer never comes."""
    given: list[Any] = []
    raised: list[RuntimeError] = []

    def run() -> None:
        try:
            given.append(action())
        except RuntimeError as error:
            raised.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(seconds)
    if raised or not given:
        raise raised[0] if raised else RuntimeError(f"no answer within {seconds:g} s")
    return given[0]


def _connect(nodes: Nodes, *, leads: bool) -> Store:
    from torch._C._distributed_c10d import TCPStore
    from torch.distributed import DistNetworkError

    try:
        return TCPStore(
            nodes.host,
            nodes.port,
            is_master=leads,
            wait_for_workers=False,
            timeout=timedelta(seconds=nodes.join_timeout_s),
        )
    except (DistNetworkError, RuntimeError) as error:
        first = str(error).splitlines()[0]
        place = f"{nodes.host}:{nodes.port}"
        raise UsageError(
            f"cannot hold the meeting of the nodes at {place}: {first}; give another --master-port"
            if leads
            else f"node {nodes.rank} cannot reach node 0 at {place} within {nodes.join_timeout_s:g} s: {first}"
        ) from error


class Meeting:
    """The meeting of all nodes of a launch, at one of them."""

    def __init__(self, nodes: Nodes) -> None:
        """Connect; node 0 holds the store.

        Raises:
            UsageError: the store cannot be made, or node 0 cannot be reached.
        """
        from torch._C._distributed_c10d import PrefixStore, TCPStore

        self.nodes = nodes
        held = _connect(nodes, leads=nodes.rank == 0)
        self.port = held.port if isinstance(held, TCPStore) else nodes.port
        self._held = held
        self.store: PrefixStore = PrefixStore(nodes.name, held)
        self._start_stores: list[Store] = []
        self._watch = _Watch()
        self._members: tuple[int, ...] = ()
        self._number = 0
        self._over = threading.Event()
        if nodes.most > 1:
            threading.Thread(target=self._beat, daemon=True).start()

    @property
    def leads(self) -> bool:
        """Whether this is node 0."""
        return self.nodes.rank == 0

    def _beat(self) -> None:
        """Tell that this node lives, and look whether the other members do; with a connection of its own."""
        from torch._C._distributed_c10d import PrefixStore, TCPStore

        nodes = self.nodes
        heard: dict[int, tuple[int, float]] = {}
        try:
            own = TCPStore(nodes.host, self.port, is_master=False, timeout=timedelta(seconds=nodes.node_timeout_s))
            store = PrefixStore(nodes.name, own)
            while not self._over.wait(BEAT_S):
                store.add(f"beat/{nodes.rank}", 1)
                self._watch.answered_s = time.monotonic()
                now, number = time.monotonic(), self._number
                for node in self._members:
                    if store.check([f"gone/{node}"]):
                        if json.loads(store.get(f"gone/{node}")) == CALLED:
                            self._watch.called.add(node)
                        continue
                    if store.check([f"{number}/ended/{node}"]):
                        self._watch.ended.add((number, node))
                    count = store.add(f"beat/{node}", 0)
                    if node not in heard or heard[node][0] != count:
                        heard[node] = (count, now)
                        self._watch.silent.discard(node)
                    elif now - heard[node][1] > nodes.node_timeout_s:
                        self._watch.silent.add(node)
        except (RuntimeError, OSError):
            self._watch.store_lost = True

    def _ask(self, action: Callable[[], Any]) -> Any:
        """An operation on the store; ``MeetingLostError`` where node 0 is gone."""
        try:
            if self._watch.store_lost:
                raise RuntimeError("no answer came before")
            return action() if self.leads else _within(action, self.nodes.node_timeout_s)
        except RuntimeError as error:
            self._watch.store_lost = True
            raise MeetingLostError(
                f"node 0 at {self.nodes.host}:{self.port} is gone, and with it the meeting of the nodes; launch again"
            ) from error

    def _has(self, key: str) -> bool:
        return bool(self._ask(lambda: self.store.check([key])))

    def _get(self, key: str) -> Any:
        return json.loads(self._ask(lambda: self.store.get(key)))

    def _set(self, key: str, value: Any) -> None:
        self._ask(lambda: self.store.set(key, json.dumps(value)))

    def _gone(self, nodes: Iterable[int]) -> set[int]:
        return {node for node in nodes if node in self._watch.silent or self._has(f"gone/{node}")}

    def _wait(self, condition: Callable[[], bool], seconds: float) -> bool:
        end = time.monotonic() + seconds
        while not condition():
            if time.monotonic() > end:
                return False
            time.sleep(POLL_S)
        return True

    def gather(
        self, processes: int, after: Verdict | None, flags_of: Callable[[int], tuple[str, ...]] | None = None
    ) -> Start:
        """Wait for the nodes of the next start.

        Args:
            processes: of this node.
            after: the verdict on the start before, None where this node comes fresh.
            flags_of: flags for a number of processes in all, where fewer nodes come than the verdict counts on.

        Raises:
            DynmoError: too few nodes came in time.
            MeetingLostError: node 0 is gone.
        """
        if self.leads:
            self._number = int(self._ask(lambda: self.store.add("start", 1)))
            start = self._call(processes, after, flags_of)
        else:
            start = self._join(processes)
        self._number, self._members = start.number, start.members
        return start

    def _call(self, processes: int, after: Verdict | None, flags_of: Callable[[int], tuple[str, ...]] | None) -> Start:
        """Node 0: wait for the others, and publish who takes part."""
        nodes, number = self.nodes, self._number
        wanted = after.nodes if after and after.nodes else nodes.most
        self._set(f"{number}/here/0", processes)

        def present() -> list[int]:
            return [node for node in range(nodes.most) if self._has(f"{number}/here/{node}")]

        if not self._wait(lambda: len(present()) >= nodes.least, nodes.join_timeout_s):
            here = ", ".join(map(str, present()))
            raise DynmoError(f"{len(present())} of {nodes.least} nodes came within {nodes.join_timeout_s:g} s: {here}")
        self._wait(lambda: len(present()) >= wanted, LAST_CALL_S if after else FIRST_CALL_S)
        members = tuple(present()[:wanted])
        counts = tuple(self._get(f"{number}/here/{node}") for node in members)
        more = after.more if after else ()
        if flags_of is not None and after and after.nodes and len(members) < wanted:
            more = flags_of(sum(counts))
        start = Start(number=number, members=members, processes=counts, port=self._start_store(), more=more)
        self._set(f"{number}/members", asdict(start))
        return start

    def _start_store(self) -> int:
        """A store for the processes of one start, so that no key of an older one is met; its port."""
        from torch._C._distributed_c10d import TCPStore

        store = TCPStore(self.nodes.host, 0, is_master=True, wait_for_workers=False)
        self._start_stores = [store]  # the one before may go
        return int(store.port)

    def _join(self, processes: int) -> Start:
        """Another node: say that it is here, in the start that node 0 calls for now or calls for next."""
        rank, said = self.nodes.rank, -1
        end = time.monotonic() + self.nodes.join_timeout_s
        while time.monotonic() < end:
            number = int(self._ask(lambda: self.store.add("start", 0)))
            if number > self._number and number != said:
                self._set(f"{number}/here/{rank}", processes)
                said = number
            if number == said and self._has(f"{number}/members"):
                found = self._get(f"{number}/members")
                lists = {name: tuple(found[name]) for name in ("members", "processes", "more")}
                start = Start(number=number, port=found["port"], **lists)
                if rank in start.members:
                    return start
                self._number, end = number, time.monotonic() + self.nodes.join_timeout_s  # came late: the next one
            time.sleep(POLL_S)
        raise DynmoError(f"node {rank} waited {self.nodes.join_timeout_s:g} s in vain for node 0 to start")

    def _ended(self) -> set[int]:
        """Nodes on which processes of this start failed."""
        return {node for number, node in self._watch.ended if number == self._number}

    def trouble(self) -> str | None:
        """Why this start cannot go on, seen from elsewhere: a node lost, or one whose processes failed; else None."""
        watch = self._watch
        if not self.leads and time.monotonic() - watch.answered_s > self.nodes.node_timeout_s + BEAT_S:
            watch.store_lost = True
        if watch.store_lost:
            return "node 0 is gone"
        if silent := sorted(watch.silent & set(self._members)):
            return f"node {', '.join(map(str, silent))} has been silent for {self.nodes.node_timeout_s:g} s"
        if called := sorted(watch.called & set(self._members)):
            return f"node {', '.join(map(str, called))} was told to end"
        if ended := sorted(self._ended() - {self.nodes.rank}):
            return f"processes of node {', '.join(map(str, ended))} failed"
        return None

    def departed(self) -> set[int]:
        """Members of this start that left for good: their workers were released, or they were told to end."""
        return {node for node in self._members if self._has(f"gone/{node}")}

    def report(self, ending: Ending) -> None:
        """Tell the others how this start ended here."""
        self._set(f"{self._number}/ended/{ending.node}", asdict(ending))

    def endings(self, wait_s: float) -> tuple[list[Ending], list[int]]:
        """Node 0: how the start ended on each node that still lives, and the nodes that were lost."""

        def missing() -> set[int]:
            told = {node for node in self._members if self._has(f"{self._number}/ended/{node}")}
            return set(self._members) - told - self._gone(self._members)

        self._wait(lambda: not missing(), wait_s)
        told = [node for node in self._members if self._has(f"{self._number}/ended/{node}")]
        found = [self._get(f"{self._number}/ended/{node}") for node in told]
        endings = [Ending(node=f["node"], failures=tuple((r, c) for r, c in f["failures"])) for f in found]
        left = {node for node in self._members if self._has(f"gone/{node}") and self._get(f"gone/{node}") == DONE}
        return endings, sorted(set(self._members) - set(told) - left - {self.nodes.rank})

    def decide(self, verdict: Verdict) -> None:
        """Node 0: publish what follows."""
        self._set(f"{self._number}/verdict", asdict(verdict))

    def verdict(self, wait_s: float) -> Verdict:
        """What node 0 decided; ``MeetingLostError`` where it does not say within ``wait_s``."""
        key = f"{self._number}/verdict"
        if not self._wait(lambda: self._has(key), wait_s):
            raise MeetingLostError(f"node 0 gave no verdict within {wait_s:g} s; launch again")
        found = self._get(key)
        return Verdict(**found | {"more": tuple(found["more"])})

    def wait_for_others(self) -> None:
        """Node 0: wait until no other node of this start is at work; it holds their store, however long they take."""
        others = set(self._members) - {self.nodes.rank}
        self._wait(lambda: others <= self._gone(others) | self._ended(), float("inf"))

    def leave(self, why: str) -> None:
        """Leave for good: ``DONE`` or ``CALLED``."""
        try:
            self._set(f"gone/{self.nodes.rank}", why)
        except MeetingLostError:
            pass  # nobody is left to be told
        finally:
            self._over.set()
