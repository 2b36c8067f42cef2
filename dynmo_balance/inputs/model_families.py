"""The families of transformers with a cost model, as tables: the configuration keys that each shape depends on.

To add a family, add an entry to ``FAMILIES``, and its configurations to the tests, which compare parameter counts
with transformers' own models.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from .._common.errors import UsageError
from ..costs.model_spec import LatentAttention

IRRELEVANT = frozenset(
    (
        "_attn_implementation",
        "_attn_implementation_autoset",
        "_name_or_path",
        "_sliding_window_pattern",
        "activation_function",
        "architectures",
        "attention_dropout",
        "attention_probs_dropout_prob",
        "attn_logit_softcapping",
        "attn_pdrop",
        "auto_map",
        "aux_loss_alpha",
        "bad_words_ids",
        "begin_suppress_tokens",
        "bos_token_id",
        "cache_implementation",
        "classifier_dropout",
        "decoder_start_token_id",
        "dense_act_fn",
        "directionality",
        "diversity_penalty",
        "do_sample",
        "dropout_rate",
        "dtype",
        "early_stopping",
        "embd_pdrop",
        "encoder_no_repeat_ngram_size",
        "eos_token_id",
        "ep_size",
        "exponential_decay_length_penalty",
        "final_logit_softcapping",
        "finetuning_task",
        "forced_bos_token_id",
        "forced_eos_token_id",
        "gradient_checkpointing",
        "hidden_act",
        "hidden_activation",
        "hidden_dropout_prob",
        "id2label",
        "initial_context_length",
        "initializer_factor",
        "initializer_range",
        "is_encoder_decoder",
        "is_gated_act",
        "is_llama_config",
        "label2id",
        "layer_norm_eps",
        "layer_norm_epsilon",
        "length_penalty",
        "mask_token_id",
        "max_length",
        "max_new_tokens",
        "min_length",
        "model_type",
        "n_ctx",
        "n_group",
        "n_special",
        "no_repeat_ngram_size",
        "norm_topk_prob",
        "num_beam_groups",
        "num_beams",
        "num_labels",
        "num_mtp_layers",
        "num_nextn_predict_layers",
        "num_return_sequences",
        "original_max_position_embeddings",
        "output_attentions",
        "output_hidden_states",
        "output_past",
        "output_router_logits",
        "output_scores",
        "pad_token_id",
        "partial_rotary_factor",
        "pooler_fc_size",
        "pooler_num_attention_heads",
        "pooler_num_fc_layers",
        "pooler_size_per_head",
        "pooler_type",
        "predict_special_tokens",
        "prefix",
        "pretraining_tp",
        "problem_type",
        "qk_head_dim",
        "quantization_config",
        "query_pre_attn_scalar",
        "relative_attention_max_distance",
        "remove_invalid_values",
        "reorder_and_upcast_attn",
        "repetition_penalty",
        "resid_pdrop",
        "return_dict",
        "return_dict_in_generate",
        "rms_norm_eps",
        "rope_interleave",
        "rope_local_base_freq",
        "rope_parameters",
        "rope_scaling",
        "rope_theta",
        "routed_scaling_factor",
        "router_aux_loss_coef",
        "router_jitter_noise",
        "scale_attn_by_inverse_layer_idx",
        "scale_attn_weights",
        "scale_decoder_outputs",
        "scoring_func",
        "sep_token_id",
        "seq_aux",
        "summary_activation",
        "summary_first_dropout",
        "summary_proj_to_labels",
        "summary_type",
        "summary_use_proj",
        "suppress_tokens",
        "swiglu_alpha",
        "swiglu_limit",
        "task_specific_params",
        "temperature",
        "tokenizer_class",
        "top_k",
        "top_p",
        "topk_group",
        "topk_method",
        "torch_dtype",
        "transformers.js_config",
        "transformers_version",
        "typical_p",
        "unk_token_id",
        "unsloth_fixed",
        "use_bidirectional_attention",
        "use_cache",
    )
)
"""Keys on which no cost depends: names, tokens, dropouts, epsilons, rotary frequencies, routing rules, files."""
NEUTRAL: Mapping[str, tuple[Any, ...]] = {
    "chunk_size_feed_forward": (0,),
    "moe_layer_freq": (1,),
    "position_embedding_type": ("absolute",),
    "pruned_heads": ({},),
}
"""Keys whose effect on costs is not modelled, with the values that have none."""

Config = Mapping[str, Any]


@dataclass(frozen=True, kw_only=True)
class Family:
    """How the configuration of a family is read.

    Attributes:
        names: configuration keys of the sizes: layers, hidden, heads, vocabulary, sequence, ffn.
        defaults: keys that the shape depends on, with the defaults of transformers' configuration class.
        shape: fields of ``ModelSpec`` that are constant in the family.
        more: further fields of ``ModelSpec``, from the configuration with its defaults.
    """

    names: Mapping[str, str]
    defaults: Mapping[str, Any] = field(default_factory=dict)
    shape: Mapping[str, Any] = field(default_factory=dict)
    more: Callable[[Config], Mapping[str, Any]] = lambda _: {}


_USUAL = {
    "layers": "num_hidden_layers",
    "hidden": "hidden_size",
    "heads": "num_attention_heads",
    "vocabulary": "vocab_size",
    "sequence": "max_position_embeddings",
    "ffn": "intermediate_size",
}
_BARE = {"norm_biases": False, "query_biases": False, "output_biases": False, "mlp_biases": False, "gated": True}
"""RMSNorm, no biases, a gated MLP: Llama and similar families."""


def _attention_biases(config: Config) -> dict[str, Any]:
    return dict.fromkeys(("query_biases", "output_biases"), bool(config["attention_bias"]))


def _head_size(config: Config) -> int:
    return int(config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"])


def _local(config: Config, is_local: Callable[[int], bool], default: bool = True) -> dict[str, Any]:
    """The window and the blocks that it applies to: by ``layer_types``, or else by the family's rule."""
    layers, window = config["num_hidden_layers"], config.get("sliding_window")
    if not window or not default:
        return {}
    # Newer configurations list the blocks; older ones rely on the rule in the family's modeling code.
    types = config.get("layer_types")
    if types is not None:
        if unknown := sorted(set(types) - {"full_attention", "sliding_attention"}):
            raise UsageError(
                f"layer_types {', '.join(unknown)}: not modelled; use full_attention and sliding_attention"
            )
        if len(types) != layers:
            raise UsageError(f"layer_types has {len(types)} entries, must have one for each of {layers} layers")
        return {"window": int(window), "local_layers": tuple(one == "sliding_attention" for one in types)}
    return {"window": int(window), "local_layers": tuple(map(is_local, range(layers)))}


def _everywhere(config: Config) -> dict[str, Any]:
    return _local({**config, "layer_types": None}, lambda _: True)


def _late(config: Config) -> dict[str, Any]:
    """Qwen 2 and 3: the window applies from a layer on, if it is used at all."""
    return _local(config, lambda layer: layer >= config["max_window_layers"], bool(config["use_sliding_window"]))


def _gemma3_pattern(config: Config) -> dict[str, Any]:
    # Five local blocks, then a global one (Gemma 3 technical report, arXiv 2503.19786, section 2).
    every = int(config["sliding_window_pattern"] or 6)
    return _local(config, lambda layer: (layer + 1) % every != 0)


def _experts(config: Config, key: str) -> dict[str, Any]:
    return {"experts": int(config[key]), "experts_per_token": int(config["num_experts_per_tok"])}


def _qwen3_moe(config: Config) -> dict[str, Any]:
    used = bool(config["use_sliding_window"])
    return {
        **_attention_biases(config),
        **_local({**config, "layer_types": None}, lambda _: True, used),
        **_experts({**config, "num_local_experts": config["num_experts"] or config["num_local_experts"]}, _LOCAL),
        "expert_ffn": int(config["moe_intermediate_size"]),
        "sparse_step": int(config["decoder_sparse_step"]),
        "dense_only": tuple(config["mlp_only_layers"] or ()),
        # One norm for queries and one for keys, each of a head's size and shared by all heads.
        "qk_norm": 2 * _head_size(config),
    }


_LOCAL = "num_local_experts"


def _deepseek(config: Config) -> dict[str, Any]:
    routed = int(config["n_routed_experts"] or 0)
    latent = LatentAttention(
        query_rank=int(config["q_lora_rank"] or 0),
        kv_rank=int(config["kv_lora_rank"]),
        nope=int(config["qk_nope_head_dim"]),
        rope=int(config["qk_rope_head_dim"]),
        value=int(config["v_head_dim"]),
        biases=bool(config["attention_bias"]),
    )
    predicted = int(config.get("num_nextn_predict_layers") or config.get("num_mtp_layers") or 0)
    return {
        "latent": latent,
        "head_size": latent.nope + latent.rope,
        # Each head has keys and values of its own, expanded from the common latent.
        "kv_heads": config["num_attention_heads"],
        "mlp_biases": bool(config["mlp_bias"]),
        "experts": max(1, routed),
        "experts_per_token": int(config["num_experts_per_tok"] or 1),
        "expert_ffn": int(config["moe_intermediate_size"]),
        "shared_ffn": int(config["n_shared_experts"] or 0) * int(config["moe_intermediate_size"]),
        "first_dense": int(config["first_k_dense_replace"]),
        "left_out": (f"{predicted} layers of multi-token prediction",) if predicted else (),
    }


_DEEPSEEK = {
    "q_lora_rank": 1536,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "attention_bias": False,
    "mlp_bias": False,
    "num_key_value_heads": None,
    "head_dim": None,
    "tie_word_embeddings": False,
}
_GEMMA = {
    "num_key_value_heads": 4,
    "head_dim": 256,
    "attention_bias": False,
    "tie_word_embeddings": True,
    "sliding_window": 4096,
    "layer_types": None,
}
_QWEN = {
    "num_key_value_heads": 32,
    "head_dim": None,
    "tie_word_embeddings": False,
    "use_sliding_window": False,
    "sliding_window": 4096,
    "max_window_layers": 28,
    "layer_types": None,
}
_LLAMA = {
    "num_key_value_heads": None,
    "head_dim": None,
    "attention_bias": False,
    "tie_word_embeddings": False,
}
_GPT2 = {
    "layers": "n_layer",
    "hidden": "n_embd",
    "heads": "n_head",
    "vocabulary": "vocab_size",
    "sequence": "n_positions",
    "ffn": "n_inner",
}
T5_NAMES = {
    "layers": "num_decoder_layers",
    "hidden": "d_model",
    "heads": "num_heads",
    "vocabulary": "vocab_size",
    "sequence": "n_positions",
    "ffn": "d_ff",
}

FAMILIES: Mapping[str, Family] = {
    "gpt2": Family(
        names=_GPT2,
        defaults={"n_inner": None, "n_positions": 1024, "tie_word_embeddings": True},
        more=lambda config: {"positions": int(config["n_positions"])},
    ),
    "bert": Family(
        names=_USUAL,
        defaults={"type_vocab_size": 2, "max_position_embeddings": 512, "tie_word_embeddings": True},
        shape={"head_transform": True, "pooler": True},
        more=lambda config: {
            "positions": int(config["max_position_embeddings"]),
            "token_types": int(config["type_vocab_size"]),
        },
    ),
    "t5": Family(
        names=T5_NAMES,
        defaults={
            "num_layers": None,
            "num_decoder_layers": None,
            "d_kv": 64,
            "n_positions": 512,
            "feed_forward_proj": "relu",
            "relative_attention_num_buckets": 32,
            "tie_word_embeddings": True,
        },
        shape={**_BARE, "gated": False},
        more=lambda config: {
            "encoder_layers": int(config["num_layers"] or config["num_decoder_layers"]),
            "head_size": int(config["d_kv"]),
            "gated": str(config["feed_forward_proj"]).startswith("gated"),
            "relative_buckets": int(config["relative_attention_num_buckets"]),
        },
    ),
    "llama": Family(
        names=_USUAL,
        defaults={**_LLAMA, "mlp_bias": False},
        shape=_BARE,
        more=lambda config: {**_attention_biases(config), "mlp_biases": bool(config["mlp_bias"])},
    ),
    "mistral": Family(
        names=_USUAL,
        defaults={
            "num_key_value_heads": 8,
            "head_dim": None,
            "tie_word_embeddings": False,
            "sliding_window": 4096,
            "layer_types": None,
        },
        shape=_BARE,
        more=_everywhere,
    ),
    "mixtral": Family(
        names=_USUAL,
        defaults={
            "num_key_value_heads": 8,
            "head_dim": None,
            "tie_word_embeddings": False,
            "sliding_window": None,
            "num_local_experts": 8,
            "num_experts_per_tok": 2,
        },
        shape=_BARE,
        more=lambda config: {**_everywhere(config), **_experts(config, _LOCAL)},
    ),
    "qwen2": Family(
        names=_USUAL,
        defaults=_QWEN,
        shape={**_BARE, "query_biases": True},
        more=_late,
    ),
    "qwen3": Family(
        names=_USUAL,
        defaults={**_QWEN, "head_dim": 128, "attention_bias": False},
        shape=_BARE,
        more=lambda config: {**_attention_biases(config), **_late(config), "qk_norm": 2 * _head_size(config)},
    ),
    "qwen3_moe": Family(
        names=_USUAL,
        defaults={
            **_QWEN,
            "num_key_value_heads": 4,
            "attention_bias": False,
            "decoder_sparse_step": 1,
            "moe_intermediate_size": 768,
            "num_experts_per_tok": 8,
            "num_experts": None,
            "num_local_experts": 128,
            "mlp_only_layers": None,
        },
        shape=_BARE,
        more=_qwen3_moe,
    ),
    "gemma": Family(
        names=_USUAL,
        defaults={
            "num_key_value_heads": 16,
            "head_dim": 256,
            "attention_bias": False,
            "tie_word_embeddings": True,
        },
        shape=_BARE,
        more=_attention_biases,
    ),
    "gemma2": Family(
        names=_USUAL,
        defaults=_GEMMA,
        shape={**_BARE, "block_norms": 2},
        more=lambda config: {**_attention_biases(config), **_local(config, lambda layer: layer % 2 == 0)},
    ),
    "gemma3_text": Family(
        names=_USUAL,
        defaults={**_GEMMA, "sliding_window_pattern": 6},
        shape={**_BARE, "block_norms": 2},
        more=lambda config: {
            **_attention_biases(config),
            **_gemma3_pattern(config),
            "qk_norm": 2 * _head_size(config),
        },
    ),
    "phi3": Family(
        names=_USUAL,
        defaults={"num_key_value_heads": None, "head_dim": None, "tie_word_embeddings": False, "sliding_window": None},
        shape=_BARE,
        more=_everywhere,
    ),
    "olmo2": Family(
        names=_USUAL,
        defaults=_LLAMA,
        shape=_BARE,
        more=lambda config: {
            **_attention_biases(config),
            "qk_norm": _head_size(config)
            * (config["num_attention_heads"] + (config["num_key_value_heads"] or config["num_attention_heads"])),
        },
    ),
    "deepseek_v2": Family(
        names=_USUAL,
        defaults={
            **_DEEPSEEK,
            "n_routed_experts": 64,
            "n_shared_experts": 2,
            "first_k_dense_replace": 0,
            "moe_intermediate_size": 1407,
            "num_experts_per_tok": None,
        },
        shape=_BARE,
        more=_deepseek,
    ),
    "deepseek_v3": Family(
        names=_USUAL,
        defaults={
            **_DEEPSEEK,
            "n_routed_experts": 256,
            "n_shared_experts": 1,
            "first_k_dense_replace": 3,
            "moe_intermediate_size": 2048,
            "num_experts_per_tok": 8,
        },
        shape=_BARE,
        more=_deepseek,
    ),
    "gpt_oss": Family(
        names=_USUAL,
        defaults={
            "num_key_value_heads": 8,
            "head_dim": 64,
            "attention_bias": True,
            "tie_word_embeddings": False,
            "sliding_window": 128,
            "layer_types": None,
            "num_local_experts": 128,
            "num_experts_per_tok": 4,
            "experts_per_token": None,
        },
        shape={**_BARE, "expert_biases": True, "router_biases": True, "sinks": True},
        more=lambda config: {
            **_attention_biases(config),
            **_local(config, lambda layer: layer % 2 == 0),
            **_experts(config, _LOCAL),
        },
    ),
}
