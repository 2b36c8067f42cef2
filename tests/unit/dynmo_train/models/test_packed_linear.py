"""Packed weights: the products of ``F.linear``, and the tokens of models that are not packed."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F

from dynmo_train.models.attention.latent_attention import LatentShape
from dynmo_train.models.experts.moe_shape import MoeShape
from dynmo_train.models.families.llama import Llama
from dynmo_train.models.kv_cache import Decoder, DecodingCache, store_by_columns
from dynmo_train.models.layers.feed_forward import join_gated_layers
from dynmo_train.models.layers.linear import PrunableLinear
from dynmo_train.models.layers.sparse_formats import SparseTable
from dynmo_train.models.packed_linear import PackedProduct, can_pack, pack_weights
from dynmo_train.models.vocabulary.head import Head
from tests.parity.item_stream import build_all
from tests.parity.test_decoder_shapes import LLAMA
from tests.tables import table

pytestmark = pytest.mark.skipif(not can_pack(), reason="this torch has no oneDNN")

LATENT = LatentShape(kv_lora_rank=8, qk_head_dim=8, qk_pos_emb_head_dim=4, v_head_dim=8)


@table("rows", [0, 1, 2, 7, 8, 300])
@table("bias", [False, True])
def test_packed_product_equals_the_plain_one_for_any_rows(rows, bias):
    generator = torch.Generator().manual_seed(rows)
    weight = torch.randn(33, 20, generator=generator)
    added = torch.randn(33, generator=generator) if bias else None
    product = PackedProduct(weight, 8)
    for shape in ((rows, 20), (rows, 3, 20)):
        x = torch.randn(shape, generator=generator)
        torch.testing.assert_close(product(x, added), F.linear(x, weight, added), rtol=0, atol=1e-5)
    # Every second row of another tensor: not contiguous.
    x = torch.randn(2 * rows, 20, generator=generator)[::2]
    torch.testing.assert_close(product(x, added), F.linear(x, weight, added), rtol=0, atol=1e-5)


SHAPES = {
    "gated": LLAMA,
    "biases": replace(LLAMA, activation="gelu", attention_bias="all", mlp_bias=True),
    "experts": replace(LLAMA, moe=MoeShape(num_experts=4, top_k=2)),
    "latent": replace(LLAMA, latent=LATENT, num_key_value_heads=None, head_dim=None),
    "soft cap": replace(LLAMA, final_logit_softcapping=5.0),
}


@pytest.mark.parametrize("name", SHAPES)
@torch.no_grad()
def test_packed_model_has_the_logits_of_the_plain_one(name):
    family = Llama(replace(SHAPES[name], hidden_dropout=0.0, attention_dropout=0.0))
    ids = torch.randint(0, LLAMA.vocab_size, (5, 6), generator=torch.Generator().manual_seed(2))
    logits = {}
    for packs in (False, True):
        modules = build_all(family)
        for module in modules.values():
            join_gated_layers(module)
            if packs:
                pack_weights(module.eval(), 5)
                # Again, and by columns afterwards: neither changes a packed layer.
                pack_weights(module, 2)
                store_by_columns(module)
        decoder, cache = Decoder(family, modules, LLAMA.max_position_embeddings), DecodingCache()
        logits[packs] = [decoder.read(piece, cache) for piece in (ids[:, :4], ids[:, 4:5], ids[:, 5:])]
    packed = [each for each in modules["layers.0.attention"].modules() if getattr(each, "packed", None) is not None]
    assert packed
    assert all(each.weight.device.type == "meta" for each in packed)
    assert modules["head"].packed is not None
    for plain, found in zip(logits[False], logits[True], strict=True):
        torch.testing.assert_close(found, plain, rtol=0, atol=1e-4)


def test_sparse_narrowed_and_other_dtypes_are_not_packed():
    device = torch.device("cpu")
    sparse, half, plain = (PrunableLinear(64, 64, device) for _ in range(3))
    with torch.no_grad():
        sparse.weight.normal_()
    mask = torch.zeros(64, 64, dtype=torch.bool)
    mask[:, 0] = True
    sparse.set_mask(mask, SparseTable(structured=True))
    for layer in (sparse, half.to(torch.bfloat16), plain):
        pack_weights(layer, 4)
    assert (sparse.packed, half.packed) == (None, None)
    assert plain.packed is not None


def test_padding_rows_of_a_head_are_not_packed():
    head = Head(width=8, rows=40, vocabulary=33, norm=torch.nn.Identity(), device=torch.device("cpu"))
    torch.nn.init.normal_(head.weight)
    x = torch.randn(3, 2, 8)
    expected = head.logits(x)
    pack_weights(head, 3)
    assert head.logits(x).shape == (3, 2, 33)
    torch.testing.assert_close(head.logits(x), expected, rtol=0, atol=1e-5)
