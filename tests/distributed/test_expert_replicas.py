"""Experts on several ranks, and different numbers of experts per rank: the same bits on any placement."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from dynmo_train.models.experts.moe_shape import MoeShape
from dynmo_train.parallel.dims import ParallelDims
from tests.distributed.layouts import DE, E2, OVERLAP, PE, TE, Layout, close, play_lists
from tests.distributed.scenario import Scenario
from tests.distributed.test_placement import cut
from tests.distributed.whole_runs import events, figures, run_command, tensors, train, verify, write_data
from tests.distributed.workers import run_workers

pytestmark = [pytest.mark.distributed, pytest.mark.timeout(600)]

ITEMS = tuple(f"layers.{layer}.mlp" for layer in range(4))
REPLICAS = {"expert_slots": 8, "expert_chunk_rows": 3}
DROPLESS = Scenario(
    steps=4,
    dropout=0.1,
    prune=False,
    freeze=(),
    moe=MoeShape(num_experts=8, shared_ffn_size=16, aux_loss_coeff=0.01),
)
CHOICE = replace(DROPLESS, moe=MoeShape(num_experts=8, routing="expert-choice"))
PADDED = replace(DROPLESS, moe=MoeShape(num_experts=8, capacity_factor=1.0, pad_to_capacity=True, z_loss_coeff=0.001))
CAPACITY = replace(DROPLESS, moe=MoeShape(num_experts=8, capacity_factor=1.0), schedule="zero-bubble", recompute=True)
BF16 = replace(DROPLESS, precision="bf16", prune=True, freeze=((3, 1),), recompute=True)
# Experts 0 and 5 on both ranks, and five experts of eight on rank 1.
UNEVEN = dict.fromkeys(ITEMS, ((0, 1), 0, 1, 1, 1, (1, 0), 0, 1))
ALL = dict.fromkeys(ITEMS, ((1, 0),) * 8)
ONE = dict.fromkeys(ITEMS[1:3], (1,) * 8)
MOVES = ({0: UNEVEN}, {0: ALL, 2: UNEVEN}, {1: ONE, 3: UNEVEN})
FOUR = dict.fromkeys(ITEMS, ((3, 1, 2), 2, 1, (0, 3), 0, 1, (2, 3, 0, 1), 3))


def layouts(layout: Layout, *placements) -> list[Layout]:
    layout = replace(layout, settings=REPLICAS | layout.settings)
    return [layout, *(replace(layout, experts=each) for each in placements)]


@pytest.fixture(scope="module")
def two():
    return play_lists(
        2,
        {
            "dropless": layouts(Layout(dims=E2, scenario=DROPLESS), *MOVES),
            "expert choice": layouts(Layout(dims=E2, scenario=CHOICE), MOVES[1]),
            "padded": layouts(Layout(dims=E2, scenario=PADDED), MOVES[1]),
            "bf16, pruned, frozen": layouts(Layout(dims=E2, scenario=BF16), MOVES[1]),
            "without": [Layout(dims=E2, scenario=DROPLESS)],
        },
    )


@pytest.fixture(scope="module")
def four():
    moving = replace(CAPACITY, moves=((1, cut(2, 2)), (3, cut(2, 7))))
    return play_lists(
        4,
        {
            "layers move": layouts(Layout(dims=PE, scenario=moving, settings=OVERLAP), MOVES[2]),
            "dropless": layouts(Layout(dims=replace(E2, pipeline=2), scenario=DROPLESS), MOVES[1]),
            "two groups": layouts(Layout(dims=DE, scenario=DROPLESS, settings=OVERLAP), MOVES[1]),
            "tensor": layouts(Layout(dims=TE, scenario=DROPLESS), MOVES[1]),
            "four ranks": layouts(Layout(dims=ParallelDims(data=4, expert=4), scenario=DROPLESS), {1: FOUR}),
        },
    )


@pytest.mark.complete
@pytest.mark.parametrize("name", ["dropless", "expert choice", "padded", "bf16, pruned, frozen"])
def test_two_ranks_have_the_same_bits_wherever_experts_and_copies_are(name, two):
    first, *others = two[name]
    assert all(other == first for other in others)


@pytest.mark.complete
def test_chunks_agree_with_whole_products(two):
    close(two["dropless"][0], two["without"][0])


@pytest.mark.complete
@pytest.mark.parametrize("name", ["layers move", "dropless", "two groups", "tensor", "four ranks"])
def test_four_ranks_have_the_same_bits_wherever_experts_and_copies_are(name, four):
    first, *others = four[name]
    assert all(other == first for other in others)


@pytest.mark.complete
def test_two_stages_have_the_bits_of_one(two, four):
    assert four["dropless"][1] == two["dropless"][0]


RUN = {
    "num_experts": "8",
    "moe_router_topk": "1",
    "moe_router_score_function": "sigmoid",
    "train_iters": "7",
    "eval_interval": "7",
    "global_batch_size": "8",
    "expert_model_parallel_size": "2",
    "granularity": "layer",
    "moe_expert_slots": "6",
    "moe_expert_chunk_rows": "16",
}


def test_run_with_planned_copies_has_the_bits_of_one_without(tmp_path):
    data, still, moving = write_data(tmp_path / "data"), tmp_path / "still", tmp_path / "moving"
    train(data, still, 2, **RUN, pipeline_model_parallel_size="1")
    options = RUN | {"pipeline_model_parallel_size": "1", "expert_rebalance_interval": "2"}
    train(data, moving, 2, **options, exit_interval="5")
    moved = events(moving, "experts_moved")
    assert moved[0]["copies"] > 0
    assert events(moving, "experts_kept") == []
    plan = max((moving / "plans").glob("experts-*.json"))
    # Resumed with copies from the first step on: they are in no checkpoint.
    train(data, moving, 2, **options, load=str(moving), expert_plan=str(plan))
    assert figures(moving) == figures(still)
    assert tensors(moving, 7) == tensors(still, 7)
    verify(moving)


@pytest.mark.complete
def test_run_with_copies_by_joint_plans_has_the_bits_of_one_without(tmp_path):
    data, still, joint = write_data(tmp_path / "data"), tmp_path / "still", tmp_path / "joint"
    options = RUN | {"pipeline_model_parallel_size": "1"}
    train(data, still, 2, **options)
    online = {"balance": "online", "balance_policy": "always", "rebalance_interval": "2"}
    printed = train(data, joint, 2, "--balance-lockstep", "--balance-experts", **options, **online)
    assert printed.count("pruned experts run dense with --moe-expert-slots") == 1
    moved = events(joint, "experts_moved")
    assert moved[0]["copies"] > 0
    assert events(joint, "plan_refused") == events(joint, "plan_rolled_back") == []
    plans = [json.loads(path.read_text()) for path in sorted((joint / "plans").glob("plan-*.json"))]
    layers = [layer for plan in plans for layer in plan.get("x_experts", {}).get("layers", [])]
    assert any(isinstance(on, list) for layer in layers for on in layer["ranks"])
    assert figures(joint) == figures(still)
    assert tensors(joint, 7) == tensors(still, 7)
    verify(joint)


SHARED_PREFIX = {
    "experts": ("--num-experts=4", "--moe-router-topk=2", "--expert-model-parallel-size=2"),
    "zero 3": ("--zero-stage=3",),
    "context": ("--context-parallel-size=2",),
}


@pytest.mark.parametrize("name", SHARED_PREFIX)
def test_ranks_agree_on_the_samples_of_the_activation_cache(tmp_path, name):
    """Few samples, of which each rank repeats others: what they compute together, all compute or none."""
    data = write_data(tmp_path / "data", documents=6, lengths=(20, 40))
    found = []
    for cache in ((), ("--freeze-cache-activations=4",)):
        run = tmp_path / f"run{len(cache)}"
        words = ["pretrain", "llama", "--run-dir", str(run), "--data-path", str(data), *SHARED_PREFIX[name], *cache]
        options = {"num-layers": 2, "hidden-size": 32, "num-attention-heads": 4, "seq-length": 16, "vocab-size": 97}
        options |= {"micro-batch-size": 1, "global-batch-size": 4, "train-iters": 16, "lr": 1e-3, "eval-iters": 0}
        options |= {"split": "100,0,0", "freeze-schedule": "1:1", "pipeline-model-parallel-size": 1}
        words += [f"--{option}={value}" for option, value in options.items()]
        results = run_workers(run_command, 2, [*words, "--untie-embeddings-and-output-weights"], joins=False)
        assert [code for code, _ in results] == [0, 0], results
        found.append(figures(run))
    assert found[0] == found[1]
