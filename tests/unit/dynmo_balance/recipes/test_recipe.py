"""The recipes: each can be run, states its assumptions, and compares with two static partitions and the bound."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace

import pytest

from dynmo_balance._common.errors import UsageError
from dynmo_balance.formats.operator_costs import read_operator_costs
from dynmo_balance.formats.profile import read_profile
from dynmo_balance.partition.exact import solve
from dynmo_balance.planning.local_search import minimize_step
from dynmo_balance.planning.plan_builder import problem_of_run
from dynmo_balance.recipes.optimality_gap import measure_gap
from dynmo_balance.recipes.recipe import COSTS, FOLDER, final_costs, load_recipe, recipe_names, run_recipe, with_size
from dynmo_balance.simulation.simulator import predict
from tests.tables import table

# Gain of balancing over the uniform and over the dense-optimal partition, and of technique and balancing over the dense
# model on its exact partition; a change of the cost model that moves them must be measured.
SPEED_UPS = {
    "early-exit": (1.27, 1.39, 1.56),
    "freezing": (2.16, 1.53, 1.66),
    "mod": (1.46, 1.00, 1.25),
    "moe": (1.23, 1.08, 0.83),
    "pruning": (1.20, 1.19, 1.28),
    "pruning-block": (1.37, 1.16, 1.70),
    "pruning-h100": (1.34, 1.34, 4.53),
    "sparse-attention": (1.32, 1.00, 1.25),
}
COMPUTED = """
technique = "pruning"
device = "h100"
[model]
family = "gpt"
num_layers = 8
hidden_size = 1024
num_attention_heads = 16
max_position_embeddings = 2048
vocab_size = 50257
[run]
workers = 4
fused_attention = true
[script.sparsity]
threshold = 0.7
overhead = 0.1
"""


@pytest.mark.parametrize("name", SPEED_UPS)
def test_recipe_speed_ups_have_the_documented_values(name):
    outcome = run_recipe(load_recipe(name))
    measured = (outcome.over_uniform, outcome.over_dense_optimal, outcome.with_technique)
    assert measured == pytest.approx(SPEED_UPS[name], abs=0.01)
    assert len(outcome.recipe.assumptions) >= 3
    assert outcome.bound_ns <= outcome.balanced_ns <= min(outcome.uniform_ns, outcome.static_ns)
    assert outcome.dense_optimal_ns <= outcome.dense_uniform_ns


@pytest.mark.parametrize("name", ["moe", "pruning-block"])
def test_static_opponent_is_the_better_partition_of_the_dense_model(name):
    recipe = load_recipe(name)
    header, dense, last = final_costs(recipe)
    before, after = (problem_of_run(header, costs, recipe.run.granularity) for costs in (dense, last))
    bottleneck = predict(after, solve(before).boundaries).step_ns
    step = predict(after, minimize_step(before, solve(before)).boundaries).step_ns
    assert bottleneck != step
    assert run_recipe(recipe).static_ns == min(bottleneck, step)


def test_recipes_cover_each_dynamic_technique():
    recipes = [load_recipe(name) for name in recipe_names()]
    assert {r.technique: r.published for r in recipes if r.published} == {
        "moe": 1.23,
        "pruning": 3.18,
        "freezing": 2.23,
        "sparse-attention": 4.02,
        "early-exit": 4.52,
        "mod": 1.17,
    }


def test_recipe_static_partitions_are_those_of_the_dense_model():
    """A technique that changes nothing: the dense-optimal partition is then its own, and balancing gains nothing."""
    recipe = load_recipe("pruning")
    static = replace(recipe, technique="static", run=replace(recipe.run, workers=5))
    outcome = run_recipe(static)
    assert outcome.static_ns == outcome.balanced_ns == outcome.dense_optimal_ns
    assert outcome.uniform_ns == outcome.dense_uniform_ns > outcome.balanced_ns, "the head unbalances an even split"


@pytest.mark.complete
def test_recipe_search_is_never_worse():
    recipe = load_recipe("freezing")
    small = replace(recipe, spec=replace(recipe.spec, layers=8), run=replace(recipe.run, workers=2, microbatches=4))
    outcome = run_recipe(small, searching=True)
    assert outcome.bound_ns <= outcome.partition_bound_ns <= outcome.balanced_ns
    for found in (outcome.searched, outcome.sharded):
        assert found.bound_ns <= found.order_bound_ns <= found.step_ns <= outcome.balanced_ns
    assert outcome.document()["sharded_ns"] == outcome.sharded.step_ns


def test_recipe_command_prints_assumptions_and_speed_ups(tmp_path):
    own = tmp_path / "own.toml"
    own.write_text((FOLDER / "mod.toml").read_text().replace("workers = 8", "workers = 4"))
    command = [sys.executable, "-m", "dynmo_balance", "recipe", str(own)]
    text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    assert "every other block computes" in text
    assert "dense-optimal ms" in text
    document = json.loads(
        subprocess.run([*command, "--format", "json"], capture_output=True, text=True, check=True).stdout
    )
    assert document[0]["recipe"] == "own"
    assert document[0]["published_up_to"] == 1.17
    assert document[0]["bound_ns"] <= document[0]["balanced_ns"] <= document[0]["dense_optimal_static_ns"]


@table(
    ("change", "message"),
    [
        (('technique = "mod"', 'technique = "magic"'), "technique must be one of .*is 'magic'"),
        (("[run]", "[walk]"), "unknown keys walk"),
        (("workers = 8", "wrokers = 8"), "run.wrokers is unknown"),
        (("workers = 8", 'workers = "8"'), "run.workers must be a number"),
        (("strength = 0.875", "strength = 2"), "script.strength must be within"),
        (("num_layers = 32\n", ""), "missing layers"),
        (("num_layers = 32", "num_layers = 32\nhidden_size = 512"), "hidden_size: the measured table has the shape"),
        (("workers = 8", "workers = 8\nmicro_batch_size = 2"), "micro_batch_size: the measured table has the shape"),
        (('costs = "cpu-2048"', 'costs = "nowhere.json"'), "nowhere.json"),
        (("[model]", "[model"), "own.toml"),
    ],
)
def test_load_recipe_invalid_file_is_refused(tmp_path, change, message):
    own = tmp_path / "own.toml"
    own.write_text((FOLDER / "mod.toml").read_text().replace(*change))
    with pytest.raises(UsageError, match=message):
        load_recipe(str(own))


def test_recipe_without_measured_costs_is_computed(tmp_path):
    own = tmp_path / "own.toml"
    own.write_text(COMPUTED)
    recipe = load_recipe(str(own))
    header, dense, last = final_costs(recipe)
    assert recipe.measured is None
    assert header.workers[0].device == "cuda"
    assert last.forward_ns[2] / dense.forward_ns[2] == pytest.approx(
        recipe.trajectory.sparsity.factor(0.9 + (1 / 9 - 0.5) * 0.45), rel=1e-4
    )
    assert last.forward_ns[-2] / dense.forward_ns[-2] == pytest.approx(0.1 + 0.9 * 0.01 / 0.3, rel=0.01)


def test_recipe_takes_shape_and_times_of_another_table(tmp_path):
    document = json.loads((COSTS / "cpu-2048.json").read_text())
    document["shape"] |= {"hidden_size": 512, "sequence_lengths": [256, 1024]}
    for row in document["rows"]:
        row["sequence_length"] = 1024
    document["rows"][0]["forward_ns"] = 77
    table = tmp_path / "costs.json"
    table.write_text(json.dumps(document))
    recipe = load_recipe("mod", table)
    header, dense, _ = final_costs(recipe)
    assert (header.model.hidden_size, header.model.sequence_length) == (512, 1024)
    assert dense.forward_ns[1] == 77


def test_load_recipe_unknown_name_lists_recipes():
    with pytest.raises(UsageError, match="choose one of early-exit, freezing"):
        load_recipe("nothing")


def test_trace_has_baseline_steps_then_technique_steps(tmp_path):
    path = tmp_path / "trace.jsonl"
    command = [sys.executable, "-m", "dynmo_balance", "recipe", "pruning-block", "--layers", "8", "--workers", "4"]
    command += ["--trace", str(path), "--baseline-steps", "2", "--technique-steps", "3"]
    assert subprocess.run(command, capture_output=True, text=True, check=False).returncode == 0
    records = [json.loads(line) for line in path.read_text().splitlines()]
    assert [record["record"] for record in records] == ["header", "step", "step", "event", "step", "step", "step"]
    header, dense, technique = records[0], records[1], records[-1]
    assert (len(header["items"]), len(header["workers"])) == (18, 4)
    # The last block is at 99 %, which is measured.
    rows = read_operator_costs(COSTS / "cpu-2048.json").rows
    [row] = [each for each in rows if each.setting == {"form": "block", "sparsity": 0.99} and each.operator == "mlp"]
    share = technique["forward_ns"][16] / dense["forward_ns"][16]
    assert share == pytest.approx(row.times.forward_ns / row.dense.forward_ns, rel=0.01)
    assert technique["forward_ns"][17] == dense["forward_ns"][17]
    read_profile(path)
    again = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (again.returncode, "exists" in again.stderr) == (2, True)


def test_trace_of_two_recipes_is_refused(tmp_path):
    command = [sys.executable, "-m", "dynmo_balance", "recipe", "mod", "moe", "--trace", str(tmp_path / "t")]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (done.returncode, "name one" in done.stderr) == (2, True)


def test_assumptions_of_a_recipe_state_another_size():
    recipe = load_recipe("freezing")
    assert with_size(recipe, None, recipe.run.workers) == recipe
    other = with_size(recipe, 24, None)
    assert other.assumptions == (
        f"here with 24 layers on {recipe.run.workers} workers, in place of the numbers below",
        *recipe.assumptions,
    )


@pytest.mark.complete
def test_optimality_gap_is_between_bounds_and_plain_1f1b():
    recipe = with_size(load_recipe("freezing"), 8, 2)
    recipe = replace(recipe, run=replace(recipe.run, microbatches=4))
    distance = measure_gap(recipe)
    assert distance.bounds.work_ns <= distance.bounds.step_ns <= distance.found_ns <= distance.plain_ns
    assert distance.document()["layers"] == 8


def test_moe_slope_increases_skew_with_depth():
    flat = load_recipe("moe")
    header, dense, last = final_costs(replace(flat, trajectory=replace(flat.trajectory, strength=0.7, slope=1.0)))
    growth = [
        after / before
        for item, before, after in zip(header.items, dense.forward_ns, last.forward_ns, strict=True)
        if item.kind == "mlp"
    ]
    assert 1 <= growth[0] < 1.1, "hardly any skew in the first layer"
    assert sum(growth[16:]) > sum(growth[:16]) + 4
