"""Sums of gradients over replicas: one copy of the gradients, and sums in bf16 on request."""

from __future__ import annotations

import gc
import weakref
from dataclasses import replace

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from dynmo_train.optim.grad_reducer import GradientReducer
from dynmo_train.parallel.dims import ParallelDims
from dynmo_train.parallel.process_groups import World, set_parallel_dims
from tests.distributed.layouts import Layout, engine_on
from tests.distributed.scenario import Scenario, batch_of
from tests.distributed.workers import run_workers

pytestmark = pytest.mark.complete

PLAIN = Scenario(prune=False, freeze=(), tied=False)


def second_copies(world: World) -> tuple[int, int]:
    """Items of which the gradients of the backward are alive once their sum has started, and after all sums."""
    engine = engine_on(
        set_parallel_dims(world, ParallelDims(data=2), 60), Layout(dims=ParallelDims(data=2), scenario=PLAIN)
    )
    store = engine.item_store
    for _, _, parameter in store.parameters():
        parameter.grad = torch.ones_like(parameter)
    before = {item: [weakref.ref(p.grad) for p in store.local_parameters(item).values()] for item in store.modules}
    reducer = GradientReducer(store, engine.world, overlap=True)
    alive = 0
    for item in store.modules:
        reducer.item_is_final(item)
        gc.collect()
        alive += any(gradient() is not None for gradient in before[item])
    reducer.finish()
    return alive, sum(int(bool((p.grad != 2).any())) for _, _, p in store.parameters())


def test_reduction_keeps_no_second_copy_of_the_gradients():
    assert run_workers(second_copies, 2) == [(0, 0)] * 2


def gradients(world: World, layout: Layout) -> dict[str, torch.Tensor]:
    engine = engine_on(set_parallel_dims(world, layout.dims, 60), layout)
    found: dict[str, torch.Tensor] = {}
    prepare = engine.prepare_gradients

    def look(step: int) -> torch.Tensor:
        squares = prepare(step)
        for _, name, parameter in engine.item_store.parameters():
            if parameter.grad is not None:
                found[name] = parameter.grad.clone()
        return squares

    engine.prepare_gradients = look  # type: ignore[method-assign]
    engine.train_step(batch_of(1), sampled=False)
    return found


@pytest.mark.parametrize("zero", [0, 2, 3])
def test_gradients_summed_in_bf16_are_near_those_in_float32(zero):
    settings = {"zero_stage": zero, "zero_sync_microbatches": bool(zero)}
    dims = ParallelDims(data=2)
    exact, rounded = (
        run_workers(gradients, 2, Layout(dims=dims, scenario=PLAIN, settings={**settings, "reduce_dtype": dtype}))[0]
        for dtype in (torch.float32, torch.bfloat16)
    )
    differs = False
    for name, gradient in exact.items():
        assert rounded[name].dtype == torch.float32
        scale = float(gradient.abs().max())
        torch.testing.assert_close(rounded[name], gradient, rtol=0.02, atol=0.02 * scale)
        differs |= not torch.equal(rounded[name], gradient)
        if not zero:
            # The sum itself is a number of bf16.
            assert torch.equal(rounded[name].bfloat16().float(), rounded[name])
    assert differs


class _Reduced(TorchDispatchMode):
    """Counts the elements that all-reduces and reduce-scatters of more than a row of figures receive."""

    def __init__(self) -> None:
        super().__init__()
        self.elements = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if str(func).startswith(("c10d.allreduce_", "c10d._reduce_scatter_base_", "c10d.reduce_scatter")):
            self.elements += sum(each.numel() for each in tree_leaves(args) if isinstance(each, torch.Tensor))
        return func(*args, **(kwargs or {}))


def reduced_elements(world: World, layouts: list[Layout]) -> list[tuple[int, int]]:
    """Elements that are reduced in the second step, and parameters of the front."""
    found = []
    for layout in layouts:
        engine = engine_on(set_parallel_dims(world, layout.dims, 60), layout)
        engine.train_step(batch_of(1), sampled=False)
        engine.after_step(1)
        front = sum(
            parameter.numel()
            for item in engine.local_names
            if item.startswith(("embedding", "layers.0", "layers.1"))
            for parameter in engine.item_store.blueprint(item).parameters()
        )
        with _Reduced() as counted:
            engine.train_step(batch_of(2), sampled=False)
        found.append((counted.elements, front))
    return found


def test_gradients_of_a_frozen_front_are_not_reduced():
    dims = ParallelDims(data=2)
    zero = {"zero_stage": 2, "zero_sync_microbatches": False}
    layouts = [
        Layout(dims=dims, scenario=replace(PLAIN, freeze=freeze), settings=settings)
        for settings in ({}, zero)
        for freeze in ((), ((1, 2),))
    ]
    for rank in run_workers(reduced_elements, 2, layouts):
        (dense, front), (frozen, _), (zero_dense, _), (zero_frozen, _) = rank
        assert dense - frozen == front > 0
        # A reduce-scatter has the gradients of all replicas as input, and a shard as output.
        assert zero_dense - zero_frozen >= front
