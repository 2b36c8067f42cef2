"""The models of llama.cpp: which one computes a model of a manifest, what it does not compute, and its keys. Pure.

llama.cpp has constants in its code where transformers has keys, such as the scale of Gemma 2's attention, the pattern
of its windows and the clamp of GPT-OSS. A model with other values is refused, because the file could not state them.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from ..huggingface.decoder_rotary import SLIDING
from ..io.errors import UnsupportedError
from ..maps.decoder_fields import decoder_fields
from .gguf_package import gguf_package

Model = Mapping[str, Any]
ARCHES: Mapping[str, str] = {
    "gpt2": "gpt2",
    "llama": "llama",
    "mistral": "llama",
    "mixtral": "llama",
    "qwen2": "qwen2",
    "qwen3": "qwen3",
    "qwen3_moe": "qwen3moe",
    "gemma": "gemma",
    "gemma2": "gemma2",
    "gemma3_text": "gemma3",
    "olmo2": "olmo2",
    "phi3": "phi3",
    "gpt_oss": "gpt-oss",
    "deepseek_v2": "deepseek2",
    "deepseek_v3": "deepseek2",
}
GEMMAS = ("gemma", "gemma2", "gemma3")
# Which layers attend to all positions: those whose number has the remainder of the last one of a period.
WINDOW_PERIODS = {"gemma2": 2, "gemma3": 6, "gpt-oss": 2}
# Whether the head is the embedding, where llama.cpp has no choice.
TIED = {"gemma": True, "gemma2": True, "gpt-oss": False, "olmo2": False}
# Numbers of layers by which llama.cpp knows the models whose attention is scaled by the width of all heads.
SCALED_BY_HIDDEN = {"gemma2": 46, "gemma3": 62}
ATTENTION_BIASES = {"gpt2": ("all",), "llama": ("none", "qkv", "all"), "qwen2": ("none", "qkv"), "gpt-oss": ("all",)}
LATENT_EPSILON = 1e-6  # of the latents' norms in transformers; llama.cpp has one epsilon
# llama.cpp sizes their projections by the hidden size.
WHOLE_HEADS = ("phi3", "qwen2", "olmo2")
DIRECT_QUERY_LAYERS = (26, 27)  # numbers of layers by which llama.cpp knows a DeepSeek without a latent of the queries
YARN_BETAS = {"beta_fast": 32.0, "beta_slow": 1.0}
GATING = {"softmax": 1, "sigmoid": 2}


def arch_of(kind: str, model: Model) -> str:
    """The architecture of llama.cpp that computes a model.

    Args:
        kind: ``model_type`` of transformers.
        model: the ``model`` of a manifest.

    Raises:
        UnsupportedError: llama.cpp has no such model, or does not compute a field of it.
    """
    arch = ARCHES.get(kind)
    if arch is None:
        raise UnsupportedError(f"GGUF is written for {', '.join(ARCHES)}; the model is a {kind}")
    unlike = {
        **_unlike_attention(kind, arch, model),
        **_unlike_experts(arch, model),
        "rotary_scaling": not _computes_scaling(arch, model),
        "activation": kind == "gpt2" and model["activation"] != "gelu_tanh",
        "tied_embeddings": model["tied_embeddings"] != TIED.get(arch, model["tied_embeddings"]),
    }
    found = [name for name, differs in unlike.items() if differs]
    if found:
        raise UnsupportedError(f"llama.cpp's {arch} does not compute {found[0]} of this model")
    return arch


def head_width(model: Model) -> int:
    """The width of an attention head."""
    return int(model.get("head_dim", model["hidden_size"] // model["num_attention_heads"]))


def rotated_width(model: Model) -> int:
    """The number of rotated values of a head."""
    if model.get("kv_lora_rank"):
        return int(model["qk_pos_emb_head_dim"])
    return int(head_width(model) * decoder_fields(model)["rotary_fraction"])


def _unlike_attention(kind: str, arch: str, model: Model) -> dict[str, bool]:
    fields, heads, hidden = decoder_fields(model), model["num_attention_heads"], model["hidden_size"]
    scale, width = fields["attention_scale"], head_width(model)
    # The scale that llama.cpp has for this number of layers.
    own = width**-0.5
    if model["num_layers"] == SCALED_BY_HIDDEN.get(arch):
        own = (hidden // heads) ** -0.5
    caps = [fields["attn_logit_softcapping"] is not None, fields["final_logit_softcapping"] is not None]
    layers = model["num_layers"]
    period, types = WINDOW_PERIODS.get(arch), fields["layer_types"]
    sliding = [period is not None and layer % period != period - 1 for layer in range(layers)]
    pattern = [each == SLIDING for each in types] if types else [bool(model.get("sliding_window"))] * layers
    # Where no layer has a window, Gemma 3 has no key for it; the others always have one.
    is_other = period is not None and pattern != sliding and not (arch == "gemma3" and not any(pattern))
    latent = bool(model.get("kv_lora_rank"))
    return {
        "attention_bias": kind != "gpt2" and fields["attention_bias"] not in ATTENTION_BIASES.get(arch, ("none",)),
        "mlp_bias": kind not in ("gpt2", "gpt_oss") and arch != "llama" and bool(fields["mlp_bias"]),
        "attention_scale": not math.isclose(width**-0.5 if scale is None else scale, own, rel_tol=1e-6),
        # Gemma 2 has both caps always, as a division by the cap.
        "attn_logit_softcapping": caps[0] != (arch == "gemma2"),
        "final_logit_softcapping": caps[1] != (arch == "gemma2") and arch != "gemma3",
        "layer_types": is_other or (period is None and bool(types)),
        "local_rotary_base": arch != "gemma3" and fields["local_rotary_base"] is not None,
        "no_rope_freq": fields["no_rope_freq"] is not None,
        "residual_multiplier": fields["residual_multiplier"] != 1.0,
        "logits_scaling": fields["logits_scaling"] != 1.0,
        "rotary_fraction": arch != "phi3" and fields["rotary_fraction"] != 1.0,
        "head_dim": arch in WHOLE_HEADS and width * heads != hidden,
        "q_lora_rank": latent and not model.get("q_lora_rank") and layers not in DIRECT_QUERY_LAYERS,
        "layernorm_epsilon": latent and not math.isclose(model["layernorm_epsilon"], LATENT_EPSILON, rel_tol=1e-6),
    }


def _unlike_experts(arch: str, model: Model) -> dict[str, bool]:
    fields = decoder_fields(model)
    is_oss, is_v2 = arch == "gpt-oss", model.get("moe_router_score_function", "softmax") == "softmax"
    return {
        "swiglu_alpha": is_oss and not math.isclose(fields["swiglu_alpha"], 1.702),
        "swiglu_limit": is_oss and not math.isclose(fields["swiglu_limit"], 7.0),
        "moe_router_pre_softmax": arch != "deepseek2" and bool(model.get("moe_router_pre_softmax")),
        "moe_layer_pattern": arch != "deepseek2" and bool(model.get("moe_layer_pattern")),
        # llama.cpp scores a group by its two best experts, as DeepSeek-V3; V2 takes the best one.
        "moe_router_num_groups": is_v2 and bool(model.get("moe_router_num_groups")),
    }


def _computes_scaling(arch: str, model: Model) -> bool:
    scaling = decoder_fields(model)["rotary_scaling"] or {"rope_type": "default"}
    kind, latent = scaling["rope_type"], arch == "deepseek2"
    if kind == "longrope":
        return arch == "phi3"
    if kind == "yarn":
        plain = {"rope_type", "factor", "original_max_position_embeddings", "truncate", *YARN_BETAS}
        # With latents, the two scales of magnitude cancel each other in the rotation, and one is in the softmax.
        scales = {"mscale", "mscale_all_dim"} if latent else set()
        if latent and (scaling.get("mscale") is None or scaling["mscale"] != scaling.get("mscale_all_dim")):
            return False
        return {*scaling} <= plain | scales and arch != "phi3"
    if kind == "llama3":
        # Its divisors are a tensor that llama.cpp looks for in a Llama alone; it loads no file with a further tensor.
        return arch == "llama"
    return kind == "default" or (kind == "linear" and not latent and arch != "phi3")


def differences(arch: str, model: Model) -> list[str]:
    """What llama.cpp computes otherwise than transformers, in sentences; it has no exact form of these.

    Args:
        arch: the architecture of llama.cpp.
        model: the ``model`` of a manifest.
    """
    scaling = decoder_fields(model)["rotary_scaling"] or {"rope_type": "default"}
    found = []
    if model.get("sliding_window") and arch not in WINDOW_PERIODS:
        found.append(f"llama.cpp's {arch} attends beyond the sliding window")
    if scaling.get("truncate") is False:
        found.append("llama.cpp rounds the bounds of YaRN to whole dimensions")
    if scaling["rope_type"] == "longrope":
        found.append("llama.cpp takes the long factors by the length of its context, not of the text")
    return found


def add_model(writer: Any, kind: str, arch: str, model: Model) -> None:
    """Add the sizes and constants of a model to a ``GGUFWriter``.

    Args:
        writer: of the file.
        kind: ``model_type`` of transformers.
        arch: the architecture of llama.cpp.
        model: the ``model`` of a manifest.
    """
    heads, width, fields = model["num_attention_heads"], head_width(model), decoder_fields(model)
    writer.add_vocab_size(model["vocab_size"])
    writer.add_context_length(model["max_position_embeddings"])
    writer.add_embedding_length(model["hidden_size"])
    writer.add_block_count(model["num_layers"])
    writer.add_feed_forward_length(model["ffn_hidden_size"])
    writer.add_head_count(heads)
    if kind == "gpt2":
        writer.add_layer_norm_eps(model["layernorm_epsilon"])
        return
    writer.add_layer_norm_rms_eps(model["layernorm_epsilon"])
    writer.add_rope_dimension_count(rotated_width(model))
    writer.add_rope_freq_base(float(fields["rotary_base"]))
    _add_rotary_scaling(writer, arch, model)
    if arch == "deepseek2":
        _add_latents(writer, model)
    else:
        writer.add_head_count_kv(model.get("num_key_value_heads", heads))
        writer.add_key_length(width)
        writer.add_value_length(width)
    if model.get("sliding_window") or arch == "phi3":
        # 0 where a Phi has none, by which llama.cpp knows Phi-4.
        writer.add_sliding_window(model.get("sliding_window") or 0)
    if arch == "gemma3" and model.get("sliding_window"):
        base = fields["local_rotary_base"]
        writer.add_rope_freq_base_swa(float(fields["rotary_base"] if base is None else base))
    if fields["attn_logit_softcapping"] is not None:
        writer.add_attn_logit_softcapping(fields["attn_logit_softcapping"])
    if fields["final_logit_softcapping"] is not None:
        writer.add_final_logit_softcapping(fields["final_logit_softcapping"])
    if model.get("num_experts") and arch != "deepseek2":
        writer.add_expert_count(model["num_experts"])
        writer.add_expert_used_count(model.get("moe_top_k", 2))
    if arch in ("qwen3moe", "gpt-oss"):
        writer.add_expert_feed_forward_length(model["ffn_hidden_size"])


def _add_rotary_scaling(writer: Any, arch: str, model: Model) -> None:
    scaling: Mapping[str, Any] = decoder_fields(model)["rotary_scaling"] or {}
    kinds = gguf_package().RopeScalingType
    trained, factor = scaling.get("original_max_position_embeddings"), scaling.get("factor")
    kind = scaling.get("rope_type")
    if kind in ("linear", "yarn"):
        writer.add_rope_scaling_type(kinds.YARN if kind == "yarn" else kinds.LINEAR)
        writer.add_rope_scaling_factor(factor)
    if kind == "yarn":
        writer.add_rope_scaling_orig_ctx_len(trained)
        if arch == "deepseek2":
            writer.add_rope_scaling_yarn_log_mul(0.1 * scaling["mscale_all_dim"])
        if scaling.get("beta_fast", YARN_BETAS["beta_fast"]) != YARN_BETAS["beta_fast"]:
            writer.add_rope_scaling_yarn_beta_fast(scaling["beta_fast"])
        if scaling.get("beta_slow", YARN_BETAS["beta_slow"]) != YARN_BETAS["beta_slow"]:
            writer.add_rope_scaling_yarn_beta_slow(scaling["beta_slow"])
    if arch == "phi3":
        writer.add_rope_scaling_orig_ctx_len(trained or model["max_position_embeddings"])
    if kind == "longrope":
        magnitude = scaling.get("attention_factor")
        if magnitude is None:
            stretch, positions = scaling["factor"], scaling["original_max_position_embeddings"]
            magnitude = 1.0 if stretch <= 1 else math.sqrt(1 + math.log(stretch) / math.log(positions))
        writer.add_rope_scaling_attn_factors(magnitude)


def _add_latents(writer: Any, model: Model) -> None:
    """The keys of DeepSeek: latent attention, which llama.cpp computes with one key of all heads, and experts."""
    rank, rotated = model["kv_lora_rank"], model["qk_pos_emb_head_dim"]
    writer.add_head_count_kv(1)
    if model.get("q_lora_rank"):
        writer.add_q_lora_rank(model["q_lora_rank"])
    writer.add_kv_lora_rank(rank)
    writer.add_key_length(rank + rotated)
    writer.add_value_length(rank)
    writer.add_key_length_mla(model["qk_head_dim"] + rotated)
    writer.add_value_length_mla(model["v_head_dim"])
    experts = model.get("num_experts", 0)
    pattern = model.get("moe_layer_pattern") or [int(bool(experts))] * model["num_layers"]
    inner = model.get("moe_ffn_hidden_size", model["ffn_hidden_size"])
    writer.add_leading_dense_block_count(model["num_layers"] - sum(pattern))
    writer.add_expert_feed_forward_length(inner)
    writer.add_expert_shared_count(model.get("moe_shared_ffn_size", 0) // inner)
    if not experts:
        return
    score = model.get("moe_router_score_function", "softmax")
    writer.add_expert_count(experts)
    writer.add_expert_used_count(model["moe_top_k"])
    writer.add_expert_gating_func(gguf_package().ExpertGatingFuncType(GATING[score]))
    writer.add_expert_weights_scale(model.get("moe_router_topk_scaling_factor") or 1.0)
    writer.add_expert_weights_norm(score == "sigmoid" and model["moe_top_k"] > 1)
    if model.get("moe_router_num_groups"):
        writer.add_expert_group_count(model["moe_router_num_groups"])
        writer.add_expert_group_used_count(model["moe_router_group_topk"])
