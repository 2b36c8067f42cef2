"""Whole runs on packed samples with a sliding window, on mock data, differ from runs across documents."""

from __future__ import annotations

import pytest

from tests.distributed.whole_runs import figures, train

pytestmark = [pytest.mark.distributed, pytest.mark.complete]

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


def test_packed_run_differs_from_one_across_documents(whole, tmp_path):
    train(None, tmp_path / "plain", 1, "--mock-data", **OPTIONS)
    plain, packed = figures(tmp_path / "plain"), figures(whole)
    assert plain.keys() == packed.keys()
    assert all(plain[step] != packed[step] for step in plain)
