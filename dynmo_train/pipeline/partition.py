"""Partitions of the layer list over pipeline stages, and placements of stages on pipeline ranks. Pure values.

Worked, for stages a to d on two pipeline ranks:

========================  =====================  ============================
placement                 ``stage_ranks``        schedules
========================  =====================  ============================
``Partition.looped``      ``(0, 1, 0, 1)``       all but the next two
``Partition.v_shaped``    ``(0, 1, 1, 0)``       those of ``V_SCHEDULES``
any other                 of the plan            ``custom``
========================  =====================  ============================
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from ..models.layer_list import SUBLAYERS, ItemSpec
from ..models.vocabulary.vocabulary_shards import ranks_of_shards

Stages = tuple[tuple[str, ...], ...]


@dataclass(frozen=True, kw_only=True)
class Partition:
    """Stages and their placement; each pipeline rank has the same number of stages.

    Attributes:
        stages: Item names of each stage, at the finest granularity, in list order; a stage may be empty.
        stage_ranks: Pipeline rank of each stage.
        shards: Names of the shards of the output layer (``--vocabulary-parallel``), which are on all pipeline ranks
            that have a stage: neighboring shards in blocks, as even as possible.
    """

    stages: Stages
    stage_ranks: tuple[int, ...]
    shards: tuple[str, ...] = ()

    @classmethod
    def looped(cls, stages: Stages, num_ranks: int) -> Partition:
        """Place stage ``s`` on pipeline rank ``s mod num_ranks``."""
        return cls(stages=stages, stage_ranks=tuple(stage % num_ranks for stage in range(len(stages))))

    @classmethod
    def v_shaped(cls, stages: Stages, num_ranks: int) -> Partition:
        """Place stages down the pipeline ranks and back up (ZB-V): ``s`` and ``2 num_ranks - 1 - s`` share a rank."""
        down = range(num_ranks)
        cycle = (*down, *reversed(down))
        return cls(stages=stages, stage_ranks=tuple(cycle[stage % len(cycle)] for stage in range(len(stages))))

    @property
    def num_ranks(self) -> int:
        """Number of pipeline ranks."""
        return len(set(self.stage_ranks))

    @property
    def virtual_stages(self) -> int:
        """Number of stages on each pipeline rank."""
        return len(self.stages) // self.num_ranks

    def stages_of_rank(self, rank: int) -> list[int]:
        """Return the stages of a pipeline rank, in order."""
        return [stage for stage, of_rank in enumerate(self.stage_ranks) if of_rank == rank]

    def items_of_rank(self, rank: int) -> tuple[str, ...]:
        """Return the item names of a pipeline rank, in the order of its stages, and then its shards."""
        shards = (name for name, at in self.shard_ranks().items() if at == rank)
        return (*(name for stage in self.stages_of_rank(rank) for name in self.stages[stage]), *shards)

    def item_ranks(self) -> dict[str, int]:
        """Return item or shard name -> pipeline rank."""
        items = {name: rank for rank, names in zip(self.stage_ranks, self.stages, strict=True) for name in names}
        return items | self.shard_ranks()

    def shard_ranks(self) -> dict[str, int]:
        """Return shard name -> pipeline rank."""
        ranks = ranks_of_shards(len(self.shards), sorted(set(self.stage_ranks)))
        return dict(zip(self.shards, ranks, strict=True))

    def renumbered(self) -> Partition:
        """Return the same partition on ranks 0, 1, ..., as the world counts after a release of ranks."""
        index = {rank: at for at, rank in enumerate(sorted(set(self.stage_ranks)))}
        return replace(self, stage_ranks=tuple(index[rank] for rank in self.stage_ranks))


def uniform_partition(
    items: Sequence[ItemSpec],
    num_ranks: int,
    virtual_stages: int = 1,
    *,
    v_shaped: bool = False,
    blocks: Sequence[int] | None = None,
) -> Partition:
    """Split the layers evenly, as Megatron does: embedding in the first stage, head in the last.

    Where the layers do not divide evenly, the first stages take one more. All items of a layer stay together.

    Args:
        items: The layer list.
        num_ranks: Number of pipeline ranks.
        virtual_stages: Stages per pipeline rank.
        v_shaped: Place stages down the pipeline ranks and back up.
        blocks: Number of layers of each stage; None: even.
    """
    stages = num_ranks * virtual_stages
    layers = list(dict.fromkeys(item.layer for item in items if item.kind in SUBLAYERS))
    base, extra = divmod(len(layers), stages)
    stage_of_layer: dict[str, int] = {}
    begin = 0
    for stage in range(stages):
        count = base + (stage < extra) if blocks is None else blocks[stage]
        stage_of_layer.update(dict.fromkeys(layers[begin : begin + count], stage))
        begin += count
    stage_of = [0] * len(items)
    for index, item in enumerate(items):
        # An item outside of the layers (a norm, the decoder's embedding of a T5) stays with the item before it.
        stage_of[index] = stage_of_layer.get(item.layer, stage_of[index - 1] if index else 0)
    # The head follows the last layer that exists, which is in an earlier stage where there are more stages than layers.
    stage_of[-1] = stages - 1
    split = tuple(tuple(item.name for item, at in zip(items, stage_of, strict=True) if at == s) for s in range(stages))
    return Partition.v_shaped(split, num_ranks) if v_shaped else Partition.looped(split, num_ranks)


@dataclass(frozen=True, kw_only=True)
class Move:
    """An item that changes its pipeline rank.

    Attributes:
        item: Item name.
        source: Pipeline rank that sends it.
        target: Pipeline rank that receives it.
    """

    item: str
    source: int
    target: int


def moves_between(before: Partition, after: Partition) -> list[Move]:
    """Return the items that change their pipeline rank from one partition to the next, in list order."""
    sources = before.item_ranks()
    return [
        Move(item=n, source=sources[n], target=rank) for n, rank in after.item_ranks().items() if sources[n] != rank
    ]


def frozen_prefix(stages: Sequence[Sequence[str]], frozen: Sequence[str]) -> list[int]:
    """Return, for each stage, how many of its first items belong to the frozen prefix of the layer list."""
    frozen_items = set(frozen)
    counts: list[int] = []
    in_prefix = True
    # A frozen item behind a trained one still needs a backward: the flag is never set again.
    for names in stages:
        count = 0
        for name in names:
            in_prefix = in_prefix and name in frozen_items
            count += in_prefix
        counts.append(count)
    return counts
