"""RMSNorm on CPU against torch's, and what it saves."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from dynmo_train.models.layers.norms import RmsNorm

D = 24


@pytest.mark.parametrize("scale", [1.0, 1e-3, 1e3])
def test_rms_norm_equals_torch(scale):
    generator = torch.Generator().manual_seed(0)
    x = (torch.randn(3, 5, D, generator=generator, dtype=torch.float32) * scale).requires_grad_()
    norm = RmsNorm(D, eps=1e-5)
    norm.weight.data = torch.randn(D, generator=generator)
    weights = torch.randn(3, 5, D, generator=generator)
    got = torch.autograd.grad((norm(x) * weights).sum(), [x, norm.weight])
    reference = F.rms_norm(x, (D,), norm.weight, 1e-5)
    expected = torch.autograd.grad((reference * weights).sum(), [x, norm.weight])
    torch.testing.assert_close(norm(x), reference, rtol=1e-5, atol=1e-5)
    for one, other in zip(got, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-4 / scale)


@pytest.mark.parametrize("frozen", [0, 1])
def test_rms_norm_frozen_input_or_weight(frozen):
    x, norm = torch.randn(4, D), RmsNorm(D, eps=1e-5)
    given = [x.requires_grad_(frozen != 0), norm.weight.requires_grad_(frozen != 1)]
    norm(x).square().sum().backward()
    assert [each.grad is None for each in given] == [frozen == 0, frozen == 1]


def test_rms_norm_saves_input_weight_and_one_number_a_row():
    saved = 0

    def count(tensor):
        nonlocal saved
        saved += tensor.numel()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(count, lambda tensor: tensor):
        RmsNorm(D)(torch.randn(7, D, requires_grad=True))
    assert saved == 7 * D + D + 7


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_rms_norm_other_types_are_torch_own(dtype):
    x, norm = torch.randn(4, D, dtype=dtype), RmsNorm(D, eps=1e-5).to(dtype)
    assert torch.equal(norm(x), F.rms_norm(x, (D,), norm.weight, 1e-5))
