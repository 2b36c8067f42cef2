"""Every decoder family of transformers in small: its configuration, and the options that train the same model."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

Options = dict[str, Any]
LAYERS, WIDTH, INNER, HEADS, TOKENS, VOCABULARY = 4, 32, 48, 4, 16, 61
SIZES: Options = {
    "vocab_size": VOCABULARY,
    "hidden_size": WIDTH,
    "intermediate_size": INNER,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": HEADS,
    "num_key_value_heads": 2,
    "max_position_embeddings": TOKENS,
    "pad_token_id": None,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
COMMON: Options = {
    "family": "llama",
    "num_layers": LAYERS,
    "hidden_size": WIDTH,
    "ffn_hidden_size": INNER,
    "num_attention_heads": HEADS,
    "num_query_groups": 2,
    "seq_length": TOKENS,
    "max_position_embeddings": TOKENS,
    "vocab_size": VOCABULARY,
    "make_vocab_size_divisible_by": 1,
    "layernorm_epsilon": 1e-6,
    "hidden_dropout": 0.0,
    "attention_dropout": 0.0,
    "init_method_std": 0.15,
}
TIED: Options = {"untie_embeddings_and_output_weights": False}
LOCAL: Options = {"sliding_window": 5}
WINDOW: Options = {"attention_window": 5}
ALTERNATING: Options = {**WINDOW, "layer_types": "sliding,full"}
GEMMA: Options = {
    "normalization": "rmsnorm_1p",
    "activation": "geglu",
    "embedding_scale": WIDTH**0.5,
    "kv_channels": 8,
    **TIED,
}
EXPERTS: Options = {"num_experts": 4, "moe_router_topk": 2, "moe_aux_loss_coeff": 0.001}
DEEPSEEK: Options = {
    "num_key_value_heads": HEADS,
    "moe_intermediate_size": 24,
    "first_k_dense_replace": 1,
    "q_lora_rank": 12,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 6,
    "qk_rope_head_dim": 4,
    "v_head_dim": 8,
    "n_routed_experts": 4,
    "n_shared_experts": 1,
    "num_experts_per_tok": 2,
    "routed_scaling_factor": 2.5,
    "n_group": 1,
    "topk_group": 1,
}
LATENT: Options = {
    "num_query_groups": HEADS,
    "multi_latent_attention": True,
    "q_lora_rank": 12,
    "kv_lora_rank": 16,
    "qk_head_dim": 6,
    "qk_pos_emb_head_dim": 4,
    "v_head_dim": 8,
    "kv_channels": 10,
    "num_experts": 4,
    "moe_router_topk": 2,
    "moe_layer_freq": "[0]+[1]*3",
    "moe_ffn_hidden_size": 24,
    "moe_shared_expert_intermediate_size": 24,
    "moe_router_topk_scaling_factor": 2.5,
}
SIGMOID: Options = {"moe_router_score_function": "sigmoid", "moe_router_enable_expert_bias": True}
OSS_YARN: Options = {
    "rope_type": "yarn",
    "factor": 32.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "truncate": False,
    "original_max_position_embeddings": 4096,
}


@dataclass(frozen=True)
class DecoderOptions:
    """A family.

    Attributes:
        config: its ``config.json``; with ``SIZES`` where the names of the sizes are those of most families.
        options: of ``pretrain``, without those of all families.
    """

    config: Options
    options: Options

    @property
    def hugging_face(self) -> Options:
        """The whole ``config.json``."""
        return self.config if "n_embd" in self.config else SIZES | self.config


GPT2: Options = {
    "model_type": "gpt2",
    "n_embd": WIDTH,
    "n_inner": INNER,
    "n_layer": LAYERS,
    "n_head": HEADS,
    "n_positions": TOKENS,
    "vocab_size": VOCABULARY,
}
FAMILIES: dict[str, DecoderOptions] = {
    "gpt2": DecoderOptions(GPT2, {"family": "gpt", "num_query_groups": HEADS, "layernorm_epsilon": 1e-5}),
    "llama": DecoderOptions({"model_type": "llama"}, {}),
    "llama 3": DecoderOptions(
        {
            "model_type": "llama",
            "rope_theta": 5e5,
            "rope_scaling": {
                "rope_type": "llama3",
                "factor": 8.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 8192,
            },
        },
        {"use_rope_scaling": True, "rotary_base": 500_000.0},
    ),
    "mistral": DecoderOptions({"model_type": "mistral", **LOCAL}, WINDOW),
    "mixtral": DecoderOptions(
        {"model_type": "mixtral", **LOCAL, "num_local_experts": 4, "num_experts_per_tok": 2, "rope_theta": 1e6},
        {**WINDOW, **EXPERTS, "rotary_base": 1e6, "layernorm_epsilon": 1e-5},
    ),
    "qwen2": DecoderOptions(
        {"model_type": "qwen2", **LOCAL, "use_sliding_window": True, "max_window_layers": 2},
        {**WINDOW, "layer_types": "full,full,sliding,sliding", "add_qkv_bias": True},
    ),
    "qwen3": DecoderOptions({"model_type": "qwen3", "head_dim": 16}, {"qk_norm": "head", "kv_channels": 16}),
    "qwen3_moe": DecoderOptions(
        {
            "model_type": "qwen3_moe",
            "head_dim": 16,
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 24,
            "norm_topk_prob": True,
        },
        {"qk_norm": "head", "kv_channels": 16, "ffn_hidden_size": 24, **EXPERTS},
    ),
    "gemma": DecoderOptions({"model_type": "gemma", "head_dim": 8}, {**GEMMA, "init_method_std": 0.02}),
    "gemma2": DecoderOptions(
        {
            "model_type": "gemma2",
            "head_dim": 8,
            **LOCAL,
            "query_pre_attn_scalar": 16,
            "attn_logit_softcapping": 0.5,
            "final_logit_softcapping": 2.0,
        },
        {
            **GEMMA,
            **ALTERNATING,
            "norm_placement": "sandwich",
            "attention_scale": 0.25,
            "attn_logit_softcapping": 0.5,
            "final_logit_softcapping": 2.0,
        },
    ),
    "gemma3": DecoderOptions(
        {
            "model_type": "gemma3_text",
            "head_dim": 8,
            **LOCAL,
            "query_pre_attn_scalar": 16,
            "sliding_window_pattern": 2,
            "rope_theta": 1e6,
            "rope_local_base_freq": 1e4,
        },
        {
            **GEMMA,
            **ALTERNATING,
            "norm_placement": "sandwich",
            "qk_norm": "head",
            "attention_scale": 0.25,
            "rotary_base": 1e6,
            "local_rotary_base": 1e4,
        },
    ),
    "smollm3": DecoderOptions(
        {"model_type": "smollm3", "no_rope_layer_interval": 2, "rope_theta": 1e4, "tie_word_embeddings": False},
        {"no_rope_freq": "2"},
    ),
    "granite": DecoderOptions(
        {
            "model_type": "granite",
            "embedding_multiplier": 3.0,
            "attention_multiplier": 0.25,
            "residual_multiplier": 0.5,
            "logits_scaling": 4.0,
        },
        {"embedding_scale": 3.0, "attention_scale": 0.25, "residual_multiplier": 0.5, "logits_scaling": 4.0},
    ),
    "phi3": DecoderOptions(
        {"model_type": "phi3", **LOCAL, "partial_rotary_factor": 0.75},
        {**WINDOW, "rotary_percent": 0.75, "layernorm_epsilon": 1e-5},
    ),
    "olmo2": DecoderOptions(
        {"model_type": "olmo2"}, {"norm_placement": "post", "qk_norm": "projection", "layernorm_epsilon": 1e-5}
    ),
    "deepseek_v2": DecoderOptions(
        {"model_type": "deepseek_v2", **DEEPSEEK, "topk_method": "greedy"}, {**LATENT, "moe_router_pre_softmax": True}
    ),
    "deepseek_v3": DecoderOptions({"model_type": "deepseek_v3", **DEEPSEEK}, {**LATENT, **SIGMOID}),
    "deepseek_v3, further tokens": DecoderOptions(
        {"model_type": "deepseek_v3", **DEEPSEEK, "num_nextn_predict_layers": 1},
        {**LATENT, **SIGMOID, "mtp_num_layers": 1},
    ),
    "gpt_oss": DecoderOptions(
        {
            "model_type": "gpt_oss",
            "head_dim": 8,
            **LOCAL,
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "rope_theta": 150000.0,
            "rope_scaling": OSS_YARN,
        },
        {
            **ALTERNATING,
            **EXPERTS,
            "layernorm_epsilon": 1e-5,
            "kv_channels": 8,
            "add_bias_linear": True,
            "activation": "clamped_swiglu",
            "attention_sinks": True,
            "moe_router_bias": True,
            "rotary_base": 150_000.0,
            "rotary_scaling": json.dumps(OSS_YARN),
        },
    ),
}
