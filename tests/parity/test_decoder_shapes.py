"""Decoders of every shape against transformers: logits, loss, gradients and decoding from the same weights."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
import transformers
from transformers.models.mixtral.modeling_mixtral import load_balancing_loss_func

from dynmo_train.models.experts.moe import route
from dynmo_train.models.experts.moe_shape import MoeShape
from dynmo_train.models.experts.router import RouterShape
from dynmo_train.models.families.llama import Llama, LlamaShape
from dynmo_train.models.kv_cache import Decoder as CachedDecoder
from dynmo_train.models.kv_cache import DecodingCache
from tests.parity.item_stream import OF_LOGITS, assert_same_gradients, build_all, copy_into, gradients, parameters, run
from tests.tables import table

TRAINED = 24
LLAMA = LlamaShape(
    num_layers=3,
    hidden_size=48,
    ffn_hidden_size=80,
    num_attention_heads=6,
    num_key_value_heads=2,
    head_dim=8,
    max_position_embeddings=64,
    vocab_size=101,
    padded_vocab_size=128,
    layernorm_epsilon=1e-6,
    init_method_std=0.15,
)
GEMMA = replace(
    LLAMA,
    normalization="rmsnorm_1p",
    activation="geglu",
    embedding_scale=math.sqrt(48),
    tied_embeddings=True,
    head_dim=16,
)
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": TRAINED}
LONGROPE = {
    "rope_type": "longrope",
    "short_factor": [1.0, 1.5],
    "long_factor": [2.0, 5.0],
    "factor": 4.0,
    "original_max_position_embeddings": TRAINED,
}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}
SHAPES = {
    "Llama": LLAMA,
    "every head its own keys": replace(LLAMA, num_key_value_heads=6),
    "Llama 3": replace(LLAMA, rotary_base=500.0, rotary_scaling=LLAMA3),
    "another head width, tied": replace(LLAMA, head_dim=12, tied_embeddings=True),
    "Mistral": replace(LLAMA, sliding_window=7),
    "Mixtral": replace(LLAMA, moe=MoeShape(num_experts=4, top_k=2)),
    "Qwen2": replace(LLAMA, attention_bias="qkv", rotary_base=1e6),
    "Qwen3": replace(LLAMA, qk_norm="head", head_dim=12, rotary_base=1e6),
    "Llama with biases": replace(LLAMA, attention_bias="all", mlp_bias=True),
    "Gemma": GEMMA,
    "Phi3": replace(LLAMA, rotary_fraction=0.5),
    "Gemma2": replace(
        GEMMA,
        norm_placement="sandwich",
        attention_scale=0.2,
        sliding_window=7,
        layer_types=("sliding_attention", "full_attention", "sliding_attention"),
        attn_logit_softcapping=2.0,
        final_logit_softcapping=1.5,
    ),
    "Gemma3": replace(
        GEMMA,
        norm_placement="sandwich",
        qk_norm="head",
        attention_scale=0.2,
        sliding_window=7,
        layer_types=("sliding_attention", "sliding_attention", "full_attention"),
        rotary_base=1e6,
        local_rotary_base=1e4,
        rotary_scaling={"rope_type": "linear", "factor": 8.0},
        final_logit_softcapping=1.5,
    ),
    "GptOss": replace(
        LLAMA,
        sliding_window=7,
        layer_types=("sliding_attention", "full_attention", "sliding_attention"),
        attention_sinks=True,
        attention_bias="all",
        mlp_bias=True,
        activation="clamped_swiglu",
        swiglu_limit=0.5,
        rotary_base=1.5e5,
        rotary_scaling={**YARN, "truncate": False, "beta_fast": 32.0, "beta_slow": 1.0},
        moe=MoeShape(num_experts=4, top_k=2, router=RouterShape(bias=True)),
    ),
    "Olmo2": replace(LLAMA, norm_placement="post", qk_norm="projection"),
    "Phi3 beyond its training": replace(LLAMA, rotary_fraction=0.5, rotary_scaling=LONGROPE),
    "Phi3 within its training": replace(
        LLAMA,
        rotary_scaling={
            **LONGROPE,
            "original_max_position_embeddings": 50,
            "long_factor": [9.0] * 4,
            "short_factor": [1.0, 1.5, 2.0, 2.5],
        },
    ),
    "linear": replace(LLAMA, rotary_scaling={"rope_type": "linear", "factor": 3.0}),
    "dynamic": replace(
        LLAMA,
        rotary_scaling={"rope_type": "dynamic", "factor": 2.0, "original_max_position_embeddings": TRAINED},
        max_position_embeddings=TRAINED,
    ),
    "yarn": replace(LLAMA, rotary_scaling=YARN),
    "yarn of DeepSeek": replace(LLAMA, rotary_scaling={**YARN, "mscale": 0.7, "mscale_all_dim": 0.4}),
    "yarn with bounds": replace(LLAMA, rotary_scaling={**YARN, "beta_fast": 4.0, "beta_slow": 0.5, "truncate": False}),
    "Qwen3Moe": replace(LLAMA, qk_norm="head", moe=MoeShape(num_experts=4, top_k=2)),
}
CLASSES = ("Mistral", "Mixtral", "Qwen2", "Qwen3", "Qwen3Moe", "Gemma", "Gemma2", "Gemma3", "GptOss", "Phi3", "Olmo2")
EXPERTS = {"num_local_experts": 4, "num_experts_per_tok": 2}


def hugging_face(name: str, shape: LlamaShape):
    """The model of transformers with random weights."""
    kind = next((each for each in CLASSES if each == name or f"{each} " in name), "Llama")
    windows = {"sliding_window": shape.sliding_window, "layer_types": list(shape.layer_types or ())}
    gemma = {
        **windows,
        "hidden_activation": "gelu_pytorch_tanh",
        "query_pre_attn_scalar": round((shape.attention_scale or 1.0) ** -2),
        "final_logit_softcapping": shape.final_logit_softcapping,
        # Soft caps of scores exclude transformers' SDPA, which would ignore them.
        "attn_implementation": "eager",
    }
    rope = {"rope_type": "default", **(shape.rotary_scaling or {}), "rope_theta": shape.rotary_base}
    if shape.local_rotary_base is not None:
        local = {"rope_type": "default", "rope_theta": shape.local_rotary_base}
        rope = {"full_attention": rope, "sliding_attention": local}
    if shape.rotary_fraction != 1.0:
        rope["partial_rotary_factor"] = shape.rotary_fraction
    own = {
        "Llama": {"attention_bias": shape.attention_bias == "all", "mlp_bias": shape.mlp_bias},
        "Phi3": {
            "pad_token_id": None,
            "original_max_position_embeddings": rope.get("original_max_position_embeddings", TRAINED),
        },
        "Olmo2": {"pad_token_id": None, "eos_token_id": None},
        "Gemma": {"hidden_activation": "gelu_pytorch_tanh"},
        "Gemma2": {**gemma, "attn_logit_softcapping": shape.attn_logit_softcapping},
        "Gemma3": gemma,
        "GptOss": {**windows, **EXPERTS, "swiglu_limit": shape.swiglu_limit, "attn_implementation": "eager"},
        "Mistral": {"sliding_window": shape.sliding_window},
        "Mixtral": {**EXPERTS, "sliding_window": None},
        "Qwen3Moe": {**EXPERTS, "norm_topk_prob": True, "moe_intermediate_size": shape.ffn_hidden_size},
    }.get(kind, {})
    names = {"Gemma3": ("Gemma3TextConfig", "Gemma3ForCausalLM")}.get(kind, (f"{kind}Config", f"{kind}ForCausalLM"))
    config = getattr(transformers, names[0])(
        vocab_size=shape.vocab_size,
        hidden_size=shape.hidden_size,
        intermediate_size=shape.ffn_hidden_size,
        num_hidden_layers=shape.num_layers,
        num_attention_heads=shape.num_attention_heads,
        num_key_value_heads=shape.groups,
        head_dim=shape.head_width,
        max_position_embeddings=shape.max_position_embeddings,
        rms_norm_eps=shape.layernorm_epsilon,
        tie_word_embeddings=shape.tied_embeddings,
        rope_parameters=rope,
        **own,
    )
    torch.manual_seed(0)
    return getattr(transformers, names[1])(config)


def renamed(values: dict[str, torch.Tensor], shape: LlamaShape, theirs: dict) -> dict[str, torch.Tensor]:
    """Tensors by our names as tensors by transformers' names, those of the model that has ``theirs``."""
    heads, groups, K = shape.num_attention_heads, shape.groups, shape.head_width
    out = {
        "model.embed_tokens.weight": values["embedding.word.weight"][: shape.vocab_size],
        "model.norm.weight": values["head.norm.weight"],
    }
    if not shape.tied_embeddings:
        out["lm_head.weight"] = values["head.weight"][: shape.vocab_size]
    single = {
        "attention.dense.weight": "self_attn.o_proj.weight",
        "attention.dense.bias": "self_attn.o_proj.bias",
        "attention.query_norm.weight": "self_attn.q_norm.weight",
        "attention.key_norm.weight": "self_attn.k_norm.weight",
        "attention.norm.weight": "input_layernorm.weight",
        "mlp.norm.weight": "post_attention_layernorm.weight",
        "attention.post_norm.weight": "post_attention_layernorm.weight",
        "mlp.post_norm.weight": "post_feedforward_layernorm.weight",
        "mlp.gate.weight": "mlp.gate_proj.weight",
        "mlp.gate.bias": "mlp.gate_proj.bias",
        "mlp.up.weight": "mlp.up_proj.weight",
        "mlp.up.bias": "mlp.up_proj.bias",
        "mlp.fc2.weight": "mlp.down_proj.weight",
        "mlp.fc2.bias": "mlp.down_proj.bias",
        "mlp.router.weight": "mlp.gate.weight",
    }
    if shape.norm_placement == "sandwich":
        single["mlp.norm.weight"] = "pre_feedforward_layernorm.weight"
    if shape.attention_sinks:
        single |= {"attention.sinks": "self_attn.sinks"}
        single |= {f"mlp.router.{each}": f"mlp.router.{each}" for each in ("weight", "bias")}
    for n in range(shape.num_layers):
        mine, other = f"layers.{n}.", f"model.layers.{n}."
        out |= {other + their: values[mine + our] for our, their in single.items() if mine + our in values}
        for kind in ("weight", "bias"):
            if (qkv := values.get(f"{mine}attention.qkv.{kind}")) is not None:
                rows = qkv.view(groups, heads // groups + 2, K, -1)
                parts = {"q": rows[:, :-2], "k": rows[:, -2], "v": rows[:, -1]}
                flat = {each: part.reshape(-1, *qkv.shape[1:]) for each, part in parts.items()}
                if f"{other}self_attn.qkv_proj.{kind}" in theirs:
                    out[f"{other}self_attn.qkv_proj.{kind}"] = torch.cat(list(flat.values()))
                else:
                    out |= {f"{other}self_attn.{each}_proj.{kind}": part for each, part in flat.items()}
        if f"{other}mlp.gate_up_proj.weight" in theirs:
            pair = [out.pop(f"{other}mlp.{each}_proj.weight") for each in ("gate", "up")]
            out[f"{other}mlp.gate_up_proj.weight"] = torch.cat(pair)
        if shape.moe is not None:
            experts = [f"{mine}mlp.experts.{e}" for e in range(shape.moe.num_experts)]
            if shape.attention_sinks:
                out |= interleaved(values, experts, other)
                continue
            pairs = [torch.cat([values[f"{e}.gate.weight"], values[f"{e}.up.weight"]]) for e in experts]
            out[f"{other}mlp.experts.gate_up_proj"] = torch.stack(pairs)
            out[f"{other}mlp.experts.down_proj"] = torch.stack([values[f"{e}.fc2.weight"] for e in experts])
    return out


def interleaved(values: dict[str, torch.Tensor], experts: list[str], other: str) -> dict[str, torch.Tensor]:
    """The experts of a GPT-OSS: inputs before outputs, gate and up in alternate columns."""
    out = {}
    for theirs, kind in (("", "weight"), ("_bias", "bias")):
        pairs = [
            torch.stack([values[f"{e}.{each}.{kind}"] for each in ("gate", "up")], 1).flatten(0, 1) for e in experts
        ]
        downs = [values[f"{e}.fc2.{kind}"] for e in experts]
        out[f"{other}mlp.experts.gate_up_proj{theirs}"] = torch.stack([each.t() for each in pairs])
        out[f"{other}mlp.experts.down_proj{theirs}"] = torch.stack([each.t() for each in downs])
    return out


def models_of(name: str):
    """Our family and its items, and the model of transformers with the same weights; vectors are not ones and zeros."""
    shape = SHAPES[name]
    family = Llama(shape)
    modules = build_all(family)
    numbers = torch.Generator().manual_seed(7)
    with torch.no_grad():
        for value in (p for module in modules.values() for p in module.parameters() if p.dim() == 1):
            value.add_(torch.randn(value.shape, generator=numbers) * 0.2)
    theirs = hugging_face(name, shape)
    copy_into(theirs, renamed(parameters(modules), shape, theirs.state_dict()))
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
    assert_same_gradients(theirs, renamed(gradients(family, modules), shape, theirs.state_dict()))


@pytest.mark.parametrize(
    "name", ["Llama 3", "Mistral", "Mixtral", "Qwen3", "Olmo2", "Phi3", "Gemma", "Gemma2", "Gemma3", "GptOss", "yarn"]
)
def test_decoding_logits_equal_whole_sequence(name):
    family, modules, theirs = models_of(name)
    decoder = CachedDecoder(family, modules, 64)
    tokens = torch.randint(0, 101, (2, 12), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        expected = theirs.eval()(tokens).logits
    cache = DecodingCache()
    torch.testing.assert_close(decoder.read(tokens[:, :5], cache), expected[:, 4], **OF_LOGITS)
    for at in range(5, 12):
        torch.testing.assert_close(decoder.read(tokens[:, at : at + 1], cache), expected[:, at], **OF_LOGITS)


@table("name", SHAPES)
def test_manifest_of_a_shape_gives_the_same_shape(name):
    family = Llama(SHAPES[name])
    again = Llama(LlamaShape.from_manifest(family.manifest()))
    assert again.manifest() == family.manifest()
    assert again.shape.stated() == family.shape.stated()


def test_moe_load_balancing_loss_equals_transformers():
    """Theirs sums over the choices of a token, ours means over them: a factor of ``top_k``."""
    logits = torch.randn(64, 8, generator=torch.Generator().manual_seed(3))
    ours = route(logits, MoeShape(num_experts=8, top_k=2)).balance.finish()["load_balancing"]
    torch.testing.assert_close(ours * 2, load_balancing_loss_func((logits,), 8, 2))
