"""Runs with grouped products of experts, which CPUs have too: nearly the loop's losses, the same bits on pipelines.

Also padded capacity in expert-parallel runs whose replicas have different numbers of tokens.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from dynmo_train.models.layers import grouped_linear
from dynmo_train.models.techniques.early_exit import ExitSettings
from dynmo_train.models.techniques.mixture_of_depths import DepthSettings
from dynmo_train.models.techniques.technique_blocks import DynamicSettings
from dynmo_train.parallel.dims import ParallelDims
from dynmo_train.parallel.process_groups import World
from tests.distributed.layouts import E2, FAMILIES, T2, Layout, close, play_layouts
from tests.distributed.test_placement import cut
from tests.distributed.workers import run_workers

pytestmark = [pytest.mark.distributed, pytest.mark.complete, pytest.mark.timeout(600)]

P2 = ParallelDims(pipeline=2)
# Without pruning: sparse products are not grouped.
PLAIN = {name: replace(FAMILIES[name], steps=4, prune=False) for name in ("mixtral", "mixtral-padded")}
MIXTRAL, PADDED = PLAIN.values()
MOVES = ((1, cut(2, 2)), (3, cut(2, 7)))
# A low threshold: the numbers of active tokens differ between replicas.
EXITS = ExitSettings(layers=(1, 2), loss_weight=0.3, threshold=0.005, measure="softmax")
DEPTHS = DepthSettings(capacity=0.5, every=2, aux_weight=0.01)
ONE = {
    **{name: Layout(dims=ParallelDims(), scenario=scenario) for name, scenario in PLAIN.items()},
    "depths": Layout(dims=ParallelDims(), scenario=replace(PADDED, dynamic=DynamicSettings(depths=DEPTHS))),
    "exits": Layout(dims=ParallelDims(), scenario=replace(PADDED, dynamic=DynamicSettings(exits=EXITS))),
}
PIPELINES = {
    "split backward": Layout(dims=P2, scenario=replace(MIXTRAL, schedule="zero-bubble", moves=MOVES)),
    "recomputed": Layout(dims=P2, scenario=replace(PADDED, recompute=True, moves=MOVES)),
    "selective": Layout(dims=P2, scenario=replace(MIXTRAL, schedule="gpipe", recompute=True, selective=True)),
}
OTHERS = {
    "mixtral, tensor": Layout(dims=T2, scenario=MIXTRAL),
    "mixtral, tensor, tokens": Layout(dims=T2, scenario=MIXTRAL, settings={"sequence_parallel": True}),
    "mixtral-padded, tensor": Layout(dims=T2, scenario=PADDED),
    "mixtral, experts": Layout(dims=E2, scenario=MIXTRAL),
    "mixtral-padded, experts": Layout(dims=E2, scenario=PADDED),
}


def play(world: World, layouts: list[Layout], *, is_grouped: bool) -> tuple[list[dict[str, Any]], int]:
    """The results of each layout, and the number of grouped products."""
    fast, usual, calls = grouped_linear.is_fast_device, grouped_linear.GROUPED_MM, []

    def counted(*arguments: Any, **options: Any) -> Any:
        calls.append(1)
        return usual(*arguments, **options)

    # Workers run other tests afterwards.
    try:
        grouped_linear.is_fast_device = lambda _rows: is_grouped
        grouped_linear.GROUPED_MM = counted
        return play_layouts(world, layouts), len(calls)
    finally:
        grouped_linear.is_fast_device, grouped_linear.GROUPED_MM = fast, usual


def play_loop(world: World, layouts: list[Layout]) -> tuple[list[dict[str, Any]], int]:
    return play(world, layouts, is_grouped=False)


def play_grouped(world: World, layouts: list[Layout]) -> tuple[list[dict[str, Any]], int]:
    return play(world, layouts, is_grouped=True)


@pytest.fixture(scope="module")
def loop():
    [(results, calls)] = run_workers(play_loop, 1, list(ONE.values()))
    assert calls == 0
    return dict(zip(ONE, results, strict=True))


@pytest.fixture(scope="module")
def one():
    [(results, calls)] = run_workers(play_grouped, 1, list(ONE.values()))
    assert calls > 100
    return dict(zip(ONE, results, strict=True))


@pytest.fixture(scope="module")
def two():
    layouts = PIPELINES | OTHERS
    (results, calls), (other, _) = run_workers(play_grouped, 2, list(layouts.values()))
    assert calls > 100
    assert results == other
    return dict(zip(layouts, results, strict=True))


@pytest.mark.parametrize("name", ["mixtral", "mixtral-padded"])
def test_grouped_products_have_nearly_the_losses_of_the_loop(name, loop, one):
    close(one[name], loop[name], norms=1e-3)


@pytest.mark.parametrize("name", PIPELINES)
def test_grouped_products_have_the_same_bits_on_any_pipeline(name, one, two):
    assert two[name] == one["mixtral-padded" if name == "recomputed" else "mixtral"]


@pytest.mark.parametrize("name", OTHERS)
def test_grouped_products_on_other_axes_are_near_one_process(name, one, two):
    close(two[name], one[name.partition(",")[0]], norms=1e-3)


@pytest.mark.parametrize("name", ["depths", "exits"])
def test_padded_experts_of_replicas_with_their_own_tokens_train(name, loop):
    """Mixture of depths has a fixed number of tokens in training only, early exits nowhere."""
    layout = replace(ONE[name], dims=E2)
    (results, _), (other, _) = run_workers(play_loop, 2, [layout])
    assert results == other
    close(results[0], loop[name], norms=1e-2, losses=1e-4)
