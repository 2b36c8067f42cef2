"""DeepSeek-V2 and V3 of transformers, and models with their attention: configurations both ways. Pure.

All have multi-head latent attention, and experts after dense blocks (``deepseek_experts.py``). GLM-4.7-Flash is a V3
that states the type of each block. Facts about what transformers reads of a configuration are in
``maps/config_keys.json``.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from .._common.document import short_repr
from ..io.errors import UnsupportedError
from ..maps.decoder_fields import LLAMA, decoder_fields
from .config_keys import size
from .decoder_rotary import rotary_config, rotary_fields
from .decoders import ROTARY, SILENT
from .deepseek_experts import expert_fields, expert_keys, unlike_experts

Config = Mapping[str, Any]
Model = dict[str, Any]
GLM_LITE = "glm4_moe_lite"
KINDS: Mapping[str, str] = {
    "deepseek_v3": "DeepseekV3ForCausalLM",
    "deepseek_v2": "DeepseekV2ForCausalLM",
    GLM_LITE: "Glm4MoeLiteForCausalLM",
}
# Field of a manifest -> key of a configuration.
LATENT: Mapping[str, str] = {
    "q_lora_rank": "q_lora_rank",
    "kv_lora_rank": "kv_lora_rank",
    "qk_head_dim": "qk_nope_head_dim",
    "qk_pos_emb_head_dim": "qk_rope_head_dim",
    "v_head_dim": "v_head_dim",
}


def deepseek_model(kind: str, config: Config) -> Model:
    """The ``model`` of a manifest, without the vocabulary.

    Args:
        kind: ``model_type`` of transformers.
        config: a configuration with the defaults of transformers.

    Raises:
        CorruptError: an invalid size.
        UnsupportedError: a variant that DynMo does not implement.
    """
    layers, heads = size(config, "num_hidden_layers"), size(config, "num_attention_heads")
    positions = size(config, "max_position_embeddings")
    if config["num_key_value_heads"] not in (None, heads):
        raise UnsupportedError(
            f"num_key_value_heads {short_repr(config['num_key_value_heads'])}: must be num_attention_heads {heads}"
        )
    rotary = rotary_fields(config, positions, ROTARY)
    sizes = {
        name: size(config, key) for name, key in LATENT.items() if name != "q_lora_rank" or config[key] is not None
    }
    if sizes["qk_pos_emb_head_dim"] % 2:
        raise UnsupportedError(f"qk_rope_head_dim {sizes['qk_pos_emb_head_dim']}: must be even")
    own: dict[str, Any] = {"attention_bias": "all" if config["attention_bias"] else "none"}
    own["mlp_bias"] = bool(config["mlp_bias"]) if kind == "deepseek_v2" else False
    return {
        "family": "llama",
        "num_layers": layers,
        "hidden_size": size(config, "hidden_size"),
        "ffn_hidden_size": size(config, "intermediate_size"),
        "num_attention_heads": heads,
        "num_key_value_heads": heads,
        "head_dim": sizes["qk_head_dim"] + sizes["qk_pos_emb_head_dim"],
        "max_position_embeddings": positions,
        "layernorm_epsilon": config["rms_norm_eps"],
        "normalization": "rmsnorm",
        "activation": "swiglu",
        "position_embedding": "rotary",
        "rotary_base": rotary["rotary_base"],
        "rotary_scaling": rotary["rotary_scaling"],
        "tied_embeddings": config["tie_word_embeddings"],
        **{name: value for name, value in own.items() if value != LLAMA[name]},
        **sizes,
        "rotary_interleaved": kind == "deepseek_v2" or bool(config["rope_interleave"]),
        **expert_fields(_router(kind), config, layers, _dense_blocks(kind, config, layers)),
    }


def _router(kind: str) -> str:
    """The architecture whose router a model has."""
    return kind if kind == "deepseek_v2" else "deepseek_v3"


def _dense_blocks(kind: str, config: Config, layers: int) -> Any:
    """The number of first blocks without experts."""
    if kind != GLM_LITE:
        return config["first_k_dense_replace"]
    types = config["mlp_layer_types"] or ["dense"] + ["sparse"] * (layers - 1)
    dense = types.count("dense") if isinstance(types, list) else 0
    if types != ["dense"] * dense + ["sparse"] * (layers - dense):
        raise UnsupportedError(
            f"mlp_layer_types {short_repr(types)}: must have {layers} entries, dense before sparse ones"
        )
    return dense


def deepseek_kind(model: Config, preferred: str | None = None) -> str:
    """The ``model_type`` of transformers that computes a model with latent attention.

    Args:
        model: the ``model`` of a manifest.
        preferred: the type to choose where several compute it; None or another one: the first of ``KINDS``.

    Raises:
        UnsupportedError: transformers has no such model.
    """
    unlike = {kind: _unlike(kind, model) for kind in KINDS}
    found = [kind for kind, reason in unlike.items() if not reason]
    if not found:
        is_v3 = model.get("moe_router_score_function") == "sigmoid"
        kind = "deepseek_v3" if is_v3 else "deepseek_v2"
        raise UnsupportedError(f"{KINDS[kind]} does not implement {unlike[kind]}; use --to native")
    return preferred if preferred in found else found[0]


def _unlike(kind: str, model: Config) -> str:
    """A field by which a model is not what an architecture computes; empty where there is none."""
    own = decoder_fields(model)
    biases = {"attention_bias": ("none", "all"), "mlp_bias": (False, True) if kind == "deepseek_v2" else (False,)}
    for name, value in LLAMA.items():
        if name not in SILENT and own[name] not in biases.get(name, (value,)):
            return f"{name} = {own[name]}"
    needed: dict[str, Any] = {"activation": "swiglu", "sliding_window": None, "embedding_scale": 1.0}
    if kind == "deepseek_v2":
        needed["rotary_interleaved"] = True
    experts = bool(model.get("num_experts"))
    if experts:
        needed |= {"moe_routing": "topk", "moe_shared_gate": False, "mlp_bias": False}
        sigmoid = _router(kind) == "deepseek_v3"
        needed["moe_router_score_function"] = "sigmoid" if sigmoid else "softmax"
        needed |= {"moe_router_enable_expert_bias": sigmoid, "moe_router_pre_softmax": not sigmoid}
    defaults = {"rotary_interleaved": True, "moe_routing": "topk", "moe_router_score_function": "softmax"}
    defaults |= dict.fromkeys(("moe_shared_gate", "mlp_bias"), False)
    defaults |= dict.fromkeys(("moe_router_enable_expert_bias", "moe_router_pre_softmax"), False)
    for name, value in needed.items():
        found = model.get(name, defaults.get(name, value))
        if found != value:
            return f"{name} = {found}"
    return unlike_experts(_router(kind), model) if experts else ""


def deepseek_config(kind: str, model: Config) -> dict[str, Any]:
    """The fields of a configuration, ``architectures`` included.

    Args:
        kind: ``model_type`` of transformers.
        model: the ``model`` of a manifest.
    """
    own, layers = decoder_fields(model), model["num_layers"]
    config = {
        "architectures": [KINDS[kind]],
        "hidden_act": "silu",
        "hidden_size": model["hidden_size"],
        "intermediate_size": model["ffn_hidden_size"],
        "num_attention_heads": model["num_attention_heads"],
        "num_key_value_heads": model["num_attention_heads"],
        "num_hidden_layers": layers,
        "max_position_embeddings": model["max_position_embeddings"],
        "rms_norm_eps": model["layernorm_epsilon"],
        **rotary_config(own, model, ROTARY),
        "attention_bias": own["attention_bias"] == "all",
        **{key: model.get(name) for name, key in LATENT.items()},
        **expert_keys(model),
    }
    if kind == "deepseek_v2":
        method = "group_limited_greedy" if model.get("moe_router_num_groups") else "greedy"
        return {**config, "mlp_bias": own["mlp_bias"], "topk_method": method, "norm_topk_prob": False}
    if kind == GLM_LITE:
        dense = config.pop("first_k_dense_replace")
        config["mlp_layer_types"] = ["dense"] * dense + ["sparse"] * (layers - dense)
    config |= {"norm_topk_prob": model.get("moe_top_k", 2) > 1, "topk_method": "noaux_tc", "scoring_func": "sigmoid"}
    config["rope_interleave"] = model.get("rotary_interleaved", True)
    return {**config, "num_nextn_predict_layers": model.get("mtp_num_layers", 0)}


def prediction_layers(config: Config, names: set[str]) -> int:
    """Number of layers of multi-token prediction in a file, by the names of its tensors.

    Not of the configuration: transformers writes its number, and leaves the layers out.

    Args:
        config: the contents of a ``config.json``.
        names: of the tensors.
    """
    layers, count = config.get("num_hidden_layers"), 0
    if isinstance(layers, int) and config.get("model_type") in (*KINDS, "glm4_moe"):
        while f"model.layers.{layers + count}.eh_proj.weight" in names:
            count += 1
    return count
