"""Our Llama against transformers' Llama, Mistral and Mixtral: logits, loss and gradients from the same weights."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
)
from transformers.models.mixtral.modeling_mixtral import load_balancing_loss_func

from dynmo_train.models.kv_cache import Decoder, DecodingCache
from dynmo_train.models.llama import Llama, LlamaShape
from dynmo_train.models.moe import MoeShape, route
from tests.parity.item_stream import TOLERANCE, assert_same_gradients, build_all, copy_into, gradients, parameters, run

SCALING = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}
SHAPE = LlamaShape(
    num_layers=3,
    hidden_size=48,
    ffn_hidden_size=80,
    num_attention_heads=6,
    num_key_value_heads=2,
    head_dim=8,
    max_position_embeddings=64,
    vocab_size=101,
    padded_vocab_size=128,
    init_method_std=0.15,
)
CASES = {
    "llama 2": SHAPE,
    "every head its own keys": replace(SHAPE, num_key_value_heads=6),
    "llama 3": replace(SHAPE, rotary_base=500.0, rotary_scaling=SCALING),
    "another head width, tied": replace(SHAPE, head_dim=12, tied_embeddings=True),
    "mistral": replace(SHAPE, sliding_window=7),
    "mixtral": replace(SHAPE, moe=MoeShape(num_experts=4, top_k=2)),
}


def hugging_face(shape: LlamaShape):
    common = {
        "vocab_size": shape.vocab_size,
        "hidden_size": shape.hidden_size,
        "intermediate_size": shape.ffn_hidden_size,
        "num_hidden_layers": shape.num_layers,
        "num_attention_heads": shape.num_attention_heads,
        "num_key_value_heads": shape.num_key_value_heads,
        "head_dim": shape.head_dim,
        "max_position_embeddings": shape.max_position_embeddings,
        "rms_norm_eps": shape.layernorm_epsilon,
        "tie_word_embeddings": shape.tied_embeddings,
    }
    rope = {"rope_theta": shape.rotary_base, **(shape.rotary_scaling or {"rope_type": "default"})}
    if shape.sliding_window is not None:
        return MistralForCausalLM(MistralConfig(**common, rope_parameters=rope, sliding_window=shape.sliding_window))
    if shape.moe is None:
        return LlamaForCausalLM(LlamaConfig(**common, rope_parameters=rope))
    experts = {"num_local_experts": shape.moe.num_experts, "num_experts_per_tok": shape.moe.top_k}
    config = MixtralConfig(**common, **experts, rope_parameters=rope, sliding_window=None)
    return MixtralForCausalLM(config)


def renamed(values: dict[str, torch.Tensor], shape: LlamaShape) -> dict[str, torch.Tensor]:
    """Tensors by our names as tensors by transformers' names."""
    heads, groups, K = shape.num_attention_heads, shape.num_key_value_heads, shape.head_dim
    out = {
        "model.embed_tokens.weight": values["embedding.word.weight"][: shape.vocab_size],
        "model.norm.weight": values["head.norm.weight"],
    }
    if not shape.tied_embeddings:
        out["lm_head.weight"] = values["head.weight"][: shape.vocab_size]
    for n in range(shape.num_layers):
        ours, theirs = f"layers.{n}", f"model.layers.{n}"
        qkv = values[f"{ours}.attention.qkv.weight"].view(groups, heads // groups + 2, K, -1)
        out |= {
            f"{theirs}.self_attn.q_proj.weight": qkv[:, :-2].reshape(heads * K, -1),
            f"{theirs}.self_attn.k_proj.weight": qkv[:, -2].reshape(groups * K, -1),
            f"{theirs}.self_attn.v_proj.weight": qkv[:, -1].reshape(groups * K, -1),
            f"{theirs}.self_attn.o_proj.weight": values[f"{ours}.attention.dense.weight"],
            f"{theirs}.input_layernorm.weight": values[f"{ours}.attention.norm.weight"],
            f"{theirs}.post_attention_layernorm.weight": values[f"{ours}.mlp.norm.weight"],
        }
        if shape.moe is None:
            for mine, other in (("gate", "gate_proj"), ("up", "up_proj"), ("fc2", "down_proj")):
                out[f"{theirs}.mlp.{other}.weight"] = values[f"{ours}.mlp.{mine}.weight"]
            continue
        experts = [f"{ours}.mlp.experts.{e}" for e in range(shape.moe.num_experts)]
        out[f"{theirs}.mlp.gate.weight"] = values[f"{ours}.mlp.router.weight"]
        out[f"{theirs}.mlp.experts.gate_up_proj"] = torch.stack(
            [torch.cat([values[f"{e}.gate.weight"], values[f"{e}.up.weight"]]) for e in experts]
        )
        out[f"{theirs}.mlp.experts.down_proj"] = torch.stack([values[f"{e}.fc2.weight"] for e in experts])
    return out


@pytest.mark.parametrize("name", CASES)
def test_llama_logits_loss_and_gradients_equal_transformers(name):
    shape = CASES[name]
    family = Llama(shape)
    modules = build_all(family)
    theirs = hugging_face(shape)
    copy_into(theirs, renamed(parameters(modules), shape))
    tokens = torch.randint(0, shape.vocab_size, (3, 41), generator=torch.Generator().manual_seed(0))
    ids, labels = tokens[:, :-1], tokens[:, 1:]
    values = run(family, modules, {"ids": ids, "labels": labels})
    logits = modules["head"].logits(values["before.hidden"])
    expected = theirs(ids).logits
    assert expected.std() > 0.3
    torch.testing.assert_close(logits, expected, **TOLERANCE)
    their_loss = F.cross_entropy(expected.reshape(-1, shape.vocab_size), labels.reshape(-1))
    torch.testing.assert_close(values["loss"], their_loss, rtol=0, atol=1e-5)
    values["loss"].backward()
    their_loss.backward()
    assert_same_gradients(theirs, renamed(gradients(family, modules), shape))


@pytest.mark.parametrize("name", ["llama 3", "mixtral", "mistral"])
def test_llama_decoding_logits_equal_whole_sequence(name):
    family = Llama(CASES[name])
    modules = build_all(family)
    decoder = Decoder(family, modules, 64)
    tokens = torch.randint(0, 101, (2, 12), generator=torch.Generator().manual_seed(1))
    theirs = hugging_face(CASES[name]).eval()
    copy_into(theirs, renamed(parameters(modules), CASES[name]))
    with torch.no_grad():
        expected = theirs(tokens).logits
    cache = DecodingCache()
    torch.testing.assert_close(decoder.read(tokens[:, :5], cache), expected[:, 4], **TOLERANCE)
    for at in range(5, 12):
        torch.testing.assert_close(decoder.read(tokens[:, at : at + 1], cache), expected[:, at], **TOLERANCE)


def test_moe_load_balancing_loss_equals_transformers():
    """Theirs sums over the choices of a token, ours means over them: a factor of ``top_k``."""
    logits = torch.randn(64, 8, generator=torch.Generator().manual_seed(3))
    ours = route(logits, MoeShape(num_experts=8, top_k=2)).balance.finish()["load_balancing"]
    torch.testing.assert_close(ours * 2, load_balancing_loss_func((logits,), 8, 2))
