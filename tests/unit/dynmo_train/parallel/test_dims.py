"""Where ranks stand: Megatron's order, groups along each axis."""

from __future__ import annotations

from itertools import product

from dynmo_train.parallel.dims import ParallelDims
from tests.tables import table

SIZES = [ParallelDims(pipeline=p, data=d, tensor=t) for p, d, t in product((1, 2, 3), (1, 2, 4), (1, 2))]


@table("dims", SIZES, ids=str)
def test_parallel_dims_coordinates_and_ranks_are_inverse(dims):
    for rank in range(dims.size):
        at = dims.coordinates(rank)
        assert dims.rank_of(pipeline=at.pipeline, data=at.data, tensor=at.tensor) == rank
        assert rank in dims.ranks(pipeline=at.pipeline)
    assert dims.ranks() == tuple(range(dims.size))


def test_parallel_dims_rank_order_is_megatrons():
    """The example of Megatron's initialize_model_parallel: 16 ranks, tensor 2, pipeline 4, so 2 replicas."""
    dims = ParallelDims(tensor=2, pipeline=4, data=2)
    assert dims.ranks(pipeline=0, data=0) == (0, 1)
    assert dims.ranks(pipeline=0, tensor=0) == (0, 2)
    assert dims.ranks(data=0, tensor=0) == (0, 4, 8, 12)


def test_parallel_dims_expert_ranks_are_neighbors():
    dims = ParallelDims(tensor=2, data=4, expert=2)
    assert dims.expert_ranks(0) == dims.expert_ranks(2) == (0, 2)
    assert dims.expert_ranks(5) == (5, 7)


def test_parallel_dims_hsdp_shards_over_neighbors():
    dims = ParallelDims(pipeline=2, tensor=2, data=4, hsdp=2)
    assert dims.shard_ranks(8) == dims.shard_ranks(10) == (8, 10)
    assert dims.shard_copies(8) == dims.shard_copies(12) == (8, 12)
    assert ParallelDims(data=4).shard_ranks(2) == (0, 1, 2, 3)
    assert ParallelDims(data=4).shard_copies(2) == (2,)


def test_parallel_dims_hsdp_shards_experts_over_those_that_have_them():
    dims = ParallelDims(data=8, expert=2, hsdp=2)
    assert dims.shard_ranks(5) == (4, 5, 6, 7)
    assert dims.shard_ranks(5, expert_local=True) == (5, 7)
    assert dims.shard_copies(5, expert_local=True) == (1, 5)
