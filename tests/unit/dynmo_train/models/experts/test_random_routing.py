"""``--moe-router-force-load-balancing``: random logits, which have the gradient of the router's own."""

from __future__ import annotations

import pytest
import torch

from dynmo_train.config import config_of
from dynmo_train.models.experts.moe import MoeMlp
from dynmo_train.models.experts.moe_shape import MoeShape
from dynmo_train.models.registry import family_of

WIDTH = 8


def layer(*, random):
    torch.manual_seed(0)
    moe = MoeShape(num_experts=4, top_k=1, random_logits=random, z_loss_coeff=1.0)
    norm, cpu = torch.nn.Identity(), torch.device("cpu")
    made = MoeMlp(moe=moe, width=WIDTH, inner=16, activation="gelu", norm=norm, device=cpu)
    for parameter in made.parameters():
        torch.nn.init.constant_(parameter, 0.1)
    return made


def loads_of(made):
    torch.manual_seed(1)
    return made(torch.ones(2, 512, WIDTH)).metrics["expert_tokens"]


def test_random_logits_have_even_loads():
    assert loads_of(layer(random=False)).tolist() == [1024, 0, 0, 0]
    assert (loads_of(layer(random=True)) - 256).abs().max() < 60


def test_router_has_the_gradient_of_the_random_logits():
    made = layer(random=True)
    torch.manual_seed(1)
    x_BTD = torch.randn(1, 6, WIDTH)
    made(x_BTD).losses["z"].backward()
    found = next(made.router.parameters()).grad
    torch.manual_seed(1)
    x_BTD = torch.randn(1, 6, WIDTH)
    logits_NE = torch.randn(6, 4).requires_grad_()
    logits_NE.logsumexp(-1).square().mean().backward()
    torch.testing.assert_close(found, logits_NE.grad.T @ x_BTD[0])


def test_manifest_does_not_state_random_logits():
    shape = {
        "num_layers": 2, "hidden_size": 16, "num_attention_heads": 2, "seq_length": 8, "vocab_size": 32,
        "micro_batch_size": 1, "train_iters": 1, "lr": 1e-3, "mock_data": True, "num_experts": 2, "moe_router_topk": 1,
    }  # fmt: skip
    plain, random = (family_of(config_of(**shape, moe_router_force_load_balancing=on)) for on in (False, True))
    assert random.shape.moe.random_logits
    assert plain.manifest() == random.manifest()


@pytest.mark.parametrize("activation", ["gelu", "gelu_tanh"])
@pytest.mark.parametrize("family", ["bert", "t5", "ict"])
def test_encoders_have_the_activation_of_the_option(family, activation):
    shape = {
        "num_layers": 2, "hidden_size": 16, "num_attention_heads": 2, "seq_length": 8, "vocab_size": 32,
        "micro_batch_size": 1, "train_iters": 1, "lr": 1e-3, "mock_data": True, "max_position_embeddings": 16,
    }  # fmt: skip
    model = family_of(config_of(family=family, **shape, activation=activation)).manifest()
    assert model["activation"] == activation
    assert family_of(config_of(family=family, **shape)).manifest()["activation"] == "gelu"
