"""Sparse attention and mixture of depths on CUDA: tiles of 128 rows, near a dense reference, without recompilation."""

from __future__ import annotations

import pytest
import torch

from dynmo_train.models.attention.hashed_attention import HashedAttention, hash_directions
from dynmo_train.models.families.gpt import Gpt, GptShape
from dynmo_train.models.layer_list import output_of
from dynmo_train.models.techniques.mixture_of_depths import DepthSettings
from dynmo_train.models.techniques.technique_blocks import DynamicFamily, DynamicSettings

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device is here")
BUCKETS = 8


def attend(q, k, v):
    sparse = HashedAttention(buckets=BUCKETS, block=128, seed=3, name="layers.0.attention")
    return sparse.attend(q, k, v, None, causal=True, dropout=0.0, training=False)


def dense(q, k, v):
    sparse = HashedAttention(buckets=BUCKETS, block=128, seed=3, name="layers.0.attention")
    axes = sparse.draw_axes(q.shape[1], q.shape[3], q.device, training=False)
    same = hash_directions(q, axes)[..., :, None] == hash_directions(k, axes)[..., None, :]
    allowed = same & torch.ones(same.shape[-2:], dtype=torch.bool, device=q.device).tril()
    scores = (q @ k.mT / q.shape[-1] ** 0.5).masked_fill(~allowed, float("-inf"))
    return scores.softmax(-1).masked_fill(~allowed.any(-1, keepdim=True), 0.0) @ v


@pytest.mark.parametrize("tokens", [512, 500], ids=["whole tiles", "part of a tile"])
def test_hashed_attention_is_near_dense_attention_under_its_mask(tokens):
    q, k, v = (torch.randn(2, 4, tokens, 64, device="cuda").requires_grad_() for _ in range(3))
    expected = dense(q, k, v)
    grad = torch.randn_like(expected)
    expected_grads = torch.autograd.grad(expected, (q, k, v), grad)
    y = attend(q, k, v)
    torch.testing.assert_close(y, expected, rtol=2e-2, atol=2e-2)
    for ours, theirs in zip(torch.autograd.grad(y, (q, k, v), grad), expected_grads, strict=True):
        torch.testing.assert_close(ours, theirs.nan_to_num(0.0), rtol=5e-2, atol=5e-2)


def test_hashed_attention_new_selections_neither_compile_nor_synchronize():
    def step():
        q, k, v = (torch.randn(2, 4, 512, 64, device="cuda", dtype=torch.bfloat16).requires_grad_() for _ in range(3))
        sparse = HashedAttention(buckets=BUCKETS, block=128, seed=3, name="layers.0.attention")
        sparse.attend(q, k, v, None, causal=True, dropout=0.0, training=True).sum().backward()

    step()
    graphs = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    torch.cuda.set_sync_debug_mode("error")
    try:
        for _ in range(3):
            step()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == graphs


def test_routed_block_fills_whole_tiles_and_does_not_synchronize():
    shape = GptShape(
        num_layers=2, hidden_size=64, ffn_hidden_size=128, num_attention_heads=2, max_position_embeddings=500,
        vocab_size=64, padded_vocab_size=64, hidden_dropout=0.0, attention_dropout=0.0,
    )  # fmt: skip
    settings = DynamicSettings(depths=DepthSettings(capacity=0.125, every=1, aux_weight=0.01))
    module = DynamicFamily(Gpt(shape), settings, seed=5, width=64, std=0.2).build("layers.0", torch.device("cuda"))
    rows = []
    module.mlp.register_forward_pre_hook(lambda _, given: rows.append(given[0].shape[1]))
    x = torch.randn(1, 500, 64, device="cuda", requires_grad=True)
    output_of(module(x)).sum().backward()
    torch.cuda.set_sync_debug_mode("error")
    try:
        output_of(module(x)).sum().backward()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert rows == [128, 128]
