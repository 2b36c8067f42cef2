"""Placement never changes the mathematics, whatever the family: partitions inside blocks, schedules, moves."""

from __future__ import annotations

import itertools
from functools import cache

import pytest

from dynmo_train.models.layer_list import live_before
from dynmo_train.pipeline.partition import Partition, uniform_partition
from tests.distributed.families import SAMPLES
from tests.distributed.scenario import Scenario, play
from tests.distributed.workers import run_workers

pytestmark = [pytest.mark.distributed, pytest.mark.complete, pytest.mark.timeout(900)]

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
