"""Multi-token prediction: tokens ahead across context-parallel ranks, layers that differ, and copies of early exits."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from dynmo_train.models.families.llama import Llama, LlamaShape
from dynmo_train.models.families.multi_token import tokens_ahead
from dynmo_train.models.techniques.early_exit import ExitSettings
from dynmo_train.models.techniques.technique_blocks import DynamicFamily, DynamicSettings
from dynmo_train.parallel.context_parallel import ContextRegion

CPU = torch.device("cpu")
SHAPE = LlamaShape(
    num_layers=3,
    hidden_size=16,
    ffn_hidden_size=24,
    num_attention_heads=2,
    max_position_embeddings=24,
    vocab_size=20,
    padded_vocab_size=32,
    mtp_num_layers=2,
)
TOKENS = 16


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("depth", [0, 1])
@pytest.mark.parametrize("size", [2, 4])
def test_context_ranks_predict_the_tokens_of_the_whole_sample(monkeypatch, size, depth, masked):
    generator = torch.Generator().manual_seed(1)
    labels = torch.randint(0, 20, (2, TOKENS), generator=generator)
    counts = (torch.rand(2, TOKENS, generator=generator) < 0.7).long() if masked else torch.ones_like(labels)
    places, total = torch.arange(TOKENS), torch.zeros(2, TOKENS)
    known = counts[:, depth + 1 :].sum()
    for rank in range(size):
        region = ContextRegion(None, rank, size)
        # A mask is cut as weights; see ``Batch.of_context``.
        weights = counts / counts.sum() * size if masked else counts
        wholes = iter([labels, weights])
        monkeypatch.setattr(region, "gather_tokens", lambda _x, wholes=wholes: next(wholes))
        ids, following, found = tokens_ahead(region.cut(labels, 1), region.cut(weights, 1), depth, region)
        for at, place in enumerate(region.cut(places, 0).tolist()):
            if place + depth < TOKENS:
                assert torch.equal(ids[:, at], labels[:, place + depth])
            if place + depth + 1 < TOKENS:
                assert torch.equal(following[:, at], labels[:, place + depth + 1])
                torch.testing.assert_close(found[:, at], size * counts[:, place + depth + 1] / known)
            total[:, place] = found[:, at]
    # The mean over the ranks is the mean over all tokens that count.
    torch.testing.assert_close(total.sum() / size, torch.tensor(1.0))
    assert not total[:, TOKENS - depth - 1 :].any()


def test_context_ranks_keep_the_weights_of_a_step(monkeypatch):
    labels = torch.arange(2 * TOKENS).view(2, TOKENS)
    # By the loss per token: a microbatch with few tokens that count does not weigh more.
    weights = 0.01 * (labels % 3 > 0)
    found = torch.zeros(2, TOKENS)
    for rank in range(2):
        region = ContextRegion(None, rank, 2, weighs_steps=True)
        wholes = iter([labels, weights])
        monkeypatch.setattr(region, "gather_tokens", lambda _x, wholes=wholes: next(wholes))
        places = region.cut(torch.arange(TOKENS), 0)
        found[:, places] = tokens_ahead(region.cut(labels, 1), region.cut(weights, 1), 0, region)[2]
    assert torch.equal(found[:, :-1], weights[:, 1:])
    assert not found[:, -1].any()


def test_gathered_tokens_are_in_the_order_of_the_sample(monkeypatch):
    whole = torch.arange(2 * TOKENS).view(2, TOKENS)

    class Done:
        def wait(self):
            pass

    def gather(out, local, group):
        assert local.shape == (2, TOKENS // 2)
        out.copy_(torch.cat([ContextRegion(None, rank, 2).cut(whole, 1) for rank in range(2)]))
        return Done()

    monkeypatch.setattr("dynmo_train.parallel.context_parallel.start_gather_rows", gather)
    region = ContextRegion("a group", 1, 2)
    assert torch.equal(region.gather_tokens(region.cut(whole, 1)), whole)


def test_depth_has_the_window_and_rotation_of_the_last_layer():
    types = ("full_attention", "full_attention", "sliding_attention")
    local = replace(SHAPE, sliding_window=4, layer_types=types, local_rotary_base=50.0)
    for shape, window in ((local, 4), (replace(local, layer_types=types[::-1]), None)):
        family = Llama(shape)
        depth, last = family.build("mtp.0", CPU).attention, family.build("layers.2.attention", CPU)
        assert depth.window == last.window == window
        assert depth.rotary.key == last.rotary.key


@pytest.mark.parametrize("tied", [False, True])
def test_exits_and_depths_are_copies_of_one_head(tied):
    exits = ExitSettings(layers=(0,), loss_weight=0.3, threshold=0.5, measure="softmax")
    base = Llama(replace(SHAPE, tied_embeddings=tied))
    family = DynamicFamily(base, DynamicSettings(exits=exits), seed=1, width=16, std=0.1)
    owner = "embedding.word.weight" if tied else "head.weight"
    copies = {"layers.0.mlp.exit.head.weight", "mtp.0.head.weight", "mtp.1.head.weight"}
    assert {name for name, of in family.ties.items() if of == owner and name.endswith("head.weight")} == copies | (
        {"head.weight"} if tied else set()
    )
    norms = {"layers.0.mlp.exit.head.norm.weight", "mtp.0.final_norm.weight"}
    assert {name for name, of in family.ties.items() if of == "head.norm.weight"} == norms
