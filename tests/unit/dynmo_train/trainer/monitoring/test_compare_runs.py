"""Comparison of two runs: equal bits, or differences within a tolerance that the user gives."""

from __future__ import annotations

import json

import pytest
from typer.testing import CliRunner

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
    return first, write_run(tmp_path / "second", [4.0, 3.0, 2.0 * (1 + 1e-6)], 1.5)


def test_compare_runs_reports_the_largest_relative_difference(runs):
    result = compare_runs(*runs)
    assert not result.identical
    assert result.first_difference == 3
    assert result.largest_difference == pytest.approx(1e-6, rel=1e-3)


@pytest.mark.parametrize(("words", "code"), [([], 1), (["--rtol", "1e-7"], 1), (["--rtol", "1e-5"], 0)])
def test_compare_rtol_decides_the_exit_code(runs, words, code):
    done = compare(*runs, *words)
    assert done.exit_code == code
    assert "losses differ (at most 1.0e-06 relative; first at step 3)" in done.stdout


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
