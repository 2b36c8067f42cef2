"""Tables of positions: computed once for all layers, and never those of a dry run or of an evaluation's mode."""

from __future__ import annotations

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from dynmo_train.models.attention.positions import RelativeBias, Rotary


def test_rotary_table_of_a_dry_run_is_not_cached():
    rotary = Rotary(8, 10000.0)
    with FakeTensorMode():
        rotary.cos_sin(0, 29, torch.device("cpu"), torch.float32)
    cosine, _ = rotary.cos_sin(0, 29, torch.device("cpu"), torch.float32)
    assert type(cosine) is torch.Tensor


def test_rotary_table_of_an_evaluation_serves_a_backward():
    rotary, q = Rotary(8, 10000.0), torch.randn(1, 1, 31, 8)
    with torch.inference_mode():
        rotary(q, q, 0)
    x = q.clone().requires_grad_()
    rotary(x, x, 0)[0].sum().backward()
    assert x.grad is not None


def test_rotary_table_is_shared_by_layers_and_starts_at_its_token():
    first, second = Rotary(8, 10000.0), Rotary(8, 10000.0)
    at = (torch.device("cpu"), torch.float32)
    assert first.cos_sin(0, 33, *at)[0] is second.cos_sin(0, 33, *at)[0]
    later = Rotary(8, 10000.0).cos_sin(3, 5, *at)
    positions = torch.arange(3, 8)[None]
    for consecutive, given in zip(later, Rotary(8, 10000.0).cos_sin(positions, 5, *at), strict=True):
        assert consecutive.equal(given[0, 0])


def test_bucket_table_of_a_dry_run_is_not_cached():
    bias = RelativeBias(32, 2, 128, torch.device("cpu"))
    with FakeTensorMode():
        RelativeBias(32, 2, 128, torch.device("cpu")).scores(27, 27, None, causal=False)
    assert type(bias.scores(27, 27, None, causal=False)) is torch.Tensor


@pytest.mark.parametrize("by_position", [True, False])
def test_apply_rotary_equals_the_formula_both_ways(by_position):
    """Hugging Face's ``rotate_half``, on more queries than keys."""
    generator = torch.Generator().manual_seed(0)
    q = torch.randn(2, 4, 6, 8, generator=generator, requires_grad=True)
    k = torch.randn(2, 2, 6, 8, generator=generator, requires_grad=True)
    rotary = Rotary(8, 10000.0)
    past = torch.randint(0, 50, (2, 6), generator=generator) if by_position else 3
    cosine, sine = rotary.cos_sin(past, 6, q.device, q.dtype)

    def formula(x):
        return x * cosine + torch.cat([-x[..., 4:], x[..., :4]], dim=-1) * sine

    weights = [torch.randn(each.shape, generator=generator) for each in (q, k)]
    results = []
    for outputs in (rotary(q, k, past), (formula(q), formula(k))):
        loss = sum((one * weight).sum() for one, weight in zip(outputs, weights, strict=True))
        results.append([*outputs, *torch.autograd.grad(loss, [q, k])])
    for one, other in zip(*results, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6)
