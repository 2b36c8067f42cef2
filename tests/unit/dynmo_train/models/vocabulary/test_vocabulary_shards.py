"""Shards of the output layer: their merged parts are the whole layer's loss and gradients."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
import torch

from dynmo_train.models.families.gpt import Gpt, GptShape
from dynmo_train.models.families.vocabulary_family import (
    VocabularyShardedFamily,
    stored_rows,
    stored_ties,
    word_parameters,
)
from dynmo_train.models.lora import LoraFamily, LoraSettings
from dynmo_train.models.vocabulary.cross_entropy import mean_linear_cross_entropy, token_weights
from dynmo_train.models.vocabulary.head import Head
from dynmo_train.models.vocabulary.vocabulary_shards import (
    WORDS,
    FinalNorm,
    VocabularyShard,
    merge_tree,
    ranks_of_shards,
    shard_index,
    subtrees,
)
from tests.tables import table

V, D, B, T = 97, 16, 3, 50
CPU = torch.device("cpu")


def problem(seed=0):
    generator = torch.Generator().manual_seed(seed)
    weight = torch.randn(V, D, generator=generator)
    x = torch.randn(B, T, D, generator=generator) * 3
    labels = torch.randint(0, V, (B, T), generator=generator)
    counts = (torch.rand(B, T, generator=generator) < 0.7).long()
    return weight, x, labels, counts


def sharded(weight, x, labels, counts, count, cap=None):
    """Loss, gradients of input and weight with ``count`` shards, and the merged part."""
    bounds = [k * V // count for k in range(count + 1)]
    shards = [
        VocabularyShard(a, torch.zeros(b - a, D), weight[a:b].clone(), softcap=cap)
        for a, b in itertools.pairwise(bounds)
    ]
    outputs = [shard(x.flatten(0, 1), labels.reshape(-1)) for shard in shards]
    whole = merge_tree(0, count, {(k, k + 1): part for k, (part, _) in enumerate(outputs)})
    weights = token_weights(labels, counts)
    for _, add_gradient in outputs:
        add_gradient(whole.log_sum(), weights)
    gradient = torch.cat([shard.output.grad for shard in shards])
    return whole.losses(weights)[0], whole.input_gradient(weights), gradient


@table("masked", [False, True])
@table("count", [1, 2, 5, 8, V])
def test_merged_shards_are_the_loss_of_the_whole_layer(count, masked):
    weight, x, labels, counts = problem()
    counts = counts if masked else None
    weight.requires_grad_()
    x.requires_grad_()
    expected = mean_linear_cross_entropy(x, weight, None, labels, counts, V)
    expected.backward()
    loss, x_gradient, weight_gradient = sharded(weight.detach(), x.detach(), labels, counts, count)
    torch.testing.assert_close(loss, expected.detach(), rtol=1e-6, atol=0)
    torch.testing.assert_close(x_gradient.view_as(x), x.grad, rtol=1e-5, atol=1e-7)
    torch.testing.assert_close(weight_gradient, weight.grad, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("count", [1, 3, 8])
@pytest.mark.parametrize("cap", [0.7, 30.0])
def test_merged_shards_of_capped_logits_equal_torch(count, cap):
    weight, x, labels, counts = problem()
    weight.requires_grad_()
    x.requires_grad_()
    logits = torch.tanh(x @ weight.t() / cap) * cap
    losses = torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels.reshape(-1), reduction="none")
    expected = (losses * token_weights(labels, counts)).sum()
    expected.backward()
    loss, x_gradient, weight_gradient = sharded(weight.detach(), x.detach(), labels, counts, count, cap)
    torch.testing.assert_close(loss, expected.detach(), rtol=1e-6, atol=0)
    torch.testing.assert_close(x_gradient.view_as(x), x.grad, rtol=1e-4, atol=1e-6)
    torch.testing.assert_close(weight_gradient, weight.grad, rtol=1e-4, atol=1e-6)


def test_large_logits_neither_overflow_nor_vanish():
    weight, x, labels, _ = problem()
    loss, gradient, _ = sharded(weight * 100, x, labels, None, 4)
    assert loss.isfinite()
    assert gradient.isfinite().all()
    expected = torch.nn.functional.cross_entropy(x.flatten(0, 1) @ (weight * 100).t(), labels.reshape(-1))
    torch.testing.assert_close(loss, expected)


@table("count", [1, 3, 8, 12])
@table("ranks", [1, 2, 3, 4])
def test_merging_by_rank_first_has_the_same_bits(count, ranks):
    """Each rank merges the nodes of its block; the last rank merges these."""
    weight, x, labels, _ = problem(1)
    parts = {}
    for k in range(count):
        begin, end = k * V // count, (k + 1) * V // count
        parts[k, k + 1], _ = VocabularyShard(begin, torch.zeros(end - begin, D), weight[begin:end].clone())(
            x.flatten(0, 1), labels.reshape(-1)
        )
    expected = merge_tree(0, count, parts)
    placed = ranks_of_shards(count, range(ranks))
    nodes = [
        node
        for rank in set(placed)
        for node in subtrees(placed.index(rank), placed.index(rank) + placed.count(rank), count)
    ]
    found = merge_tree(0, count, {node: merge_tree(*node, parts) for node in nodes})
    for one, other in zip(found.tensors, expected.tensors, strict=True):
        assert torch.equal(one, other)


def test_subtrees_cover_a_block_with_few_nodes():
    assert subtrees(0, 8, 8) == [(0, 8)]
    assert subtrees(2, 8, 8) == [(2, 4), (4, 8)]
    assert subtrees(3, 6, 12) == [(3, 6)]
    assert subtrees(1, 2, 4) == [(1, 2)]


def test_shards_are_placed_in_even_blocks():
    assert ranks_of_shards(6, range(4)) == [0, 0, 1, 2, 2, 3]
    assert ranks_of_shards(8, [0, 2]) == [0, 0, 0, 0, 2, 2, 2, 2]


FAMILY = Gpt(
    GptShape(
        num_layers=2,
        hidden_size=D,
        ffn_hidden_size=32,
        num_attention_heads=4,
        max_position_embeddings=T,
        vocab_size=V,
        padded_vocab_size=128,
        tied_embeddings=False,
        seed=3,
    )
)


def test_family_shards_have_the_initial_weights_of_the_whole_layer():
    family = VocabularyShardedFamily(FAMILY, 3)
    whole = FAMILY.build("head", CPU)
    assert isinstance(whole, Head)
    shards = [family.build(name, CPU) for name in family.shards]
    assert torch.equal(torch.cat([shard.output for shard in shards]), whole.weight[:V])
    assert [shard.first for shard in shards] == [0, 32, 64]
    norm = family.build("head", CPU)
    assert isinstance(norm, FinalNorm)
    assert [name for name, _ in norm.named_parameters()] == ["norm.weight", "norm.bias"]


def test_family_has_the_items_and_the_manifest_of_its_base():
    family = VocabularyShardedFamily(FAMILY, 3)
    assert [item.name for item in family.items] == [item.name for item in FAMILY.items]
    assert family.items[-1].writes == "hidden"
    assert family.loss_inputs == ("labels",)
    assert family.manifest() == FAMILY.manifest()


def test_stored_rows_name_the_rows_of_the_whole_layer():
    family = VocabularyShardedFamily(FAMILY, 3)
    rows = stored_rows(family, "vocabulary.2.head.weight.exp_avg")
    assert rows is not None
    assert (rows.name, rows.begin, rows.end) == ("head.weight.exp_avg", 64, 97)
    assert stored_rows(family, "head.norm.weight") is None
    assert stored_rows(FAMILY, "vocabulary.2.head.weight") is None
    assert shard_index("vocabulary.12.head.weight") == 12
    assert shard_index("layers.1.mlp") is None


def test_family_refuses_a_head_of_another_kind():
    class Other:
        items = FAMILY.items
        manifest = FAMILY.manifest

        def build(self, name, device):
            return torch.nn.Identity()

    with pytest.raises(TypeError, match="Identity has no form without its table"):
        VocabularyShardedFamily(Other(), 2).build("head", CPU)


def test_embedding_of_a_sharded_family_has_positions_alone():
    tied = VocabularyShardedFamily(Gpt(replace(FAMILY.shape, tied_embeddings=True)), 3)
    assert [name for name, _ in tied.build("embedding", CPU).named_parameters()] == ["position.weight"]
    assert tied.items[0].reads == (WORDS,)
    assert tied.items[-1].tied_to is None
    assert (dict(tied.ties), stored_ties(tied)) == ({}, {"head.weight": "embedding.word.weight"})
    shards = [tied.build(name, CPU) for name in tied.shards]
    assert [name for name, _ in shards[0].named_parameters()] == ["embedding.word.weight"]
    table = tied.base.build("embedding", CPU).word.weight
    assert torch.equal(torch.cat([shard.words for shard in shards]), table[:V])
    assert word_parameters(tied, ["head", "vocabulary.1"]) == {"vocabulary.1.embedding.word.weight"}


def test_slices_of_shards_cover_the_padded_vocabulary():
    """Two tensor-parallel ranks and 128 padded rows: 64 each, of which three shards have 21, 21 and 22."""
    family = VocabularyShardedFamily(FAMILY, 3, parts=2)
    assert [family.rows(index) for index in range(3)] == [(0, 42), (42, 84), (84, 128)]
    assert [family.local_rows(index, 1) for index in range(3)] == [(21, 42), (63, 84), (106, 128)]
    last = family.build("vocabulary.2", CPU)
    assert (len(last.words), len(last.output)) == (44, V - 84)


def test_part_of_padding_alone_changes_nothing():
    weight, x, labels, _ = problem()
    part, _ = VocabularyShard(0, torch.zeros(V, D), weight)(x.flatten(0, 1), labels.reshape(-1))
    padding, add_gradient = VocabularyShard(V, torch.zeros(8, D), torch.zeros(8, D), V)(
        x.flatten(0, 1), labels.reshape(-1)
    )
    add_gradient(part.log_sum(), torch.ones(B * T))
    for merged in (part.merged(padding), padding.merged(part)):
        for one, other in zip(merged.tensors, part.tensors, strict=True):
            assert torch.equal(one, other)
    nothing = padding.merged(padding)
    assert not any(tensor.isnan().any() for tensor in nothing.tensors)


@pytest.mark.parametrize("tied", [True, False])
def test_shards_under_adapters_are_frozen_and_have_the_same_part(tied):
    """They keep no exponentials for a gradient that nothing reads."""
    sizes = {"num_layers": 1, "hidden_size": 8, "ffn_hidden_size": 8, "num_attention_heads": 1}
    plain = Gpt(GptShape(**sizes, max_position_embeddings=8, vocab_size=20, padded_vocab_size=20, tied_embeddings=tied))
    adapted = LoraFamily(plain, LoraSettings(rank=1, alpha=1.0, targets=("q_proj",)), seed=0)
    frozen, trained = (
        VocabularyShardedFamily(each, 2).build("vocabulary.1", torch.device("cpu")) for each in (adapted, plain)
    )
    assert not any(parameter.requires_grad for parameter in frozen.parameters())
    assert all(parameter.requires_grad for parameter in trained.parameters())
    x, labels = torch.randn(6, 8, generator=torch.Generator().manual_seed(0)), torch.arange(6) + 8
    (mine, add), (theirs, _) = frozen(x, labels), trained(x, labels)
    assert all(torch.equal(a, b) for a, b in zip(mine.tensors, theirs.tensors, strict=True))
    add(torch.zeros(6), torch.ones(6))
    assert all(parameter.grad is None for parameter in frozen.parameters())
