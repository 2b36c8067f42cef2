"""Experts on CUDA: grouped products near those of a loop, without a synchronization of host and device."""

from __future__ import annotations

import copy

import pytest
import torch

from dynmo_train.models.experts.moe import MoeMlp
from dynmo_train.models.experts.moe_shape import MoeShape
from dynmo_train.models.layers import grouped_linear

pytestmark = pytest.mark.skipif(
    not torch.cuda.is_available() or torch.cuda.get_device_capability()[0] not in grouped_linear.FAST_CAPABILITIES,
    reason="no CUDA device of compute capability 9 or 10 is here",
)
WIDTH = 64
CASES = [
    {"capacity_factor": None},
    {"capacity_factor": 1.0},
    {"capacity_factor": 1.0, "pad_to_capacity": True},
    {"capacity_factor": 0.5, "drop_policy": "position"},
]


def layer(**options):
    moe = MoeShape(num_experts=8, top_k=2, **options)
    made = MoeMlp(
        moe=moe, width=WIDTH, inner=128, activation="gelu", norm=torch.nn.LayerNorm(WIDTH), device=torch.device("cuda")
    )
    with torch.no_grad():
        for parameter in made.parameters():
            parameter.normal_(std=0.2)
    return made.bfloat16()


def gradients(made, x):
    made.zero_grad()
    x.grad = None
    output = made(x).output
    output.square().mean().backward()
    return [output.detach(), x.grad.clone(), *(parameter.grad.clone() for parameter in made.parameters())]


@pytest.mark.parametrize("options", CASES, ids=str)
def test_grouped_products_are_near_the_loop(monkeypatch, options):
    torch.manual_seed(1)
    made = layer(**options)
    x = torch.randn(2, 128, WIDTH, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    got = gradients(made, x)
    monkeypatch.setattr(grouped_linear, "is_fast_device", lambda rows: False)
    for value, expected in zip(got, gradients(copy.deepcopy(made), x), strict=True):
        torch.testing.assert_close(value, expected, rtol=5e-2, atol=5e-2)


@pytest.mark.parametrize("options", CASES, ids=str)
def test_expert_layer_does_not_synchronize(options):
    torch.manual_seed(1)
    made = layer(**options)
    x = torch.randn(2, 128, WIDTH, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    gradients(made, x)
    torch.cuda.set_sync_debug_mode("error")
    try:
        gradients(made, x)
    finally:
        torch.cuda.set_sync_debug_mode("default")
