"""Placement never changes the mathematics, whatever the family: partitions inside blocks, schedules, moves."""

from __future__ import annotations

import itertools
from dataclasses import replace
from functools import cache

import pytest

from dynmo_train.models.layer_list import live_before
from dynmo_train.pipeline.partition import Partition, uniform_partition
from tests.distributed.families import SAMPLES
from tests.distributed.scenario import Scenario, merged, play
from tests.distributed.workers import run_workers

pytestmark = [pytest.mark.distributed, pytest.mark.timeout(900)]

BASE = {"steps": 10, "freeze": ((3, 1), (6, 3))}


def cut(model: str, workers: int, *boundaries: int) -> Partition:
    """A partition that begins stages 1, 2, ... at these items of the list."""
    names = tuple(item.name for item in SAMPLES[model].family.items)
    ends = [0, *boundaries, len(names)]
    return Partition.looped(tuple(names[begin:end] for begin, end in itertools.pairwise(ends)), workers)


@cache
def reference(model: str) -> dict:
    """The family on one worker, GPipe, nothing recomputed."""
    return run_workers(play, 1, Scenario(model=model, schedule="gpipe", **BASE))[0]


PLACES = {
    "2 workers, moving, recompute": (2, {"recompute": True}, ((2, (2,)), (4, (7,)), (7, (3,)))),
    "2 workers, zero-bubble, moving": (2, {"schedule": "zero-bubble"}, ((3, (4,)), (5, (8,)))),
    "3 workers, an empty stage": (3, {}, ((2, (5, 5)), (5, (6, 8)))),
}


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("model", SAMPLES)
def test_partition_has_the_bits_of_one_worker(model, place):
    workers, options, moves = PLACES[place]
    steps = tuple((step, cut(model, workers, *boundaries)) for step, boundaries in moves)
    expected = reference(model)
    got = merged(run_workers(play, workers, Scenario(model=model, moves=steps, **BASE, **options)))
    for part in ("losses", "norms", "eval_loss", "metrics", "weights"):
        assert got[part] == expected[part], part


SPLIT = {"zero-bubble": 1, "zb-v": 2}


def play_selective(world, model: str) -> list[dict]:
    """1F1B without recomputation, then the schedules of split backwards with selective recomputation."""
    plain = Scenario(model=model, steps=3, freeze=((2, 1),))
    split = [replace(plain, schedule=name, virtual=virtual, selective=True) for name, virtual in SPLIT.items()]
    return [play(world, scenario) for scenario in (plain, *(replace(each, recompute=True) for each in split))]


@pytest.mark.parametrize("model", ["gpt", *SAMPLES])
def test_selective_recomputation_of_split_backwards_is_1f1b(model):
    plain, *split = (merged(list(results)) for results in zip(*run_workers(play_selective, 2, model), strict=True))
    assert all(each["losses"] == plain["losses"] for each in split)
    assert split == [plain] * len(SPLIT)


def test_metrics_of_experts_have_an_entry_for_each_layer():
    figures = reference("mixtral")["metrics"][0]
    assert list(figures) == [f"layers.{n}.mlp" for n in range(4)]
    assert all(sum(each["expert_tokens"]) == 2 * 16 * 2 for each in figures.values())
    assert all(each["load_balancing_loss"][0] > 0.9 for each in figures.values())


def test_boundary_values_of_t5_are_those_still_read():
    items = SAMPLES["t5"].family.items
    crossing = {item.name: live_before(items, index) for index, item in enumerate(items)}
    assert crossing["encoder.embedding"] == ()
    assert crossing["encoder.norm"] == ("encoder",)
    assert crossing["decoder.embedding"] == ("encoder",)
    assert crossing["decoder.layers.0.attention"] == ("encoder", "decoder")
    assert crossing["decoder.layers.1.cross_attention"] == ("encoder", "decoder")
    # Nobody attends to the encoder any more: it is not sent.
    assert crossing["decoder.layers.1.mlp"] == ("decoder",)
    assert crossing["head"] == ("decoder",)
    stages = [list(stage) for stage in uniform_partition(items, 2).stages]
    assert stages[0][-2:] == ["encoder.norm", "decoder.embedding"]
    assert stages[1][0] == "decoder.layers.0.attention"
