"""A pruned weight has no gradient: its moments decay, and the norm leaves it out."""

from __future__ import annotations

import pytest
import torch

from dynmo_train.optim.optimizers.adamw import MOMENTS
from tests.distributed.scenario import Scenario, batch_of, engine_of
from tests.distributed.workers import run_workers

pytestmark = pytest.mark.distributed
BETAS = dict(zip(MOMENTS, (0.9, 0.99), strict=True))


def pruned_moments(engine):
    """Moments of the pruned weights, by tensor."""
    tensors = {name: t for item in engine.local_names for name, t in engine.item_store.export(item).tensors.items()}
    masks = {name.removesuffix(".mask"): t.bool() for name, t in tensors.items() if name.endswith(".mask")}
    return {
        f"{weight}.{moment}": tensors[f"{weight}.{moment}"][~mask].tolist()
        for weight, mask in masks.items()
        for moment in MOMENTS
    }


def moments_of_two_steps(world):
    """Moments of pruned weights after steps 9 and 10; pruning came after step 8."""
    engine = engine_of(Scenario(freeze=()), world)
    after = []
    for step in range(1, 11):
        engine.train_step(batch_of(step), sampled=False)
        engine.after_step(step)
        after.append(pruned_moments(engine))
    return after[-2:]


def test_pruned_moments_decay_without_gradient():
    before, after = run_workers(moments_of_two_steps, 1)[0]
    assert sum(map(len, before.values())) > 1000, "almost nothing was pruned"
    for name, values in before.items():
        expected = torch.tensor(values) * BETAS[name.rpartition(".")[2]]
        torch.testing.assert_close(torch.tensor(after[name]), expected, rtol=1e-5, atol=1e-12)
