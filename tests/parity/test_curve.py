"""The benchmark of the loss curve, in short: twenty-five steps on text made here stay with transformers' own."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

import pytest
import torch

from dynmo_train.parallel.process_groups import destroy_world

pytestmark = pytest.mark.complete

SCRIPT = Path(__file__).parents[1] / "benchmarks" / "train_curve.py"


@pytest.fixture(scope="module")
def benchmark():
    sys.path.insert(0, str(SCRIPT.parent))
    spec = importlib.util.spec_from_file_location("train_curve", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    sys.modules["train_curve"] = module
    spec.loader.exec_module(module)
    yield module
    del sys.modules["train_curve"]
    sys.path.remove(str(SCRIPT.parent))


@pytest.mark.parametrize("family", ["gpt", "llama"])
def test_pretrain_losses_of_many_steps_follow_transformers(benchmark, family):
    random = torch.Generator().manual_seed(4)
    ids = torch.randint(1, 4, (4000,), generator=random).cumsum(0) % 61
    sizes = benchmark.Sizes(layers=2, width=32, inner=48, tokens=32, vocabulary=61)
    try:
        losses = benchmark.curves(family, ids, sizes, 25)
    finally:
        destroy_world()
    assert max(abs(mine - other) for mine, other in losses) < 1e-4
    assert losses[-1][0] < losses[0][0] - 0.3
