"""Collectives of ZeRO on CUDA: on streams of their own, the same ones for all items."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch._C._distributed_c10d import HashStore
from torch.distributed.fsdp._fully_shard._fsdp_collectives import DefaultAllGather, DefaultReduceScatter
from torch.testing._internal.distributed import fake_pg

from dynmo_train.parallel.dims import ParallelDims
from dynmo_train.parallel.fsdp import FsdpSharding, connect_items, share_streams
from dynmo_train.parallel.process_groups import Groups, World

one_device = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device is here")


def streams_of_step(device: torch.device, monkeypatch) -> dict[str, list[object]]:
    """The current stream at each forward, gather and reduce-scatter of a step of three items over two ranks.

    The second rank and its collectives are those of torch's fake process group: they return at once.
    """
    assert fake_pg.FakeStore, "importing the module registers the group"
    dist.init_process_group("fake", store=HashStore(), rank=0, world_size=2)
    try:
        groups = Groups(shard=dist.group.WORLD, data=dist.group.WORLD)
        world = World(rank=0, size=2, device=device, host="", dims=ParallelDims(data=2), groups=groups)
        sharding = FsdpSharding(world, reshard=True, compute=torch.float32, sync_microbatches=True)
        items = [nn.Sequential(nn.Linear(8, 8), nn.Tanh()).to(device) for _ in range(3)]
        local = [sharding.wrap(item) for item in items]
        connect_items(items)
        share_streams(items)
        found: dict[str, list[object]] = {"forward": [], "gather": [], "reduce-scatter": []}

        def recorded(kind, proper):
            def call(*arguments, **keywords):
                found[kind].append(torch.cuda.current_stream(device) if device.type == "cuda" else None)
                return proper(*arguments, **keywords)

            return call

        # Not functions of torch.distributed, whose names differ by version.
        for kind, comm in {"gather": DefaultAllGather, "reduce-scatter": DefaultReduceScatter}.items():
            monkeypatch.setattr(comm, "__call__", recorded(kind, comm.__call__))
        for item in items:
            item.forward = recorded("forward", item.forward)
        x = torch.ones(4, 8, device=device)
        for item in items:
            x = item(x)
        x.sum().backward()
        for item in items:
            sharding.start_reduction(item)
        sharding.finish_reduction(zip(items, local, strict=True))
        assert all(parameter.grad is not None for named in local for parameter in named.values())
        return found
    finally:
        dist.destroy_process_group()


@one_device
def test_gathers_and_reduce_scatters_have_streams_of_their_own(monkeypatch):
    found = streams_of_step(torch.device("cuda", 0), monkeypatch)
    assert {kind: len(streams) for kind, streams in found.items()} == {"forward": 3, "gather": 6, "reduce-scatter": 3}
    of_kind = {kind: set(streams) for kind, streams in found.items()}
    assert all(len(streams) == 1 for streams in of_kind.values()), "all items use the same streams"
    assert len(set.union(*of_kind.values())) == 3
