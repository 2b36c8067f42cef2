"""Configurations of today's decoders as their publishers write them: keys that no class of transformers has, too."""

import json

import pytest

from dynmo_ckpt.huggingface.decoders import DECODERS, unlike_decoder
from dynmo_ckpt.huggingface.models import hf_model
from dynmo_ckpt.io.errors import CorruptError, UnsupportedError
from tests.unit.dynmo_ckpt.huggingface.test_published_configs import MIXTRAL

QWEN_2 = {
    "architectures": ["Qwen2ForCausalLM"],
    "attention_dropout": 0.0,
    "bos_token_id": 151643,
    "eos_token_id": 151645,
    "hidden_act": "silu",
    "hidden_size": 3584,
    "initializer_range": 0.02,
    "intermediate_size": 18944,
    "max_position_embeddings": 131072,
    "max_window_layers": 28,
    "model_type": "qwen2",
    "num_attention_heads": 28,
    "num_hidden_layers": 28,
    "num_key_value_heads": 4,
    "rms_norm_eps": 1e-06,
    "rope_theta": 10000,
    "sliding_window": 4096,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "transformers_version": "4.44.0",
    "use_cache": True,
    "use_mrope": False,
    "use_sliding_window": False,
    "vocab_size": 152064,
}
QWEN_3_MOE = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "attention_bias": False,
    "attention_dropout": 0.0,
    "decoder_sparse_step": 1,
    "eos_token_id": 151645,
    "head_dim": 128,
    "hidden_act": "silu",
    "hidden_size": 2048,
    "initializer_range": 0.02,
    "intermediate_size": 5472,
    "max_position_embeddings": 262144,
    "max_window_layers": 28,
    "mlp_only_layers": [],
    "model_type": "qwen3_moe",
    "moe_intermediate_size": 768,
    "norm_topk_prob": True,
    "num_attention_heads": 32,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "num_hidden_layers": 48,
    "num_key_value_heads": 4,
    "output_router_logits": False,
    "qkv_bias": False,
    "rms_norm_eps": 1e-06,
    "rope_scaling": None,
    "rope_theta": 10000000,
    "router_aux_loss_coef": 0.0,
    "shared_expert_intermediate_size": 0,
    "sliding_window": None,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "transformers_version": "4.52.3",
    "use_cache": True,
    "use_qk_norm": True,
    "use_sliding_window": False,
    "vocab_size": 151936,
}
GEMMA_2 = {
    "architectures": ["Gemma2ForCausalLM"],
    "attention_bias": False,
    "attention_dropout": 0.0,
    "attn_logit_softcapping": 50.0,
    "bos_token_id": 2,
    "cache_implementation": "hybrid",
    "eos_token_id": 1,
    "final_logit_softcapping": 30.0,
    "head_dim": 256,
    "hidden_act": "gelu_pytorch_tanh",
    "hidden_activation": "gelu_pytorch_tanh",
    "hidden_size": 3584,
    "initializer_range": 0.02,
    "intermediate_size": 14336,
    "max_position_embeddings": 8192,
    "model_type": "gemma2",
    "num_attention_heads": 16,
    "num_hidden_layers": 42,
    "num_key_value_heads": 8,
    "pad_token_id": 0,
    "query_pre_attn_scalar": 256,
    "rms_norm_eps": 1e-06,
    "rope_theta": 10000.0,
    "sliding_window": 4096,
    "sliding_window_size": 4096,
    "torch_dtype": "bfloat16",
    "transformers_version": "4.42.0.dev0",
    "use_cache": True,
    "vocab_size": 256000,
}
PHI_4_MINI = {
    "architectures": ["Phi3ForCausalLM"],
    "attention_bias": False,
    "attention_dropout": 0.0,
    "auto_map": {
        "AutoConfig": "configuration_phi3.Phi3Config",
        "AutoModelForCausalLM": "modeling_phi3.Phi3ForCausalLM",
    },
    "bos_token_id": 199999,
    "embd_pdrop": 0.0,
    "eos_token_id": 199999,
    "full_attn_mod": 1,
    "hidden_act": "silu",
    "hidden_size": 3072,
    "initializer_range": 0.02,
    "intermediate_size": 8192,
    "interpolate_factor": 1,
    "lm_head_bias": False,
    "max_position_embeddings": 131072,
    "mlp_bias": False,
    "model_type": "phi3",
    "num_attention_heads": 24,
    "num_hidden_layers": 32,
    "num_key_value_heads": 8,
    "original_max_position_embeddings": 4096,
    "pad_token_id": 199999,
    "partial_rotary_factor": 0.75,
    "resid_pdrop": 0.0,
    "rms_norm_eps": 1e-05,
    "rope_scaling": {"long_factor": [1.0 + at for at in range(48)], "short_factor": [1.0] * 48, "type": "longrope"},
    "rope_theta": 10000.0,
    "sliding_window": 262144,
    "tie_word_embeddings": True,
    "torch_dtype": "bfloat16",
    "transformers_version": "4.45.0",
    "use_cache": True,
    "vocab_size": 200064,
}
SMOL_LM_2 = {
    "architectures": ["LlamaForCausalLM"],
    "attention_bias": False,
    "attention_dropout": 0.0,
    "bos_token_id": 0,
    "eos_token_id": 0,
    "hidden_act": "silu",
    "hidden_size": 576,
    "initializer_range": 0.041666666666666664,
    "intermediate_size": 1536,
    "is_llama_config": True,
    "max_position_embeddings": 8192,
    "mlp_bias": False,
    "model_type": "llama",
    "num_attention_heads": 9,
    "num_hidden_layers": 30,
    "num_key_value_heads": 3,
    "pretraining_tp": 1,
    "rms_norm_eps": 1e-05,
    "rope_interleaved": False,
    "rope_scaling": None,
    "rope_theta": 100000,
    "tie_word_embeddings": True,
    "torch_dtype": "bfloat16",
    "transformers_version": "4.40.1",
    "use_cache": True,
    "vocab_size": 49152,
}
PUBLISHED = [QWEN_2, QWEN_3_MOE, GEMMA_2, PHI_4_MINI, SMOL_LM_2]


@pytest.mark.parametrize(
    ("config", "field", "value"),
    [
        (QWEN_2, "attention_bias", "qkv"),
        (QWEN_3_MOE, "num_experts", 128),
        (GEMMA_2, "sliding_window", 4096),
        (PHI_4_MINI, "rotary_fraction", 0.75),
        (SMOL_LM_2, "num_key_value_heads", 3),
    ],
    ids=lambda each: each["model_type"] if isinstance(each, dict) else None,
)
def test_hf_model_of_a_published_decoder_is_read(config, field, value):
    model = hf_model(config, 1)
    assert (model["vocab_size"], model[field]) == (config["vocab_size"], value)


@pytest.mark.parametrize(
    ("config", "changes"),
    [
        (QWEN_2, {"use_mrope": True}),
        (QWEN_3_MOE, {"qkv_bias": True}),
        (QWEN_3_MOE, {"use_qk_norm": False}),
        (QWEN_3_MOE, {"shared_expert_intermediate_size": 768}),
        (PHI_4_MINI, {"lm_head_bias": True}),
        (PHI_4_MINI, {"full_attn_mod": 2}),
        (PHI_4_MINI, {"interpolate_factor": 2}),
        (SMOL_LM_2, {"rope_interleaved": True}),
    ],
)
def test_setting_that_no_class_of_transformers_reads_has_its_plain_value(config, changes):
    """The publisher's own program computes another model with it."""
    with pytest.raises(UnsupportedError, match=next(iter(changes))):
        hf_model(config | changes, 1)


# Everything else has transformers' defaults.
DEEPSEEK = {"architectures": ["DeepseekV3ForCausalLM"], "model_type": "deepseek_v3", "vocab_size": 96}


@pytest.mark.parametrize(
    ("published", "key"),
    [(QWEN_3_MOE, "num_local_experts"), (DEEPSEEK, "n_routed_experts"), (MIXTRAL, "num_local_experts")],
    ids=["qwen3_moe", "deepseek_v3", "mixtral"],
)
def test_hf_model_with_more_experts_per_token_than_experts_is_refused(published, key):
    with pytest.raises(CorruptError, match=f"num_experts_per_tok 1,000 is above {key}"):
        hf_model(published | {"num_experts_per_tok": 1000}, 1)


def test_trained_length_of_layer_types_is_their_own():
    """As transformers: an outer length replaces that of a single set of parameters, not that of a set by layer type."""
    gemma = pytest.importorskip("transformers").CONFIG_MAPPING["gemma3_text"]
    scaling = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    scaling["original_max_position_embeddings"] = 16
    config = {"model_type": "gemma3_text", "sliding_window_pattern": 1, "original_max_position_embeddings": 64}
    config |= {"rope_scaling": scaling, "num_hidden_layers": 2}
    theirs = gemma.from_dict(json.loads(json.dumps(config))).rope_parameters["full_attention"]
    ours = hf_model(config, 1)["rotary_scaling"]
    assert ours == scaling == {name: theirs[name] for name in scaling}


def test_window_that_is_switched_off_is_not_read():
    """Half of the layers would have it."""
    assert "sliding_window" not in hf_model({**QWEN_2, "max_window_layers": 14}, 1)
    assert hf_model({**QWEN_2, "max_window_layers": 14, "use_sliding_window": True}, 1)["sliding_window"] == 4096


def test_model_with_norms_of_heads_is_not_a_llama():
    model = hf_model(QWEN_3_MOE, 1)
    assert unlike_decoder(model, DECODERS["llama"])["qk_norm"][0] == model["qk_norm"]
    assert "qk_norm" not in unlike_decoder(model, DECODERS["qwen3_moe"])
