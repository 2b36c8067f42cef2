"""Experts on any rank of their group, moved during a run: the same bits, next to layers that move."""

from __future__ import annotations

import json
import subprocess
from dataclasses import replace

import pytest

from dynmo_train.launch.find_command import program_path
from dynmo_train.models.experts.moe_shape import MoeShape
from dynmo_train.parallel.dims import ParallelDims
from dynmo_train.parallel.process_groups import World, set_parallel_dims
from dynmo_train.pipeline.migration import MoveError
from tests.distributed.layouts import DE, E2, OVERLAP, PE, ZERO, Layout, engine_on, play_lists
from tests.distributed.scenario import Scenario, batch_of
from tests.distributed.test_placement import cut
from tests.distributed.whole_runs import (
    arguments,
    events,
    figures,
    run_command,
    tensors,
    train,
    verify,
    write_data,
)
from tests.distributed.workers import run_workers

pytestmark = [pytest.mark.distributed, pytest.mark.timeout(600)]

ITEMS = tuple(f"layers.{layer}.mlp" for layer in range(4))
CHOICE = Scenario(
    steps=4,
    dropout=0.1,
    prune=False,
    freeze=(),
    moe=MoeShape(num_experts=8, routing="expert-choice", shared_ffn_size=16, aux_loss_coeff=0.01),
)
DROPPING = replace(CHOICE, moe=MoeShape(num_experts=8, capacity_factor=1.0, pad_to_capacity=True, z_loss_coeff=0.001))
DROPLESS = replace(CHOICE, moe=MoeShape(num_experts=8), precision="bf16", prune=True)
MIXED = {item: (1, 0, 1, 0, 0, 1, 0, 1) for item in ITEMS}
SWAPPED = {item: (1, 1, 1, 1, 0, 0, 0, 0) for item in ITEMS[1:3]}
MOVES = ({0: MIXED}, {2: MIXED}, {1: SWAPPED, 3: MIXED})


def layouts(layout: Layout, *placements) -> list[Layout]:
    return [layout, *(replace(layout, experts=each) for each in placements)]


@pytest.fixture(scope="module")
def two():
    return play_lists(
        2,
        {
            "expert choice": layouts(Layout(dims=E2, scenario=CHOICE), *MOVES),
            "dropping": layouts(Layout(dims=E2, scenario=DROPPING), MOVES[2]),
            "dropless, bf16, pruned": layouts(Layout(dims=E2, scenario=DROPLESS), MOVES[2]),
        },
    )


@pytest.fixture(scope="module")
def four():
    moving = replace(DROPLESS, schedule="zero-bubble", recompute=True, moves=((1, cut(2, 2)), (3, cut(2, 7))))
    each = {item: (3, 2, 1, 0, 0, 1, 2, 3) for item in ITEMS}
    return play_lists(
        4,
        {
            "expert choice": layouts(Layout(dims=replace(E2, pipeline=2), scenario=CHOICE), MOVES[2]),
            "dropless, bf16, pruned": layouts(Layout(dims=PE, scenario=moving, settings=OVERLAP), MOVES[2]),
            "two groups": layouts(Layout(dims=DE, scenario=CHOICE), MOVES[2]),
            "four ranks": layouts(Layout(dims=ParallelDims(data=4, expert=4), scenario=DROPPING), {1: each}),
            "ZeRO": layouts(Layout(dims=DE, scenario=CHOICE, settings=ZERO), MOVES[2]),
        },
    )


@pytest.mark.complete
@pytest.mark.parametrize("name", ["expert choice", "dropping", "dropless, bf16, pruned"])
def test_two_ranks_have_the_same_bits_wherever_experts_are(name, two):
    first, *others = two[name]
    assert all(other == first for other in others)


@pytest.mark.complete
@pytest.mark.parametrize("name", ["expert choice", "dropless, bf16, pruned", "two groups", "four ranks", "ZeRO"])
def test_four_ranks_have_the_same_bits_wherever_experts_are(name, four):
    first, *others = four[name]
    assert all(other == first for other in others)


@pytest.mark.complete
@pytest.mark.parametrize("name", ["expert choice", "dropless, bf16, pruned"])
def test_experts_and_layers_that_move_have_the_bits_of_one_stage(name, two, four):
    assert four[name][1] == two[name][0]


RUN = {
    "num_experts": "8",
    "moe_router_topk": "1",
    "moe_router_score_function": "sigmoid",
    "train_iters": "9",
    "eval_interval": "9",
    "global_batch_size": "8",
    "expert_model_parallel_size": "2",
    "granularity": "layer",
}


def test_run_that_moves_experts_has_the_bits_of_one_that_does_not(tmp_path):
    data, plan = write_data(tmp_path / "data"), tmp_path / "experts.json"
    still, moving = tmp_path / "still", tmp_path / "moving"
    train(data, still, 2, **RUN, pipeline_model_parallel_size="1")
    words = [program_path("dynmo-plan"), "experts", str(still), "-o", str(plan)]
    assert subprocess.run(words, capture_output=True, check=False).returncode == 0
    planned = json.loads(plan.read_text())
    assert sum(len(layer["moves"]) for layer in planned["layers"])
    assert all(layer["max_tokens"] <= layer["max_tokens_before"] for layer in planned["layers"])
    options = RUN | {"pipeline_model_parallel_size": "2", "balance": "online", "expert_rebalance_interval": "2"}
    options |= {"expert_plan": str(plan)}
    train(data, moving, 4, "--balance-lockstep", **options, exit_interval="5")
    assert events(moving, "experts_moved")[0]["step"] == 0
    assert len(events(moving, "experts_moved")) > 1
    assert events(moving, "experts_kept") == []
    # By one plan for layers and experts, from the first decision on.
    joint = tmp_path / "joint"
    options |= {"expert_rebalance_interval": None, "expert_plan": None, "balance_policy": "always"}
    given = {name: value for name, value in options.items() if value is not None}
    train(data, joint, 4, "--balance-lockstep", "--balance-experts", **given)
    assert events(joint, "experts_moved")
    assert figures(joint) == figures(still)
    assert tensors(joint, 9) == tensors(still, 9)
    verify(joint)
    # From another placement than the one that was saved.
    train(data, moving, 2, **RUN, pipeline_model_parallel_size="1", load=str(moving), expert_rebalance_interval="2")
    assert figures(moving) == figures(still)
    assert tensors(moving, 9) == tensors(still, 9)
    verify(moving)


def test_expert_plan_of_other_ranks_is_refused(tmp_path):
    data, plan = write_data(tmp_path / "data"), tmp_path / "experts.json"
    layer = {"item": "layers.0.mlp", "tokens": [1, 1], "max_tokens_before": 1, "max_tokens": 1}
    layer |= {"ranks": [[{"expert": 0, "tokens": 1}], [{"expert": 1, "tokens": 1}]], "moves": []}
    layer |= {"lower_bound_tokens": 1, "optimal": True}
    document = {"format": "dynmo.expert_plan", "version": 1, "written_by": "t", "created_utc": "2026-01-01T00:00:00Z"}
    document |= {"run_id": "r", "read_to_step": 1, "num_ranks": 2, "slots_per_rank": 1, "num_nodes": 1}
    document |= {"num_groups": 1, "shares": "free", "layers": [layer], "reason": "x"}
    plan.write_text(json.dumps(document | {"migration": {"bytes": 0, "max_rank_bytes": 0, "pause_ns": None}}))
    options = RUN | {"pipeline_model_parallel_size": "1", "expert_plan": str(plan)}
    results = run_workers(run_command, 2, arguments(data, tmp_path / "run", **options), joins=False)
    assert [code for code, _ in results] == [2, 2]
    assert "with 2 experts is not an item of this run" in results[0][1]


def moves_that_fail(world: World) -> list[str]:
    """What a wrong placement and a damaged transfer raise, and whether training continues as if nothing was tried."""
    engine = engine_on(set_parallel_dims(world, E2, 60), Layout(dims=E2, scenario=CHOICE))
    whole = engine_on(set_parallel_dims(world, E2, 60), Layout(dims=E2, scenario=CHOICE))
    found = []
    for item, ranks in (("embedding", (0, 1)), (ITEMS[0], (0, 1)), (ITEMS[0], (0, 0, 0, 0, 0, 1, 1, 1))):
        with pytest.raises(MoveError) as error:
            engine.place_experts({item: ranks})
        found.append(str(error.value))
    with pytest.MonkeyPatch.context() as patch:
        if world.rank == 1:
            patch.setattr("dynmo_train.pipeline.expert_migration.crc_after", lambda block, crc: 1)
        with pytest.raises(MoveError) as error:
            engine.place_experts(MIXED)
    found.append(str(error.value))
    losses = [each.train_step(batch_of(1), sampled=False).loss for each in (engine, whole)]
    return [*found, str(losses[0] == losses[1])]


def test_move_that_fails_keeps_the_old_placement():
    first, second = run_workers(moves_that_fail, 2)
    assert first == second
    for text, part in zip(first, ("item has 0", "item has 8", "same number", "CRC-32"), strict=False):
        assert part in text
        assert "the old placement stays active" in text
    assert first[-1] == "True"
