"""Derived losses of a step."""

from __future__ import annotations

import pytest

from dynmo_train.trainer.step_result import StepResult

STEP = {"grad_norm": 1.0, "rate": 0.1, "next_rate": 0.1, "loss_scale": 1.0, "updated": True, "step_ns": 1}


def test_expert_load_is_the_mean_over_layers_of_the_busiest_expert():
    metrics = {
        "layers.0.mlp": {"expert_tokens": [6.0, 2.0], "z_loss": [3.0]},
        "layers.1.mlp": {"expert_tokens": [4.0, 4.0], "z_loss": [5.0]},
        "layers.2.mlp": {"expert_tokens": [0.0, 0.0], "z_loss": [4.0]},
    }
    losses = StepResult(loss=2.0, metrics=metrics, **STEP).losses
    assert losses == pytest.approx({"lm_loss": 2.0, "z_loss": 4.0, "expert_load": 1.25})


def test_dense_step_has_no_expert_load():
    assert StepResult(loss=2.0, **STEP).losses == {"lm_loss": 2.0}
