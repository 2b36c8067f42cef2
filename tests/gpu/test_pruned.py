"""Pruned layers on CUDA near masked dense products: block-sparse, 2:4 and CSR, forward and both gradients."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from dynmo_train.dynamics.tuning import mask_with
from dynmo_train.models.layers.linear import PrunableLinear
from dynmo_train.models.layers.sparse_formats import BLOCK, CSR, SEMI_STRUCTURED, TRANSPOSABLE, SparseTable

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device is here")
OUTPUTS, INPUTS, TOKENS = 256, 512, 192


@pytest.mark.parametrize("tokens", [TOKENS, TOKENS - 9], ids=["whole tiles", "part of a tile"])
@pytest.mark.parametrize(
    ("rule", "form"),
    [
        ("block16", BLOCK),
        ("block", BLOCK),
        ("block64", BLOCK),
        (SEMI_STRUCTURED, SEMI_STRUCTURED),
        (TRANSPOSABLE, SEMI_STRUCTURED),
        (CSR, CSR),
    ],
)
def test_sparse_products_are_near_masked_dense_ones(rule, form, tokens):
    device = torch.device("cuda")
    layer = PrunableLinear(INPUTS, OUTPUTS, device).to(torch.bfloat16)
    mask = mask_with(0.8, OUTPUTS, INPUTS, rule).to(device)
    with torch.no_grad():
        layer.weight.normal_().mul_(mask)
    layer.set_mask(mask, SparseTable(thresholds={f"cuda.{rule}": 0.0}))
    assert layer.form == form
    x = torch.randn(tokens, INPUTS, device=device, dtype=torch.bfloat16, requires_grad=True)
    grad = torch.randn(tokens, OUTPUTS, device=device, dtype=torch.bfloat16)
    y = layer(x)
    y.backward(grad)
    weight, plain_x = (each.detach().float().requires_grad_() for each in (layer.weight, x))
    expected = F.linear(plain_x, weight, layer.bias.detach().float())
    expected.backward(grad.float())
    for one, other in ((y, expected), (x.grad, plain_x.grad), (layer.weight.grad, weight.grad * mask)):
        torch.testing.assert_close(one.float(), other, rtol=2e-2, atol=2e-2 * float(other.detach().abs().max()))
    assert not layer.weight.grad[~mask].any()


def test_block_products_repeat_the_same_bits():
    """Exactness over placement: the kernels add in a fixed order."""
    device = torch.device("cuda")
    mask = mask_with(0.8, OUTPUTS, INPUTS, BLOCK).to(device)
    weight = torch.randn(OUTPUTS, INPUTS, device=device, dtype=torch.bfloat16) * mask
    x = torch.randn(TOKENS, INPUTS, device=device, dtype=torch.bfloat16)
    results = []
    for _ in range(2):
        layer = PrunableLinear(INPUTS, OUTPUTS, device, bias=False).to(torch.bfloat16)
        with torch.no_grad():
            layer.weight.copy_(weight)
        layer.set_mask(mask, SparseTable(thresholds={"cuda.block": 0.0}))
        given = x.clone().requires_grad_()
        y = layer(given)
        y.square().sum().backward()
        results.append((y.detach(), given.grad, layer.weight.grad))
    for one, other in zip(*results, strict=True):
        assert torch.equal(one, other)
