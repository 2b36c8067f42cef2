"""Continue a round with other ranks: without those that died, or with those of a node that joins (``growth.py``).

The processes of the remaining ranks stay alive.

The launcher of node 0 decides (``node_continuation.py``), the workers follow. Keys in the store of the round, with the
prefix ``continuation``::

    worker, rank 0                    launcher                        workers
    ready/G: generation G trains  --> a rank is killed
                                      next/G+1: Notice            --> close the connections of generation G
                                                                      new world of the survivors, state from copies
    ready/G+1                     <-- rank 0
                                      no ready/G+1: end the round, restart from the last checkpoint

A *generation* is a set of ranks that train together; the first one has all ranks of the round. A rank keeps its number
of the round in all generations; ranks that join get numbers that no rank had before. Whatever fails between ``next``
and ``ready`` ends the round as any failure does: another death, a survivor that exits, or the time limit.
"""

from __future__ import annotations

import json
import os
import signal
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from datetime import timedelta
from typing import TYPE_CHECKING

from ..._common.checks import array, integer, number, obj, string
from ..exit_status import describe_exit
from ..store_values import decode_value
from ..worker import GENERATION_VARIABLE

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store

# Set by a launcher whose workers may continue: seconds until these learn of a death, at most.
CONTINUATION_VARIABLE = "DYNMO_CONTINUATION"
# Seconds from a death until the survivors train; then the round ends.
LIMIT_S = 120.0
PREFIX = "continuation"
# A worker waits for a notice as long as it runs.
FOREVER = timedelta(days=365)
_NOTICE = obj(
    {
        "generation": integer(1),
        "ranks": array(integer()),
        "lost": array(integer()),
        "sizes": array(integer(1)),
        "cause": string(),
        "since": number(0),
        "joined": array(integer()),
        "workers": integer(),
    }
)
_TERMINATING = (-signal.SIGTERM, -signal.SIGINT)


@dataclass(frozen=True, kw_only=True)
class Notice:
    """The next generation.

    Attributes:
        generation: its number, from 1.
        ranks: its members, by their ranks in the round, ascending.
        lost: ranks that died, by the same numbers.
        sizes: for each member the number of members on its node.
        cause: why, as a phrase.
        since: Unix time at which the launcher noticed it.
        joined: ranks that were not in the generation before.
        workers: number of pipeline ranks; 0: as a restart with this number of processes.
    """

    generation: int
    ranks: tuple[int, ...]
    lost: tuple[int, ...]
    sizes: tuple[int, ...]
    cause: str
    since: float
    joined: tuple[int, ...] = ()
    workers: int = 0


def encode_notice(notice: Notice) -> str:
    """The value of a notice in the store."""
    return json.dumps(asdict(notice))


def decode_notice(value: bytes) -> Notice:
    """The inverse of :func:`encode_notice`.

    Raises:
        DocumentError: it is not a notice of this version.
    """
    found = decode_value(value, _NOTICE, "a notice")
    return Notice(**found | {name: tuple(found[name]) for name in ("ranks", "lost", "sizes", "joined")})


def is_kill(code: int) -> bool:
    """Whether an exit code is of a process that a signal killed, other than one that ends a run."""
    return code < 0 and code not in _TERMINATING


def may_continue(codes: Mapping[int, int], survivors: Sequence[int], *, is_training: bool) -> bool:
    """Whether the other ranks can continue after deaths.

    Only where a signal killed the processes. A process that exits by itself has reported an error, which the others
    would repeat, or ends the run; SIGTERM and SIGINT end the run, too.

    Args:
        codes: rank to exit code of those that died.
        survivors: ranks that run.
        is_training: whether the current generation trains.
    """
    return is_training and bool(survivors) and all(map(is_kill, codes.values()))


@dataclass
class Continuation:
    """The generations of a round, on the launcher.

    Attributes:
        store: store of the round's processes.
        ranks: ranks of the current generation, by their ranks in the round, ascending.
        processes: number of processes of each node: of the members of the round, and then of those that were to join.
        describe_loss: returns the cause where the watchdog killed these ranks; None elsewhere.
        generation: current generation.
        pending: rank to exit code of those that died before the current generation trains.
        since: monotonic time of these deaths.
    """

    store: Store
    processes: tuple[int, ...]
    describe_loss: Callable[[Sequence[int]], str | None] = lambda _: None
    generation: int = 0
    pending: dict[int, int] = field(default_factory=dict)
    since: float = 0.0

    def __post_init__(self) -> None:
        self.ranks = tuple(range(sum(self.processes)))
        from torch._C._distributed_c10d import PrefixStore

        self.keys = PrefixStore(PREFIX, self.store)

    @property
    def nodes(self) -> tuple[int, ...]:
        """Positions in ``processes`` of the nodes with ranks of the current generation."""
        of_rank = [node for node, count in enumerate(self.processes) for _ in range(count)]
        return tuple(dict.fromkeys(of_rank[rank] for rank in self.ranks))

    @property
    def is_training(self) -> bool:
        """Whether the current generation trains; deaths before it are then not pending any more."""
        if not self.keys.check([f"ready/{self.generation}"]):
            return False
        self.pending.clear()
        return True

    @property
    def is_pending(self) -> bool:
        """Whether ranks left or joined and the current generation does not train yet."""
        return self.generation > 0 and not self.is_training

    @property
    def is_overdue(self) -> bool:
        """Whether the ranks of another generation did not train in time."""
        return self.is_pending and time.monotonic() - self.since > LIMIT_S

    def may_take(self, codes: Mapping[int, int], survivors: Sequence[int]) -> bool:
        """Whether the survivors can continue; arguments as :meth:`take`."""
        return may_continue(codes, survivors, is_training=self.is_training)

    def take(self, codes: Mapping[int, int], survivors: Sequence[int], cause: str | None = None) -> Notice:
        """Let the survivors continue after deaths that allow it.

        Args:
            codes: rank to exit code of those that died.
            survivors: ranks that run, ascending.
            cause: why they died, as a phrase; None for how the processes ended.

        Returns:
            What the survivors were notified of.
        """
        lost = tuple(sorted(codes))
        cause = cause or self.describe_loss(lost) or describe_exit(codes[lost[0]]).removeprefix("was ")
        return self._begin(survivors, cause, dict(codes))

    def reserve(self, processes: Sequence[int]) -> tuple[int, ...]:
        """Numbers for the ranks of nodes that are to join, which no other rank ever gets.

        Args:
            processes: number of processes of each of these nodes.
        """
        first = sum(self.processes)
        self.processes = (*self.processes, *processes)
        return tuple(range(first, first + sum(processes)))

    def grow(self, joined: Sequence[int], workers: int, cause: str) -> Notice:
        """Let the ranks continue together with others.

        Args:
            joined: ranks that join, of :meth:`reserve`.
            workers: number of pipeline ranks.
            cause: why they join, as a phrase.

        Returns:
            What the ranks were notified of.
        """
        return self._begin((*self.ranks, *joined), cause, {}, tuple(joined), workers)

    def _begin(
        self,
        ranks: Sequence[int],
        cause: str,
        codes: dict[int, int],
        joined: tuple[int, ...] = (),
        workers: int = 0,
    ) -> Notice:
        self.ranks = tuple(ranks)
        self.generation, self.pending, self.since = self.generation + 1, codes, time.monotonic()
        notice = Notice(
            generation=self.generation,
            ranks=self.ranks,
            lost=tuple(sorted(codes)),
            sizes=tuple(_ranks_of_nodes(self.ranks, self.processes)),
            cause=cause,
            since=time.time(),
            joined=joined,
            workers=workers,
        )
        self.keys.set(f"next/{notice.generation}", encode_notice(notice))
        return notice


def _ranks_of_nodes(ranks: Sequence[int], processes: Sequence[int]) -> list[int]:
    """For each of ``ranks`` the number of ranks on its node; nodes had ``processes`` in the first generation."""
    nodes = [node for node, count in enumerate(processes) for _ in range(count)]
    counts = Counter(nodes[rank] for rank in ranks)
    return [counts[nodes[rank]] for rank in ranks]


class SurvivorLink:
    """The connection of a worker to its launcher, by which it learns that other ranks died or join.

    Args:
        environment: environment of the process, as the launcher set it.
    """

    def __init__(self, environment: Mapping[str, str]) -> None:
        self._address = environment["MASTER_ADDR"], int(environment["MASTER_PORT"])
        self.first_rank = int(environment["RANK"])
        self.generation = 0
        self._notice: Notice | None = None
        self._has_notice = threading.Event()
        self.keys = self.connect()

    @property
    def store_port(self) -> int:
        """Port of the store, to which all processes are connected."""
        return self._address[1]

    def connect(self) -> Store:
        """A connection of its own: a request that blocks holds the lock of its connection."""
        from torch._C._distributed_c10d import PrefixStore, TCPStore

        return PrefixStore(PREFIX, TCPStore(*self._address, is_master=False, wait_for_workers=False))

    def watch(self, on_notice: Callable[[], None]) -> None:
        """Call ``on_notice`` in a thread once other ranks of this generation have died; not where others join."""
        self._notice = None
        self._has_notice = threading.Event()
        threading.Thread(target=self._wait, args=(self.generation + 1, on_notice), daemon=True).start()

    def _wait(self, generation: int, on_notice: Callable[[], None]) -> None:
        key = f"next/{generation}"
        try:
            keys = self.connect()
            keys.wait([key], FOREVER)
            notice = self._notice = decode_notice(keys.get(key))
        except RuntimeError:
            return  # the launcher has ended, and this process will
        # Ranks that others join leave their connections by themselves, at a boundary.
        if not notice.joined:
            on_notice()
        self._has_notice.set()

    def confirm(self) -> None:
        """Report that this generation trains; rank 0 of the generation calls this."""
        self.keys.set(f"ready/{self.generation}", "1")

    def wait(self, seconds: float) -> Notice | None:
        """The notice of the next generation; None if none arrives in time.

        Args:
            seconds: how long to wait.
        """
        return self._notice if self._has_notice.wait(seconds) else None


def enter_generation(notice: Notice, first_rank: int) -> None:
    """Set the variables from which torch joins processes to those of a generation.

    Args:
        notice: the generation.
        first_rank: rank of this process in the round.
    """
    rank = notice.ranks.index(first_rank)
    os.environ["RANK"], os.environ["WORLD_SIZE"] = str(rank), str(len(notice.ranks))
    os.environ["LOCAL_WORLD_SIZE"] = str(notice.sizes[rank])
    os.environ[GENERATION_VARIABLE] = str(notice.generation)
