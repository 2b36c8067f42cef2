"""DeepSeek-V2 and V3 against transformers: logits, loss, gradients and decoding from the same weights."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
import transformers

from dynmo_balance.inputs.model_config import from_config
from dynmo_train.models.attention.latent_attention import LatentShape
from dynmo_train.models.experts.moe_shape import MoeShape
from dynmo_train.models.experts.router import RouterShape
from dynmo_train.models.families.llama import Llama, LlamaShape
from dynmo_train.models.kv_cache import Decoder as CachedDecoder
from dynmo_train.models.kv_cache import DecodingCache
from dynmo_train.models.layer_list import parameters_of
from tests.parity.item_stream import OF_LOGITS, assert_same_gradients, build_all, copy_into, gradients, parameters, run
from tests.tables import table

LATENT = LatentShape(q_lora_rank=24, kv_lora_rank=16, qk_head_dim=12, qk_pos_emb_head_dim=8, v_head_dim=10)
GREEDY = MoeShape(
    num_experts=8,
    top_k=3,
    ffn_size=20,
    layers=(0, 1, 1),
    shared_ffn_size=40,
    router=RouterShape(pre_softmax=True, scaling_factor=1.5),
)
SIGMOID = replace(
    GREEDY,
    top_k=4,
    router=RouterShape(
        score_function="sigmoid", scaling_factor=2.5, expert_bias=True, num_groups=4, group_topk=2, group_experts=2
    ),
)
V2 = LlamaShape(
    num_layers=3,
    hidden_size=48,
    ffn_hidden_size=56,
    num_attention_heads=4,
    max_position_embeddings=64,
    vocab_size=101,
    padded_vocab_size=128,
    layernorm_epsilon=1e-5,
    init_method_std=0.15,
    latent=LATENT,
    moe=GREEDY,
)
V3 = replace(V2, moe=SIGMOID)
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16}
GROUPS = RouterShape(pre_softmax=True, scaling_factor=16.0, num_groups=4, group_topk=2, group_experts=1)
SHAPES = {
    "V2": V2,
    "V2, queries without a latent": replace(V2, latent=replace(LATENT, q_lora_rank=None)),
    "V2, groups": replace(V2, moe=replace(GREEDY, router=GROUPS)),
    "V2 with biases": replace(V2, attention_bias="all", moe=None, mlp_bias=True),
    "V2, yarn": replace(V2, rotary_scaling={**YARN, "mscale": 0.7, "mscale_all_dim": 0.4}),
    "V2, wide values": replace(V2, latent=replace(LATENT, v_head_dim=28)),
    "V3": V3,
    "V3, halves": replace(V3, latent=replace(LATENT, rotary_interleaved=False)),
    "V3 with biases, tied": replace(V3, attention_bias="all", tied_embeddings=True),
    "V3, yarn": replace(V3, rotary_scaling={**YARN, "mscale": 1.0, "mscale_all_dim": 1.0}),
    "V3, dense": replace(V3, moe=None),
}


def hugging_face(name: str, shape: LlamaShape):
    """The model of transformers with random weights."""
    latent, moe, kind = shape.latent, shape.moe, name[:2]
    router = (moe or SIGMOID).router
    config = getattr(transformers, f"Deepseek{kind}Config")(
        vocab_size=shape.vocab_size,
        hidden_size=shape.hidden_size,
        intermediate_size=shape.ffn_hidden_size,
        moe_intermediate_size=20,
        num_hidden_layers=shape.num_layers,
        num_attention_heads=shape.num_attention_heads,
        num_key_value_heads=shape.num_attention_heads,
        q_lora_rank=latent.q_lora_rank,
        kv_lora_rank=latent.kv_lora_rank,
        qk_nope_head_dim=latent.qk_head_dim,
        qk_rope_head_dim=latent.qk_pos_emb_head_dim,
        v_head_dim=latent.v_head_dim,
        n_routed_experts=8,
        n_shared_experts=2,
        num_experts_per_tok=1 if moe is None else moe.top_k,
        first_k_dense_replace=shape.num_layers if moe is None else 1,
        routed_scaling_factor=router.scaling_factor,
        n_group=router.num_groups or 1,
        topk_group=router.group_topk or 1,
        max_position_embeddings=shape.max_position_embeddings,
        rms_norm_eps=shape.layernorm_epsilon,
        tie_word_embeddings=shape.tied_embeddings,
        attention_bias=shape.attention_bias == "all",
        rope_parameters={"rope_type": "default", **(shape.rotary_scaling or {}), "rope_theta": shape.rotary_base},
        **(
            {"topk_method": "group_limited_greedy" if router.num_groups else "greedy", "mlp_bias": shape.mlp_bias}
            if kind == "V2"
            else {"norm_topk_prob": True, "rope_interleave": latent.rotary_interleaved}
        ),
    )
    torch.manual_seed(0)
    return getattr(transformers, f"Deepseek{kind}ForCausalLM")(config)


NAMES = {
    "attention.norm": "input_layernorm",
    "attention.query_down": "self_attn.q_a_proj",
    "attention.query_latent_norm": "self_attn.q_a_layernorm",
    "attention.kv_down": "self_attn.kv_a_proj_with_mqa",
    "attention.kv_latent_norm": "self_attn.kv_a_layernorm",
    "attention.kv_up": "self_attn.kv_b_proj",
    "attention.dense": "self_attn.o_proj",
    "mlp.norm": "post_attention_layernorm",
    "mlp.gate": "mlp.gate_proj",
    "mlp.up": "mlp.up_proj",
    "mlp.fc2": "mlp.down_proj",
    "mlp.router": "mlp.gate",
    "mlp.shared.gate": "mlp.shared_experts.gate_proj",
    "mlp.shared.up": "mlp.shared_experts.up_proj",
    "mlp.shared.fc2": "mlp.shared_experts.down_proj",
}


def renamed_block(values: dict, mine: str, other: str, shape: LlamaShape) -> dict:
    """The tensors of one block by transformers' names; ``mine`` and ``other`` are its prefixes."""
    names = {**NAMES, "attention.query_up": f"self_attn.q{'_b' if shape.latent.q_lora_rank else ''}_proj"}
    out = {
        f"{other}{theirs}.{kind}": values[f"{mine}{ours}.{kind}"]
        for ours, theirs in names.items()
        for kind in ("weight", "bias")
        if f"{mine}{ours}.{kind}" in values
    }
    if f"{mine}mlp.experts.0.gate.weight" in values:
        experts = [f"{mine}mlp.experts.{e}" for e in range(shape.moe.num_experts)]
        pairs = [torch.cat([values[f"{e}.gate.weight"], values[f"{e}.up.weight"]]) for e in experts]
        out[f"{other}mlp.experts.gate_up_proj"] = torch.stack(pairs)
        out[f"{other}mlp.experts.down_proj"] = torch.stack([values[f"{e}.fc2.weight"] for e in experts])
    return out


def renamed(values: dict, shape: LlamaShape) -> dict:
    """Tensors by our names as tensors by transformers' names."""
    out = {
        "model.embed_tokens.weight": values["embedding.word.weight"][: shape.vocab_size],
        "model.norm.weight": values["head.norm.weight"],
    }
    if not shape.tied_embeddings:
        out["lm_head.weight"] = values["head.weight"][: shape.vocab_size]
    for n in range(shape.num_layers):
        out |= renamed_block(values, f"layers.{n}.", f"model.layers.{n}.", shape)
    return out


def models_of(name: str):
    """Our family and its items, and the model of transformers with the same weights; vectors are not ones and zeros."""
    shape = SHAPES[name]
    family = Llama(shape)
    modules = build_all(family)
    numbers = torch.Generator().manual_seed(7)
    theirs = hugging_face(name, shape)
    with torch.no_grad():
        for value in (p for module in modules.values() for p in module.parameters() if p.dim() == 1):
            value.add_(torch.randn(value.shape, generator=numbers) * 0.2)
        for n in range(shape.num_layers):
            bias = getattr(getattr(modules[f"layers.{n}.mlp"], "router", None), "expert_bias", None)
            if bias is not None:
                bias.copy_(torch.randn(bias.shape, generator=numbers) * 0.1)
                theirs.model.layers[n].mlp.gate.e_score_correction_bias.copy_(bias)
    copy_into(theirs, renamed(parameters(modules), shape))
    return family, modules, theirs


@pytest.mark.parametrize("name", SHAPES)
def test_logits_loss_and_gradients_equal_transformers(name):
    family, modules, theirs = models_of(name)
    shape = family.shape
    tokens = torch.randint(0, shape.vocab_size, (3, 41), generator=torch.Generator().manual_seed(0))
    ids, labels = tokens[:, :-1], tokens[:, 1:]
    values = run(family, modules, {"ids": ids, "labels": labels})
    logits = modules["head"].logits(values["before.hidden"])
    expected = theirs(ids).logits
    assert expected.std() > 0.3
    torch.testing.assert_close(logits, expected, **OF_LOGITS)
    their_loss = F.cross_entropy(expected.reshape(-1, shape.vocab_size), labels.reshape(-1))
    torch.testing.assert_close(values["loss"], their_loss, rtol=0, atol=1e-5)
    values["loss"].backward()
    their_loss.backward()
    assert_same_gradients(theirs, renamed(gradients(family, modules), shape))


@pytest.mark.parametrize("name", SHAPES)
def test_decoding_logits_equal_whole_sequence(name):
    family, modules, theirs = models_of(name)
    decoder = CachedDecoder(family, modules, 64)
    tokens = torch.randint(0, 101, (2, 12), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        expected = theirs.eval()(tokens).logits
    cache = DecodingCache()
    torch.testing.assert_close(decoder.read(tokens[:, :5], cache), expected[:, 4], **OF_LOGITS)
    torch.testing.assert_close(decoder.read(tokens[:, 5:8], cache), expected[:, 7], **OF_LOGITS)
    for at in range(8, 12):
        torch.testing.assert_close(decoder.read(tokens[:, at : at + 1], cache), expected[:, at], **OF_LOGITS)


def test_cache_has_one_latent_a_token_for_all_heads():
    family, modules, _ = models_of("V3")
    cache = DecodingCache(capacity=32)
    CachedDecoder(family, modules, 64).read(torch.zeros(2, 5, dtype=torch.int64), cache)
    stored = cache.by_item["layers.0.attention"]
    assert sum(each.numel() for each in vars(stored).values() if isinstance(each, torch.Tensor)) == 2 * 32 * (16 + 8)


@table("name", SHAPES)
def test_manifest_of_a_shape_gives_the_same_shape(name):
    family = Llama(SHAPES[name])
    again = Llama(LlamaShape.from_manifest(family.manifest()))
    assert again.manifest() == family.manifest()
    assert (again.shape.latent, again.shape.moe) == (family.shape.latent, family.shape.moe)


@table("name", SHAPES)
def test_cost_model_counts_the_parameters_of_a_manifest(name):
    family = Llama(SHAPES[name])
    stored = (
        parameter.numel()
        for item in family.items
        for full, parameter in parameters_of(item.name, family.build(item.name, torch.device("meta"))).items()
        if full not in family.ties
    )
    assert from_config(family.manifest(), "manifest").params == sum(stored)
