"""Sensitivity of the recipes: sources of their parameters, and gains over their ranges."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import fields

import pytest

from dynmo_balance._common.errors import UsageError
from dynmo_balance.costs.sparsity import SparsityModel
from dynmo_balance.inputs.scenarios import TrajectorySettings
from dynmo_balance.recipes.recipe import FOLDER, load_recipe, recipe_names, run_recipe, script_parameters
from dynmo_balance.recipes.sensitivity import parameter_of, sensitivity, with_parameter


def default_of(parameter):
    name, _, inner = parameter.partition(".")
    [field] = [each for each in fields(SparsityModel if inner else TrajectorySettings) if each.name == (inner or name)]
    return field.default


@pytest.mark.parametrize("name", recipe_names())
def test_recipe_has_a_source_for_each_parameter_it_sets(name):
    recipe = load_recipe(name)
    is_set = {each for each in script_parameters() if parameter_of(recipe, each) != default_of(each)}
    assert is_set <= set(recipe.ranges)
    assert (recipe.measured is None) == (name == "pruning-h100"), "the others are measured"
    assert all(given.source.strip() and len(given.values) > 1 for given in recipe.ranges.values())


def test_sensitivity_has_the_recipe_and_each_value_of_its_range():
    recipe = load_recipe("pruning")
    rows = sensitivity(recipe)
    own = run_recipe(recipe)
    for parameter, given in recipe.ranges.items():
        of_parameter = [row for row in rows if row.parameter == parameter]
        values = [row.value for row in of_parameter]
        assert values == sorted({*given.values, parameter_of(recipe, parameter)})
        [same] = [row for row in of_parameter if row.is_recipe]
        assert (same.result.balanced_ns, same.result.static_ns) == (own.balanced_ns, own.static_ns)
        assert len({row.result.balanced_ns for row in of_parameter}) == len(values), "the value has an effect"
        assert {row.source for row in of_parameter} == {given.source}


@pytest.mark.parametrize("parameter", ["strength", "sparsity.threshold", "sparsity.overhead"])
def test_with_parameter_changes_this_parameter_only(parameter):
    recipe = load_recipe("pruning")
    changed = with_parameter(recipe, parameter, 0.25)
    for each in script_parameters():
        expected = 0.25 if each == parameter else parameter_of(recipe, each)
        assert parameter_of(changed, each) == expected


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("ranges = 3", "must be a table"),
        ("[ranges]\nstrength = 3", "must have values"),
        ('[ranges.strength]\nvalues = []\nsource = "a"', "must have values"),
        ('[ranges.strength]\nvalues = [true]\nsource = "a"', "must have values"),
        ("[ranges.strength]\nvalues = [0.5]", "must have values"),
        ('[ranges.strength]\nvalues = [0.5]\nsource = "a"\nmore = 1', "must have values"),
        ('[ranges.steps]\nvalues = [5]\nsource = "a"', "ranges.steps is unknown"),
        ('[ranges."sparsity.mode"]\nvalues = [5]\nsource = "a"', "is unknown"),
    ],
)
def test_recipe_with_damaged_ranges_is_refused(tmp_path, text, message):
    recipe = (FOLDER / "mod.toml").read_text().partition("[ranges")[0]
    path = tmp_path / "r.toml"
    path.write_text(f"{text}\n{recipe}" if text.startswith("ranges =") else f"{recipe}\n{text}\n")
    with pytest.raises(UsageError, match=message.replace(".", r"\.")):
        load_recipe(str(path))


def test_command_prints_ranges_with_sources():
    command = [sys.executable, "-m", "dynmo_balance", "recipe", "mod", "--sensitivity"]
    text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    assert "0.875 (recipe)" in text
    assert "mod, strength: Raposo et al. 2024" in text
    done = subprocess.run([*command, "--format", "json"], capture_output=True, text=True, check=True)
    rows = json.loads(done.stdout)
    assert [row["value"] for row in rows] == [0.25, 0.5, 0.75, 0.875]
    assert [row["is_recipe"] for row in rows] == [False, False, False, True]
    assert all(row["over_dense_optimal_static"] >= 0.999 for row in rows)
