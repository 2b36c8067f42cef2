"""Placement never changes the mathematics: one worker against any other way to place the same layers, bit for bit."""

from __future__ import annotations

import itertools
from dataclasses import replace
from functools import cache

import pytest
import torch

from dynmo_train.parallel.process_groups import World
from dynmo_train.pipeline.partition import Partition, uniform_partition
from tests.distributed.scenario import MICROBATCHES, Scenario, batch_of, engine_of, play
from tests.distributed.workers import run_workers

pytestmark = [pytest.mark.distributed, pytest.mark.timeout(900)]

NAMES = tuple(item.name for item in Scenario().family().items)


def cut(workers: int, *boundaries: int) -> Partition:
    """A partition that begins stages 1, 2, ... at these items of the list."""
    ends = [0, *boundaries, len(NAMES)]
    return Partition.looped(tuple(NAMES[begin:end] for begin, end in itertools.pairwise(ends)), workers)


def vee(partition: Partition) -> Partition:
    """The same stages down the workers and back up."""
    return Partition.v_shaped(partition.stages, partition.num_ranks)


@cache
def reference(scenario: Scenario) -> dict:
    """The scenario on one worker, GPipe, nothing recomputed."""
    plain = replace(scenario, schedule="gpipe", virtual=1, recompute=False, selective=False, moves=(), start=None)
    return run_workers(play, 1, plain)[0]


WANDER = ((3, cut(2, 2)), (9, cut(2, 7)), (13, cut(2, 1)), (16, cut(2, 9)))


def test_scenario_exercises_what_it_claims():
    """The reference prunes, freezes, clips and drops out: without each of these it has other losses."""
    base = reference(Scenario())
    assert min(base["norms"]) > Scenario().clip, "the gradient norm must be above the limit to be clipped"
    assert any(name.endswith(".mask") for name in base["weights"])
    frozen = [name for name in NAMES if name.startswith(("layers.0.", "layers.1.", "layers.2."))]
    assert not [name for name in base["weights"] for item in frozen if name.startswith(item) and "exp_avg" in name]
    for other in (Scenario(prune=False), Scenario(freeze=()), Scenario(clip=0.0), Scenario(freeze_tied=True)):
        assert reference(other)["losses"] != base["losses"]


def test_lower_precision_stays_near_float32_and_float16_overflows():
    base = reference(Scenario())
    for name in ("bf16", "fp16"):
        other = reference(Scenario(precision=name))
        assert other["losses"] != base["losses"]
        assert other["losses"][0] == pytest.approx(base["losses"][0], rel=1e-2)
        assert other["eval_loss"] == pytest.approx(base["eval_loss"], rel=5e-2)
    half = reference(Scenario(precision="fp16"))
    assert None in half["norms"], "no step overflowed"
    scales = half["scales"]
    assert any(after < before for before, after in itertools.pairwise(scales))
    assert any(after > before for before, after in itertools.pairwise(scales))


def test_uniform_partition_equals_megatrons():
    items = Scenario().family().items
    assert uniform_partition(items, 2).stages == (NAMES[:5], NAMES[5:])
    assert uniform_partition(items, 3).stages == (NAMES[:5], NAMES[5:7], NAMES[7:])


def grad_modes(world: World, scenario: Scenario) -> list[bool]:
    """Whether autograd records each call of the first layer: in a step, then in an evaluation."""
    engine = engine_of(scenario, world)
    enabled: list[bool] = []
    if "embedding" in engine.item_store.modules:
        module = engine.item_store.modules["embedding"]
        module.register_forward_hook(lambda *_: enabled.append(torch.is_grad_enabled()))
    engine.train_step(batch_of(1), sampled=False)
    engine.evaluate([batch_of(1)])
    return enabled


@pytest.mark.parametrize("changes", [{"schedule": "1f1b"}, {"schedule": "zb-v", "virtual": 2}])
def test_evaluation_records_no_backward(changes):
    first, _ = run_workers(grad_modes, 2, Scenario(freeze=(), prune=False, **changes))
    assert first == [True] * MICROBATCHES + [False] * MICROBATCHES
