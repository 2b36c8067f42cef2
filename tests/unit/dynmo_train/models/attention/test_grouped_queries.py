"""Grouped queries: keys and values are read by the kernel, not repeated; the results are those of repeated ones."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from dynmo_train.models.attention.self_attention import SelfAttention


def attention() -> SelfAttention:
    torch.manual_seed(3)
    layer = SelfAttention(
        width=32, heads=8, groups=2, norm=nn.Identity(), device=torch.device("cpu"), causal=True, bias=False
    )
    for parameter in layer.parameters():
        nn.init.normal_(parameter, std=0.2)
    return layer


class _LargestKeys(TorchDispatchMode):
    """The number of heads of the keys that attention kernels get."""

    def __init__(self) -> None:
        super().__init__()
        self.heads: list[int] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if "attention" in str(func) and "backward" not in str(func):
            self.heads.append(args[1].shape[1])
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("masked", [False, True])
def test_grouped_queries_equal_repeated_keys(masked):
    layer = attention()
    q = torch.randn(2, 8, 12, 4, requires_grad=True)
    k, v = (torch.randn(2, 2, 12, 4, requires_grad=True) for _ in range(2))
    mask = torch.ones(12, 12, dtype=torch.bool).tril() if masked else None
    with _LargestKeys() as kernels:
        got = layer.attend(q, k, v, mask, not masked)
    assert kernels.heads == [2]
    repeated = (each.repeat_interleave(4, dim=1) for each in (k, v))
    y = F.scaled_dot_product_attention(q, *repeated, attn_mask=mask, is_causal=not masked)
    expected = layer.dense(y.transpose(1, 2).flatten(2))
    torch.testing.assert_close(got, expected)
    for first, second in zip(
        torch.autograd.grad(got.sum(), (q, k, v)), torch.autograd.grad(expected.sum(), (q, k, v)), strict=True
    ):
        torch.testing.assert_close(first, second)


def test_grouped_queries_with_dropout_repeat_keys_for_the_kernel():
    layer = attention()
    layer.attention_dropout = 0.5
    q, k = torch.randn(1, 8, 4, 4), torch.randn(1, 2, 4, 4)
    assert layer.attend(q, k, k, None, True).shape == (1, 4, 32)
