"""The fields of a manifest's ``model`` that describe a decoder, with the defaults of its family. Pure.

A manifest states a field only where it differs, so that readers of versions without it refuse the model.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

# The names of shapes of decoders; they are interchangeable where all fields are stated.
DECODERS = ("gpt", "llama")
SIGMOID_GATED = ("clamped_swiglu", "quick_geglu")
GATED = ("swiglu", "geglu", *SIGMOID_GATED)
COMMON: Mapping[str, Any] = {
    "norm_placement": "pre",
    "qk_norm": None,
    "rotary_base": 10000.0,
    "rotary_scaling": None,
    "rotary_fraction": 1.0,
    "embedding_scale": 1.0,
    "attention_scale": None,
    "layer_types": None,
    "local_rotary_base": None,
    "no_rope_freq": None,
    "residual_multiplier": 1.0,
    "logits_scaling": 1.0,
    "attn_logit_softcapping": None,
    "final_logit_softcapping": None,
    "attention_sinks": False,
    "softmax_off_by_one": False,
    "swiglu_alpha": 1.702,
    "swiglu_limit": 7.0,
    "swiglu_offset": 1.0,
    "moe_router_bias": False,
}
LLAMA: Mapping[str, Any] = {
    **COMMON,
    "normalization": "rmsnorm",
    "attention_bias": "none",
    "mlp_bias": False,
    "position_embedding": "rotary",
}
OTHERS: Mapping[str, Any] = {
    **COMMON,
    "normalization": "layernorm",
    "attention_bias": "all",
    "mlp_bias": True,
    "position_embedding": "learned",
}


def family_fields(family: str) -> Mapping[str, Any]:
    """The fields of a model of the family that states none of them."""
    return LLAMA if family == "llama" else OTHERS


def decoder_fields(model: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of a model, by name.

    Args:
        model: the ``model`` of a manifest; its biases are those of decoders, and mean nothing in other families.
    """
    return {name: model.get(name, value) for name, value in family_fields(model["family"]).items()}


def unlike_family(model: Mapping[str, Any]) -> dict[str, Any]:
    """The fields by which a model differs from others of its family, without positions and rotation.

    Args:
        model: the ``model`` of a manifest.
    """
    plain, separate = family_fields(model["family"]), ("position_embedding", "rotary_base", "rotary_scaling")
    found = decoder_fields(model)
    unlike = {name: value for name, value in found.items() if value != plain[name] and name not in separate}
    unlike |= {name: model[name] for name in ("kv_lora_rank", "moe_layer_pattern", "mtp_num_layers") if model.get(name)}
    if (model["activation"] in GATED) != (model["family"] == "llama"):
        unlike["activation"] = model["activation"]
    return unlike
