"""Shards of the vocabulary on other axes, and with ZeRO: at fixed sizes the same bits on any pipeline."""

from __future__ import annotations

from dataclasses import replace

import pytest

from dynmo_train.parallel.dims import ParallelDims
from tests.distributed.layouts import Layout, play_layouts
from tests.distributed.scenario import Scenario
from tests.distributed.test_placement import cut, vee
from tests.distributed.workers import run_workers

pytestmark = [pytest.mark.distributed, pytest.mark.timeout(900)]

SHARDED = Scenario(steps=7, freeze=((3, 1),), tied=False, shards=4, schedule="gpipe")
TIED = replace(SHARDED, tied=True)
PLAIN = replace(SHARDED, dropout=0.0, prune=False, freeze=())
T2, C2, D2 = ParallelDims(tensor=2), ParallelDims(data=2, context=2), ParallelDims(data=2)
# A quarter of the padded vocabulary is padding: the slice of the second rank of the last shard has no token.
CUT = {"shard_parts": 2}
TOKENS = {"sequence_parallel": True}
SYNC = {"zero_sync_microbatches": True}
MOVED = {"schedule": "zero-bubble", "moves": ((2, cut(2, 2)), (4, cut(2, 7)), (6, cut(2, 1)))}
VEE = {"schedule": "zb-v", "virtual": 2, "moves": ((3, vee(cut(2, 1, 5, 8))), (5, vee(cut(2, 3, 4, 7))))}
TWO = {
    "tensor": Layout(dims=T2, scenario=replace(SHARDED, **CUT)),
    "tensor, tied": Layout(dims=T2, scenario=replace(TIED, **CUT)),
    "sequence": Layout(dims=T2, scenario=replace(SHARDED, precision="bf16", **CUT), settings=TOKENS),
    "context": Layout(dims=C2, scenario=replace(TIED)),
    "zero 1": Layout(dims=D2, scenario=replace(TIED, precision="bf16"), settings={"zero_stage": 1}),
    "zero 2": Layout(dims=D2, scenario=SHARDED, settings=SYNC | {"zero_stage": 2}),
    "zero 3": Layout(dims=D2, scenario=replace(SHARDED, freeze=()), settings=SYNC | {"zero_stage": 3}),
}
NEAR = {
    "tensor": Layout(dims=T2, scenario=replace(PLAIN, **CUT)),
    "sequence, tied": Layout(dims=T2, scenario=replace(PLAIN, tied=True, **CUT), settings=TOKENS),
    "context": Layout(dims=C2, scenario=PLAIN),
    "zero 3, tied": Layout(dims=D2, scenario=replace(PLAIN, tied=True), settings={"zero_stage": 3}),
}


def on_pipeline(layout: Layout, options: dict) -> Layout:
    return replace(layout, dims=replace(layout.dims, pipeline=2), scenario=replace(layout.scenario, **options))


FOUR = {
    "tensor": on_pipeline(TWO["tensor"], MOVED),
    "tensor, tied": on_pipeline(TWO["tensor, tied"], {"schedule": "1f1b", "recompute": True}),
    "sequence": on_pipeline(TWO["sequence"], VEE),
    "context": on_pipeline(TWO["context"], MOVED),
    "zero 1": on_pipeline(TWO["zero 1"], VEE),
    "zero 2": on_pipeline(TWO["zero 2"], MOVED),
    "zero 3": on_pipeline(TWO["zero 3"], {**MOVED, "schedule": "1f1b"}),
}


def played(size: int, layouts: list[Layout]) -> list[dict]:
    results = run_workers(play_layouts, size, layouts)
    for other in results[1:]:
        assert other == results[0]
    return results[0]


@pytest.fixture(scope="module")
def two():
    found = played(2, [*TWO.values(), *NEAR.values()])
    return dict(zip([*TWO, *(f"{name}, near" for name in NEAR)], found, strict=True))


# Two copies of the shards of two replicas.
HYBRID = Layout(dims=ParallelDims(data=4, hsdp=2), scenario=replace(PLAIN, tied=True), settings={"zero_stage": 2})


@pytest.fixture(scope="module")
def four():
    return dict(zip([*FOUR, "hybrid"], played(4, [*FOUR.values(), HYBRID]), strict=True))


@pytest.fixture(scope="module")
def whole():
    """One process, without shards: by whether the tables are tied."""
    scenarios = [replace(PLAIN, tied=tied, shards=None) for tied in (False, True)]
    return played(1, [Layout(dims=ParallelDims(), scenario=each) for each in scenarios])


@pytest.mark.parametrize("name", FOUR)
def test_shards_have_the_same_bits_on_two_pipeline_ranks(two, four, name):
    assert four[name] == two[name]


@pytest.mark.parametrize("name", [*NEAR, "hybrid, tied"])
def test_shards_that_ranks_share_are_near_one_process(two, four, whole, name):
    expected, found = whole["tied" in name], two[f"{name}, near"] if name in NEAR else four["hybrid"]
    assert found["losses"] == pytest.approx(expected["losses"], rel=1e-5)
    assert found["norms"] == pytest.approx(expected["norms"], rel=1e-4)
    assert found["eval_loss"] == pytest.approx(expected["eval_loss"], rel=1e-5)
