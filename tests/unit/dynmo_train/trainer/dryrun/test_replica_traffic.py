"""Bytes between data-parallel ranks: the volumes of arXiv 1910.02054, and those of hybrid sharding."""

from __future__ import annotations

import pytest

from dynmo_train.config import DefaultContext, config_of
from dynmo_train.trainer.dryrun.replica_traffic import replica_bytes
from tests.unit.dynmo_train.config.small_config import SMALL

COUNT, REPLICAS, MICROBATCHES = 1_000_000, 8, 4


def sent(**options) -> float:
    """Bytes per parameter, without the factor of a ring of all replicas, where there is one ring."""
    size = SMALL["micro_batch_size"] * REPLICAS * MICROBATCHES
    options |= {"pipeline_model_parallel_size": 1, "global_batch_size": size}
    config = config_of(DefaultContext(world_size=REPLICAS), **SMALL | options)
    return replica_bytes(config, COUNT, 2) / COUNT


@pytest.mark.parametrize(
    ("options", "per_parameter"),
    [
        ({}, 2 * 4),
        ({"grad_reduce_in_bf16": True}, 2 * 2),
        ({"zero_stage": 1}, 2 + 4),
        ({"zero_stage": 2}, 2 + 4 * MICROBATCHES),
        ({"zero_stage": 2, "zero_gradient_sync": "step"}, 2 + 4),
        ({"zero_stage": 3}, (2 * 2 + 4) * MICROBATCHES),
    ],
)
def test_replica_bytes_of_stages_are_sums_of_rings(options, per_parameter):
    assert sent(**options) == pytest.approx(per_parameter * (REPLICAS - 1) / REPLICAS)


def test_replica_bytes_of_hybrid_sharding_are_within_shards_and_one_sum():
    within = (2 + 4 * MICROBATCHES) * 3 / 4
    assert sent(zero_stage=2, hsdp=2) == pytest.approx(within + 4 / 4)


def test_replica_bytes_of_one_replica_are_none():
    config = config_of(DefaultContext(world_size=1), **SMALL, zero_stage=3)
    assert replica_bytes(config, COUNT, 2) == 0
