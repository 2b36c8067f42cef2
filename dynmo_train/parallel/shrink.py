"""Releases pipeline ranks from a run: the remaining processes form a smaller world.

Tensor, data and expert groups are within one pipeline rank and stay valid. torch's default group cannot lose members;
the remaining processes do not use it any more.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace
from datetime import timedelta

import torch.distributed as dist

from .process_groups import Groups, World, group_factory, vocabulary_groups


def without_workers(world: World, leaving: Collection[int], timeout_s: float | None = None) -> World | None:
    """Return the world without some pipeline ranks; None on their own processes. A collective.

    A released process may exit when this returns: it returns nowhere before all processes have called it, and none
    communicates with a released process any more.

    Args:
        world: Processes of the run.
        leaving: Pipeline ranks to release.
        timeout_s: Timeout of collectives of the remaining processes, in seconds; None is that of ``world``.

    Returns:
        The smaller world, with new ranks in the old order; None on released processes.
    """
    staying = [position for position in range(world.dims.pipeline) if position not in leaving]
    before = world.groups
    # A process that exits earlier would break the connections of collectives that others have not completed.
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
    timeout = timedelta(seconds=world.timeout_s if timeout_s is None else timeout_s)
    make = group_factory({}, timeout)

    def among(ranks: Collection[int], *, alone: bool = False) -> dist.ProcessGroup | None:
        return make([left.global_rank(rank) for rank in ranks], alone=alone)

    own = left.coordinates
    pipeline = [left.global_rank(rank) for rank in dims.ranks(data=own.data, tensor=own.tensor)]
    # All groups are made before any is destroyed: torch names a group by its ranks and the number of groups.
    groups = replace(
        before,
        world=among(range(left.size), alone=True),
        pipeline=among(dims.ranks(data=own.data, tensor=own.tensor), alone=True),
        model=among(dims.ranks(data=own.data)),
        vocabulary=vocabulary_groups(pipeline, timeout) if before.vocabulary else (),
    )
    _forget(before, groups)
    return replace(left, groups=groups)


def _forget(before: Groups, now: Groups) -> None:
    """Destroy the groups that lost members; torch's default group stays."""
    in_use = {
        now.tensor,
        now.data,
        now.context,
        now.expert,
        now.expert_data,
        now.shard,
        now.shard_copies,
        now.expert_shard,
        now.expert_shard_copies,
        now.model,
        now.pipeline,
        now.world,
        dist.group.WORLD,
    }
    for group in {before.world, before.pipeline, before.model, *before.vocabulary} - in_use:
        if group is not None:
            dist.destroy_process_group(group)
