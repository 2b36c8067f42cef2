"""What breaks placement invariance, done naively: the comparison that the engine passes must see each of these."""

from __future__ import annotations

import time
from dataclasses import replace

import pytest
import torch
from torch.distributed.pipelining import PipelineStage

import dynmo_train.models.layers.linear as linear_module
import dynmo_train.parallel.random_stream as random_stream
import dynmo_train.pipeline.pipeline_stage as pipeline_stage
import dynmo_train.pipeline.stage_module as stage_module
import dynmo_train.trainer.engine as engine_module
from dynmo_train.parallel.process_groups import World
from tests.distributed.scenario import Scenario, engine_of, merged, play
from tests.distributed.test_placement import cut, reference
from tests.distributed.workers import run_workers

pytestmark = [pytest.mark.distributed, pytest.mark.timeout(900)]

SHORT = Scenario(steps=6, prune=False, freeze=())


def differs(naive_play, scenario: Scenario, workers: int = 2) -> bool:
    """Whether the naive form gives other losses, norms or weights on several workers than on one."""
    alone = run_workers(naive_play, 1, replace(scenario, schedule="gpipe", virtual=1, moves=()))[0]
    spread = merged(run_workers(naive_play, workers, scenario))
    return any(alone[key] != spread[key] for key in ("losses", "norms", "weights"))


def stateful_random_numbers(world: World, scenario: Scenario):
    """Dropout draws from one generator a process, seeded at the start."""
    from contextlib import nullcontext

    torch.manual_seed(5)
    stage_module.seeded = stage_module.drawing_from = lambda *_: nullcontext()
    return play(world, scenario)


def local_microbatch_numbers(world: World, scenario: Scenario):
    """Keys count what this process has run, not the global microbatch."""
    calls = {"n": 0}

    def counted(_keys, _microbatch, _position):
        calls["n"] += 1
        return torch.full((2,), calls["n"])

    random_stream.StreamKeys.key = counted
    return play(world, scenario)


def untied_gradients(world: World, scenario: Scenario):
    """Each copy of the tied weight keeps its own gradient where the copies live apart."""
    proper = engine_module.add_tied_gradients

    def only_at_home(store, ties, owners, world, presence, done=()):
        if world.size == 1:
            proper(store, ties, owners, world, presence, done)

    engine_module.add_tied_gradients = only_at_home
    return play(world, scenario)


def norm_by_worker(world: World, scenario: Scenario):
    """The norm is summed in float32 over each worker's gradients first, and over workers after."""

    def naive(squares, store):
        gradients = [p.grad.flatten() for _, name, p in store.parameters() if p.grad is not None and "head" not in name]
        square = torch.linalg.vector_norm(torch.cat(gradients)).square().double().reshape(1)
        return torch.cat([square, square.new_zeros(len(scenario.family().items) - 1)])

    engine_module.ItemSquares.__call__ = naive
    return play(world, scenario)


def form_by_load(world: World, scenario: Scenario):
    """The form of a sparse product depends on which worker runs it."""

    def form(_table, mask_OI, _device):
        return "csr" if world.rank == 1 and float(mask_OI.float().mean()) < 0.2 else "dense"

    linear_module.SparseTable.form = form
    return play(world, scenario)


@pytest.mark.parametrize(
    ("naive", "scenario"),
    [
        (stateful_random_numbers, SHORT),
        (local_microbatch_numbers, SHORT),
        (untied_gradients, SHORT),
        (norm_by_worker, SHORT),
        (form_by_load, Scenario(freeze=(), steps=14)),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_comparison_of_a_naive_form_finds_a_difference(naive, scenario):
    assert differs(naive, scenario)


def test_comparison_of_the_engine_finds_no_difference():
    assert not differs(play, SHORT)


def gradients_of_split_backward(world: World, scenario: Scenario, naive: bool):
    """Names of the trainable parameters that got no gradient in a zero-bubble step behind a frozen front."""
    if naive:
        for name in ("backward_one_chunk", "backward_weight_one_chunk"):
            setattr(pipeline_stage.ItemStage, name, getattr(PipelineStage, name))
    engine = engine_of(scenario, world)
    engine.techniques.load_state_dict({}, 1)
    missing = []

    def look(_step: int) -> torch.Tensor:
        frozen = set(engine.techniques.frozen_items)
        missing.extend(
            name for item, name, p in engine.item_store.parameters() if item not in frozen and p.grad is None
        )
        return torch.ones(len(engine.family.items), dtype=torch.float64)

    engine.prepare_gradients = look
    from tests.distributed.scenario import batch_of

    try:
        engine.train_step(batch_of(1), sampled=False)
    except RuntimeError as error:
        return [f"failed: {error}"[:200]]
    return missing


def test_naive_split_backward_after_frozen_layers_drops_gradients():
    """Stage 0 wholly frozen, stage 1 the first that trains: torch's own split backward loses its weights' gradients."""
    behind = Scenario(schedule="zero-bubble", freeze=((1, 2),), start=cut(2, 5), prune=False)
    assert run_workers(gradients_of_split_backward, 2, behind, False) == [[], []]
    assert any(run_workers(gradients_of_split_backward, 2, behind, True))


def test_profiling_changes_no_bit():
    """Sampling every step or none gives the reference's bits; the reference samples every fifth."""
    expected = reference(Scenario())
    for every in (1, 10**6):
        got = merged(run_workers(sampled_play, 2, Scenario(), every))
        assert (got["losses"], got["weights"]) == (expected["losses"], expected["weights"])


def sampled_play(world: World, scenario: Scenario, every: int):
    proper = engine_module.Engine.train_step

    def step(self, batch, *, sampled):
        return proper(self, batch, sampled=batch.step % every == 0)

    engine_module.Engine.train_step = step
    return play(world, scenario)


def slow_worker_play(world: World, scenario: Scenario):
    proper = stage_module.StageModule.forward

    def forward(self, *entering, **kwargs):
        time.sleep(0.002 * world.rank)  # the slower worker
        return proper(self, *entering, **kwargs)

    stage_module.StageModule.forward = forward
    return play(world, scenario)


def test_timing_changes_no_bit():
    expected = reference(Scenario())
    got = merged(run_workers(slow_worker_play, 2, Scenario()))
    assert (got["losses"], got["weights"]) == (expected["losses"], expected["weights"])
