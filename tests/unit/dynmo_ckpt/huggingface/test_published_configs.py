"""Published configurations: each is read, or refused for an unsupported setting, never for an obsolete key."""

from pathlib import Path

import pytest

from dynmo_ckpt._common.errors import DynmoError
from dynmo_ckpt.converters.assemble import model_from_config
from dynmo_ckpt.formats.choices import ReadOptions
from dynmo_ckpt.huggingface.models import hf_model
from dynmo_ckpt.io.errors import CorruptError, UnsupportedError
from tests.tables import table

LABELS = {"id2label": {"0": "LABEL_0"}, "label2id": {"LABEL_0": 0}}
GPT2 = {
    "activation_function": "gelu_new",
    "architectures": ["GPT2LMHeadModel"],
    "attn_pdrop": 0.1,
    "bos_token_id": 50256,
    "embd_pdrop": 0.1,
    "eos_token_id": 50256,
    "initializer_range": 0.02,
    "layer_norm_epsilon": 1e-05,
    "model_type": "gpt2",
    "n_ctx": 1024,
    "n_embd": 768,
    "n_head": 12,
    "n_layer": 12,
    "n_positions": 1024,
    "resid_pdrop": 0.1,
    "summary_activation": None,
    "summary_first_dropout": 0.1,
    "summary_proj_to_labels": True,
    "summary_type": "cls_index",
    "summary_use_proj": True,
    "task_specific_params": {"text-generation": {"do_sample": True, "max_length": 50}},
    "vocab_size": 50257,
}
OLD_GPT2 = {"n_special": 0, "predict_special_tokens": True}
OLD_PRETRAINED = {
    "_num_labels": 1,
    "do_sample": False,
    "eos_token_ids": 0,
    "finetuning_task": None,
    "is_decoder": False,
    "length_penalty": 1.0,
    "max_length": 20,
    "num_beams": 1,
    "num_return_sequences": 1,
    "output_attentions": False,
    "output_hidden_states": False,
    "output_past": True,
    "pad_token_id": None,
    "pruned_heads": {},
    "repetition_penalty": 1.0,
    "temperature": 1.0,
    "top_k": 50,
    "top_p": 1.0,
    "torchscript": False,
    "use_bfloat16": False,
    "xla_device": None,
    **LABELS,
}
T5_TASKS = {
    "summarization": {"early_stopping": True, "length_penalty": 2.0, "max_length": 200, "prefix": "summarize: "},
    "translation_en_to_de": {"max_length": 300, "num_beams": 4, "prefix": "translate English to German: "},
}
T5_SMALL = {
    "architectures": ["T5ForConditionalGeneration"],
    "d_ff": 2048,
    "d_kv": 64,
    "d_model": 512,
    "decoder_start_token_id": 0,
    "dropout_rate": 0.1,
    "eos_token_id": 1,
    "initializer_factor": 1.0,
    "is_encoder_decoder": True,
    "layer_norm_epsilon": 1e-06,
    "model_type": "t5",
    "n_positions": 512,
    "num_heads": 8,
    "num_layers": 6,
    "output_past": True,
    "pad_token_id": 0,
    "relative_attention_num_buckets": 32,
    "task_specific_params": T5_TASKS,
    "vocab_size": 32128,
}
MEGATRON_BERT = {
    "attention_probs_dropout_prob": 0.1,
    "gradient_checkpointing": False,
    "hidden_act": "gelu",
    "hidden_dropout_prob": 0.1,
    "hidden_size": 1024,
    "initializer_range": 0.02,
    "intermediate_size": 4096,
    "layer_norm_eps": 1e-12,
    "max_position_embeddings": 512,
    "model_type": "megatron-bert",
    "num_attention_heads": 16,
    "num_hidden_layers": 24,
    "pad_token_id": 0,
    "position_embedding_type": "absolute",
    "transformers_version": "4.4.0.dev0",
    "type_vocab_size": 2,
    "use_cache": True,
    "vocab_size": 29056,
}
LLAMA_1 = {
    "architectures": ["LLaMAForCausalLM"],
    "bos_token_id": 0,
    "eos_token_id": 1,
    "hidden_act": "silu",
    "hidden_size": 4096,
    "initializer_range": 0.02,
    "intermediate_size": 11008,
    "max_sequence_length": 2048,
    "model_type": "llama",
    "num_attention_heads": 32,
    "num_hidden_layers": 32,
    "pad_token_id": -1,
    "rms_norm_eps": 1e-06,
    "torch_dtype": "float16",
    "transformers_version": "4.27.0.dev0",
    "use_cache": True,
    "vocab_size": 32000,
}
LLAMA_2 = {
    "architectures": ["LlamaForCausalLM"],
    "bos_token_id": 1,
    "eos_token_id": 2,
    "hidden_act": "silu",
    "hidden_size": 4096,
    "initializer_range": 0.02,
    "intermediate_size": 11008,
    "max_position_embeddings": 4096,
    "model_type": "llama",
    "num_attention_heads": 32,
    "num_hidden_layers": 32,
    "num_key_value_heads": 32,
    "pretraining_tp": 1,
    "rms_norm_eps": 1e-05,
    "rope_scaling": None,
    "tie_word_embeddings": False,
    "torch_dtype": "float16",
    "transformers_version": "4.31.0.dev0",
    "use_cache": True,
    "vocab_size": 32000,
}
LLAMA_3 = LLAMA_2 | {
    "attention_bias": False,
    "attention_dropout": 0.0,
    "bos_token_id": 128000,
    "eos_token_id": 128001,
    "intermediate_size": 14336,
    "max_position_embeddings": 131072,
    "mlp_bias": False,
    "num_key_value_heads": 8,
    "rope_scaling": {
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
        "rope_type": "llama3",
    },
    "rope_theta": 500000.0,
    "torch_dtype": "bfloat16",
    "transformers_version": "4.43.0.dev0",
    "vocab_size": 128256,
}
MISTRAL = {
    "architectures": ["MistralForCausalLM"],
    "bos_token_id": 1,
    "eos_token_id": 2,
    "hidden_act": "silu",
    "hidden_size": 4096,
    "initializer_range": 0.02,
    "intermediate_size": 14336,
    "max_position_embeddings": 32768,
    "model_type": "mistral",
    "num_attention_heads": 32,
    "num_hidden_layers": 32,
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-05,
    "rope_theta": 10000.0,
    "sliding_window": 4096,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "transformers_version": "4.34.0.dev0",
    "use_cache": True,
    "vocab_size": 32000,
}
MIXTRAL = MISTRAL | {
    "architectures": ["MixtralForCausalLM"],
    "attention_dropout": 0.0,
    "model_type": "mixtral",
    "num_experts_per_tok": 2,
    "num_local_experts": 8,
    "output_router_logits": False,
    "rope_theta": 1000000.0,
    "router_aux_loss_coef": 0.02,
    "sliding_window": None,
}
READ = {
    "gpt2": GPT2,
    "gpt2-medium": GPT2 | OLD_GPT2 | {"n_embd": 1024, "n_head": 16, "n_layer": 24},
    "gpt2-xl": GPT2 | {"n_embd": 1600, "n_head": 25, "n_layer": 48, "output_past": True},
    "distilgpt2": GPT2 | {"_num_labels": 1, "n_layer": 6, **LABELS},
    "gpt2 of 2019": GPT2 | OLD_GPT2 | OLD_PRETRAINED,
    "t5-small": T5_SMALL,
    "t5-small of 2020": T5_SMALL | OLD_PRETRAINED,
    "megatron-bert": MEGATRON_BERT,
    "llama-7b": LLAMA_1,
    "Llama-2-7b": LLAMA_2 | {"_name_or_path": "meta-llama/Llama-2-7b-hf"},
    "Llama-3.1-8B": LLAMA_3,
    "Mistral-7B-v0.1": MISTRAL,
    "Mistral-7B-v0.3": MISTRAL | {"sliding_window": None, "rope_theta": 1000000.0, "vocab_size": 32768},
    "Mixtral-8x7B": MIXTRAL,
}
# Keys of published files; their values where these decide how a model is read.
COMMON = {
    "attention_dropout": 0.0,
    "hidden_act": "silu",
    "initializer_range": 0.02,
    "rms_norm_eps": 1e-05,
    "rope_scaling": None,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "transformers_version": "4.54.1",
    "use_cache": True,
}
LOCAL = ["sliding_attention", "sliding_attention", "sliding_attention", "full_attention"]
ROUTED = COMMON | {
    "first_k_dense_replace": 1,
    "hidden_size": 4096,
    "intermediate_size": 10944,
    "moe_intermediate_size": 1408,
    "n_group": 1,
    "n_routed_experts": 128,
    "n_shared_experts": 1,
    "norm_topk_prob": True,
    "num_experts_per_tok": 8,
    "num_nextn_predict_layers": 1,
    "rope_theta": 1000000,
    "topk_group": 1,
}
NEWER = {
    "GLM-4.5-Air": ROUTED
    | {"model_type": "glm4_moe", "attention_bias": True, "head_dim": 128, "max_position_embeddings": 131072}
    | {"num_attention_heads": 96, "num_hidden_layers": 46, "num_key_value_heads": 8, "partial_rotary_factor": 0.5}
    | {"routed_scaling_factor": 1.0, "use_qk_norm": False, "vocab_size": 151552},
    "GLM-4.7-Flash": ROUTED
    | {"model_type": "glm4_moe_lite", "attention_bias": False, "hidden_size": 2048, "intermediate_size": 10240}
    | {"kv_lora_rank": 512, "max_position_embeddings": 202752, "moe_intermediate_size": 1536, "n_routed_experts": 64}
    | {"num_attention_heads": 20, "num_experts_per_tok": 4, "num_hidden_layers": 47, "num_key_value_heads": 20}
    | {"partial_rotary_factor": 1.0, "q_lora_rank": 768, "qk_nope_head_dim": 192, "qk_rope_head_dim": 64}
    | {"routed_scaling_factor": 1.8, "topk_method": "noaux_tc", "v_head_dim": 256, "vocab_size": 154880},
    "SmolLM3-3B": COMMON
    | {"model_type": "smollm3", "attention_bias": False, "hidden_size": 2048, "intermediate_size": 11008}
    | {"layer_types": ["full_attention"] * 36, "max_position_embeddings": 65536, "max_window_layers": 28}
    | {"mlp_bias": False, "no_rope_layer_interval": 4, "no_rope_layers": [1, 1, 1, 0] * 9, "num_attention_heads": 16}
    | {"num_hidden_layers": 36, "num_key_value_heads": 4, "pretraining_tp": 2, "rope_theta": 5000000.0}
    | {"sliding_window": None, "tie_word_embeddings": True, "use_sliding_window": False, "vocab_size": 128256},
    "Seed-OSS-36B": COMMON
    | {"model_type": "seed_oss", "attention_bias": True, "attention_out_bias": False, "head_dim": 128}
    | {"hidden_size": 5120, "intermediate_size": 27648, "max_position_embeddings": 524288, "mlp_bias": False}
    | {"num_attention_heads": 80, "num_hidden_layers": 64, "num_key_value_heads": 8, "residual_dropout": 0.1}
    | {"rope_scaling": {"rope_type": "default"}, "rope_theta": 10000000.0, "vocab_size": 155136},
    "Olmo-3-7B": COMMON
    | {"model_type": "olmo3", "attention_bias": False, "hidden_size": 4096, "intermediate_size": 11008}
    | {"layer_types": LOCAL * 8, "max_position_embeddings": 65536, "num_attention_heads": 32, "num_hidden_layers": 32}
    | {"num_key_value_heads": 32, "rope_theta": 500000, "sliding_window": 4096, "vocab_size": 100278}
    | {
        "rope_scaling": {"rope_type": "yarn", "attention_factor": 1.2079441541679836, "beta_fast": 32.0}
        | {"beta_slow": 1.0, "factor": 8.0, "original_max_position_embeddings": 8192}
    },
    "ERNIE-4.5-0.3B": COMMON
    | {"model_type": "ernie4_5", "auto_map": {"AutoConfig": "configuration_ernie4_5.Ernie4_5_Config"}, "head_dim": 128}
    | {"hidden_size": 1024, "intermediate_size": 3072, "max_position_embeddings": 131072, "num_attention_heads": 16}
    | {"num_hidden_layers": 18, "num_key_value_heads": 2, "rope_theta": 500000, "use_bias": False, "vocab_size": 103424}
    | {"tie_word_embeddings": True},
    "EXAONE-4.0-32B": COMMON
    | {"model_type": "exaone4", "head_dim": 128, "hidden_size": 5120, "intermediate_size": 27392}
    | {"max_position_embeddings": 131072, "num_attention_heads": 40, "num_hidden_layers": 64, "num_key_value_heads": 8}
    | {"rope_theta": 1000000, "sliding_window": 4096, "sliding_window_pattern": 4, "vocab_size": 102400}
    | {
        "rope_scaling": {"factor": 16.0, "high_freq_factor": 4.0, "low_freq_factor": 1.0, "rope_type": "llama3"}
        | {"original_max_position_embeddings": 8192}
    },
    "Granite-4.1-3B": COMMON
    | {"model_type": "granite", "attention_multiplier": 0.015625, "embedding_multiplier": 12.0, "hidden_size": 2560}
    | {"intermediate_size": 8192, "logits_scaling": 10.0, "num_attention_heads": 40, "num_hidden_layers": 40}
    | {"num_key_value_heads": 8, "residual_multiplier": 0.22, "vocab_size": 100352},
    "Qwen1.5-MoE-A2.7B": COMMON
    | {"model_type": "qwen2_moe", "decoder_sparse_step": 1, "hidden_size": 2048, "intermediate_size": 5632}
    | {"max_position_embeddings": 8192, "max_window_layers": 21, "moe_intermediate_size": 1408, "norm_topk_prob": False}
    | {"num_attention_heads": 16, "num_experts": 60, "num_experts_per_tok": 4, "num_hidden_layers": 24}
    | {"num_key_value_heads": 16, "rope_theta": 1000000.0, "shared_expert_intermediate_size": 5632}
    | {"sliding_window": 32768, "use_sliding_window": False, "vocab_size": 151936},
    "MiniMax-M2": COMMON
    | {"model_type": "minimax_m2", "attention_bias": False, "attn_type_list": [1] * 62, "head_dim": 128}
    | {"hidden_size": 3072, "intermediate_size": 1536, "layernorm_mlp_beta": 1.0, "max_position_embeddings": 196608}
    | {"mlp_intermediate_size": 8192, "mtp_transformer_layers": 1, "num_attention_heads": 48, "num_experts_per_tok": 8}
    | {"num_hidden_layers": 62, "num_key_value_heads": 8, "num_local_experts": 256, "num_mtp_modules": 3}
    | {"output_router_logits": False, "qk_norm_type": "per_layer", "rope_theta": 5000000, "rotary_dim": 64}
    | {"router_jitter_noise": 0.0, "scoring_func": "sigmoid", "shared_intermediate_size": 0, "sliding_window": None}
    | {"use_mtp": True, "use_qk_norm": True, "use_routing_bias": True, "vocab_size": 200064},
    "internlm3-8b": COMMON
    | {"model_type": "internlm3", "bias": False, "head_dim": 128, "hidden_size": 4096, "intermediate_size": 10240}
    | {"max_position_embeddings": 32768, "num_attention_heads": 32, "num_hidden_layers": 48, "num_key_value_heads": 2}
    | {"qkv_bias": False, "rope_scaling": {"factor": 6.0, "rope_type": "dynamic"}, "rope_theta": 50000000}
    | {"vocab_size": 128512},
    "OLMoE-1B-7B": COMMON
    | {"model_type": "olmoe", "clip_qkv": None, "hidden_size": 2048, "intermediate_size": 1024}
    | {"max_position_embeddings": 4096, "norm_topk_prob": False, "num_attention_heads": 16, "num_experts": 64}
    | {"num_experts_per_tok": 8, "num_hidden_layers": 16, "num_key_value_heads": 16, "router_aux_loss_coef": 0.01}
    | {"vocab_size": 50304},
    "starcoder2-3b": {
        "model_type": "starcoder2",
        **{"attention_dropout": 0.1, "attention_softmax_in_fp32": True, "embedding_dropout": 0.1},
        **{"hidden_act": "gelu_pytorch_tanh", "hidden_size": 3072, "initializer_range": 0.018042},
        **{"intermediate_size": 12288, "layer_norm_epsilon": 1e-05, "max_position_embeddings": 16384},
        **{"mlp_type": "default", "norm_epsilon": 1e-05, "norm_type": "layer_norm", "num_attention_heads": 24},
        **{"num_hidden_layers": 30, "num_key_value_heads": 2, "residual_dropout": 0.1, "sliding_window": 4096},
        **{"rope_theta": 999999.4420358813, "scale_attention_softmax_in_fp32": True, "scale_attn_weights": True},
        **{"use_bias": True, "vocab_size": 49152},
    },
}
READ |= NEWER
FLAN = {"feed_forward_proj": "gated-gelu", "tie_word_embeddings": False, "num_decoder_layers": 8, "num_layers": 8}
REFUSED = {
    "flan-t5-small": (T5_SMALL | FLAN, r"feed_forward_proj gated-gelu: .* lack gated layers of a T5 1.1 \(flan-T5\)"),
    "bert-base-uncased": (MEGATRON_BERT | {"model_type": "bert"}, "model_type 'bert': must be one of"),
}


@table("name", READ)
def test_hf_model_of_a_published_config_is_read(name):
    model = hf_model(READ[name], 1)
    assert model["vocab_size"] == READ[name]["vocab_size"]


@pytest.mark.parametrize("name", REFUSED)
def test_hf_model_unsupported_published_config_names_setting(name):
    config, message = REFUSED[name]
    with pytest.raises(UnsupportedError, match=message):
        hf_model(config, 1)


@table("kind", [["llama3"], {"a": 1}, 3, None, True])
@table("field", ["rope_type", "type"])
def test_hf_model_invalid_rope_type_is_refused(kind, field):
    with pytest.raises(DynmoError, match="rope_type "):
        hf_model(LLAMA_3 | {"rope_scaling": {field: kind, "factor": 2.0}}, 1)


@pytest.mark.parametrize(
    ("count", "message"),
    [(200_000, "at most 10,000, is 200,000"), (10_000, "times num_layers must be at most 131,072")],
)
def test_model_from_config_too_many_experts_is_refused(count, message):
    with pytest.raises(CorruptError, match=message):
        model_from_config(MIXTRAL | {"num_local_experts": count}, Path("config.json"), ReadOptions())
    assert (
        model_from_config(MIXTRAL | {"num_local_experts": 4096}, Path("config.json"), ReadOptions())["num_experts"]
        == 4096
    )
