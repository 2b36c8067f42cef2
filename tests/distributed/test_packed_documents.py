"""Whole runs on packed samples with a sliding window, on mock data: the same on any placement and after a resume."""

from __future__ import annotations

import pytest

from tests.distributed.whole_runs import figures, tensors, train

pytestmark = pytest.mark.complete

PACKED = (
    "--mock-data",
    "--reset-position-ids",
    "--reset-attention-mask",
    "--eod-mask-loss",
    "--attention-window",
    "16",
)
OPTIONS = {
    "train_iters": "8",
    "eval_interval": "4",
    "pruning_start_iter": None,
    "pruning_end_iter": None,
    "pruning_freq": None,
    "freeze_schedule": None,
}


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    run = tmp_path_factory.mktemp("packed") / "one"
    train(None, run, 1, *PACKED, **OPTIONS)
    return run


def test_packed_run_has_the_same_bits_on_two_stages(whole, tmp_path):
    train(None, tmp_path / "two", 2, *PACKED, **OPTIONS, pipeline_model_parallel_size="2", schedule="zero-bubble")
    assert figures(tmp_path / "two") == figures(whole)


def test_packed_run_resumes_with_the_same_bits(whole, tmp_path):
    run = tmp_path / "run"
    train(None, run, 1, *PACKED, **OPTIONS, exit_interval="5")
    assert max(figures(run)) == 5
    train(None, run, 1, *PACKED, **OPTIONS, load=str(run))
    assert figures(run) == figures(whole)
    assert tensors(run, 8) == tensors(whole, 8)


def test_packed_run_differs_from_one_across_documents(whole, tmp_path):
    train(None, tmp_path / "plain", 1, "--mock-data", **OPTIONS)
    plain, packed = figures(tmp_path / "plain"), figures(whole)
    assert plain.keys() == packed.keys()
    assert all(plain[step] != packed[step] for step in plain)
