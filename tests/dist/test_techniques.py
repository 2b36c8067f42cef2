"""Techniques that change the model: one worker against any placement, bit for bit, with everything else on as well."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import pytest
from scenario import Scenario, merged, play
from workers import run_workers

from dynmo_train.models.dynamic import DynamicSettings, SparseAttentionSettings
from dynmo_train.models.early_exit import ExitSettings
from dynmo_train.models.mixture_of_depths import DepthSettings
from dynmo_train.pipeline.partition import Partition

pytestmark = [pytest.mark.dist, pytest.mark.timeout(300)]

TECHNIQUES = {
    "depths": DynamicSettings(depths=DepthSettings(capacity=0.5, every=2, aux_weight=0.01)),
    "exits": DynamicSettings(exits=ExitSettings(layers=(0, 2), loss_weight=0.3, threshold=0.003, measure="softmax")),
    "saturation": DynamicSettings(
        exits=ExitSettings(layers=(1,), loss_weight=0.3, threshold=0.98, measure="saturation")
    ),
    "sparse": DynamicSettings(sparse_attention=SparseAttentionSettings(buckets=4, block=4)),
}


def scenario(technique: str, **options) -> Scenario:
    return Scenario(steps=12, dynamic=TECHNIQUES[technique], **options)


def cut(technique: str, *boundaries: int) -> Partition:
    names = tuple(item.name for item in scenario(technique).family().items)
    ends = [0, *boundaries, len(names)]
    stages = tuple(names[begin:end] for begin, end in zip(ends, ends[1:], strict=False))
    return Partition(stages=stages, workers=2)


@cache
def reference(technique: str) -> dict:
    return run_workers(play, 1, scenario(technique, schedule="gpipe"))[0]


CASES = {
    "depths, moving": (2, "depths", {"moves": True, "recompute": True}),
    "depths, zero-bubble": (2, "depths", {"schedule": "zero-bubble"}),
    "exits, moving": (2, "exits", {"moves": True, "recompute": True}),
    "exits, zero-bubble": (2, "exits", {"schedule": "zero-bubble"}),
    "exits, interleaved": (2, "exits", {"schedule": "interleaved-1f1b", "virtual": 2}),
    "saturation, moving": (2, "saturation", {"moves": True}),
    "sparse, moving": (2, "sparse", {"moves": True, "recompute": True}),
}


@pytest.mark.parametrize("name", CASES)
def test_same_bits_as_one_worker(name):
    workers, technique, options = CASES[name]
    options = dict(options)
    if options.pop("moves", False):
        options["moves"] = ((3, cut(technique, 2)), (7, cut(technique, 4)))
    expected = reference(technique)
    got = merged(run_workers(play, workers, scenario(technique, **options)))
    for key in ("losses", "norms", "held_out", "figures", "weights"):
        assert got[key] == expected[key], key


@pytest.mark.parametrize("technique", TECHNIQUES)
def test_the_scenario_exercises_the_technique(technique):
    told = reference(technique)
    plain = run_workers(play, 1, replace(scenario(technique, schedule="gpipe"), dynamic=None))[0]
    assert told["losses"] != plain["losses"]
    figures = told["figures"][-1]
    if technique == "depths":
        assert figures["layers.1"]["depth_share"] == [0.5]
    if technique in ("exits", "saturation"):
        shares = [step[f"layers.{TECHNIQUES[technique].exits.layers[0]}.mlp"]["exit_share"][0] for step in told["figures"]]
        assert all(0 < share < 1 for share in shares), "tokens leave, and tokens stay"
