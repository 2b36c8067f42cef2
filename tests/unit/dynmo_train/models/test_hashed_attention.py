"""Hash-bucketed attention against dense attention under the mask that the buckets give."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch.nn.attention.flex_attention import flex_attention

from dynmo_train.models.gpt import Gpt, GptShape
from dynmo_train.models.hashed_attention import HashedAttention, hash_directions, hash_mask
from dynmo_train.models.technique_blocks import DynamicFamily, DynamicSettings, SparseAttentionSettings

SPARSE = HashedAttention(buckets=4, block=4, seed=3, name="layers.0.attention")


def inputs(tokens: int = 24, batch: int = 2, heads: int = 3, width: int = 8):
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(batch, heads, tokens, width, generator=generator).requires_grad_() for _ in range(3)]


def dense(q, k, v, key_mask, *, causal):
    """All scores, then the mask: same bucket, causal, ``key_mask``; 0 for a query without any key."""
    axes = SPARSE.draw_axes(q.shape[1], q.shape[3], q.device, training=False)
    mask = hash_directions(q, axes)[..., :, None] == hash_directions(k, axes)[..., None, :]
    if causal:
        mask = mask & torch.ones(mask.shape[-2:], dtype=torch.bool).tril()
    if key_mask is not None:
        mask = mask & key_mask[:, None, None, :]
    scores = (q @ k.transpose(-1, -2) / q.shape[-1] ** 0.5).masked_fill(~mask, float("-inf"))
    weights = scores.softmax(-1).nan_to_num(0.0)
    return weights @ v, mask


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("tokens", [24, 21, 3])
@pytest.mark.parametrize("padded", [True, False])
def test_hashed_attention_equals_dense_attention_under_its_mask(causal, tokens, padded):
    q, k, v = inputs(tokens)
    key_mask = torch.arange(tokens).expand(2, -1) < torch.tensor([[tokens - 1], [2]]) if padded else None
    y = SPARSE.attend(q, k, v, key_mask, causal=causal, dropout=0.0, training=False)
    copies = [x.detach().clone().requires_grad_() for x in (q, k, v)]
    expected, mask = dense(*copies, key_mask, causal=causal)
    if causal or padded:
        assert not mask.any(-1).all(), "some query sees nothing"
    torch.testing.assert_close(y, expected, rtol=1e-4, atol=1e-5)
    grad = torch.randn(y.shape, generator=torch.Generator().manual_seed(2))
    y.backward(grad)
    expected.backward(grad)
    for ours, theirs in zip((q, k, v), copies, strict=True):
        torch.testing.assert_close(ours.grad, theirs.grad.nan_to_num(0.0), rtol=1e-4, atol=1e-5)


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
@pytest.mark.parametrize("causal", [True, False])
def test_flex_attention_with_the_hash_mask_equals_gather(causal):
    q, k, v = (x.detach() for x in inputs(32))
    mask = SPARSE.mask(q, k, None, causal=causal, training=False)
    rows = [
        x.flatten(0, 1).gather(1, order[..., None].expand(-1, -1, 8)).unflatten(0, (2, 3))
        for x, order in ((q, mask.q_order_PT), (k, mask.k_order_PT), (v, mask.k_order_PT))
    ]
    y = flex_attention(*rows, block_mask=mask.flex_mask(2, 3)).flatten(0, 1)
    back = y.gather(1, torch.argsort(mask.q_order_PT, 1)[..., None].expand(-1, -1, 8)).unflatten(0, (2, 3))
    expected, _ = dense(q, k, v, None, causal=causal)
    torch.testing.assert_close(back.nan_to_num(0.0), expected, rtol=1e-4, atol=1e-5)


def computed_scores(mask):
    """Scores that are computed, over all samples and heads; dense attention computes ``B H T^2``."""
    return int(mask.blocks_PQJ.sum()) * mask.block**2


def test_hash_mask_covers_allowed_scores_with_few_blocks():
    generator = torch.Generator().manual_seed(4)
    buckets = [torch.randint(0, 8, (2, 64), generator=generator) for _ in range(2)]
    mask = hash_mask(*buckets, torch.ones(2, 64, dtype=torch.bool), block=4, causal=True)
    index = torch.arange(64)
    allowed = mask.allowed(torch.arange(2)[:, None, None], index[:, None], index[None, :])
    needed = allowed.unflatten(1, (16, 4)).unflatten(3, (16, 4)).any(4).any(2)
    assert bool((mask.blocks_PQJ | ~needed).all())
    assert computed_scores(mask) < 0.5 * 2 * 64 * 64


def test_hash_mask_more_buckets_compute_fewer_scores(monkeypatch):
    q, k, v = (x.detach() for x in inputs(256, width=16))
    scores = []
    plain = F.scaled_dot_product_attention

    def counting(q, k, v, **options):
        scores.append(q.shape[0] * q.shape[-2] * k.shape[-2])
        return plain(q, k, v, **options)

    monkeypatch.setattr(F, "scaled_dot_product_attention", counting)
    counted = []
    for buckets in (2, 8, 32):
        sparse = HashedAttention(buckets=buckets, block=8, seed=3, name="layers.0.attention")
        scores.clear()
        sparse.attend(q, k, v, None, causal=False, dropout=0.0, training=False)
        counted.append(sum(scores))
        assert sum(scores) == computed_scores(sparse.mask(q, k, None, causal=False, training=False))
    dense_scores = 2 * 3 * 256 * 256
    assert counted[2] < counted[1] < counted[0] < 0.6 * dense_scores
    assert counted[2] < 0.15 * dense_scores


def test_hash_mask_changes_in_training_not_in_evaluation():
    q, k, _ = (x.detach() for x in inputs(64))
    masks = [
        SPARSE.mask(q, k, None, causal=True, training=training).q_bucket_PT for training in (True, True, False, False)
    ]
    assert not torch.equal(masks[0], masks[1])
    assert torch.equal(masks[2], masks[3])


def test_draw_axes_of_tensor_parallel_ranks_are_slices_of_all_heads():
    whole = SPARSE.draw_axes(4, 8, torch.device("cpu"), training=False)
    parts = [
        replace(SPARSE, part=part, parts=2).draw_axes(2, 8, torch.device("cpu"), training=False) for part in (0, 1)
    ]
    assert torch.equal(torch.cat(parts), whole)


def test_model_with_sparse_attention_is_causal():
    shape = GptShape(
        num_layers=1, hidden_size=16, ffn_hidden_size=32, num_attention_heads=2, max_position_embeddings=16,
        vocab_size=20, padded_vocab_size=32, hidden_dropout=0.0, attention_dropout=0.0, init_method_std=0.3,
    )  # fmt: skip
    settings = DynamicSettings(sparse_attention=SparseAttentionSettings(buckets=2, block=4))
    family = DynamicFamily(Gpt(shape), settings, seed=3, width=16, std=1.0)
    module = family.build("layers.0.attention", torch.device("cpu")).eval()
    x = torch.randn(2, 16, 16, generator=torch.Generator().manual_seed(7))
    q, k, v = module.project(x)
    sparse = HashedAttention(buckets=2, block=4, seed=3, name="layers.0.attention")
    y = sparse.attend(q, k, v, None, causal=True, dropout=0.0, training=False)
    torch.testing.assert_close(module(x), x + module.dense(y.transpose(1, 2).flatten(2)))
    other = x.clone()
    other[:, 9:] += 1.0
    torch.testing.assert_close(module(other)[:, :9], module(x)[:, :9], rtol=1e-4, atol=1e-5)
