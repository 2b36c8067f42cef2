"""Layers on CUDA near those of the CPU: gated MLP in one product, RMSNorm, rotary positions, the loss in chunks."""

from __future__ import annotations

import pytest
import torch

from dynmo_train.models.attention.positions import Rotary
from dynmo_train.models.layers.feed_forward import FeedForward
from dynmo_train.models.layers.gated import are_stacked
from dynmo_train.models.layers.norms import RmsNorm
from dynmo_train.models.vocabulary import cross_entropy
from tests.unit.dynmo_train.models.vocabulary.test_cross_entropy import Alone

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device is here")
D = 64


def near(function, tensors):
    """Results and gradients of both devices, from the same float32 values."""
    results = []
    for device in ("cpu", "cuda"):
        given = [each.detach().to(device) for each in tensors]
        floats = [each.requires_grad_() for each in given if each.is_floating_point()]
        outputs = function(*given)
        grads = torch.autograd.grad(sum(each.square().sum() for each in outputs), floats)
        results.append([each.detach().cpu() for each in (*outputs, *grads)])
    for one, other in zip(*results, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-3, atol=1e-3 * float(other.abs().max()))


def test_gated_mlp_in_one_product_is_near_the_cpu():
    def run(x, gate, up, fc2):
        mlp = FeedForward(width=D, inner=96, activation="swiglu", device=x.device, bias=False)
        both = torch.cat([gate, up])
        values = {"gate.weight": both[:96], "up.weight": both[96:], "fc2.weight": fc2}
        assert are_stacked(values["gate.weight"], values["up.weight"])
        return [torch.func.functional_call(mlp, values, (x,))]

    near(run, [torch.randn(8, D), torch.randn(96, D), torch.randn(96, D), torch.randn(D, 96)])


def test_rms_norm_is_near_the_cpu():
    def run(x, weight):
        norm = RmsNorm(D, eps=1e-5, device=x.device)
        return [torch.func.functional_call(norm, {"weight": weight}, (x,))]

    near(run, [torch.randn(8, D), torch.randn(D)])


def test_rotary_is_near_the_cpu():
    near(lambda q, k: Rotary(16, 1e4)(q, k, 3), [torch.randn(2, 4, 6, 16), torch.randn(2, 2, 6, 16)])


def test_sharded_loss_is_near_the_cpu():
    labels, weights = torch.randint(0, 80, (12,)), torch.rand(12)

    def run(x, weight):
        loss = cross_entropy.linear_cross_entropy(
            x,
            weight,
            None,
            labels.to(x.device),
            weights.to(x.device),
            vocabulary=80,
            chunk_tokens=5,
            region=Alone(rank=0),
        )
        return [loss]

    near(run, [torch.randn(12, D), torch.randn(40, D)])
