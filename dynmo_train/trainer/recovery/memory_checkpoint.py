"""The newest state that the copies of the remaining ranks have together, read like a checkpoint.

After the loss of a rank, on every remaining rank::

    all_gather_objects     tags and items of the copies of each rank
      | newest_complete      the newest step that has every item; the ranks that have each item
      v
    MemoryCheckpoint       progress of the run at that step
      | partition of the remaining ranks
      v
    load                   items from the own copies, others by messages between hosts, with CRC-32
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from ..._common.errors import DynmoError
from ...optim.item_state import ItemState
from ...parallel.process_groups import World, all_agree, all_gather_objects
from ...pipeline.partition import Partition
from .state_copy import StateCopy, Tag, item_state, newest_complete


class IncompleteCopiesError(DynmoError):
    """The copies of the remaining ranks lack items: the run has to restart from a checkpoint."""


@dataclass(frozen=True, kw_only=True)
class MemoryCheckpoint:
    """The state of a run in the memory of its ranks.

    Attributes:
        tag: branch and step of the copies.
        next_branch: number of the branch that begins with this state: above that of any copy.
        manifest: the fields of a checkpoint's manifest that describe the progress; the same on every rank.
        copied_at: Unix time of the copy.
        holders: item -> ranks that have it; replicas of a stage have the same bits.
        entries: item -> its entry in the copy's header.
        copies: copies of this rank with the chosen tag.
    """

    tag: Tag
    next_branch: int
    manifest: Mapping[str, Any]
    copied_at: float
    holders: Mapping[str, tuple[int, ...]]
    entries: Mapping[str, Mapping[str, Any]]
    copies: Sequence[StateCopy]

    @property
    def step(self) -> int:
        """Number of completed steps."""
        return int(self.manifest["step"])

    def load(self, partition: Partition, world: World) -> Callable[[str], ItemState]:
        """Fetch the items of this rank from those that have them. Every rank calls this.

        Args:
            partition: partition of the remaining ranks.
            world: the remaining ranks, without tensor parallelism.

        Returns:
            A function from the name of a local item to its state, on the CPU.

        Raises:
            DynmoError: on every rank, if a received item differs from the sent one.
        """
        own = {item: copy for copy in self.copies for item in copy.header["items"]}
        transfers = self._transfers(partition, world)
        # Only of those that are sent: the rest stays where it was written.
        sums = {
            item: zlib.crc32(own[item].item_bytes(item).numpy().data)
            for item, source, target in transfers
            if source == world.rank != target
        }
        expected = {item: crc for gathered in all_gather_objects(world, sums) for item, crc in gathered.items()}
        contents: dict[str, torch.Tensor] = {}
        works = []
        for item, source, target in transfers:
            entry = self.entries[item]
            if source == target == world.rank:
                contents[item] = own[item].item_bytes(item)
            elif source == world.rank:
                works.append(dist.isend(own[item].item_bytes(item), world.global_rank(target)))
            elif target == world.rank:
                contents[item] = torch.empty(entry["end"] - entry["begin"], dtype=torch.uint8)
                works.append(dist.irecv(contents[item], world.global_rank(source)))
        for work in (work for work in works if work is not None):
            work.wait()
        is_sound = all(
            zlib.crc32(content.numpy().data) == expected[item] for item, content in contents.items() if item in expected
        )
        if not all_agree(world, is_sound):
            raise DynmoError("a received item differs from the sent one")
        empty = torch.empty(0, dtype=torch.uint8)
        return lambda item: item_state(self.entries[item], contents.get(item, empty))

    def _transfers(self, partition: Partition, world: World) -> list[tuple[str, int, int]]:
        """Item, source and target rank of each item with tensors and of each rank that trains it, on every rank."""
        return [
            (item, target if target in self.holders[item] else self.holders[item][0], target)
            for item, stage in partition.item_ranks().items()
            if self.entries[item]["end"] > self.entries[item]["begin"]
            for target in world.dims.ranks(pipeline=stage)
        ]


def find_memory_checkpoint(world: World, copies: Sequence[StateCopy], items: Sequence[str]) -> MemoryCheckpoint:
    """The newest state that the copies of all ranks have together. Every rank calls this.

    Args:
        world: the remaining ranks.
        copies: complete copies in the memory of this rank.
        items: names of all items of the model.

    Raises:
        IncompleteCopiesError: on every rank, if no step has every item.
    """
    local = [[list(copy.tag), list(copy.header["items"])] for copy in copies]
    inventories: list[list[tuple[Tag, list[str]]]] = [
        [((tag[0], tag[1]), names) for tag, names in of_rank] for of_rank in all_gather_objects(world, local)
    ]
    found = newest_complete(inventories, items)
    if found is None:
        raise IncompleteCopiesError("the copies in the memory of the remaining ranks lack items of the model")
    tag, holders = found
    chosen = [copy for copy in copies if copy.tag == tag]
    own = {item: copy.entry(item) for copy in chosen for item in copy.header["items"]}
    local_entries = {item: own[item] for item, ranks in holders.items() if ranks[0] == world.rank}
    gathered = all_gather_objects(world, [chosen[0].header["progress"] if chosen else None, local_entries])
    progress = next(found for found, _ in gathered if found is not None)
    return MemoryCheckpoint(
        tag=tag,
        next_branch=1 + max(each[0] for of_rank in inventories for each, _ in of_rank),
        manifest=progress["manifest"],
        copied_at=progress["copied_at"],
        holders=holders,
        entries={item: entry for _, entries in gathered for item, entry in entries.items()},
        copies=chosen,
    )
