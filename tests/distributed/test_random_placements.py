"""The placement matrix of ``bin/bench --case train-exact``: its generator, and some of its layouts."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.distributed.random_placements import (
    FEATURES,
    SCHEDULES,
    command_line,
    counts_of,
    differences,
    draw,
    report_of,
    write_inputs,
)

pytestmark = [pytest.mark.distributed, pytest.mark.timeout(900)]


@pytest.fixture(scope="module")
def inputs(tmp_path_factory):
    return write_inputs(tmp_path_factory.mktemp("inputs"))


@pytest.fixture(scope="module")
def matrix():
    return [draw(0, number) for number in range(2 * len(FEATURES))]


def test_matrix_is_the_same_for_a_seed(matrix):
    assert [draw(0, number) for number in range(len(matrix))] == matrix
    assert draw(1, 0) != matrix[0]


def test_matrix_has_every_feature_and_schedule(matrix):
    assert {name for drawn in matrix for name in drawn.features} == set(FEATURES)
    runs = [run for drawn in matrix for run in drawn.placed]
    assert {run.options["schedule"] for run in runs} == set(SCHEDULES)
    assert {drawn.family for drawn in matrix} == {"gpt", "llama", "bert", "t5"}
    assert any(run.is_graphed for run in runs)
    assert any(run.changes for run in runs)
    assert any(run.release for run in runs)
    assert {len(drawn.placed) for drawn in matrix} == {1, 2}


def quick(matrix, lead):
    """A layout with this leading feature that compiles nothing, which takes a minute."""
    layouts = [drawn for drawn in matrix if drawn.features[0] == lead and "compiled" not in drawn.features]
    return min(layouts, key=lambda drawn: len(drawn.placed))


@pytest.mark.parametrize("lead", ["ZeRO 1", "context parallel", "vocabulary parallel"])
def test_random_placement_has_the_same_bits(lead, matrix, inputs, tmp_path):
    drawn = quick(matrix, lead)
    problems = list(differences(drawn, tmp_path, inputs))
    assert not problems, report_of(drawn, problems)
    if any(run.changes or run.release for run in drawn.placed):
        assert sum(counts_of(tmp_path).values()) > 0


def test_layout_that_differs_is_reported_with_its_commands(matrix, inputs, tmp_path):
    drawn = quick(matrix, "dropout")
    run = drawn.placed[0]
    whole = {name: value for name, value in run.options.items() if name != "exit_interval"}
    wrong = replace(drawn, placed=(replace(run, options=whole | {"lr": 1e-3}, changes={}, release=None),))
    problems = list(differences(wrong, tmp_path, inputs))
    assert problems == ["other losses and norms", "other validation losses", "other tensors"]
    report = report_of(wrong, problems)
    assert f"layout {drawn.number}: other losses and norms" in report
    assert command_line(wrong, wrong.reference) in report
    assert "--lr 0.001" in report


def test_command_line_names_what_no_option_has(matrix):
    [run] = [run for drawn in matrix for run in drawn.placed if run.is_graphed and run.changes][:1]
    text = command_line(matrix[0], run)
    assert text.startswith("dynmo-train launch local --nproc ")
    assert "CUDA graphs are emulated" in text
    assert "random moves after steps" in text
