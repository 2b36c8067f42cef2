"""Products that overlap with the collectives of sequence parallelism: near the plain ones, alone and in a run."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from dynmo_train.models.layers.linear import PrunableLinear
from dynmo_train.parallel import async_tensor_parallel
from dynmo_train.parallel.async_tensor_parallel import symmetric_memory_obstacle
from dynmo_train.parallel.dims import ParallelDims
from dynmo_train.parallel.process_groups import set_parallel_dims
from dynmo_train.parallel.tensor_parallel import tensor_region
from tests.distributed.layouts import CUT, FAMILIES, PLAIN, PT, T2, Layout, close, engine_on, play_named
from tests.distributed.scenario import MICROBATCHES, batch_of
from tests.distributed.test_placement import cut
from tests.distributed.whole_runs import train, write_data
from tests.distributed.workers import run_workers

pytestmark = [pytest.mark.distributed, pytest.mark.complete, pytest.mark.timeout(900)]

ASYNC = CUT | {"async_tensor_parallel": True}
LLAMA = FAMILIES["llama"]
TWO = {
    "plain": Layout(dims=T2, scenario=PLAIN, settings=CUT),
    "async": Layout(dims=T2, scenario=PLAIN, settings=ASYNC),
    "llama": Layout(dims=T2, scenario=LLAMA, settings=CUT),
    "llama, async": Layout(dims=T2, scenario=LLAMA, settings=ASYNC),
    "llama, async, recomputing": Layout(dims=T2, scenario=replace(LLAMA, recompute=True), settings=ASYNC),
}
FOUR = {
    "async": Layout(dims=PT, scenario=replace(PLAIN, moves=((2, cut(2, 2)), (4, cut(2, 7)))), settings=ASYNC),
    "llama, async": Layout(dims=PT, scenario=replace(LLAMA, schedule="zero-bubble"), settings=ASYNC),
}


def multiply(world):
    """Output and gradients of a column- and a row-parallel layer, plain and overlapped, and their number of gathers."""
    world = set_parallel_dims(world, ParallelDims(tensor=2), 60)
    obstacle = symmetric_memory_obstacle(world)
    if obstacle is not None and world.device.type == "cuda":
        return [], obstacle
    results = []
    for overlaps in (False, True):
        region = tensor_region(world, sequence=True, overlaps=overlaps)
        torch.manual_seed(world.tensor_rank)
        first, second = PrunableLinear(8, 12, world.device), PrunableLinear(12, 8, world.device)
        for layer in (first, second):
            torch.nn.init.normal_(layer.weight)
            layer.overlap = region if overlaps else None
        first.enter, second.leave = region.enter, region.leave
        x = torch.randn(3, 4, 8, device=world.device, requires_grad=True)
        y = second(first(x))
        y.backward(torch.randn(3, 4, 8, device=world.device))
        grads = [x.grad, *(p.grad for layer in (first, second) for p in (layer.weight, layer.bias))]
        results.append([each.detach().cpu() for each in (y, *grads)])
    return results, obstacle


def count_gathers(world):
    """Fused gathers of one step."""
    engine = engine_on(set_parallel_dims(world, T2, 60), Layout(dims=T2, scenario=LLAMA, settings=ASYNC))
    fused, count = async_tensor_parallel._gather_product, 0

    def counted(*arguments):
        nonlocal count
        count += 1
        return fused(*arguments)

    async_tensor_parallel._gather_product = counted
    try:
        engine.train_step(batch_of(1, "llama"), sampled=False)
    finally:
        async_tensor_parallel._gather_product = fused
    return count, len(engine.family.items) - 2


@pytest.fixture(scope="module")
def two():
    return play_named(2, TWO)


def test_overlapped_products_equal_plain_ones_forward_and_backward():
    for (plain, overlapped), obstacle in run_workers(multiply, 2):
        for one, other in zip(plain, overlapped, strict=True):
            torch.testing.assert_close(other, one, rtol=1e-5, atol=1e-5)
        assert obstacle == "this process runs on cpu"


def test_async_tensor_parallel_step_gathers_once_per_end_of_a_layer():
    # In the forward ahead of ``qkv``, and of gate and up together; in the backward ahead of both row-parallel layers.
    for count, sublayers in run_workers(count_gathers, 2):
        assert count == 2 * sublayers * MICROBATCHES


def test_async_tensor_parallel_run_is_near_the_plain_one(two):
    close(two["async"], two["plain"])
    close(two["llama, async"], two["llama"])


def test_async_tensor_parallel_has_the_same_bits_on_any_pipeline(two):
    four = play_named(4, FOUR)
    assert four["async"] == two["async"]
    assert four["llama, async"] == two["llama, async"] == two["llama, async, recomputing"]


def test_async_tensor_parallel_without_symmetric_memory_runs_as_plain(tmp_path):
    text = train(
        write_data(tmp_path / "data"),
        tmp_path / "run",
        2,
        "--sequence-parallel",
        "--async-tensor-parallel",
        tensor_model_parallel_size="2",
        train_iters="2",
        eval_iters="0",
    )
    line = "warning: --async-tensor-parallel has no effect: no symmetric memory: this process runs on cpu"
    assert text.count(line) == 1
