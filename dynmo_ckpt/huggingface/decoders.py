"""Decoders of transformers: which one computes a model, and their configurations both ways. Pure.

A row of ``DECODERS`` states by which fields of a manifest's ``model`` an architecture differs from a Llama, and which
groups of keys its configuration has.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from ..io.errors import UnsupportedError
from ..maps.decoder_fields import GATED, LLAMA, decoder_fields, family_fields
from .config_keys import size
from .decoder_keys import KEY_GROUPS, WindowRules, periodic_pattern, qwen2_moe_pattern, qwen_pattern, smollm3_pattern
from .decoder_rotary import (
    FULL,
    SLIDING,
    RotaryRules,
    local_rotary_config,
    local_rotary_fields,
    rotary_config,
    rotary_fields,
)
from .deepseek_experts import unlike_experts

Config = Mapping[str, Any]
Model = dict[str, Any]
# What a Mixtral's router computes: the likeliest experts, weighted by their normalized probabilities.
MIXTRAL_ROUTER: Mapping[str, Any] = {
    "moe_router_score_function": "softmax",
    "moe_router_pre_softmax": False,
    "moe_router_topk_scaling_factor": None,
    "moe_router_enable_expert_bias": False,
    "moe_router_num_groups": None,
    "moe_router_group_topk": None,
    "moe_router_group_experts": None,
}
# The shared experts that a Mixtral does not have.
PLAIN_EXPERTS: Mapping[str, Any] = {**MIXTRAL_ROUTER, "moe_shared_ffn_size": 0, "moe_shared_gate": False}
ASSIGNMENTS = ("balanced", "sinkhorn")
NO_OR_ALL, NO_OR_QKV = ("none", "all"), ("none", "qkv")
ROTARY = RotaryRules()


@dataclass(frozen=True, kw_only=True)
class Decoder:
    """An architecture of transformers.

    Attributes:
        map: the table of ``maps/``.
        name: of its classes, without ``ForCausalLM``.
        activation: of its MLP, as in a manifest.
        fields: permitted values of fields; others must be those of a Llama.
        free: fields that its configuration states, with any value.
        keys: groups of keys of its configuration, of ``KEY_GROUPS``.
        experts: whether its MLPs are experts.
        router: permitted values of fields of the experts, empty for any; others must be those of a Mixtral.
        deepseek_experts: whether its experts, shared ones included, are those of a DeepSeek-V3.
        scales_embedding: whether word embeddings are multiplied by the square root of the width.
        windows: which layers have a sliding window; None where it has none.
        rotary: what it reads of rotary positions.
        local_rotary: whether sliding layers have a rotation of their own.
        config: further keys of its configuration.
        names: its names of keys that others name as a Llama does.
    """

    map: str
    name: str
    activation: str = "swiglu"
    fields: dict[str, tuple[Any, ...]] = field(default_factory=dict)
    free: tuple[str, ...] = ()
    keys: tuple[str, ...] = ()
    experts: bool = False
    router: dict[str, tuple[Any, ...]] = field(default_factory=dict)
    deepseek_experts: bool = False
    scales_embedding: bool = False
    windows: WindowRules | None = None
    rotary: RotaryRules = ROTARY
    local_rotary: bool = False
    config: Mapping[str, Any] = field(default_factory=dict)
    names: Mapping[str, str] = field(default_factory=dict)


GPT_OSS_YARN = {
    "rope_type": "yarn",
    "factor": 32.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "truncate": False,
    "original_max_position_embeddings": 4096,
}
_QWEN = WindowRules(switch=True, pattern=qwen_pattern)
_ALTERNATING = WindowRules(pattern=lambda _config, layer: FULL if layer % 2 else SLIDING)
_GEMMA: dict[str, tuple[Any, ...]] = {"attention_bias": NO_OR_ALL, "normalization": ("rmsnorm_1p",)}
_SANDWICH: dict[str, tuple[Any, ...]] = {**_GEMMA, "norm_placement": ("sandwich",)}
_TANH = {"hidden_activation": "gelu_pytorch_tanh"}
_PRE_SOFTMAX: dict[str, tuple[Any, ...]] = {"moe_router_pre_softmax": ()}
_SIGMOID: dict[str, tuple[Any, ...]] = {
    "moe_router_score_function": ("sigmoid",),
    "moe_router_enable_expert_bias": (True,),
}
# The router of DeepSeek-V3, with its groups and shared experts.
_DEEPSEEK: dict[str, tuple[Any, ...]] = {
    **_SIGMOID,
    **dict.fromkeys(("moe_router_topk_scaling_factor", "moe_shared_ffn_size"), ()),
    **dict.fromkeys(("moe_router_num_groups", "moe_router_group_topk", "moe_router_group_experts"), ()),
}
_LLAMA = Decoder(
    map="llama",
    name="Llama",
    fields={"attention_bias": NO_OR_ALL, "mlp_bias": (False, True)},
    keys=("attention_bias", "mlp_bias"),
)
DECODERS: Mapping[str, Decoder] = {
    "llama": _LLAMA,
    "mistral": Decoder(
        map="llama",
        name="Mistral",
        windows=WindowRules(everywhere=True, required=True),
        config={"attention_bias": False, "mlp_bias": False},
    ),
    "mixtral": Decoder(
        map="llama",
        name="Mixtral",
        experts=True,
        keys=("experts",),
        windows=WindowRules(everywhere=True),
        config={"attention_bias": False, "mlp_bias": False},
    ),
    "qwen2": Decoder(map="llama", name="Qwen2", fields={"attention_bias": ("qkv",)}, windows=_QWEN),
    "qwen3": Decoder(
        map="llama",
        name="Qwen3",
        fields={"attention_bias": NO_OR_ALL, "qk_norm": ("head",)},
        keys=("attention_bias",),
        windows=_QWEN,
    ),
    "qwen3_moe": Decoder(
        map="qwen3_moe",
        name="Qwen3Moe",
        fields={"attention_bias": NO_OR_ALL, "qk_norm": ("head",)},
        experts=True,
        router=_PRE_SOFTMAX,
        keys=("attention_bias", "experts", "expert_size"),
        windows=WindowRules(everywhere=True, switch=True),
        config={"decoder_sparse_step": 1},
    ),
    "qwen2_moe": Decoder(
        map="qwen2_moe",
        name="Qwen2Moe",
        fields={"attention_bias": NO_OR_QKV},
        experts=True,
        router={**_PRE_SOFTMAX, "moe_shared_ffn_size": (), "moe_shared_gate": (True,)},
        keys=("qkv_bias", "experts", "expert_size", "shared_expert"),
        windows=WindowRules(switch=True, pattern=qwen2_moe_pattern),
        config={"decoder_sparse_step": 1},
    ),
    "gemma": Decoder(
        map="llama",
        name="Gemma",
        activation="geglu",
        fields=_GEMMA,
        keys=("attention_bias",),
        scales_embedding=True,
        config=_TANH,
    ),
    "gemma2": Decoder(
        map="gemma2",
        name="Gemma2",
        activation="geglu",
        fields=_SANDWICH,
        free=("attention_scale", "attn_logit_softcapping", "final_logit_softcapping"),
        keys=("attention_bias", "query_pre_attn_scalar", "softcaps"),
        scales_embedding=True,
        windows=_ALTERNATING,
        config=_TANH,
    ),
    "gemma3_text": Decoder(
        map="gemma2",
        name="Gemma3",
        activation="geglu",
        fields={**_SANDWICH, "qk_norm": ("head",)},
        free=("attention_scale", "final_logit_softcapping", "local_rotary_base"),
        keys=("attention_bias", "query_pre_attn_scalar", "final_softcap"),
        scales_embedding=True,
        windows=WindowRules(pattern=periodic_pattern),
        local_rotary=True,
        config=_TANH,
    ),
    "olmo2": Decoder(
        map="olmo2",
        name="Olmo2",
        fields={"attention_bias": NO_OR_ALL, "norm_placement": ("post",), "qk_norm": ("projection",)},
        keys=("attention_bias",),
    ),
    "phi3": Decoder(
        map="phi3",
        name="Phi3",
        free=("rotary_fraction",),
        windows=WindowRules(everywhere=True),
        rotary=RotaryRules(
            types=("default", "longrope"), fraction=True, renamed={"su": "longrope", "yarn": "longrope"}
        ),
        # Its default is a token of its own vocabulary.
        config={"pad_token_id": None},
    ),
    "gpt_oss": Decoder(
        map="gpt_oss",
        name="GptOss",
        activation="clamped_swiglu",
        fields={
            "attention_bias": NO_OR_ALL,
            "mlp_bias": (True,),
            "attention_sinks": (True,),
            "moe_router_bias": (True,),
        },
        free=("swiglu_alpha", "swiglu_limit"),
        keys=("attention_bias", "experts", "clamped_swiglu"),
        experts=True,
        windows=_ALTERNATING,
        rotary=RotaryRules(default=GPT_OSS_YARN),
    ),
    "olmo3": Decoder(
        map="olmo2",
        name="Olmo3",
        fields={"attention_bias": NO_OR_ALL, "norm_placement": ("post",), "qk_norm": ("projection",)},
        free=("local_rotary_base",),
        keys=("attention_bias",),
        windows=WindowRules(pattern=periodic_pattern),
        rotary=RotaryRules(local_base="rope_theta"),
        local_rotary=True,
    ),
    "exaone4": Decoder(
        map="olmo2",
        name="Exaone4",
        fields={"norm_placement": ("post",), "qk_norm": ("head",)},
        free=("no_rope_freq",),
        keys=("full_layers_without_rotation",),
        windows=WindowRules(pattern=periodic_pattern, absent=None),
    ),
    "smollm3": Decoder(
        map="llama",
        name="SmolLM3",
        fields={"attention_bias": NO_OR_ALL, "mlp_bias": (False, True)},
        free=("no_rope_freq",),
        keys=("attention_bias", "mlp_bias", "no_rope_layers"),
        windows=WindowRules(switch=True, pattern=smollm3_pattern),
        config={"pad_token_id": None},
    ),
    "granite": Decoder(
        map="llama",
        name="Granite",
        fields={"attention_bias": NO_OR_ALL, "mlp_bias": (False, True)},
        free=("embedding_scale", "attention_scale", "residual_multiplier", "logits_scaling"),
        keys=("attention_bias", "mlp_bias", "multipliers"),
    ),
    "olmoe": Decoder(
        map="qwen3_moe",
        name="Olmoe",
        fields={"attention_bias": NO_OR_ALL, "qk_norm": ("projection",)},
        experts=True,
        router=_PRE_SOFTMAX,
        keys=("attention_bias", "experts", "norm_topk_prob"),
    ),
    "ministral": Decoder(
        map="llama", name="Ministral", windows=WindowRules(required=True, pattern=lambda _config, _layer: SLIDING)
    ),
    "seed_oss": Decoder(
        map="llama",
        name="SeedOss",
        fields={"attention_bias": ("none", "qkv", "all")},
        keys=("attention_out_bias",),
        config={"mlp_bias": False},
    ),
    # Its own class has the tensors and the configuration of a Llama.
    "internlm3": _LLAMA,
    "ernie4_5": Decoder(
        map="ernie4_5",
        name="Ernie4_5",
        fields={"attention_bias": NO_OR_ALL, "mlp_bias": (False, True)},
        keys=("use_bias",),
    ),
    "glm4_moe": Decoder(
        map="glm4_moe",
        name="Glm4Moe",
        fields={"attention_bias": NO_OR_QKV, "qk_norm": (None, "head")},
        free=("rotary_fraction",),
        experts=True,
        router=_DEEPSEEK,
        deepseek_experts=True,
        keys=("attention_qkv_bias", "use_qk_norm", "deepseek_experts"),
        rotary=RotaryRules(fraction=True),
    ),
    "dots1": Decoder(
        map="glm4_moe",
        name="Dots1",
        fields={"attention_bias": NO_OR_ALL, "qk_norm": ("head",)},
        experts=True,
        router=_DEEPSEEK,
        deepseek_experts=True,
        keys=("attention_bias", "deepseek_experts"),
        windows=WindowRules(pattern=qwen_pattern),
    ),
    "minimax_m2": Decoder(
        map="minimax_m2",
        name="MiniMaxM2",
        fields={"qk_norm": ("projection",)},
        free=("rotary_fraction",),
        experts=True,
        router=_SIGMOID,
        keys=("experts", "rotary_dim"),
        rotary=RotaryRules(fraction=True),
    ),
    "starcoder2": Decoder(
        map="starcoder2",
        name="Starcoder2",
        activation="gelu_tanh",
        fields={"normalization": ("layernorm",), "attention_bias": NO_OR_ALL, "mlp_bias": (False, True)},
        keys=("use_bias",),
        windows=WindowRules(everywhere=True),
        names={"rms_norm_eps": "norm_epsilon"},
    ),
    "arcee": Decoder(
        map="arcee",
        name="Arcee",
        activation="squared_relu",
        fields={"attention_bias": NO_OR_ALL, "mlp_bias": (False, True)},
        keys=("attention_bias", "mlp_bias"),
    ),
    "jais2": Decoder(
        map="arcee",
        name="Jais2",
        activation="squared_relu",
        fields={"normalization": ("layernorm",), "attention_bias": NO_OR_ALL, "mlp_bias": (False, True)},
        keys=("attention_bias", "mlp_bias"),
        names={"rms_norm_eps": "layer_norm_eps"},
    ),
}
SILENT = ("rotary_base", "rotary_scaling", "embedding_scale", "layer_types")
ACTIVATIONS = {
    "swiglu": "silu",
    "geglu": "gelu_pytorch_tanh",
    "clamped_swiglu": "silu",
    "gelu_tanh": "gelu_pytorch_tanh",
    "squared_relu": "relu2",
}


def decoder_kind(model: Config, preferred: str | None = None) -> str:
    """The ``model_type`` of transformers that computes a decoder.

    Args:
        model: the ``model`` of a manifest.
        preferred: the type to choose where several compute it; None or another one: the first of the table.

    Raises:
        UnsupportedError: transformers has no such model.
    """
    candidates = {kind: unlike_decoder(model, decoder) for kind, decoder in DECODERS.items()}
    # In the order of the table: a plain model with a window is a Mistral, one without a Llama.
    found = [kind for kind, unlike in candidates.items() if not unlike]
    if found:
        return preferred if preferred in found else found[0]
    if model.get("num_experts"):
        if model.get("moe_shared_ffn_size"):
            raise UnsupportedError("transformers' Mixtral has no shared experts; use --to native")
        free = ("moe_router_pre_softmax",) if model.get("qk_norm") else ()
        if unlike := {name: value for name, value in unlike_mixtral(model).items() if name not in free}:
            fields = ", ".join(f"{name} = {value}" for name, value in unlike.items())
            raise UnsupportedError(f"transformers' Mixtral implements no router with {fields}; use --to native")
    # Of the architecture that fits best.
    kind, unlike = min(candidates.items(), key=lambda item: len(item[1]))
    name, (value, needed) = next(iter(unlike.items()))
    raise UnsupportedError(f"a {DECODERS[kind].name} implements {name} = {needed} only; the model has {value}")


def unlike_decoder(model: Config, decoder: Decoder) -> dict[str, tuple[Any, Any]]:
    """The fields by which a model is not the one that an architecture computes: its value, and what it must be.

    Args:
        model: the ``model`` of a manifest.
        decoder: an architecture.
    """
    own = decoder_fields(model)
    fixed = (name for name in LLAMA if name not in SILENT and name not in decoder.free)
    allowed = {name: decoder.fields.get(name, (LLAMA[name],)) for name in fixed}
    unlike: dict[str, tuple[Any, Any]] = {
        name: (own[name], " or ".join(map(str, values))) for name, values in allowed.items()
    }
    unlike = {name: pair for name, pair in unlike.items() if own[name] not in allowed[name]}
    if model["activation"] != decoder.activation:
        unlike["activation"] = (model["activation"], decoder.activation)
    scale = math.sqrt(model.get("hidden_size", 0)) if decoder.scales_embedding else 1.0
    if "embedding_scale" not in decoder.free and not math.isclose(own["embedding_scale"], scale, rel_tol=1e-6):
        unlike["embedding_scale"] = (own["embedding_scale"], scale)
    unlike |= _unlike_experts(model, decoder) if model.get("num_experts") and decoder.experts else {}
    if bool(model.get("num_experts")) != decoder.experts:
        unlike["num_experts"] = (model.get("num_experts"), "any number" if decoder.experts else None)
    window = model.get("sliding_window")
    scaling = (own["rotary_scaling"] or {}).get("rope_type", "default")
    if scaling not in decoder.rotary.types:
        unlike["rotary_scaling"] = (scaling, " or ".join(decoder.rotary.types))
    if decoder.windows is None and window is not None:
        unlike["sliding_window"] = (window, None)
    elif decoder.windows is not None and (found := decoder.windows.unlike(model)) is not None:
        unlike[found[0]] = found[1:]
    return unlike


def _unlike_experts(model: Config, decoder: Decoder) -> dict[str, tuple[Any, Any]]:
    """As :func:`unlike_decoder`, of the experts and their router."""
    unlike: dict[str, tuple[Any, Any]] = {}
    for name, plain in PLAIN_EXPERTS.items():
        allowed, value = decoder.router.get(name, (plain,)), model.get(name, plain)
        if allowed and value not in allowed:
            unlike[name] = (value, " or ".join(map(str, allowed)))
    if model.get("moe_routing") in ASSIGNMENTS:
        unlike["moe_routing"] = (model["moe_routing"], "topk")
    if decoder.deepseek_experts and (reason := unlike_experts("deepseek_v3", model)):
        unlike["experts"] = (reason, "those of a DeepSeek-V3")
    for name in ("moe_layer_pattern", "moe_ffn_hidden_size"):
        if model.get(name) is not None and "expert_size" not in decoder.keys and not decoder.deepseek_experts:
            unlike[name] = (model[name], None)
    return unlike


def unlike_mixtral(model: Config) -> dict[str, Any]:
    """The fields of a model by which its router computes something else than a Mixtral's, with their values."""
    unlike = {field: model[field] for field, value in MIXTRAL_ROUTER.items() if model.get(field, value) != value}
    # Training by expert choice ends in a model that routes as a Mixtral; that by an assignment has other weights.
    if model.get("moe_routing") in ASSIGNMENTS:
        unlike["moe_routing"] = model["moe_routing"]
    return unlike


def decoder_config(kind: str, model: Config) -> dict[str, Any]:
    """The fields of a configuration, ``architectures`` included.

    Args:
        kind: ``model_type`` of transformers.
        model: the ``model`` of a manifest.
    """
    decoder, heads, own = DECODERS[kind], model["num_attention_heads"], decoder_fields(model)
    rotary = local_rotary_config if decoder.local_rotary else rotary_config
    config = {
        "architectures": [f"{decoder.name}ForCausalLM"],
        "hidden_act": ACTIVATIONS[decoder.activation],
        "hidden_size": model["hidden_size"],
        "intermediate_size": model["ffn_hidden_size"],
        "num_attention_heads": heads,
        "num_key_value_heads": model.get("num_key_value_heads", heads),
        "head_dim": model.get("head_dim", model["hidden_size"] // heads),
        "num_hidden_layers": model["num_layers"],
        "max_position_embeddings": model["max_position_embeddings"],
        "rms_norm_eps": model["layernorm_epsilon"],
        **rotary(own, model, decoder.rotary),
        **decoder.config,
    }
    for group in decoder.keys:
        config |= KEY_GROUPS[group].write(model, own)
    config |= {} if decoder.windows is None else decoder.windows.write(model)
    return {decoder.names.get(key, key): value for key, value in config.items()}


def decoder_model(kind: str, config: Config) -> Model:
    """The ``model`` of a manifest, without the vocabulary.

    Args:
        kind: ``model_type`` of transformers.
        config: a configuration with the defaults of transformers.

    Raises:
        CorruptError: an invalid size.
        UnsupportedError: a variant that DynMo does not implement.
    """
    decoder, heads = DECODERS[kind], size(config, "num_attention_heads")
    hidden, layers = size(config, "hidden_size"), size(config, "num_hidden_layers")
    positions = size(config, "max_position_embeddings")
    rotary = (local_rotary_fields if decoder.local_rotary else rotary_fields)(config, positions, decoder.rotary)
    own = {**LLAMA, **{name: values[0] for name, values in (decoder.fields | decoder.router).items() if values}}
    if decoder.scales_embedding:
        own["embedding_scale"] = math.sqrt(hidden)
    # Of the two names of shapes, the one whose MLPs are those of the decoder.
    family = "llama" if decoder.activation in GATED else "gpt"
    model = {
        "family": family,
        "num_layers": layers,
        "hidden_size": hidden,
        "ffn_hidden_size": size(config, "intermediate_size"),
        "num_attention_heads": heads,
        "num_key_value_heads": config["num_key_value_heads"] or heads,
        "head_dim": config["head_dim"] or hidden // heads,
        "max_position_embeddings": positions,
        "layernorm_epsilon": config["rms_norm_eps"],
        "normalization": own["normalization"],
        "activation": decoder.activation,
        "position_embedding": "rotary",
        "tied_embeddings": config["tie_word_embeddings"],
        "rotary_base": rotary.pop("rotary_base"),
        "rotary_scaling": rotary.pop("rotary_scaling"),
    }
    for group in decoder.keys:
        own |= KEY_GROUPS[group].fields(config)
    windows = {} if decoder.windows is None else decoder.windows.fields(config, layers, positions)
    if not windows:
        rotary.pop("local_rotary_base", None)
    elif "layer_types" not in windows and rotary.get("local_rotary_base") is not None:
        # Every layer is a sliding one: the rotation of the others is that of none.
        model |= {"rotary_base": rotary.pop("local_rotary_base"), "rotary_scaling": None}
    own |= {**rotary, **windows}
    # Readers of versions without a field must refuse a model that has it.
    plain = family_fields(family)
    return {**model, **{name: value for name, value in own.items() if name not in plain or value != plain[name]}}
