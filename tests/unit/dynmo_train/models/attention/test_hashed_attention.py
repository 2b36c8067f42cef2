"""Hash-bucketed attention against dense attention under the mask that the buckets give."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F

from dynmo_train.models.attention.hashed_attention import (
    HashedAttention,
    HashMask,
    attend_sorted,
    flex_by_lists,
    hash_directions,
    hash_mask,
)
from dynmo_train.models.attention.hashed_tiles import tile_table
from dynmo_train.models.families.gpt import Gpt, GptShape
from dynmo_train.models.techniques.technique_blocks import DynamicFamily, DynamicSettings, SparseAttentionSettings
from tests.tables import table

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


@table("causal", [True, False])
@table("tokens", [24, 21, 3])
@table("padded", [True, False])
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
@pytest.mark.parametrize("tokens", [32, 27])
@pytest.mark.parametrize("padded", [True, False])
def test_flex_attention_by_tile_lists_equals_dense_under_the_mask(causal, tokens, padded):
    q, k, v = (x.detach() for x in inputs(tokens))
    key_mask = torch.arange(tokens).expand(2, -1) < torch.tensor([[tokens - 1], [2]]) if padded else None
    mask = SPARSE.mask(q, k, key_mask, causal=causal, training=False)
    y = attend_sorted(q, k, v, mask, tile=8, compiled=False)
    expected, _ = dense(q, k, v, key_mask, causal=causal)
    torch.testing.assert_close(y.nan_to_num(0.0), expected, rtol=1e-4, atol=1e-5)


def random_mask(*, tokens: int = 64, buckets: int = 8, causal: bool = True, seed: int = 4) -> HashMask:
    generator = torch.Generator().manual_seed(seed)
    drawn = [torch.randint(0, buckets, (6, tokens), generator=generator) for _ in range(2)]
    key_mask = torch.rand(6, tokens, generator=generator) < 0.9
    return hash_mask(*drawn, key_mask, buckets=buckets, causal=causal)


def listed(counts, indices):
    """The tiles of ordered lists, as bool ``[B, H, Q, J]``."""
    places = torch.arange(indices.shape[-1])
    return torch.zeros(indices.shape, dtype=torch.bool).scatter(-1, indices.long(), places < counts[..., None])


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("buckets", [1, 2, 8])
def test_tile_lists_are_exactly_the_tiles_of_the_dense_mask(causal, buckets):
    mask = random_mask(buckets=buckets, causal=causal)
    lists = mask.tile_lists(8, 3)
    tiles = mask.allowed().view(2, 3, 8, 8, 8, 8)
    full = tiles.all(-1).all(3)
    partial = tiles.any(-1).any(3) & ~full
    assert torch.equal(listed(lists.counts_BHQ, lists.indices_BHQJ), partial)
    assert torch.equal(listed(lists.full_counts_BHQ, lists.full_indices_BHQJ), full)
    for counts, indices in (
        (lists.counts_BHQ, lists.indices_BHQJ),
        (lists.full_counts_BHQ, lists.full_indices_BHQJ),
    ):
        assert indices.shape[-1] == 8, "constant shapes, whatever is selected"
        assert counts.dtype == indices.dtype == torch.int32


def test_tile_lists_one_bucket_without_masked_keys_has_full_tiles_only():
    zeros = torch.zeros(6, 64, dtype=torch.int64)
    lists = hash_mask(zeros, zeros, None, buckets=1, causal=False).tile_lists(8, 3)
    assert int(lists.counts_BHQ.sum()) == 0
    assert int(lists.full_counts_BHQ.sum()) == 6 * 8 * 8


def test_attend_by_lists_other_selections_compile_nothing_more():
    torch._dynamo.reset()
    # The graphs of torch's tracer without Inductor's code generation: what causes a recompilation is the same.
    attend = torch.compile(flex_by_lists, dynamic=False, fullgraph=True, backend="eager")
    q, k, v = (x.detach() for x in inputs(32))
    before = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    for seed in range(4):
        mask = random_mask(tokens=32, buckets=4, causal=True, seed=seed)
        lists = mask.tile_lists(8, 3)
        ranges = lists.first_BHT, lists.end_BHT
        partial = lists.counts_BHQ, lists.indices_BHQJ
        y = attend(q, k, v, lists.tile, ranges, partial, (lists.full_counts_BHQ, lists.full_indices_BHQJ))
        allowed = mask.allowed().unflatten(0, (2, 3))
        scores = (q @ k.mT / q.shape[-1] ** 0.5).masked_fill(~allowed, float("-inf"))
        expected = scores.softmax(-1).nan_to_num(0.0) @ v
        torch.testing.assert_close(y.nan_to_num(0.0), expected, rtol=1e-4, atol=1e-5)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] - before == 1


def needed_blocks(mask: HashMask, tile: int) -> int:
    """Pairs of a tile of one bucket's queries and ``tile`` of its keys in order that have an allowed score."""
    allowed, total = mask.allowed(), 0
    for p, rows in enumerate(mask.bucket_PT):
        for bucket in rows.unique().tolist():
            begin, end = mask.k_edges_PN[p, bucket : bucket + 2].tolist()
            queries = allowed[p, rows == bucket, begin:end]
            for tile_of in queries.split(tile):
                total += sum(bool(block.any()) for block in tile_of.split(tile, dim=1)) if end > begin else 0
    return total


@pytest.mark.parametrize("causal", [True, False])
def test_tile_table_has_the_needed_blocks_and_no_other(causal):
    mask = random_mask(causal=causal)
    table = tile_table(mask, 4)
    assert len(table.key_blocks) == needed_blocks(mask, 4)
    assert sum(tiles * blocks for tiles, blocks in table.groups) == len(table.key_blocks)


def test_hashed_attention_more_buckets_compute_fewer_scores(monkeypatch):
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
        sparse.attend(q, k, v, None, causal=True, dropout=0.0, training=False)
        counted.append(sum(scores))
    dense_scores = 2 * 3 * 256 * 256
    assert counted[2] < counted[1] < counted[0] < 0.35 * dense_scores
    assert counted[2] < 0.07 * dense_scores


def test_hashed_attention_dropout_has_the_mean_of_attention_without():
    q, k, v = (x.detach() for x in inputs(16, batch=1, heads=1))
    torch.manual_seed(0)
    drawn = [SPARSE.attend(q, k, v, None, causal=True, dropout=0.2, training=False) for _ in range(200)]
    expected = SPARSE.attend(q, k, v, None, causal=True, dropout=0.0, training=False)
    torch.testing.assert_close(torch.stack(drawn).mean(0), expected, rtol=0.0, atol=0.3)
    assert not torch.equal(drawn[0], drawn[1])


@pytest.mark.parametrize(
    ("tokens", "buckets", "tile"),
    [(8192, 2, 128), (2048, 16, 32), (512, 4, 32), (512, 2, 64), (512, 32, 16), (3, 2, 16)],
)
def test_tile_is_a_quarter_of_a_bucket_within_limits(tokens, buckets, tile):
    assert replace(SPARSE, buckets=buckets, block=128).tile(tokens) == tile


def test_hash_mask_changes_in_training_not_in_evaluation():
    q, k, _ = (x.detach() for x in inputs(64))
    masks = [
        SPARSE.mask(q, k, None, causal=True, training=training).bucket_PT for training in (True, True, False, False)
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
