"""Features of a model that rows of the tables require with ``when``. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from .decoder_fields import decoder_fields


def features(model: Mapping[str, Any], layer: int | None = None) -> set[str]:
    """Features of a model, which rows of a table may require with ``when``.

    Args:
        model: the ``model`` of a manifest.
        layer: number of a block, whose MLP may be dense or have experts; None: the model as a whole.
    """
    fields = decoder_fields(model)
    experts, biases = bool(model.get("num_experts")), fields["attention_bias"]
    pattern = model.get("moe_layer_pattern")
    if pattern and layer is not None:
        experts = bool(pattern[min(layer, len(pattern) - 1)])
    found = {fields["position_embedding"], "experts" if experts else "dense", fields["norm_placement"]}
    found |= {"qk_norm", f"qk_norm_{fields['qk_norm']}"} if fields["qk_norm"] else set()
    found |= {"norm_bias"} if fields["normalization"] == "layernorm" else set()
    found |= {"qkv_bias"} if biases != "none" else set()
    found |= {"dense_bias"} if biases == "all" else set()
    found |= {"query_latent"} if model.get("q_lora_rank") else {"query_direct"}
    found |= {"query_latent_bias"} if model.get("q_lora_rank") and biases != "none" else set()
    found |= {"expert_bias"} if experts and model.get("moe_router_enable_expert_bias") else set()
    found |= {"shared_experts"} if experts and model.get("moe_shared_ffn_size") else set()
    found |= _attention_features(model, biases)
    found |= {"router_bias"} if experts and fields["moe_router_bias"] else set()
    found |= {"shared_gate"} if "shared_experts" in found and model.get("moe_shared_gate") else set()
    found |= {"expert_mlp_bias"} if experts and fields["mlp_bias"] else set()
    found |= {"sinks"} if fields["attention_sinks"] else set()
    found |= {"mlp_bias"} if fields["mlp_bias"] and not experts else set()
    found |= {"tokentypes"} if model.get("num_tokentypes") else set()
    found |= {"binary", "pooler"} if model.get("binary_head") else set()
    return found | ({model["task_head"], "pooler"} if model.get("task_head") else {"language"})


def _attention_features(model: Mapping[str, Any], biases: str) -> set[str]:
    """Whether attention has a latent, in the names of tables that have both kinds."""
    if not model.get("kv_lora_rank"):
        return {"direct_attention"} | ({"direct_qkv_bias"} if biases != "none" else set())
    return {"latent_attention"} | (set() if model.get("q_lora_rank") else {"latent_query_direct"})
