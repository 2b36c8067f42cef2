"""Products in float8: the same bits on any pipeline, near those of bfloat16 under every kind of parallelism."""

from __future__ import annotations

from dataclasses import replace

import pytest

from dynmo_train.models.float8 import Float8Settings
from dynmo_train.parallel.dims import ParallelDims
from tests.distributed.layouts import BASE, CUT, D2, FAMILIES, T2, ZERO, ZERO_3, Layout, play_named
from tests.distributed.scenario import PRECISIONS
from tests.distributed.test_placement import cut, vee

pytestmark = [pytest.mark.distributed, pytest.mark.complete, pytest.mark.timeout(900)]
pytest.importorskip("torchao", reason="the extra fp8 is not installed")

HALF_PRECISION = PRECISIONS["bf16"]
FLOAT8 = {"precision": replace(HALF_PRECISION, float8=Float8Settings())}
ROWWISE = {"precision": replace(HALF_PRECISION, float8=Float8Settings(recipe="rowwise", form="e4m3", first_in_bf16=1))}
# Pruned, frozen, moved: what changes an item while it trains.
HALF = replace(BASE, precision="bf16", steps=5)
PLAIN = replace(HALF, dropout=0.0, prune=False, freeze=())
MIXTRAL = replace(FAMILIES["mixtral"], precision="bf16", steps=4)
MOVING = ((2, cut(2, 2)), (4, cut(2, 7)))
ONE, P2 = ParallelDims(), ParallelDims(pipeline=2)
ALONE = {
    "one": Layout(dims=ONE, scenario=HALF, settings=FLOAT8),
    "rowwise": Layout(dims=ONE, scenario=HALF, settings=ROWWISE),
    "bf16": Layout(dims=ONE, scenario=HALF),
    "plain": Layout(dims=ONE, scenario=PLAIN, settings=FLOAT8),
    "plain, bf16": Layout(dims=ONE, scenario=PLAIN),
    "mixtral": Layout(dims=ONE, scenario=MIXTRAL, settings=FLOAT8),
    "compiled": Layout(dims=ONE, scenario=replace(PLAIN, compiled="aot_eager"), settings=FLOAT8),
}
PAIRS = {
    "moving": Layout(dims=P2, scenario=replace(HALF, moves=MOVING), settings=FLOAT8),
    "zero-bubble": Layout(dims=P2, scenario=replace(HALF, schedule="zero-bubble", moves=MOVING), settings=FLOAT8),
    "vee": Layout(
        dims=P2,
        scenario=replace(HALF, schedule="zb-v", virtual=2, recompute=True, moves=((3, vee(cut(2, 1, 5, 8))),)),
        settings=FLOAT8,
    ),
    "selective": Layout(dims=P2, scenario=replace(HALF, recompute=True, selective=True), settings=FLOAT8),
    "rowwise, moving": Layout(dims=P2, scenario=replace(HALF, moves=MOVING), settings=ROWWISE),
    "mixtral, moving": Layout(dims=P2, scenario=replace(MIXTRAL, moves=MOVING), settings=FLOAT8),
    "cut": Layout(dims=T2, scenario=PLAIN, settings=FLOAT8),
    "cut along tokens": Layout(dims=T2, scenario=PLAIN, settings=FLOAT8 | CUT),
    "replicas": Layout(dims=D2, scenario=PLAIN, settings=FLOAT8),
    "zero 2": Layout(dims=D2, scenario=PLAIN, settings=FLOAT8 | ZERO),
    "zero 3": Layout(dims=D2, scenario=PLAIN, settings=FLOAT8 | ZERO_3),
}


@pytest.fixture(scope="module")
def runs():
    return play_named(1, ALONE) | play_named(2, PAIRS)


@pytest.mark.parametrize(
    ("name", "alone"),
    [
        ("moving", "one"),
        ("zero-bubble", "one"),
        ("vee", "one"),
        ("selective", "one"),
        ("rowwise, moving", "rowwise"),
        ("mixtral, moving", "mixtral"),
    ],
)
def test_float8_has_the_same_bits_on_any_pipeline(runs, name, alone):
    assert runs[name] == runs[alone]


def test_float8_changes_the_result_a_little(runs):
    for ours, exact in (("one", "bf16"), ("rowwise", "bf16"), ("plain", "plain, bf16")):
        assert runs[ours]["losses"] != runs[exact]["losses"]
        assert runs[ours]["losses"] == pytest.approx(runs[exact]["losses"], rel=5e-3)
    assert runs["one"]["losses"] != runs["rowwise"]["losses"]


@pytest.mark.parametrize("name", ["cut", "cut along tokens", "replicas", "zero 2", "zero 3", "compiled"])
def test_float8_is_near_one_process_on_any_layout(runs, name):
    assert runs[name]["losses"] == pytest.approx(runs["plain"]["losses"], rel=2e-3)
    assert runs[name]["norms"] == pytest.approx(runs["plain"]["norms"], rel=5e-2)
    if name.startswith(("replicas", "zero", "cut")):
        assert runs[name]["losses"] != runs["plain, bf16"]["losses"], "no product ran in float8"
