"""Partitions of the layer list over pipeline stages, as pure values."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ..models.layer_list import SUBLAYERS, ItemSpec


@dataclass(frozen=True, kw_only=True)
class Partition:
    """Stages of items, in order, on workers: in rotation, or down the workers and back up.

    Attributes:
        stages: names of the items of each stage, at the finest granularity; a stage may be empty.
        workers: the number of pipeline workers.
        vee: whether stages ``p`` and ``2 workers - 1 - p`` are on worker ``p`` (ZB-V); else stage ``s`` is on worker
            ``s mod workers``.
        placed: the worker of each stage, as many stages on each, where a plan with its own operations says it.
        places: where workers are about to leave, the pipeline positions of those that stay; empty is all in order.
    """

    stages: tuple[tuple[str, ...], ...]
    workers: int
    vee: bool = False
    placed: tuple[int, ...] | None = None
    places: tuple[int, ...] = ()

    @property
    def virtual_stages(self) -> int:
        """Stages on each worker."""
        return len(self.stages) // self.workers

    def worker_of_stage(self, stage: int) -> int:
        """The pipeline position of the worker that runs a stage."""
        if self.placed is not None:
            return self.placed[stage]
        turn, place = divmod(stage, self.workers)
        position = self.workers - 1 - place if self.vee and turn % 2 else place
        return self.places[position] if self.places else position

    def stages_of_worker(self, worker: int) -> list[int]:
        """The stages of a worker, in order."""
        return [stage for stage in range(len(self.stages)) if self.worker_of_stage(stage) == worker]

    def owners(self) -> dict[str, int]:
        """Item name -> worker that holds it."""
        return {name: self.worker_of_stage(stage) for stage, names in enumerate(self.stages) for name in names}

    def lists(self) -> list[list[str]]:
        """The stages as lists, for documents."""
        return [list(stage) for stage in self.stages]


def uniform_partition(
    items: Sequence[ItemSpec], workers: int, virtual_stages: int = 1, *, vee: bool = False
) -> Partition:
    """Megatron's static split: layers evenly over the stages, embedding with the first, head with the last.

    Where layers do not divide, the first stages take one more. All items of a layer stay together.
    """
    stages = workers * virtual_stages
    layers = list(dict.fromkeys(item.layer for item in items if item.kind in SUBLAYERS))
    base, extra = divmod(len(layers), stages)
    owner: dict[str, int] = {}
    begin = 0
    for stage in range(stages):
        count = base + (stage < extra)
        owner.update(dict.fromkeys(layers[begin : begin + count], stage))
        begin += count
    place = [0] * len(items)
    for index, item in enumerate(items):
        # What is no layer (a norm, the second embedding of an encoder-decoder) stays with what comes before it.
        place[index] = owner.get(item.layer, place[index - 1] if index else 0)
    place[-1] = stages - 1
    split = tuple(tuple(item.name for item, at in zip(items, place, strict=True) if at == s) for s in range(stages))
    return Partition(stages=split, workers=workers, vee=vee)


@dataclass(frozen=True, kw_only=True)
class Move:
    """One item that changes worker."""

    item: str
    source: int
    target: int


def moves_between(before: Partition, after: Partition) -> list[Move]:
    """The items that change worker from one partition to the next, in list order."""
    held, wanted = before.owners(), after.owners()
    return [Move(item=name, source=held[name], target=to) for name, to in wanted.items() if held[name] != to]


def frozen_prefix(stages: Sequence[Sequence[str]], frozen: Sequence[str]) -> list[int]:
    """For each stage, how many of its first items belong to the frozen front of the whole list."""
    front = set(frozen)
    counts: list[int] = []
    open_front = True
    for names in stages:
        count = 0
        for name in names:
            open_front = open_front and name in front
            count += open_front
        counts.append(count)
    return counts
