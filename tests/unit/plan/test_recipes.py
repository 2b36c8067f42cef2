"""The recipes: each can be run, says its assumptions, and keeps its two speed-ups apart."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace

import pytest

from dynmo_balance.errors import UsageError
from dynmo_balance.recipes import FOLDER, cook, load_recipe, recipe_names

# What they give (balancing only, technique and balancing) as of their first version; a change of the cost model that
# moves them must be seen.
SEEN = {
    "early-exit": (1.09, 2.38),
    "freezing": (2.15, 2.33),
    "mod": (1.56, 1.79),
    "moe": (1.12, 0.99),
    "pruning": (1.20, 2.28),
    "sparse-attention": (1.64, 2.78),
}


@pytest.mark.parametrize("name", SEEN)
def test_figures(name):
    outcome = cook(load_recipe(name))
    seen = (outcome.balancing_only, outcome.technique_and_balancing)
    assert seen == pytest.approx(SEEN[name], abs=0.01)
    assert len(outcome.recipe.assumptions) >= 3
    assert outcome.balanced_ns <= outcome.unbalanced_ns


def test_there_is_one_for_each_dynamic_technique():
    recipes = [load_recipe(name) for name in recipe_names()]
    assert {r.technique: r.published for r in recipes} == {
        "moe": 1.23,
        "pruning": 3.18,
        "freezing": 2.23,
        "sparse-attention": 4.02,
        "early-exit": 4.52,
        "mod": 1.17,
    }


def test_the_two_speed_ups_differ_by_the_baseline_alone():
    outcome = cook(load_recipe("pruning"))
    ratio = outcome.technique_and_balancing / outcome.balancing_only
    assert ratio == pytest.approx(outcome.baseline_ns / outcome.unbalanced_ns)


def test_searching_is_never_worse():
    recipe = load_recipe("freezing")
    small = replace(recipe, spec=replace(recipe.spec, layers=8), run=replace(recipe.run, workers=2, microbatches=4))
    outcome = cook(small, searching=True)
    assert outcome.bound_ns <= outcome.searched_ns <= outcome.balanced_ns


def test_the_command(tmp_path):
    own = tmp_path / "own.toml"
    own.write_text((FOLDER / "mod.toml").read_text().replace("workers = 8", "workers = 4"))
    command = [sys.executable, "-m", "dynmo_balance", "recipe", str(own)]
    text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    assert "every other block computes" in text
    assert "balancing only" in text
    document = json.loads(
        subprocess.run([*command, "--format", "json"], capture_output=True, text=True, check=True).stdout
    )
    assert document[0]["recipe"] == "own"
    assert document[0]["published"] == 1.17


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (('technique = "mod"', 'technique = "magic"'), "technique must be one of .*is 'magic'"),
        (("[run]", "[walk]"), "unknown keys walk"),
        (("workers = 8", "wrokers = 8"), "run.wrokers is unknown"),
        (("workers = 8", 'workers = "8"'), "run.workers must be a number"),
        (("strength = 0.99", "strength = 2"), "script.strength must be within"),
        (("hidden_size = 1024\n", ""), "missing hidden"),
        (("[model]", "[model"), "own.toml"),
    ],
)
def test_bad_recipes_are_refused(tmp_path, change, message):
    own = tmp_path / "own.toml"
    own.write_text((FOLDER / "mod.toml").read_text().replace(*change))
    with pytest.raises(UsageError, match=message):
        load_recipe(str(own))


def test_an_unknown_recipe_names_the_known_ones():
    with pytest.raises(UsageError, match="use one of early-exit, freezing"):
        load_recipe("nothing")
