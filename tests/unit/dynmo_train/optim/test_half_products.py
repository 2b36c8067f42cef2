"""Products of float16 on a CPU by float32: the values, the gradients, and who is left alone."""

from __future__ import annotations

from contextlib import nullcontext

import pytest
import torch
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

from dynmo_train.optim.precision import float32_matmuls

CPU = torch.device("cpu")


def results(context, *, recompute=False):
    """A linear layer, attention and a product into a place of its own, forward and backward."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(2, 3, 8, 16, generator=generator).half().requires_grad_()
    weight = (torch.randn(16, 16, generator=generator) / 8).half().requires_grad_()
    bias = (torch.randn(16, generator=generator) / 8).half().requires_grad_()

    def forward(x):
        y = F.linear(x, weight, bias)
        return F.scaled_dot_product_attention(y, y, y, is_causal=True) @ weight

    with context:
        y = checkpoint(forward, x, use_reentrant=False) if recompute else forward(x)
        grads = torch.autograd.grad(y.float().square().sum() / 256, [x, weight, bias])
        into = torch.empty(8, 16, dtype=torch.float16)
        with torch.no_grad():
            torch.mm(x[0, 0], weight, out=into)
            biased = torch.addmm(bias, x[0, 0], weight, beta=0.5)
    return [y.detach(), *grads, into, biased]


def test_float32_matmuls_match_float16_values_and_gradients():
    own, plain = results(float32_matmuls(CPU, torch.float16)), results(nullcontext())
    assert {each.dtype for each in own} == {torch.float16}
    for one, other in zip(own, plain, strict=True):
        torch.testing.assert_close(one, other, rtol=2e-2, atol=2e-2)


def test_float32_matmuls_recomputed_are_the_same_bits():
    own = results(float32_matmuls(CPU, torch.float16))
    again = results(float32_matmuls(CPU, torch.float16), recompute=True)
    assert all(torch.equal(one, other) for one, other in zip(own, again, strict=True))


def test_float32_matmuls_round_each_result_once():
    x, weight = torch.randn(5, 300).half(), torch.randn(300, 7).half()
    with float32_matmuls(CPU, torch.float16):
        assert torch.equal(x @ weight, (x.float() @ weight.float()).half())
    wide = torch.randn(5, 300)
    with float32_matmuls(CPU, torch.float16):
        assert torch.equal(wide @ weight.float(), wide @ weight.float())
        assert (wide @ weight.float()).dtype == torch.float32


@pytest.mark.parametrize(
    ("device", "dtype", "compiled"),
    [("cuda", torch.float16, False), ("cpu", torch.bfloat16, False), ("cpu", torch.float16, True)],
)
def test_float32_matmuls_leave_other_operations(device, dtype, compiled):
    assert isinstance(float32_matmuls(torch.device(device), dtype, compiled=compiled), nullcontext)
