"""FSDP2 over the items of a stage: the order and the number of its collectives, and hybrid sharding."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from functools import partial

import pytest
import torch.distributed as dist
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.fsdp._fully_shard import _fsdp_param_group

from dynmo_train.parallel.dims import ParallelDims
from dynmo_train.parallel.fsdp import param_groups
from dynmo_train.parallel.process_groups import World, set_parallel_dims
from tests.distributed.layouts import D2, FAMILIES, ZERO, ZERO_3, Layout, close, engine_on, play_named
from tests.distributed.scenario import Scenario, batch_of
from tests.distributed.test_parallel import LONG
from tests.distributed.test_placement import cut
from tests.distributed.workers import run_workers

pytestmark = [pytest.mark.complete, pytest.mark.distributed, pytest.mark.timeout(900)]

BASE = Scenario(steps=2, prune=False, freeze=((1, 2),), dropout=0.0)
# Two copies of the shards; its context-parallel ranks share the tokens of two microbatches each.
HYBRID = ParallelDims(data=4, context=2, hsdp=2)
PER_STEP = {"zero_stage": 2}
COUNTED = {
    "zero 1": Layout(dims=D2, scenario=BASE, settings={"zero_stage": 1}),
    "zero 2": Layout(dims=D2, scenario=BASE, settings=ZERO),
    "zero 3": Layout(dims=D2, scenario=BASE, settings=ZERO_3),
    "zero 3, recomputing": Layout(dims=D2, scenario=replace(BASE, recompute=True), settings=ZERO_3),
}
COUNTED_HYBRID = {
    "zero 2": Layout(dims=HYBRID, scenario=BASE, settings=ZERO),
    "zero 2, per step": Layout(dims=HYBRID, scenario=BASE, settings=PER_STEP),
    "zero 3": Layout(dims=HYBRID, scenario=BASE, settings=ZERO_3),
}


def events(world: World, layouts: list[Layout]) -> list[list[list[str]]]:
    """For each layout and step: g a gather, f a forward, r a reduce-scatter, each with the item's place; all-reduces.

    Items are frozen after the first step.
    """
    return [_events(set_parallel_dims(world, layout.dims, 60), layout) for layout in layouts]


def _events(world: World, layout: Layout) -> list[list[str]]:
    engine = engine_on(world, layout)
    places: dict[int, int] = {}
    happened: list[str] = []
    contexts = set()

    def forward(place, proper, *arguments, **keywords):
        happened.append(f"f{place}")
        return proper(*arguments, **keywords)

    for place, module in enumerate(engine.item_store.modules.values()):
        places |= {id(each): place for group in param_groups(module) for each in group.fsdp_params}
        module.forward = partial(forward, place, module.forward)

    def recorded(kind, proper, parameters, *arguments, **keywords):
        happened.append(f"{kind}{places[id(parameters[0])]}")
        return proper(parameters, *arguments, **keywords)

    proper_sum = dist.all_reduce

    def all_reduce(tensor, *arguments, **keywords):
        # Sums over pipeline ranks have no gradients.
        if keywords.get("async_op"):
            happened.append("all-reduce")
        return proper_sum(tensor, *arguments, **keywords)

    gather, reduce = _fsdp_param_group.foreach_all_gather, _fsdp_param_group.foreach_reduce
    steps = []
    try:
        _fsdp_param_group.foreach_all_gather = partial(recorded, "g", gather)
        _fsdp_param_group.foreach_reduce = partial(recorded, "r", reduce)
        dist.all_reduce = all_reduce
        for step in range(1, layout.scenario.steps + 1):
            happened.clear()
            engine.train_step(batch_of(step), sampled=False)
            engine.after_step(step)
            steps.append(list(happened))
            for module in engine.item_store.modules.values():
                contexts.add(id(fully_shard.state(module)._comm_ctx))
    finally:
        _fsdp_param_group.foreach_all_gather, _fsdp_param_group.foreach_reduce = gather, reduce
        dist.all_reduce = proper_sum
    assert all(isinstance(module, FSDPModule) for module in engine.item_store.modules.values())
    assert len(contexts) == 1, "all items use the same streams"
    return steps


def counted(size: int, layouts: dict[str, Layout]) -> dict[str, list[list[str]]]:
    ranks = run_workers(events, size, list(layouts.values()))
    assert all(rank == ranks[0] for rank in ranks)
    return dict(zip(layouts, ranks[0], strict=True))


@pytest.fixture(scope="module")
def two():
    return counted(2, COUNTED)


@pytest.fixture(scope="module")
def four():
    return counted(4, COUNTED_HYBRID)


ITEMS = len(BASE.family().items)
LAST = ITEMS - 1
# The embedding, and attention and MLP of two blocks.
FROZEN = 5


def forward_order() -> list[str]:
    """Item k + 1 is gathered before the forward of item k."""
    ahead = [event for place in range(LAST) for event in (f"g{place + 1}", f"f{place}")]
    return ["g0", *ahead, f"f{LAST}"]


def backward_order(first: int = 0) -> list[str]:
    """Item k - 1 is gathered before the gradients of item k are reduced; nothing before the first item that trains."""
    ahead = [event for place in range(LAST, first, -1) for event in (f"g{place - 1}", f"r{place}")]
    return [f"g{LAST}", *ahead, f"r{first}"]


def test_zero_3_gathers_one_item_ahead_in_both_directions(two):
    first, frozen = two["zero 3"]
    assert first == 2 * (forward_order() + backward_order())
    assert frozen == 2 * (forward_order() + backward_order(FROZEN))


def test_zero_3_recomputes_with_the_parameters_of_the_backward(two):
    [first, _] = two["zero 3, recomputing"]
    gathers = [event for event in first if event[0] != "f"]
    assert gathers == [event for event in 2 * (forward_order() + backward_order()) if event[0] != "f"]


def test_zero_2_gathers_once_per_step(two):
    first, _ = two["zero 2"]
    kinds = Counter(event[0] for event in first)
    assert kinds == {"g": ITEMS, "f": 2 * ITEMS, "r": 2 * ITEMS}
    assert first[: 2 * ITEMS] == forward_order()


def test_zero_1_reduces_once_per_step(two):
    first, _ = two["zero 1"]
    assert Counter(event[0] for event in first) == {"g": ITEMS, "f": 2 * ITEMS, "r": ITEMS}
    assert first[-ITEMS:] == [f"r{place}" for place in range(ITEMS)]


@pytest.mark.parametrize(
    ("name", "gathers", "scatters"), [("zero 2", 1, 2), ("zero 2, per step", 1, 1), ("zero 3", 4, 2)]
)
def test_hybrid_sharding_sums_over_copies_once_per_step(name, gathers, scatters, four):
    first, frozen = four[name]
    assert Counter(event[0] for event in first) == {
        "g": gathers * ITEMS,
        "f": 2 * ITEMS,
        "r": scatters * ITEMS,
        "a": ITEMS,
    }
    assert set(first[-ITEMS:]) == {"all-reduce"}
    assert Counter(event[0] for event in frozen)["a"] == ITEMS - FROZEN


def hybrid(scenario: Scenario, settings: dict, **dims: int) -> Layout:
    return Layout(dims=ParallelDims(**{"data": 4, "hsdp": 2} | dims), scenario=scenario, settings=settings)


MOVING = replace(LONG, steps=5, moves=((2, cut(2, 2)), (4, cut(2, 7))))
STEPS_5 = replace(MOVING, moves=())
MIXTRAL = FAMILIES["mixtral"]
ALONE = {"long": Layout(dims=ParallelDims(), scenario=LONG)}
HYBRIDS = {
    "zero 2, long": hybrid(LONG, ZERO, hsdp=1),
    "hybrid 1, long": hybrid(LONG, {"zero_stage": 1}),
    "hybrid 2, long": hybrid(LONG, ZERO),
    "hybrid 3, long": hybrid(LONG, ZERO_3 | {"overlap_reduction": True}),
    "hybrid 2": hybrid(STEPS_5, ZERO),
    "hybrid 3, bf16": hybrid(replace(STEPS_5, precision="bf16"), ZERO_3),
    "experts": hybrid(MIXTRAL, ZERO, hsdp=1, expert=2),
    "hybrid experts": hybrid(MIXTRAL, ZERO_3, expert=2),
}
PLACED = {
    "hybrid 2": hybrid(MOVING, ZERO | {"overlap_reduction": True}, pipeline=2),
    "hybrid 3, bf16": hybrid(replace(MOVING, schedule="zero-bubble", precision="bf16"), ZERO_3, pipeline=2),
}


@pytest.fixture(scope="module")
def results():
    return play_named(1, ALONE) | play_named(4, HYBRIDS)


@pytest.mark.parametrize("name", ["hybrid 1, long", "hybrid 2, long", "hybrid 3, long"])
@pytest.mark.parametrize("expected", ["long", "zero 2, long"])
def test_hybrid_sharding_is_near_other_layouts_after_20_steps(name, expected, results):
    close(results[name], results[expected])


def test_hybrid_sharding_of_experts_is_near_zero(results):
    close(results["hybrid experts"], results["experts"])


def test_hybrid_zero_3_has_the_bits_of_zero_2(results):
    assert results["hybrid 3, long"] == results["hybrid 2, long"]


def test_hybrid_sharding_has_the_same_bits_on_any_pipeline(results):
    for name, moving in play_named(8, PLACED).items():
        assert moving == results[name]
