"""Comparison of two runs: equal bits, or differences within a tolerance that the user gives."""

from __future__ import annotations

import json
import tracemalloc

import pytest
from typer.testing import CliRunner

from dynmo_train._common.errors import UsageError
from dynmo_train.cli import app
from dynmo_train.trainer.monitoring.compare_runs import compare_runs


def write_run(folder, losses, validation=None, norm=1.0):
    folder.mkdir()
    lines = [
        {"step": step, "lm_loss": loss, "grad_norm": norm, "step_ns": 1_000_000, "tokens": 100}
        for step, loss in enumerate(losses, 1)
    ]
    if validation is not None:
        lines.append({"step": len(losses), "validation_loss": validation})
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return folder


def compare(*words):
    return CliRunner().invoke(app, ["compare", *map(str, words)], catch_exceptions=False)


@pytest.fixture
def runs(tmp_path):
    first = write_run(tmp_path / "first", [4.0, 3.0, 2.0], 1.5)
    return first, write_run(tmp_path / "second", [4.0, 3.0 * (1 + 1e-6), 2.0 * (1 + 2e-7)], 1.5)


def test_compare_runs_reports_the_largest_relative_difference(runs):
    result = compare_runs(*runs)
    assert not result.identical
    assert result.first_difference == 2
    assert result.largest_difference == pytest.approx(1e-6, rel=1e-3)


@pytest.mark.parametrize(("words", "code"), [([], 1), (["--rtol", "1e-7"], 1), (["--rtol", "1e-5"], 0)])
def test_compare_rtol_decides_the_exit_code(runs, words, code):
    done = compare(*runs, *words)
    assert done.exit_code == code
    assert "losses differ (at most 1.0e-06 relative; first at step 2)" in done.stdout


def test_compare_equal_runs_are_bit_identical(tmp_path, runs):
    other = write_run(tmp_path / "other", [4.0, 3.0, 2.0], 1.5)
    done = compare(runs[0], other)
    assert done.exit_code == 0
    assert done.stdout.splitlines()[-1] == "losses bit-identical"
    assert [line.split() for line in done.stdout.splitlines()[2:4]] == [
        ["first", "common", "loss", "4.000000", "4.000000"],
        ["last", "common", "loss", "2.000000", "2.000000"],
    ]


def test_compare_prints_which_of_losses_and_norms_differ(tmp_path, runs):
    norms = write_run(tmp_path / "norms", [4.0, 3.0, 2.0], 1.5, norm=0.72)
    done = compare(runs[0], norms)
    assert done.exit_code == 1
    assert done.stdout.splitlines()[-1] == (
        "losses bit-identical; gradient norms differ (at most 2.8e-01 relative; first at step 1)"
    )
    both = write_run(tmp_path / "both", [4.0, 3.0, 2.5], 1.5, norm=0.72)
    assert "losses differ (at most 2.0e-01 relative; first at step 3); gradient norms" in compare(runs[0], both).stdout
    assert json.loads(compare(runs[0], norms, "--format", "json").stdout)["losses"] is None


def test_compare_loss_that_was_not_finite_is_beyond_any_rtol(tmp_path, runs):
    other = write_run(tmp_path / "other", [4.0, None, 2.0], 1.5)  # metrics.jsonl has null for nan
    done = compare(runs[0], other, "--rtol", "1000", "--format", "json")
    assert done.exit_code == 1
    assert json.loads(done.stdout)["largest_difference"] is None


def test_compare_validation_loss_counts_and_hides_no_other_difference(tmp_path, runs):
    other = write_run(tmp_path / "other", [4.0, 3.0, 2.5], 1.5 * (1 + 1e-7))
    assert compare_runs(runs[0], other).largest_difference == pytest.approx(0.2)
    other = write_run(tmp_path / "another", [4.0, 3.0, 2.0], 1.6)
    assert compare(runs[0], other).exit_code == 1


def test_compare_later_lines_of_repeated_steps_count_in_any_part(tmp_path):
    """A run was resumed from step 2, in another part of its log; the other one has more steps and no norm."""
    first = write_run(tmp_path / "first", [4.0, 3.0, 9.0, 9.0], 1.5)
    (first / "metrics.jsonl").rename(first / "metrics.jsonl.1")
    lines = [{"step": step, "lm_loss": 2.0, "grad_norm": 1.0, "step_ns": 3_000_000, "tokens": 10} for step in (3, 4)]
    (first / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    second = write_run(tmp_path / "second", [4.0, 3.0, 2.0, 2.0, 1.0], 1.5)
    result = compare_runs(first, second)
    assert (result.identical, result.steps) == (True, 4)
    assert result.step_ms == (pytest.approx(7 / 3), 1.0)
    assert (result.steady_ms, result.steady_from) == ((3.0, 1.0), 1)
    assert (result.last_losses, result.tokens_per_s) == ((2.0, 2.0), pytest.approx(100 / 1e-3))


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('{"lm_loss": 1.0}', "has no valid 'step'"),
        ("[1]", "is not an object"),
        ("{", "is not JSON"),
    ],
)
def test_compare_damaged_line_is_one_message(runs, line, message):
    (runs[1] / "metrics.jsonl").write_text(f"{line}\n")
    done = CliRunner().invoke(app, ["compare", *map(str, runs)])
    assert isinstance(done.exception, UsageError)
    assert f"line 1 {message}" in str(done.exception)


def test_compare_keeps_numbers_and_no_lines_in_memory(tmp_path):
    runs = [write_run(tmp_path / name, [1.0] * 4_000) for name in ("a", "b")]
    compare_runs(*runs)  # imports
    tracemalloc.start()
    try:
        compare_runs(*runs)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 200 * 4_000  # of two runs; a line has 90 bytes, and 1,000 as a dictionary
