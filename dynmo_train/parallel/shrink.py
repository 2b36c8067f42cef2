"""When workers leave a run: the processes that stay, as a world of their own.

Ranks of tensor, data and expert groups all belong to one worker, so these groups live on. Torch's own group cannot lose
members: those that stay never use it again.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace
from datetime import timedelta

import torch.distributed as dist

from .process_groups import Groups, World, group_factory


def without_workers(world: World, leaving: Collection[int], timeout_s: float = 600.0) -> World | None:
    """The world without the workers at the pipeline positions ``leaving``; None at their own processes.

    Every process calls this. Whoever leaves may end as soon as this has returned: it returns nowhere before all have
    called it, and nobody talks to a process that left any more.

    Args:
        timeout_s: how long a collective of those that stay may wait.
    """
    staying = [position for position in range(world.dims.pipeline) if position not in leaving]
    before = world.groups
    dist.barrier(group=before.world)
    if world.pipeline_rank in leaving:
        return None
    dims = replace(world.dims, pipeline=len(staying))
    old_ranks = [rank for position in staying for rank in world.dims.ranks(pipeline=position)]
    members = tuple(world.global_rank(rank) for rank in old_ranks)
    left = replace(
        world,
        rank=old_ranks.index(world.rank),
        size=dims.size,
        dims=dims,
        members=members,
        workers=tuple(world.worker_ids[position] for position in staying),
    )
    make = group_factory({}, timedelta(seconds=timeout_s))

    def among(ranks: Collection[int], *, alone: bool = False) -> dist.ProcessGroup | None:
        return make([left.global_rank(rank) for rank in ranks], alone=alone)

    own = left.coordinates
    groups = replace(
        before,
        world=among(range(left.size), alone=True),
        pipeline=among(dims.ranks(data=own.data, tensor=own.tensor), alone=True),
        model=among(dims.ranks(data=own.data)),
    )
    _forget(before, groups)
    return replace(left, groups=groups)


def _forget(before: Groups, now: Groups) -> None:
    """Close the groups that somebody has left; torch's own group of all that were started stays."""
    kept = {now.tensor, now.data, now.expert, now.expert_data, now.model, now.pipeline, now.world, dist.group.WORLD}
    for group in {before.world, before.pipeline, before.model} - kept:
        if group is not None:
            dist.destroy_process_group(group)
