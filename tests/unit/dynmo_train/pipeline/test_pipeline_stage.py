"""Selective checkpointing saves the results of matrix products, and gives the same gradients."""

from __future__ import annotations

from functools import partial

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from dynmo_train.pipeline.stage_module import save_products


def test_save_products_keeps_gradients_bit_identical():
    torch.manual_seed(0)
    module = nn.Sequential(nn.LayerNorm(8), nn.Linear(8, 32), nn.GELU(), nn.Linear(32, 8))
    x = torch.randn(3, 8, requires_grad=True)
    module(x).square().sum().backward()
    expected = [x.grad, *(parameter.grad for parameter in module.parameters())]
    x.grad = None
    module.zero_grad(set_to_none=True)
    saved_bytes = [x.numel() * 4]
    checkpoint(module, x, use_reentrant=False, context_fn=partial(save_products, saved_bytes)).square().sum().backward()
    # The input, and what the two products give: 3 x 32 and 3 x 8 numbers of 4 bytes; computed again, they do not count.
    assert saved_bytes == [96, 384, 96]
    for before, after in zip(expected, [x.grad, *(p.grad for p in module.parameters())], strict=True):
        assert torch.equal(before, after)
