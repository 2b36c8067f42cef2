"""Adapters of a run, from its options."""

from __future__ import annotations

import pytest
import torch

from dynmo_train.config import config_of, validate
from dynmo_train.config.schema import GATED_ACTIVATIONS
from dynmo_train.dynamics.lora import settings_of
from dynmo_train.models.lora import compare_adapters, is_adapter
from dynmo_train.models.registry import family_of

SIZES = {"num_layers": 1, "hidden_size": 32, "num_attention_heads": 4, "seq_length": 8, "vocab_size": 64}
TRAINING = {"lr": 1e-3, "train_iters": 1, "data_path": "none", "micro_batch_size": 1, "lora_rank": 2}


@pytest.mark.parametrize("activation", ["gelu", "relu", "squared_relu", *GATED_ACTIVATIONS])
def test_adapters_are_those_of_the_gated_or_plain_mlp(activation):
    found = settings_of(config_of(**SIZES, **TRAINING, activation=activation)).targets
    assert {"gate_proj", "up_proj", "fc1"} & {*found} == (
        {"gate_proj", "up_proj"} if activation in GATED_ACTIVATIONS else {"fc1"}
    )


LATENT = {"family": "llama", "multi_latent_attention": True, "kv_lora_rank": 8, "qk_head_dim": 8, "v_head_dim": 8}


def latent_config(targets):
    return config_of(**SIZES, **TRAINING, **LATENT, qk_pos_emb_head_dim=4, lora_target_modules=targets)


@pytest.mark.parametrize("targets", ["all", "o_proj", "down_proj,gate_proj"])
def test_model_with_latents_has_every_adapter_that_it_states(targets):
    config = latent_config(targets)
    family, meta = family_of(config), torch.device("meta")
    found = {name for item in family.items for name, _ in family.build(item.name, meta).named_parameters()}
    adapters = {name.rpartition(".")[2] for name in found if is_adapter(name)}
    assert adapters == set(settings_of(config).targets)


@pytest.mark.parametrize("targets", ["q_proj", "q_proj,v_proj", "o_proj,k_proj"])
def test_latents_have_no_adapters(targets):
    [problem] = validate(latent_config(targets), 1)
    assert problem.path == "--lora-target-modules"
    assert "products of latents have no adapters; name some of o_proj" in problem.message


def test_targets_that_no_layer_has_are_those_of_earlier_checkpoints():
    expected = family_of(latent_config("all")).manifest()
    earlier = expected | {
        "x_lora": expected["x_lora"] | {"targets": ["q_proj", "k_proj", *expected["x_lora"]["targets"]]}
    }
    assert compare_adapters(earlier, expected, resumes=True) == (earlier, [])
    other = earlier | {"x_lora": earlier["x_lora"] | {"rank": 3}}
    assert compare_adapters(other, expected, resumes=True) == (expected, [])
