"""Shapes from Hugging Face configurations against transformers' own models, and what is refused."""

from __future__ import annotations

import pytest

from dynmo_balance._common.errors import UsageError
from dynmo_balance.costs.devices import PRESETS
from dynmo_balance.inputs.analytic_profile import BuildOptions, build_costs, build_header, header_of
from dynmo_balance.inputs.model_config import from_config
from dynmo_balance.inputs.model_families import FAMILIES, IRRELEVANT, NEUTRAL
from tests.tables import table

LATENT = {"kv_lora_rank": 16, "qk_nope_head_dim": 8, "qk_rope_head_dim": 4, "v_head_dim": 6, "n_routed_experts": 4}
TINY = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "vocab_size": 64,
    "max_position_embeddings": 32,
}
GROUPED = {**TINY, "num_key_value_heads": 2}
WIDE = {**GROUPED, "head_dim": 24}
EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 20}
CASES = [
    ("gpt2", {"n_embd": 32, "n_layer": 3, "n_head": 4, "vocab_size": 64, "n_positions": 16}),
    ("gpt2", {"n_embd": 32, "n_layer": 3, "n_head": 4, "vocab_size": 64, "n_inner": 40}),
    ("llama", GROUPED),
    ("llama", {**WIDE, "attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True}),
    ("mistral", WIDE),
    ("mixtral", {**GROUPED, "num_local_experts": 3, "num_experts_per_tok": 2}),
    ("qwen2", GROUPED),
    ("qwen3", WIDE),
    ("qwen3", {**GROUPED, "attention_bias": True}),
    ("qwen3_moe", {**WIDE, **EXPERTS, "num_experts": 4, "mlp_only_layers": [1]}),
    ("qwen3_moe", {**GROUPED, **EXPERTS, "num_experts": 4, "decoder_sparse_step": 2}),
    ("gemma", GROUPED),
    ("gemma2", WIDE),
    ("gemma3_text", {**WIDE, "attention_bias": True}),
    ("phi3", {**GROUPED, "pad_token_id": 0}),
    ("olmo2", GROUPED),
    ("olmo2", {**TINY, "attention_bias": True, "tie_word_embeddings": True}),
    ("deepseek_v2", {**TINY, **LATENT, **EXPERTS, "q_lora_rank": 12, "first_k_dense_replace": 1}),
    ("deepseek_v2", {**TINY, **LATENT, **EXPERTS, "q_lora_rank": None, "attention_bias": True, "mlp_bias": True}),
    ("deepseek_v3", {**TINY, **LATENT, **EXPERTS, "q_lora_rank": 12, "n_shared_experts": 2, "n_group": 2}),
    ("deepseek_v3", {**TINY, **LATENT, **EXPERTS, "q_lora_rank": None, "attention_bias": True}),
    ("gpt_oss", {**WIDE, "num_local_experts": 3, "num_experts_per_tok": 2}),
    ("gpt_oss", {**GROUPED, "num_local_experts": 3, "num_experts_per_tok": 2, "attention_bias": False}),
    ("bert", TINY),
    (
        "t5",
        {
            "vocab_size": 64,
            "d_model": 32,
            "d_kv": 6,
            "d_ff": 40,
            "num_layers": 2,
            "num_decoder_layers": 3,
            "num_heads": 4,
        },
    ),
    (
        "t5",
        {
            "vocab_size": 64,
            "d_model": 32,
            "d_ff": 40,
            "num_layers": 2,
            "num_heads": 4,
            "feed_forward_proj": "gated-gelu",
        },
    ),
]
LARGE = {
    "deepseek_v3": 671_026_404_352,
    "gpt_oss": 116_829_156_672,
}
QWEN3_600M = {
    "hidden_size": 1024,
    "intermediate_size": 3072,
    "num_hidden_layers": 28,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "vocab_size": 151936,
    "tie_word_embeddings": True,
}


def parameters(name, changes):
    """The parameters of transformers' model, on the meta device, and its configuration as it is saved."""
    import torch
    import transformers

    config = transformers.CONFIG_MAPPING[name](**changes)
    if name == "bert":
        kind = transformers.BertForPreTraining
    elif name == "t5":
        kind = transformers.T5ForConditionalGeneration
    else:
        kind = transformers.AutoModelForCausalLM
    with torch.device("meta"):
        model = kind.from_config(config) if hasattr(kind, "from_config") else kind(config)
    return sum(parameter.numel() for parameter in model.parameters()), config.to_dict()


@table(("name", "changes"), CASES, ids=lambda value: value if isinstance(value, str) else "")
def test_from_config_parameters_equal_transformers(name, changes):
    count, config = parameters(name, changes)
    for document in (config, {**changes, "model_type": name}):
        spec = from_config({**document, "dtype": None}, "config.json")
        header = header_of(build_header(spec, PRESETS["h100"], BuildOptions(workers=1), "test"))
        tied = spec.table_params * sum(item.tied_to is not None for item in header.items)
        assert spec.params == count
        assert sum(item.param_count for item in header.items) - tied == count


@table("name", FAMILIES)
def test_from_config_full_size_parameters_equal_transformers(name):
    count, config = parameters(name, {"num_experts_per_tok": 6} if name == "deepseek_v2" else {})
    assert from_config(config, "config.json").params == count
    assert count == LARGE.get(name, count)


def test_from_config_qwen3_has_published_parameters():
    assert from_config({**QWEN3_600M, "model_type": "qwen3"}, "config.json").params == 596_049_920


@pytest.mark.parametrize("name", ["mamba", "mamba2", "jamba", "falcon_mamba", "llama4_text", "gemma3", "rwkv", "mt5"])
def test_from_config_unknown_family_is_refused_by_name(name):
    with pytest.raises(UsageError, match=f"model_type '{name}' is not modelled; known are model_type gpt2, bert"):
        from_config({**TINY, "model_type": name}, "config.json")


def test_from_config_without_family_is_refused():
    with pytest.raises(UsageError, match="needs model_type or family"):
        from_config(TINY, "config.json")
    with pytest.raises(UsageError, match="family 'ict' is not modelled"):
        from_config({**TINY, "family": "ict"}, "run.json")


@table(
    ("name", "changes", "words"),
    [
        ("llama", {"num_local_experts": 8}, "num_local_experts 8: its effect on a llama is not modelled"),
        ("llama", {"sliding_window": 512}, "sliding_window 512"),
        ("bert", {"add_cross_attention": True}, "add_cross_attention True"),
        ("bert", {"is_decoder": True}, "is_decoder True"),
        ("bert", {"position_embedding_type": "relative_key"}, "position_embedding_type 'relative_key'"),
        ("deepseek_v3", {"moe_layer_freq": 2}, "moe_layer_freq 2"),
        ("qwen3", {"layer_types": ["linear_attention"] * 3, "use_sliding_window": True}, "layer_types linear_att"),
        ("gemma2", {"layer_types": ["full_attention"]}, "layer_types has 1 entries"),
        ("llama", {"clip_qkv": 8.0, "embedding_multiplier": 12.0}, "clip_qkv 8.0, embedding_multiplier 12.0"),
        ("llama", {"num_key_value_heads": 3}, "are inconsistent"),
        ("llama", {"head_dim": "wide"}, "not an integer"),
        ("mixtral", {"num_local_experts": 2, "num_experts_per_tok": 4}, "4 of 2 experts per token are inconsistent"),
        ("llama", {"hidden_size": 0}, "hidden must be positive integers"),
        ("llama", {"num_hidden_layers": 10**18}, "at most 100,000 layers"),
        ("llama", {"vocab_size": 10**18}, "vocabulary 1000000000000000000: must be at most"),
        ("llama", {"intermediate_size": None}, r"missing ffn \(intermediate_size\)"),
    ],
)
def test_from_config_unmodelled_key_is_refused(name, changes, words):
    with pytest.raises(UsageError, match=words):
        from_config({**GROUPED, **changes, "model_type": name}, "config.json")


PUBLISHED = {
    "HuggingFaceTB/SmolLM2-135M": {
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
    },
    "google-bert/bert-base-chinese": {
        "architectures": ["BertForMaskedLM"],
        "attention_probs_dropout_prob": 0.1,
        "directionality": "bidi",
        "hidden_act": "gelu",
        "hidden_dropout_prob": 0.1,
        "hidden_size": 768,
        "initializer_range": 0.02,
        "intermediate_size": 3072,
        "layer_norm_eps": 1e-12,
        "max_position_embeddings": 512,
        "model_type": "bert",
        "num_attention_heads": 12,
        "num_hidden_layers": 12,
        "pad_token_id": 0,
        "pooler_fc_size": 768,
        "pooler_num_attention_heads": 12,
        "pooler_num_fc_layers": 3,
        "pooler_size_per_head": 128,
        "pooler_type": "first_token_transform",
        "type_vocab_size": 2,
        "vocab_size": 21128,
    },
    "google-t5/t5-small": {
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
        "task_specific_params": {"summarization": {"max_length": 200, "num_beams": 4, "prefix": "summarize: "}},
        "vocab_size": 32128,
    },
    "a chat model with its generation settings": {
        **GROUPED,
        "model_type": "mistral",
        "do_sample": True,
        "temperature": 0.6,
        "top_k": 20,
        "top_p": 0.9,
        "num_beams": 4,
        "repetition_penalty": 1.1,
        "length_penalty": 2.0,
        "no_repeat_ngram_size": 3,
        "min_length": 30,
        "sep_token_id": 102,
        "tokenizer_class": "LlamaTokenizer",
    },
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_from_config_reads_published_configuration(name):
    assert from_config(PUBLISHED[name], "config.json").params > 0


def test_families_no_key_is_read_and_irrelevant():
    for name, family in FAMILIES.items():
        read = {*family.names.values(), *family.defaults}
        assert not read & IRRELEVANT, name
        assert not read & NEUTRAL.keys(), name


def costs(name, **changes):
    config = {**GROUPED, "hidden_size": 1024, "intermediate_size": 2048, "max_position_embeddings": 8192, **changes}
    spec = from_config({**config, "model_type": name}, "config.json")
    header = header_of(build_header(spec, PRESETS["h100"], BuildOptions(workers=1), "test"))
    found = build_costs(spec, header, PRESETS["h100"], BuildOptions(workers=1))
    return dict(zip([item.name for item in header.items], found.total_ns, strict=True))


def test_sliding_window_makes_local_blocks_cheaper():
    times = costs("gemma2", sliding_window=256)
    assert times["layers.0.attention"] < 0.8 * times["layers.1.attention"]
    assert times["layers.0.mlp"] == times["layers.1.mlp"]
    assert len({costs("mistral", sliding_window=None)[f"layers.{i}.attention"] for i in range(3)}) == 1


def test_dense_and_expert_blocks_cost_what_a_token_uses():
    latent = {**LATENT, "q_lora_rank": 64, "num_experts_per_tok": 2, "moe_intermediate_size": 256}
    times = costs("deepseek_v3", **{**latent, "first_k_dense_replace": 1, "intermediate_size": 8192})
    assert times["layers.0.mlp"] > 2 * times["layers.1.mlp"]
    more = costs("deepseek_v3", **{**latent, "n_routed_experts": 8, "moe_intermediate_size": 2048})
    assert more["layers.1.mlp"] < 2 * costs("deepseek_v3", **{**latent, "moe_intermediate_size": 2048})["layers.1.mlp"]


def test_load_spec_reads_runs_of_dynmo_train():
    options = {
        "family": "llama",
        "num_layers": 2,
        "hidden_size": 64,
        "ffn_hidden_size": 160,
        "num_attention_heads": 8,
        "num_query_groups": 2,
        "seq_length": 16,
        "vocab_size": 100,
        "untie_embeddings_and_output_weights": False,
        "position_embedding_type": "rotary",
    }
    spec = from_config(options, "run.json")
    assert (spec.kv_heads, spec.tied, spec.positions, spec.sequence) == (2, True, 0, 16)
    assert spec.params == 100 * 64 + 64 + 2 * (64 * 8 * (2 * 8 + 2 * 2) + 3 * 64 * 160 + 2 * 64)
    with pytest.raises(UsageError, match="early_exit_layers: not modelled"):
        from_config({**options, "early_exit_layers": "1"}, "run.json")
