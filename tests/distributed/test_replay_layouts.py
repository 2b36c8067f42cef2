"""Digests of a step on any layout: equal where placement alone differs, compared as far as the bits are the same."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from dynmo_train.formats.step_digests import StepDigests, StepFigures, TensorKey
from dynmo_train.models.sharding import expert_of
from dynmo_train.parallel.dims import ParallelDims
from dynmo_train.parallel.process_groups import World, set_parallel_dims
from dynmo_train.trainer.replay.compare_digests import Comparability, first_different_tensor
from dynmo_train.trainer.replay.step_digests import gathered_copies, gathered_digests, layout_of, observed_step
from tests.distributed.layouts import CUT, D2, E2, FAMILIES, OVERLAP, T2, ZERO, ZERO_1, ZERO_3, Layout, engine_on
from tests.distributed.scenario import MICROBATCHES, Scenario, batch_of
from tests.distributed.workers import run_workers

pytestmark = [pytest.mark.distributed, pytest.mark.timeout(900)]

BASE = Scenario(prune=False, freeze=())
C2 = ParallelDims(data=2, context=2)
PLAIN = replace(BASE, dropout=0.0)
EXPERTS = replace(FAMILIES["mixtral"], freeze=())
SHARDED = replace(PLAIN, tied=False, shards=4, schedule="gpipe")
ONE = {
    "plain": Layout(dims=ParallelDims(), scenario=BASE),
    "bf16": Layout(dims=ParallelDims(), scenario=replace(BASE, precision="bf16")),
    "untied": Layout(dims=ParallelDims(), scenario=replace(PLAIN, tied=False)),
}
TWO = {
    "tensor": Layout(dims=T2, scenario=BASE),
    "sequence": Layout(dims=T2, scenario=replace(BASE, precision="bf16"), settings=CUT),
    "context": Layout(dims=C2, scenario=BASE),
    "experts": Layout(dims=E2, scenario=EXPERTS),
    "replicas": Layout(dims=D2, scenario=BASE, settings=OVERLAP),
    "zero 1": Layout(dims=D2, scenario=BASE, settings=ZERO_1),
    "zero 2": Layout(dims=D2, scenario=BASE, settings=ZERO | OVERLAP),
    "zero 3": Layout(dims=D2, scenario=BASE, settings=ZERO_3),
    "zero 3, bf16": Layout(dims=D2, scenario=replace(BASE, precision="bf16"), settings={"zero_stage": 3}),
    "experts, zero 2": Layout(dims=E2, scenario=EXPERTS, settings=ZERO),
    "vocabulary": Layout(dims=D2, scenario=SHARDED),
}
# The schedules of the same layouts on two pipeline ranks.
SPLIT = {"schedule": "zero-bubble"}
SCHEDULES = {
    **dict.fromkeys(("tensor", "experts", "zero 1", "zero 2"), SPLIT),
    "sequence": {"schedule": "zb-v", "virtual": 2},
    "context": {"schedule": "1f1b"},
    "vocabulary": {"schedule": "zb-v", "virtual": 2},
}
FOUR = {
    name: replace(
        layout,
        dims=replace(layout.dims, pipeline=2),
        settings={name: value for name, value in layout.settings.items() if name != "overlap_reduction"},
        scenario=replace(layout.scenario, **SCHEDULES[name]),
    )
    for name, layout in TWO.items()
    if name in SCHEDULES
}
WEIGHT = "layers.1.mlp.fc1.weight"
WHOLE = TensorKey(direction="weight_gradient", item="layers.1.mlp", parameter=WEIGHT)
LAST = [
    replace(WHOLE, direction="accumulated_gradient", microbatch=microbatch, part=part)
    for microbatch in range(MICROBATCHES)
    for part in range(2)
]
UP_TO_BACKWARD = ["initial_weight", "activation", "activation_gradient"]


def observed(world: World, layout: Layout) -> tuple[StepDigests, dict[TensorKey, torch.Tensor]]:
    """The digests of the first step, and copies of the gradients of one weight."""
    world = set_parallel_dims(world, layout.dims, 60)
    engine = engine_on(world, layout)
    result, observer = observed_step(engine, batch_of(1, layout.scenario.model), 1, [WHOLE, *LAST])
    names = (*(item.name for item in engine.family.items), *engine.partition.shards)
    digests = StepDigests(
        run_id="run",
        step=1,
        loaded_step=0,
        tensors=gathered_digests(world, names, observer),
        figures=StepFigures(loss=result.loss, grad_norm=result.grad_norm),
        updated=result.updated,
        logged=None,
        layout=layout_of(engine),
    )
    return digests, gathered_copies(world, observer)


def observe_all(world: World, layouts: list[Layout]) -> list[tuple[StepDigests, dict[TensorKey, torch.Tensor]]]:
    return [observed(world, layout) for layout in layouts]


def played(size: int, layouts: dict[str, Layout]) -> dict[str, tuple[StepDigests, dict[TensorKey, torch.Tensor]]]:
    results = run_workers(observe_all, size, list(layouts.values()))
    for other in results[1:]:
        assert [digests for digests, _ in other] == [digests for digests, _ in results[0]]
    return dict(zip(layouts, results[0], strict=True))


@pytest.fixture(scope="module")
def one():
    return played(1, ONE)


@pytest.fixture(scope="module")
def two():
    return played(2, TWO)


@pytest.fixture(scope="module")
def four():
    return played(4, FOUR)


@pytest.mark.complete
@pytest.mark.parametrize("name", FOUR)
def test_digests_on_two_pipeline_ranks_are_those_on_one(two, four, name):
    one_rank, two_ranks = two[name][0], four[name][0]
    assert Comparability.of(one_rank.layout, two_ranks.layout).reasons == ()
    assert first_different_tensor(one_rank, two_ranks) is None
    assert one_rank.tensors == two_ranks.tensors


@pytest.mark.complete
@pytest.mark.parametrize("name", ["plain", "untied", *TWO])
def test_accumulated_gradients_of_every_parameter_and_microbatch_exist(one, two, name):
    digests = (one | two)[name][0]
    parameters = {
        each.key.parameter
        for each in digests.tensors
        if each.key.direction == "weight_gradient" and not each.key.item.startswith("vocabulary")
    }
    found = {
        (each.key.parameter, each.key.microbatch)
        for each in digests.tensors
        if each.key.direction == "accumulated_gradient" and not each.nonfinite
    }
    # The rows of an expert are of all replicas: a rank has one gradient for the microbatches that it runs together.
    of_rank = MICROBATCHES // 2
    expected = {
        (parameter, microbatch)
        for parameter in parameters
        for microbatch in range(MICROBATCHES)
        if ".experts." not in parameter or microbatch // of_rank == expert_of(parameter) // 2
    }
    assert parameters
    assert {pair for pair in found if pair[0] in parameters} == expected


@pytest.mark.complete
def test_last_accumulated_gradient_is_the_weight_gradient(one):
    found = {each.key: each.digest for each in one["untied"][0].tensors}
    pairs = [
        (found[replace(key, direction="accumulated_gradient", microbatch=MICROBATCHES - 1)], digest)
        for key, digest in found.items()
        if key.direction == "weight_gradient"
    ]
    assert len(pairs) > 20
    assert all(accumulated == summed for accumulated, summed in pairs)
    # Each microbatch adds something.
    weight = [found[replace(key, part=0)] for key in LAST[::2]]
    assert len(set(weight)) == MICROBATCHES


@pytest.mark.parametrize("name", ["replicas", "zero 1", "zero 2", "zero 3"])
def test_accumulated_gradients_of_replicas_add_up_to_the_weight_gradient(two, name):
    copies = two[name][1]
    # Each replica has two of the four microbatches.
    if two[name][0].layout.sums_microbatches:
        total = torch.cat([copies[key] for key in LAST if key.microbatch == 2 * key.part + 1])
    else:
        total = sum(copies[key] for key in LAST if key.part == 0 and key.microbatch in (1, 3))
    assert torch.equal(total, copies[WHOLE])


@pytest.mark.parametrize(
    ("first", "second", "directions", "reason"),
    [
        ("plain", "replicas", UP_TO_BACKWARD, "number of replicas 1 and 2"),
        ("plain", "tensor", UP_TO_BACKWARD[:1], "tensor-parallel size 1 and 2"),
        ("plain", "context", UP_TO_BACKWARD[:1], "context-parallel size 1 and 2"),
        ("bf16", "sequence", UP_TO_BACKWARD[:1], "tensor-parallel size 1 and 2; sequence parallelism off and on"),
        ("bf16", "zero 3, bf16", UP_TO_BACKWARD, "number of replicas 1 and 2; ZeRO off and on"),
        ("untied", "vocabulary", UP_TO_BACKWARD[:1], "number of replicas 1 and 2; vocabulary shards 0 and 4"),
        ("replicas", "zero 1", [*UP_TO_BACKWARD, "accumulated_gradient"], "ZeRO off and on"),
        ("replicas", "zero 3", UP_TO_BACKWARD, "ZeRO off and on; sum over replicas in each microbatch off and on"),
        ("zero 1", "zero 2", UP_TO_BACKWARD, "sum over replicas in each microbatch off and on"),
        ("experts", "experts, zero 2", UP_TO_BACKWARD, "ZeRO off and on; sum over replicas in each microbatch off"),
    ],
)
def test_digests_of_other_layouts_are_equal_in_what_is_compared(one, two, first, second, directions, reason):
    pair = [(one | two)[name][0] for name in (first, second)]
    comparability = Comparability.of(*(each.layout for each in pair))
    compared = comparability.select(*pair)
    assert sorted({each.key.direction for each in compared[0].tensors}) == sorted(directions)
    assert first_different_tensor(*compared) is None
    assert reason in comparability.line()
    # Something of what is left out differs: the statement is not idle. Two replicas have one order of addition.
    assert (first_different_tensor(*pair) is None) is (second == "zero 1")


@pytest.mark.complete
def test_digests_of_zero_2_and_3_are_equal(two):
    stages = two["zero 2"][0], two["zero 3"][0]
    assert stages[0].tensors == stages[1].tensors
