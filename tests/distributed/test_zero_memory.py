"""Gradients that ZeRO keeps, and the operations of an update: counted in real steps on two and four replicas."""

from __future__ import annotations

from dataclasses import replace

import pytest
from torch.utils._python_dispatch import TorchDispatchMode

import dynmo_train.pipeline.pipeline_stage as stage_module
from dynmo_train.parallel.dims import ParallelDims
from dynmo_train.parallel.fsdp import param_groups
from dynmo_train.parallel.process_groups import World, set_parallel_dims
from tests.distributed.layouts import Layout, engine_on
from tests.distributed.scenario import Scenario, batch_of
from tests.distributed.workers import run_workers
from tests.levels import complete_but

pytestmark = [pytest.mark.distributed, pytest.mark.timeout(900)]

BASE = Scenario(steps=1, prune=False, freeze=())
SPLIT = replace(BASE, schedule="zero-bubble")


def gradient_elements(engine) -> tuple[int, int]:
    """Elements of whole gradients and of sharded sums that are alive now."""
    whole = sharded = 0
    for module in engine.item_store.modules.values():
        for group in param_groups(module):
            for parameter in group.fsdp_params:
                unsharded = getattr(parameter, "_unsharded_param", None)
                for gradient in (
                    parameter.unsharded_accumulated_grad,
                    None if unsharded is None else unsharded.grad,
                ):
                    whole += 0 if gradient is None else gradient.numel()
                if parameter.sharded_param.grad is not None:
                    sharded += parameter.sharded_param.grad.to_local().numel()
    return whole, sharded


def peaks(world: World, layout: Layout) -> dict[str, float]:
    """Most elements after any backward of a step, relative to the parameters of the rank's items."""
    engine = engine_on(set_parallel_dims(world, layout.dims, 60), layout)
    counts: list[tuple[int, int]] = []
    for name in ("backward_one_chunk", "backward_weight_one_chunk"):
        proper = getattr(stage_module.ItemStage, name)

        def counted(*arguments, proper=proper, **keywords):
            proper(*arguments, **keywords)
            counts.append(gradient_elements(engine))

        setattr(stage_module.ItemStage, name, counted)
    engine.train_step(batch_of(1, layout.scenario.model), sampled=False)
    count = sum(
        parameter.numel() for name in engine.local_names for parameter in engine.item_store.blueprint(name).parameters()
    )
    return {"whole": max(each[0] for each in counts) / count, "sharded": max(each[1] for each in counts) / count}


@pytest.mark.parametrize("stage", complete_but([2, 3], 2))
@pytest.mark.parametrize(
    ("replicas", "pipeline", "scenario"),
    [
        (2, 1, BASE),
        pytest.param(4, 1, BASE, marks=pytest.mark.complete),
        pytest.param(2, 2, SPLIT, marks=pytest.mark.complete),
    ],
    ids=["two replicas", "four replicas", "split backward"],
)
def test_zero_keeps_gradient_shards_only(stage, replicas, pipeline, scenario):
    layout = Layout(
        dims=ParallelDims(pipeline=pipeline, data=replicas),
        scenario=scenario,
        settings={"zero_stage": stage, "zero_sync_microbatches": True},
    )
    for rank in run_workers(peaks, layout.dims.size, layout):
        assert rank["whole"] == 0
        assert rank["sharded"] == pytest.approx(1 / replicas, rel=0.05)


def test_zero_per_step_keeps_whole_gradients():
    """The count sees what it has to see."""
    layout = Layout(dims=ParallelDims(data=2), scenario=BASE, settings={"zero_stage": 2})
    for rank in run_workers(peaks, 2, layout):
        assert rank == {"whole": 1, "sharded": 0}


class _Operations(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += 1
        return func(*args, **(kwargs or {}))


def update_operations(world: World, layout: Layout) -> int:
    """Operations dispatched between the end of the reduction and the end of the update, in the second step."""
    from dynmo_train.trainer import engine as engine_module

    engine = engine_on(set_parallel_dims(world, layout.dims, 60), layout)
    engine.train_step(batch_of(1, layout.scenario.model), sampled=False)
    with _Operations() as counted:
        proper = engine_module.ItemSquares.__call__

        def from_here(*arguments):
            counted.count = 0
            return proper(*arguments)

        engine_module.ItemSquares.__call__ = from_here
        engine.train_step(batch_of(2, layout.scenario.model), sampled=False)
        engine_module.ItemSquares.__call__ = proper
    return counted.count


def test_update_operations_do_not_grow_with_replicas():
    def counts(replicas: int, settings: dict) -> set[int]:
        layout = Layout(dims=ParallelDims(data=replicas), scenario=BASE, settings=settings)
        return set(run_workers(update_operations, replicas, layout))

    two, four = (counts(replicas, {}) for replicas in (2, 4))
    assert two == four
    assert max(two) < 100
    assert max(counts(4, {"zero_stage": 2, "zero_sync_microbatches": True})) < 100
