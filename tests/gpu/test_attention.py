"""Attention over sequences of variable length on CUDA: near masks on the CPU, in both directions."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from dynmo_train.models.attention.cross_attention import CrossAttention
from dynmo_train.models.attention.documents import STARTS, PackedAttention
from dynmo_train.models.attention.self_attention import SelfAttention
from dynmo_train.parallel.context_parallel import ContextRegion
from tests.unit.dynmo_train.models.attention.test_varlen import MASK, D, H

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device is here")
# Of 12 tokens, for context parallelism over two ranks.
LONG_STARTS_BT = torch.tensor(
    [[0, 0, 0, 3, 3, 5, 5, 5, 5, 5, 10, 11], [0, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1], [0, 0, 0, 0, 0, 0, 6, 6, 6, 9, 9, 9]]
)
STARTS_BT = torch.tensor([[0, 0, 0, 3, 3, 5], [0, 1, 1, 1, 1, 1], [0, 0, 0, 0, 0, 0]])


def results(module, tensors, where, device, dtype):
    """Output and gradients, on the CPU in float32."""
    module = module.to(device, dtype)
    module.zero_grad()
    moved = [each.detach().to(device, dtype if each.is_floating_point() else None) for each in tensors]
    moved[0].requires_grad_()
    y = module(*moved)
    (y * where.to(device)[..., None]).float().square().sum().backward()
    gradients = [moved[0].grad, *(parameter.grad for parameter in module.parameters())]
    return [each.detach().float().cpu() for each in (y[where.to(device)], *gradients)]


def module_of(kind, **options):
    torch.manual_seed(0)
    module = kind(width=D, heads=H, norm=nn.LayerNorm(D), device=torch.device("cpu"), **options)
    for parameter in module.parameters():
        if parameter.dim() > 1:
            nn.init.normal_(parameter, std=0.2)
    return module


@pytest.mark.parametrize(
    "case", ["padded", "cross", "documents", "window", "window of documents", "context", "context of documents"]
)
def test_varlen_attention_is_near_a_mask_on_the_cpu(case):
    x, where = torch.randn(3, 6, D), torch.ones(3, 6, dtype=torch.bool)
    if case == "padded":
        module, tensors, where = module_of(SelfAttention, causal=False), [x, MASK], MASK
    elif case == "cross":
        module, tensors = module_of(CrossAttention), [x, torch.randn(3, 6, D), MASK]
    elif case == "window":
        module, tensors = module_of(SelfAttention, window=3), [x]
    elif "context" in case:
        # Without other processes the keys of both ranks are this rank's, on either device.
        module = module_of(PackedAttention, reset_positions=True, reset_mask="documents" in case, groups=2)
        module.context = ContextRegion(None, 1, 2)
        tensors = [x, module.context.cut(LONG_STARTS_BT, 1)]
        module.prepare_batch({STARTS: tensors[1]})
    else:
        window = 2 if case == "window of documents" else None
        module = module_of(PackedAttention, reset_positions=True, reset_mask=True, window=window)
        tensors = [x, STARTS_BT]
        module.prepare_batch({STARTS: STARTS_BT})
    expected = results(module, tensors, where, "cpu", torch.float32)
    got = results(module, tensors, where, "cuda", torch.bfloat16)
    for one, other in zip(got, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=0.1, atol=0.1 * float(other.abs().max()))
