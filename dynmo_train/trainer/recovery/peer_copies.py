"""Copies the state of each rank into its own host memory and into that of another rank, while training continues.

At the boundary of a copy, on every rank::

    wait for the last transfer       at most if it took longer than --peer-checkpoint-interval steps
    gather the sizes of all blocks   every rank has the last copy now: the one before it may be overwritten
    copy the state into the block    training is paused for this
    thread: block -> peer            training continues
            block <- the rank whose peer this is

Each rank has two blocks of its own state, and two for each rank that sends to it. The last copy that all ranks have is
never overwritten, so that a death during a copy or a transfer leaves it complete.

Peers: each rank sends to a rank of another node, so that the loss of a whole node leaves a copy of each of its ranks;
on one node, to the next rank. Nothing is sent where a data-parallel replica of the same stage is on another node (on
one node: where there is any), since its copy of itself has the same bits.
"""

from __future__ import annotations

import os
import threading
import time
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from ...parallel.process_groups import World, all_gather_objects
from ..engine import Engine
from .state_copy import StateCopy, Tag, plan_layout, read_copy, write_copy

# Larger messages would not be interleaved with the activations of the training on a shared link.
_MESSAGE_BYTES = 64 << 20


def peer_targets(nodes: Sequence[str], stages: Sequence[int]) -> list[int | None]:
    """The rank that each rank sends its copy to; None for one whose copy is elsewhere without that. See the module.

    Args:
        nodes: node of each rank, at least two ranks.
        stages: pipeline rank of each rank; equal ones are replicas, which have the same state.
    """
    size, loads = len(nodes), [0] * len(nodes)
    targets: list[int | None] = []
    for rank in range(size):
        others = [each for each in range(size) if each != rank]
        apart = [each for each in others if nodes[each] != nodes[rank]] or others
        replicas = [each for each in range(size) if stages[each] == stages[rank]]
        if set(replicas) & set(apart) or rank != replicas[0]:
            targets.append(None)
            continue
        # The one that receives the fewest copies, and of these the next one.
        target = min(apart, key=lambda each: (loads[each], (each - rank) % size))
        loads[target] += 1
        targets.append(target)
    return targets


@dataclass(frozen=True, kw_only=True)
class CopyReport:
    """A copy that this rank has, and its peer where it has one.

    Attributes:
        step: number of completed steps.
        num_bytes: bytes of this rank's block.
        stalled_s: seconds for which training was paused.
        duration_s: seconds until the transfers had ended.
    """

    step: int
    num_bytes: int
    stalled_s: float
    duration_s: float


class CopySlots:
    """Two blocks of host memory for copies of one rank's state."""

    def __init__(self) -> None:
        self._blocks = [torch.empty(0, dtype=torch.uint8), torch.empty(0, dtype=torch.uint8)]
        self._copies: list[StateCopy | None] = [None, None]

    @property
    def copies(self) -> list[StateCopy]:
        """The complete copies."""
        return [copy for copy in self._copies if copy is not None]

    def begin(self, keep: Tag | None, num_bytes: int) -> tuple[int, torch.Tensor]:
        """The slot of a new copy and its block, uint8 ``[num_bytes]``; the copy ``keep`` is not overwritten."""
        is_last = [copy is not None and copy.tag == keep for copy in self._copies]
        slot = is_last.index(False)
        # Incomplete from here on: no rank may resume from it.
        self._copies[slot] = None
        if self._blocks[slot].numel() < num_bytes:
            # Freed before the new one is allocated.
            self._blocks[slot] = torch.empty(0, dtype=torch.uint8)
            self._blocks[slot] = torch.empty(num_bytes, dtype=torch.uint8)
        return slot, self._blocks[slot][:num_bytes]

    def complete(self, slot: int, copy: StateCopy) -> None:
        """Record that the copy in a slot is complete."""
        self._copies[slot] = copy


class PeerCopies:
    """The copies in the memory of this rank, which outlive the process groups.

    Args:
        interval: ``--peer-checkpoint-interval``.

    Attributes:
        interval: steps between copies.
        own: copies of the state of this rank.
        received: copies of the states of other ranks, in the order of these.
        branch: branch of the run that copies are made of; see ``Tag``.
    """

    def __init__(self, interval: int) -> None:
        self.interval = interval
        self.own = CopySlots()
        self.received: list[CopySlots] = []
        self.branch = 0
        self._world: World | None = None
        self._group: dist.ProcessGroup | None = None
        self._target: int | None = None
        self._sources: list[int] = []
        self._last: Tag | None = None
        self._thread: threading.Thread | None = None
        self._error: RuntimeError | None = None
        self._report: CopyReport | None = None

    @property
    def copies(self) -> list[StateCopy]:
        """All complete copies in the memory of this rank."""
        return [*self.own.copies, *(copy for slots in self.received for copy in slots.copies)]

    def join(self, world: World, branch: int, last: Tag | None) -> None:
        """Make copies with the ranks of ``world``. Every rank calls this.

        Args:
            world: ranks of the generation.
            branch: number of the branch that these ranks begin.
            last: the copy that these ranks resume from; None at the start of a run.
        """
        self.branch, self._world, self._group, self._last = branch, world, None, last
        self._thread, self._error, self._report = None, None, None
        # Of the generation before.
        self._target, self._sources = None, []
        if world.size == 1:
            return
        # Hosts may share a name: launchers of several nodes also run on one machine in tests.
        node = f"{world.host}/{os.environ.get('GROUP_RANK', '0')}"
        nodes = all_gather_objects(world, node)
        targets = peer_targets(nodes, [world.dims.coordinates(rank).pipeline for rank in range(world.size)])
        self._target = targets[world.rank]
        self._sources = [rank for rank, target in enumerate(targets) if target == world.rank]
        # A group of its own: transfers in a thread must not be matched with operations of the training.
        ranks = [world.global_rank(rank) for rank in range(world.size)]
        timeout = timedelta(seconds=world.timeout_s)
        self._group = dist.new_group(ranks, timeout=timeout, backend="gloo", use_local_synchronization=True)

    def leave(self) -> None:
        """Wait for the end of a transfer whose connections are shut down, and forget the groups."""
        if self._thread is not None:
            self._thread.join()
        self._world, self._group, self._thread = None, None, None

    def start(self, engine: Engine, step: int, progress: Mapping[str, Any], *, is_needed: bool = False) -> None:
        """Start a copy of the state after ``step``. Every rank calls this at the same boundary.

        Args:
            engine: engine of this rank.
            step: number of completed steps.
            progress: state of the run apart from its items, as a JSON document.
            is_needed: whether others receive the copy, also where this is the only rank.

        Raises:
            RuntimeError: the last transfer failed.
        """
        world = self._world
        if world is None or (self._group is None and not is_needed):
            return  # the only rank: its death is the end of the round
        start_s = time.perf_counter()
        self.wait()
        tag = (self.branch, step)
        states = {item: engine.item_store.export(item) for item in engine.local_names}
        layout = plan_layout(states, tag, progress)
        sizes = [int(size) for size in all_gather_objects(world, layout.num_bytes)]
        # The last copy is in all places: each rank waited for its transfers before it sent its size.
        keep = self._last
        slot, block = self.own.begin(keep, layout.num_bytes)
        self.own.complete(slot, write_copy(block, layout, states))
        slots = self._slots_of_sources(keep)
        begun = [each.begin(keep, sizes[source]) for each, source in zip(slots, self._sources, strict=True)]
        received = {world.global_rank(s): begun[i][1] for i, s in enumerate(self._sources)}
        self._last = tag
        stalled_s = time.perf_counter() - start_s
        target = None if self._target is None else world.global_rank(self._target)

        def transfer() -> None:
            try:
                copies = _exchange(block, target, received, self._group)
            # Kept, not raised: this is a thread. Training ends with the same lost connection.
            except RuntimeError as error:
                self._error = error
                return
            for each, (index, _), copy in zip(slots, begun, copies, strict=True):
                each.complete(index, copy)
            duration_s = time.perf_counter() - start_s
            self._report = CopyReport(step=step, num_bytes=layout.num_bytes, stalled_s=stalled_s, duration_s=duration_s)

        self._thread = threading.Thread(target=transfer, name="peer-copy", daemon=True)
        self._thread.start()

    def _slots_of_sources(self, keep: Tag | None) -> list[CopySlots]:
        """Slots for the ranks that send to this one; of others only those with the copy ``keep`` are left."""
        count = len(self._sources)
        self.received += [CopySlots() for _ in range(count - len(self.received))]
        # Of a former generation with more ranks that sent here.
        rest = [slots for slots in self.received[count:] if any(copy.tag == keep for copy in slots.copies)]
        self.received = [*self.received[:count], *rest]
        return self.received[:count]

    def wait(self) -> None:
        """Wait for the transfer in progress.

        Raises:
            RuntimeError: it failed.
        """
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        if self._error is not None:
            raise self._error

    def take_metrics(self) -> dict[str, float]:
        """Measurements of a copy that was completed since the last call; empty without one."""
        report, self._report = self._report, None
        if report is None:
            return {}
        return {
            "peer_copy_s": report.duration_s,
            "peer_copy_stalled_s": report.stalled_s,
            "peer_copy_bytes": report.num_bytes,
        }


def _exchange(
    block: torch.Tensor, target: int | None, received: Mapping[int, torch.Tensor], group: dist.ProcessGroup | None
) -> list[StateCopy]:
    """Send a block, uint8 ``[bytes]``, to ``target`` and receive those of other ranks.

    Args:
        block: copy of this rank.
        target: global rank that it is sent to; None sends nothing.
        received: global rank to the block that its copy is received in.
        group: process group of the copies.

    Raises:
        RuntimeError: a connection was lost, or the received bytes are not those that were sent.
    """
    outgoing = {} if target is None else {target: block}
    longest = max((each.numel() for each in (*outgoing.values(), *received.values())), default=0)
    for begin in range(0, longest, _MESSAGE_BYTES):
        end = begin + _MESSAGE_BYTES
        works = [dist.isend(each[begin:end], to, group=group) for to, each in outgoing.items() if begin < each.numel()]
        works += [dist.irecv(each[begin:end], of, group=group) for of, each in received.items() if begin < each.numel()]
        _wait(works)
    sums = {to: torch.tensor([zlib.crc32(each.numpy().data)], dtype=torch.int64) for to, each in outgoing.items()}
    expected = {of: torch.zeros(1, dtype=torch.int64) for of in received}
    works = [dist.isend(each, to, group=group) for to, each in sums.items()]
    _wait([*works, *(dist.irecv(each, of, group=group) for of, each in expected.items())])
    for of, each in received.items():
        found = zlib.crc32(each.numpy().data)
        if found != int(expected[of]):
            raise RuntimeError(f"a copy was received with CRC-32 {found:08x}, sent with {int(expected[of]):08x}")
    return [read_copy(each) for each in received.values()]


def _wait(works: Sequence[dist.Work | None]) -> None:
    for work in works:
        if work is not None:
            work.wait()
