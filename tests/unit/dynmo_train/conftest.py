"""Fixtures of the trainer's unit tests."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch._C._distributed_c10d import HashStore

from dynmo_train.parallel.dims import ParallelDims
from dynmo_train.parallel.process_groups import Groups, World


@pytest.fixture
def world():
    """The world of one process on the CPU."""
    dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    groups = Groups(pipeline=dist.group.WORLD)
    yield World(rank=0, size=1, device=torch.device("cpu"), host="here", dims=ParallelDims(), groups=groups)
    dist.destroy_process_group()
