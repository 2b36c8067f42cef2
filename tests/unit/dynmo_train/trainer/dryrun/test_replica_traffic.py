"""Bytes between data-parallel ranks: the volumes of arXiv 1910.02054, and those of hybrid sharding."""

from __future__ import annotations

import pytest

from dynmo_train.config import DefaultContext, config_of
from dynmo_train.trainer.dryrun.replica_traffic import replica_bytes
from dynmo_train.trainer.dryrun.report import dry_run, not_modelled
from tests.unit.dynmo_train.config.small_config import SMALL

COUNT, REPLICAS, MICROBATCHES = 1_000_000, 8, 4


def sent(frozen: float = 0.0, **options) -> float:
    """Bytes per parameter, without the factor of a ring of all replicas, where there is one ring."""
    size = SMALL["micro_batch_size"] * REPLICAS * MICROBATCHES
    options |= {"pipeline_model_parallel_size": 1, "global_batch_size": size}
    config = config_of(DefaultContext(world_size=REPLICAS), **SMALL | options)
    return replica_bytes(config, COUNT, 2, round(frozen * COUNT)) / COUNT


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


@pytest.mark.parametrize(
    ("options", "flags"),
    [({}, ""), ({"inter_grad_comp": True}, "(--inter-grad-comp)"), ({"grad_comp": True}, "(--grad-comp)")],
)
def test_compression_is_named_as_not_modelled(options, flags):
    found = not_modelled(config_of(DefaultContext(world_size=REPLICAS), **SMALL, **options))
    assert [flags in sentence for sentence in found] == [True] * bool(flags)


@pytest.mark.parametrize(
    ("options", "per_frozen_parameter"),
    [
        ({}, 0),
        ({"zero_stage": 2}, 2),
        ({"zero_stage": 3}, 2 * MICROBATCHES),
    ],
)
def test_replica_bytes_of_frozen_parameters_are_those_of_the_forward(options, per_frozen_parameter):
    assert sent(frozen=1.0, **options) == pytest.approx(per_frozen_parameter * (REPLICAS - 1) / REPLICAS)
    half = (sent(**options) + sent(frozen=1.0, **options)) / 2
    assert sent(frozen=0.5, **options) == pytest.approx(half)


def test_dry_run_of_a_freeze_schedule_leaves_out_gradients_of_the_front():
    def report(**options):
        size = 2 * SMALL["micro_batch_size"]
        changes = {"num_layers": 4, "pipeline_model_parallel_size": 1, "global_batch_size": size, **options}
        return dry_run(config_of(DefaultContext(world_size=2), **SMALL | changes), "cpu")

    dense, found = report(), report(freeze_schedule="10:2,20:3")
    assert dense.replica_bytes_frozen == []
    assert found.replica_bytes == dense.replica_bytes == 4 * dense.parameters_per_worker
    first, second = found.replica_bytes_frozen
    assert (first.after_step, second.after_step) == (10, 20)
    [block] = {report(num_layers=n).replica_bytes - report(num_layers=n - 1).replica_bytes for n in (2, 3)}
    assert first.replica_bytes - second.replica_bytes == block
    # The tied word embedding trains; the position embedding is the rest of the front.
    positions = 4 * SMALL["hidden_size"] * SMALL["seq_length"]
    assert dense.replica_bytes - first.replica_bytes == 2 * block + positions
    # From the first step on.
    assert report(freeze_schedule="0:2").replica_bytes == first.replica_bytes


@pytest.mark.parametrize("options", [{}, {"untie_embeddings_and_output_weights": True, "vocabulary_parallel": 2}])
@pytest.mark.parametrize("stage", [0, 2, 3])
def test_dry_run_of_adapters_sums_their_gradients_alone(stage, options):
    size = 4 * SMALL["micro_batch_size"]  # two microbatches
    changes = {"pipeline_model_parallel_size": 1, "global_batch_size": size, "zero_stage": stage, **options}
    plain, adapted = (
        dry_run(config_of(DefaultContext(world_size=2), **SMALL | changes | more), "cpu")
        for more in ({}, {"lora_rank": 3, "lora_target_modules": "fc1"})
    )
    hidden, layers = SMALL["hidden_size"], SMALL["num_layers"]
    adapters = layers * 3 * (hidden + 4 * hidden)
    assert adapted.parameters - plain.parameters == adapters
    gathered = {0: 0, 2: adapted.parameters_per_worker, 3: 2 * 2 * adapted.parameters_per_worker}[stage]
    if stage == 3:
        # No backward passes through the first attention and what is before it.
        attention = 4 * hidden * hidden + 6 * hidden
        tables = SMALL["seq_length"] * hidden + (0 if options else 1024 * hidden)
        gathered -= 2 * (tables + attention)
    # An all-reduce, or a reduce-scatter for each microbatch.
    assert adapted.replica_bytes == (4 * gathered + 4 * 2 * adapters) // 2


def test_replica_bytes_of_hybrid_sharding_are_within_shards_and_one_sum():
    within = (2 + 4 * MICROBATCHES) * 3 / 4
    assert sent(zero_stage=2, hsdp=2) == pytest.approx(within + 4 / 4)


def test_replica_bytes_of_one_replica_are_none():
    config = config_of(DefaultContext(world_size=1), **SMALL, zero_stage=3)
    assert replica_bytes(config, COUNT, 2) == 0
