"""Adapters of a run, from its options."""

from __future__ import annotations

import pytest

from dynmo_train.config import config_of
from dynmo_train.config.schema import GATED_ACTIVATIONS
from dynmo_train.dynamics.lora import settings_of

SIZES = {"num_layers": 1, "hidden_size": 32, "num_attention_heads": 4, "seq_length": 8, "vocab_size": 64}
TRAINING = {"lr": 1e-3, "train_iters": 1, "data_path": "none", "micro_batch_size": 1, "lora_rank": 2}


@pytest.mark.parametrize("activation", ["gelu", "relu", "squared_relu", *GATED_ACTIVATIONS])
def test_adapters_are_those_of_the_gated_or_plain_mlp(activation):
    found = settings_of(config_of(**SIZES, **TRAINING, activation=activation)).targets
    assert {"gate_proj", "up_proj", "fc1"} & {*found} == (
        {"gate_proj", "up_proj"} if activation in GATED_ACTIVATIONS else {"fc1"}
    )
