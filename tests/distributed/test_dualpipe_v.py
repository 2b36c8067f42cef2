"""Whole runs with DualPipeV and ZeRO: the bits of the same layout without a pipeline, with moves and after a resume."""

from __future__ import annotations

import pytest

from tests.distributed.whole_runs import figures, lines, tensors, train, write_data

pytestmark = [pytest.mark.distributed, pytest.mark.timeout(900)]


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    return write_data(tmp_path_factory.mktemp("dualpipe") / "data")


@pytest.mark.parametrize("stage", ["2", "3"])
def test_dualpipe_v_run_with_zero_has_the_same_bits(data, tmp_path, stage):
    """Pruned and frozen on the way; the second half is resumed, and moves layers."""
    whole, run = tmp_path / "whole", tmp_path / "run"
    train(data, whole, 2, pipeline_model_parallel_size="1", zero_stage=stage)
    parts = {"pipeline_model_parallel_size": "2", "schedule": "dualpipe-v", "zero_stage": stage}
    train(data, run, 4, exit_interval="11", **parts)
    train(data, run, 4, "--balance-lockstep", load=str(run), balance="online", profile_interval="1", **parts)
    assert figures(run) == figures(whole)
    assert tensors(run, 24) == tensors(whole, 24)
    header = [line for line in lines(run / "profile.jsonl") if line["record"] == "header"][-1]
    assert (header["schedule"], header["virtual_stages_per_worker"]) == ("dualpipe-v", 2)
    plans = [line for line in lines(run / "profile.jsonl") if line["record"] == "plan_result"]
    assert plans, "the planner was never asked"
