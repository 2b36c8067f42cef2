"""Adaptive freezing: slopes, traces and distances of plasticity."""

from __future__ import annotations

import pytest
import torch

from dynmo_train.dynamics import plasticity
from dynmo_train.dynamics.plasticity import (
    AdaptiveFreezing,
    PlasticityRule,
    PlasticityTrace,
    observe,
    similarity_distance,
    slope,
)
from dynmo_train.models.layer_list import output_of
from dynmo_train.models.registry import family_of
from dynmo_train.pipeline.frozen_cache import FrozenPrefixCache, sample_hashes
from dynmo_train.pipeline.partition import uniform_partition
from dynmo_train.trainer.engine import Engine
from dynmo_train.trainer.settings_from_config import engine_settings
from tests.distributed.option_runs import batch, resolved
from tests.unit.dynmo_train.config.small_config import SMALL

RULE = PlasticityRule(interval=10, window=3, tolerance=0.2, patience=2, max_layers=1)


def test_slope_fits_a_line():
    assert slope([1.0, 3.0, 5.0]) == pytest.approx(2.0)
    assert slope([0.0, 1.0, 0.0]) == 0.0
    assert slope([4.0, 1.0]) == pytest.approx(-3.0)


def test_observe_consecutive_small_slopes_freeze_the_layer():
    trace = PlasticityTrace()
    for value in (0.0, 1.0, 2.0, 2.2, 2.3):
        trace = observe(trace, value, RULE)
        assert trace.frozen_layers == 0
    assert trace.steepest == pytest.approx(1.0)
    assert trace.patience_count == 1
    assert observe(trace, 2.31, RULE) == PlasticityTrace(frozen_layers=1)
    assert observe(trace, 9.0, RULE).patience_count == 0


def test_observe_at_max_layers_freezes_no_further_layer():
    trace = PlasticityTrace(frozen_layers=1, values=(1.0, 1.0), steepest=1.0, patience_count=5)
    assert observe(trace, 1.0, RULE).frozen_layers == 1


def test_similarity_distance_is_zero_only_for_equal_similarities():
    x = torch.randn(2, 5, 8, generator=torch.Generator().manual_seed(1))
    rotation = torch.linalg.qr(torch.randn(8, 8, generator=torch.Generator().manual_seed(2)))[0]
    assert float(similarity_distance(x, x)) == 0.0
    assert float(similarity_distance(x, x @ rotation)) < 1e-10
    assert float(similarity_distance(x, x.roll(1, 1))) > 1e-3


def test_frozen_prefix_cache_over_its_limit_drops_the_oldest():
    cache = FrozenPrefixCache(limit_bytes=3 * 4 * 4)
    rows = torch.arange(16.0).view(4, 4)
    keys = torch.tensor([11, 12, 13, 14])
    cache.put(0, keys, {"hidden": rows})
    assert cache.num_bytes == 48
    assert cache.get(0, keys) is None
    assert cache.get(1, keys[1:]) is None
    assert torch.equal(cache.get(0, keys[[3, 1]])["hidden"], rows[[3, 1]])


def test_sample_hashes_depend_on_all_inputs_except_labels():
    ids = torch.tensor([[1, 2], [1, 3], [1, 2]])
    keys = sample_hashes({"ids": ids, "labels": torch.arange(6).view(3, 2)}).tolist()
    assert keys[0] == keys[2] != keys[1]
    other = sample_hashes({"ids": ids, "types": torch.tensor([[0, 0], [0, 0], [0, 1]])}).tolist()
    assert other[0] != other[2]


def test_reference_copy_has_the_biases_of_its_experts(world):
    """With a learning rate of nearly 0 the biases of experts alone change what a layer computes."""
    options = {"global_batch_size": 4, "lr": 1e-30, "min_lr": 0.0, "hidden_dropout": 0.0, "attention_dropout": 0.0}
    options |= {"num_experts": 4, "moe_router_score_function": "sigmoid", "moe_router_enable_expert_bias": True}
    options |= {"moe_router_bias_update_rate": 0.3, "freeze_adaptive": True, "freeze_interval": 1, "freeze_window": 9}
    config = resolved(SMALL | options | {"pipeline_model_parallel_size": 1})
    family = family_of(config)
    engine = Engine(family, engine_settings(config), uniform_partition(family.items, 1), world)
    engine.build()
    [freezing] = [each for each in engine.techniques if isinstance(each, AdaptiveFreezing)]
    name, inputs, biases, expected = "layers.0.mlp", [], [], []
    module = engine.item_store.modules[name]
    for step in (1, 2, 3):
        first = []
        hook = module.register_forward_pre_hook(
            lambda _module, arguments, first=first: first.append(arguments[0].detach())
        )
        engine.train_step(batch(config, step), sampled=False)
        hook.remove()
        inputs.append(first[0])
        biases.append(module.router.expert_bias.clone())
        engine.after_step(step)
    assert not torch.equal(biases[1], biases[0])
    module.eval()
    for step in range(3):
        outputs = []
        for bias in (biases[step], biases[0]):
            module.router.expert_bias.copy_(bias)
            outputs.append(output_of(module(inputs[step])).detach())
        expected.append(float(similarity_distance(*outputs)))
    assert freezing.trace.values == pytest.approx(expected)
    assert max(expected) > 1e-6
    # The copy moves and is saved with the item.
    stored = engine.item_store.export(name)
    module.router.expert_bias.zero_()
    engine.item_store.load_state(name, stored)
    assert torch.equal(engine.item_store.extras[name][f"{name}.router.expert_bias.reference"], biases[0])


def test_plasticity_is_the_mean_over_tensor_ranks(world, monkeypatch):
    config = resolved(SMALL | {"freeze_adaptive": True, "pipeline_model_parallel_size": 1})
    family = family_of(config)
    engine = Engine(family, engine_settings(config), uniform_partition(family.items, 1), world)
    engine.build()
    [freezing] = [each for each in engine.techniques if isinstance(each, AdaptiveFreezing)]
    monkeypatch.setattr(plasticity, "gather_over", lambda _, values: [values, 3 * values])
    monkeypatch.setattr(freezing, "_distance", lambda _: 1.0)
    freezing._inputs = {"layers.0.attention": (), "layers.0.mlp": ()}
    assert freezing._plasticity(["layers.0.attention", "layers.0.mlp"]) == 2.0 + 2.0
