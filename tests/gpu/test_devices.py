"""What differs on CUDA: losses near those of the CPU, random numbers by item, moves and stages between devices."""

from __future__ import annotations

import os
from dataclasses import replace

import pytest
import torch

from dynmo_train.parallel.device_clock import clock_for
from dynmo_train.parallel.process_groups import destroy_world, init_world
from dynmo_train.parallel.random_stream import ItemStream, StreamKeys, drawing_from, item_dropout
from dynmo_train.parallel.seeding import default_generator, seeded
from dynmo_train.pipeline.partition import Partition
from tests.distributed.scenario import Scenario, digest, engine_of
from tests.distributed.workers import run_workers

pytestmark = [pytest.mark.distributed, pytest.mark.timeout(900)]
one_device = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device is here")
two_devices = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="there are not two CUDA devices")

PLAIN = Scenario(steps=6, prune=False, freeze=((3, 1),), dropout=0.0)
NAMES = tuple(item.name for item in PLAIN.family().items)


def play(scenario, device):
    """Losses and the digests of the weights and optimizer state of this process, on the device of its rank."""
    os.environ["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"
    world = init_world(device)
    try:
        engine, losses = engine_of(scenario, world), []
        for step in range(1, scenario.steps + 1):
            losses.append(engine.train_step(scenario.batch(step), sampled=step == 5).loss)
            engine.after_step(step)
            if step in dict(scenario.moves):
                engine.repartition(dict(scenario.moves)[step])
        state = {name: engine.item_store.export(name).tensors for name in engine.local_names}
        return losses, {name: digest(t.cpu()) for tensors in state.values() for name, t in tensors.items()}
    finally:
        destroy_world()


@one_device
@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
def test_losses_are_near_those_of_the_cpu(precision):
    scenario = replace(PLAIN, precision=precision)
    [(expected, _)] = run_workers(play, 1, scenario, "cpu", joins=False)
    [(losses, _)] = run_workers(play, 1, scenario, "cuda", joins=False)
    assert losses == pytest.approx(expected, rel=1e-4 if precision == "fp32" else 2e-2)


@one_device
@pytest.mark.parametrize(
    "changes",
    [{"recompute": True}, {"schedule": "zero-bubble"}, {"schedule": "gpipe", "recompute": True, "selective": True}],
)
def test_recomputing_and_schedules_give_the_same_bits_with_dropout(changes):
    scenario = replace(PLAIN, dropout=0.1)
    expected = run_workers(play, 1, scenario, "cuda", joins=False)
    assert run_workers(play, 1, replace(scenario, **changes), "cuda", joins=False) == expected


@one_device
def test_compiled_items_are_near_plain_ones():
    [(expected, _)] = run_workers(play, 1, PLAIN, "cuda", joins=False)
    [(losses, _)] = run_workers(play, 1, replace(PLAIN, compiled="inductor"), "cuda", joins=False)
    assert losses == pytest.approx(expected, rel=1e-4)


GRAPHS = replace(PLAIN, dropout=0.1, attention_dropout=0.0, schedule="gpipe")


@one_device
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_items_in_cuda_graphs_are_near_plain_ones(precision):
    """Four microbatches in flight, each with masks of its own; kernels may be chosen otherwise during a capture."""
    scenario = replace(GRAPHS, precision=precision)
    [(expected, _)] = run_workers(play, 1, scenario, "cuda", joins=False)
    [(losses, _)] = run_workers(play, 1, replace(scenario, cuda_graphs=True), "cuda", joins=False)
    assert losses == pytest.approx(expected, rel=1e-4 if precision == "fp32" else 2e-2)


@one_device
def test_items_in_cuda_graphs_have_the_same_bits_in_any_schedule():
    scenario = replace(GRAPHS, cuda_graphs=True)
    expected = run_workers(play, 1, scenario, "cuda", joins=False)
    for schedule in ("gpipe", "1f1b"):
        assert run_workers(play, 1, replace(scenario, schedule=schedule), "cuda", joins=False) == expected


@two_devices
def test_items_in_cuda_graphs_move_between_two_devices():
    scenario = replace(GRAPHS, cuda_graphs=True, schedule="1f1b")
    [(losses, weights)] = run_workers(play, 1, scenario, "cuda", joins=False)
    moved = replace(scenario, moves=((2, Partition.looped((NAMES[:3], NAMES[3:]), 2)),))
    results = run_workers(play, 2, moved, "cuda", joins=False)
    assert [reported for reported, _ in results] == [losses, losses]
    assert results[0][1] | results[1][1] == weights


@two_devices
def test_moves_between_two_devices_change_no_bit():
    scenario = replace(PLAIN, dropout=0.1)
    [(losses, weights)] = run_workers(play, 1, scenario, "cuda", joins=False)
    moved = replace(scenario, moves=((2, Partition.looped((NAMES[:3], NAMES[3:]), 2)),))
    results = run_workers(play, 2, moved, "cuda", joins=False)
    assert [reported for reported, _ in results] == [losses, losses]
    assert results[0][1] | results[1][1] == weights


@one_device
def test_items_draw_their_own_numbers_and_leave_the_generator_alone():
    device = torch.device("cuda", 0)
    before = default_generator(device).get_state()
    with seeded(device, 1, 2, "layers.0.mlp"):
        first = torch.rand(4, device=device)
    with seeded(device, 1, 2, "layers.0.mlp"):
        again = torch.rand(4, device=device)
    assert torch.equal(first, again)
    assert torch.equal(default_generator(device).get_state(), before)


@one_device
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_dropout_of_items_has_the_mask_of_the_cpu(dtype):
    """Integer operations only: also under torch.compile, which fuses them on a device."""
    masks = []
    for name in ("cpu", "cuda"):
        keys = StreamKeys(1, ["layers.0.mlp"], torch.device(name))
        keys.begin_step(3, range(4, 8))
        for run in (item_dropout, torch.compile(item_dropout, fullgraph=True)):
            with drawing_from(ItemStream(keys.key(5, 0))):
                masks.append((run(torch.ones(257, 63, dtype=dtype, device=name), 0.3, True) != 0).cpu())
    assert all(torch.equal(mask, masks[0]) for mask in masks)


@one_device
def test_clock_of_a_device_counts_its_kernels():
    device = torch.device("cuda", 0)
    clock, square = clock_for(device), torch.randn(2048, 2048, device=device)
    begin = clock.stamp()
    for _ in range(20):
        square = square @ square
    end = clock.stamp()
    torch.cuda.synchronize(device)
    assert clock.elapsed_ns(begin, end) > 10_000
