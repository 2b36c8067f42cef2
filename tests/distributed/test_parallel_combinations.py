"""Axes, precisions, families and techniques combined: nearly the figures of one process.

Each kind of parallelism is combined with each other one at least in a pair; a set of processes runs many.
"""

from __future__ import annotations

from dataclasses import replace

import pytest

from dynmo_train.models.techniques.early_exit import ExitSettings
from dynmo_train.models.techniques.mixture_of_depths import DepthSettings
from dynmo_train.models.techniques.technique_blocks import DynamicSettings, SparseAttentionSettings
from dynmo_train.parallel.dims import ParallelDims
from tests.distributed.layouts import (
    CUT,
    D2,
    DE,
    E2,
    FAMILIES,
    OVERLAP,
    PLAIN,
    T2,
    TD,
    TE,
    ZERO,
    ZERO_3,
    Layout,
    close,
    play,
    play_named,
)
from tests.distributed.scenario import Scenario
from tests.distributed.test_placement import cut

pytestmark = [pytest.mark.distributed, pytest.mark.complete, pytest.mark.timeout(900)]

STEPS = 4
DYNAMIC = {
    "depths": DynamicSettings(depths=DepthSettings(capacity=0.5, every=2, aux_weight=0.01)),
    "exits": DynamicSettings(exits=ExitSettings(layers=(1, 2), loss_weight=0.3, threshold=0.05, measure="softmax")),
    "classifier": DynamicSettings(
        exits=ExitSettings(layers=(1, 2), loss_weight=0.3, threshold=0.04745, measure="classifier", token_share=0.5)
    ),
    "sparse": DynamicSettings(sparse_attention=SparseAttentionSettings(buckets=4, block=4)),
}
MODELS = {name: replace(scenario, steps=STEPS) for name, scenario in FAMILIES.items()} | {
    name: replace(PLAIN, dynamic=settings, steps=STEPS, prune=False, freeze=((3, 1),))
    for name, settings in DYNAMIC.items()
}


def model(name: str, precision: str = "fp32", **options) -> Scenario:
    return replace(MODELS[name], precision=precision, **options)


def on(dims: ParallelDims, scenario: Scenario, settings: dict | None = None) -> Layout:
    return Layout(dims=dims, scenario=scenario, settings=settings or {})


DROPPING = replace(PLAIN, dropout=0.1, steps=STEPS, freeze=((3, 1),))
LOW = {"bf16": replace(DROPPING, precision="bf16"), "fp16": replace(DROPPING, precision="fp16", steps=7)}

ONE = {
    name: on(ParallelDims(), model(name))
    for name in ("bert", "mixtral", "depths", "exits", "classifier", "sparse", "t5")
} | {"bf16": on(ParallelDims(), replace(LOW["bf16"], dropout=0.0))}
TWO = {
    "t5": on(D2, model("t5")),
    "bf16": on(D2, LOW["bf16"]),
    "bf16, zero 2": on(D2, LOW["bf16"], ZERO),
    "fp16": on(D2, LOW["fp16"], OVERLAP),
    "fp16, zero 3": on(D2, LOW["fp16"], ZERO_3),
    "experts fp16": on(E2, model("mixtral", "fp16")),
    "experts fp16, zero 3": on(E2, model("mixtral", "fp16"), ZERO_3 | OVERLAP),
    "cut bf16": on(T2, replace(LOW["bf16"], dropout=0.0), CUT),
    **{f"cut {name}": on(T2, model(name), CUT) for name in ("bert", "mixtral", "depths", "exits", "sparse")},
    "tensor exits": on(T2, model("exits")),
    "cut classifier": on(T2, model("classifier"), CUT),
}
FOUR = {
    "cut experts, zero 3": on(TE, model("mixtral"), CUT | ZERO_3),
    "more experts, zero 2": on(DE, model("mixtral", schedule="gpipe"), ZERO),
    "cut depths, zero 2": on(TD, model("depths", recompute=True, selective=True), CUT | ZERO | OVERLAP),
}
ALL = on(
    ParallelDims(pipeline=2, tensor=2, data=2, expert=2),
    model("mixtral", schedule="interleaved-1f1b", virtual=2, steps=2, moves=((1, cut(2, 1, 5, 8)),)),
    CUT | ZERO | OVERLAP,
)


@pytest.fixture(scope="module")
def one():
    return play_named(1, ONE)


@pytest.fixture(scope="module")
def two():
    return play_named(2, TWO)


@pytest.fixture(scope="module")
def four():
    return play_named(4, FOUR)


@pytest.mark.parametrize(
    ("name", "same"),
    [
        ("bf16, zero 2", "bf16"),
        ("fp16, zero 3", "fp16"),
        ("experts fp16, zero 3", "experts fp16"),
    ],
)
def test_zero_stages_are_near_plain_replicas(name, same, two):
    # In bf16 and fp16 a last bit of a sum can be one of a weight's copy, too.
    close(two[name], two[same], norms=1e-3, losses=1e-4)


@pytest.mark.parametrize(
    "name", ["cut bert", "cut mixtral", "cut depths", "cut exits", "tensor exits", "cut classifier"]
)
def test_sequence_parallelism_gathers_for_items_of_all_tokens(name, one, two):
    close(two[name], one[name.split()[1]], norms=1e-3)


def test_evaluation_hash_buckets_do_not_depend_on_the_tensor_rank(one, two):
    """In training each rank draws axes of its own, as it draws dropout."""
    assert two["cut sparse"]["losses"][0] != pytest.approx(one["sparse"]["losses"][0], rel=1e-6)
    assert two["cut sparse"]["eval_loss"] == pytest.approx(one["sparse"]["eval_loss"], rel=1e-3)


@pytest.mark.parametrize("name", ["cut experts, zero 3", "more experts, zero 2"])
def test_experts_are_sharded_along_every_other_axis(name, one, four):
    close(four[name], one["mixtral"], norms=1e-3)


def test_mixture_of_depths_on_other_axes_is_near_one_process(one, four):
    close(four["cut depths, zero 2"], one["depths"], norms=1e-3)


def test_t5_on_replicas_has_nearly_the_losses_of_one_process(one, two):
    close(two["t5"], one["t5"])


def test_bfloat16_with_tensor_parallelism_is_near_one_process(one, two):
    assert two["cut bf16"]["losses"] == pytest.approx(one["bf16"]["losses"], rel=1e-3)


def test_float16_skips_the_same_steps_on_any_layout(two):
    assert None in two["fp16"]["norms"]
    assert two["fp16"]["norms"][-1] is not None


def test_run_on_all_axes_has_nearly_the_losses_of_one_process(one):
    """Eight processes: pipeline, tensor, data and expert parallel, ZeRO, tokens cut, interleaved; and a move."""
    [got] = play(8, [ALL])
    assert got["losses"] == pytest.approx(one["mixtral"]["losses"][:2], rel=1e-5)
    assert got["norms"] == pytest.approx(one["mixtral"]["norms"][:2], rel=1e-3)
