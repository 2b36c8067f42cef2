"""Techniques that change the model: one worker against any placement, bit for bit, with everything else on as well."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import pytest

from dynmo_train.dynamics.plasticity import PlasticityRule
from dynmo_train.dynamics.pruning_units import PruningRule
from dynmo_train.models.experts.moe_shape import MoeShape
from dynmo_train.models.techniques.early_exit import ExitSettings
from dynmo_train.models.techniques.mixture_of_depths import DepthSettings
from dynmo_train.models.techniques.technique_blocks import DynamicSettings, SparseAttentionSettings
from tests.distributed.scenario import Scenario, calls_of_front, play
from tests.distributed.workers import run_workers

pytestmark = [pytest.mark.distributed, pytest.mark.complete, pytest.mark.timeout(900)]

PLASTICITY = PlasticityRule(interval=1, window=2, tolerance=0.9, patience=1, max_layers=2)

TECHNIQUES = {
    "depths": DynamicSettings(depths=DepthSettings(capacity=0.5, every=2, aux_weight=0.01)),
    "exits": DynamicSettings(exits=ExitSettings(layers=(0, 2), loss_weight=0.3, threshold=0.003, measure="softmax")),
    "saturation": DynamicSettings(
        exits=ExitSettings(layers=(1,), loss_weight=0.3, threshold=0.985, measure="saturation")
    ),
    "sampled exits": DynamicSettings(
        exits=ExitSettings(
            layers=(0, 2),
            loss_weight=0.3,
            threshold=0.003,
            measure="softmax",
            token_share=0.5,
            vocabulary_samples=16,
            layer_weights=(0.1, 0.2),
            propagate=True,
        )
    ),
    "classified exits": DynamicSettings(
        exits=ExitSettings(
            layers=(0, 2), loss_weight=0.3, threshold=0.047, measure="classifier", token_share=0.5, propagate=True
        )
    ),
    "depths and exits": DynamicSettings(
        depths=DepthSettings(capacity=0.5, every=2, aux_weight=0.01),
        exits=ExitSettings(layers=(0, 1), loss_weight=0.3, threshold=0.003, measure="softmax"),
    ),
    "structured": PruningRule(mode="structured", scope="global"),
    "layer by layer": PruningRule(mode="structured", scope="layer"),
    "adaptive": PLASTICITY,
    "expert choice": MoeShape(num_experts=4, top_k=2, routing="expert-choice"),
    "balanced experts": MoeShape(num_experts=4, top_k=1, routing="balanced"),
    "2:4": PruningRule(mode="2:4"),
    "transposable": PruningRule(mode="2:4-transposable"),
    "blocks": PruningRule(mode="block", block_size=16),
    "sparse": DynamicSettings(sparse_attention=SparseAttentionSettings(buckets=4, block=4)),
}


def scenario(technique: str, **options) -> Scenario:
    requested = TECHNIQUES[technique]
    if isinstance(requested, MoeShape):
        return Scenario(steps=12, moe=requested, **options)
    if isinstance(requested, PlasticityRule):
        return Scenario(steps=16, plasticity=requested, **options)
    if isinstance(requested, PruningRule):
        return Scenario(steps=12, rule=requested, **options)
    return Scenario(steps=12, dynamic=requested, **options)


@cache
def reference(technique: str) -> dict:
    return run_workers(play, 1, scenario(technique, schedule="gpipe"))[0]


@pytest.mark.parametrize("technique", TECHNIQUES)
def test_scenario_exercises_the_technique(technique):
    result = reference(technique)
    plain = run_workers(
        play,
        1,
        replace(scenario(technique, schedule="gpipe"), dynamic=None, rule=PruningRule(), plasticity=None, moe=None),
    )[0]
    assert result["losses"] != plain["losses"]
    if technique == "adaptive":
        with_moments = {name for name in result["weights"] if name.endswith(".exp_avg")}
        frozen = [layer for layer in range(4) if f"layers.{layer}.mlp.fc1.weight.exp_avg" not in with_moments]
        assert frozen == [0, 1], "two layers froze, one after the other, and dropped their moments"
        return
    figures = result["metrics"][-1]
    if "expert" in technique:
        loads = figures["layers.3.mlp"]["expert_tokens"]
        assert max(loads) == min(loads), "every expert has as much to do"
    if technique == "depths":
        assert figures["layers.1"]["depth_share"] == [0.5]
    if technique == "depths and exits":
        shares = [step["layers.1"]["exit_share"][0] for step in result["metrics"]]
        before = [step["layers.0.mlp"]["exit_share"][0] for step in result["metrics"]]
        assert all(early <= late < 1 for early, late in zip(before, shares, strict=True))
        assert any(early < late for early, late in zip(before, shares, strict=True))
        assert 0.4 < figures["layers.3"]["depth_share"][0] < 0.7, "half of what is left goes through"
    if technique == "classified exits":
        weights = [name for name in result["weights"] if name.endswith("exit.classifier.weight")]
        assert weights == [f"layers.{layer}.mlp.exit.classifier.weight" for layer in (0, 2)]
        found = [step["layers.0.mlp"] for step in result["metrics"]]
        assert any(0 < step["exit_share"][0] < 1 for step in found)
        assert all(0 <= step["exit_agreement"][0] <= 1 for step in found)
    if technique in ("exits", "saturation"):
        shares = [
            step[f"layers.{TECHNIQUES[technique].exits.layers[0]}.mlp"]["exit_share"][0] for step in result["metrics"]
        ]
        assert all(0 < share < 1 for share in shares), "tokens leave, and tokens stay"


@pytest.mark.parametrize("model", ["gpt", "deepseek"])
def test_cached_frozen_layers_are_skipped_with_the_same_bits(model):
    """Frozen after step 2, samples again from step 5 on: with room for all of them the front runs no more."""
    plain = Scenario(model=model, steps=8, freeze=((2, 1),), prune=False, epoch=4, freeze_tied=True)
    [(losses, calls)] = run_workers(calls_of_front, 1, replace(plain, cache_bytes=1 << 24))
    [(again, every)] = run_workers(calls_of_front, 1, replace(plain, cache_bytes=1))
    assert losses == again
    assert {step for step in every if step > 2} == {3, 4, 5, 6, 7, 8}
    assert max(calls) == 6, "steps 5 and 6 bring the samples of 1 and 2, which were not frozen then"
    over_two = run_workers(calls_of_front, 2, replace(plain, cache_bytes=1 << 24))
    assert over_two[0][0] == losses
