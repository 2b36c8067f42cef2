"""Shapes from Hugging Face configurations against transformers' own models, and what is refused."""

from __future__ import annotations

import pytest

from dynmo_balance.build import BuildOptions, build_costs, build_header, header_of
from dynmo_balance.devices import PRESETS
from dynmo_balance.errors import UsageError
from dynmo_balance.modelconfig import from_config
from dynmo_balance.modelfamilies import FAMILIES, IRRELEVANT, NEUTRAL

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


@pytest.mark.parametrize(("name", "changes"), CASES, ids=lambda value: value if isinstance(value, str) else "")
def test_parameters_equal_those_of_transformers(name, changes):
    count, config = parameters(name, changes)
    for document in (config, {**changes, "model_type": name}):
        spec = from_config({**document, "dtype": None}, "config.json")
        header = header_of(build_header(spec, PRESETS["h100"], BuildOptions(workers=1), "test"))
        tied = spec.table_params * sum(item.tied_to is not None for item in header.items)
        assert spec.params == count
        assert sum(item.param_count for item in header.items) - tied == count


@pytest.mark.parametrize("name", FAMILIES)
def test_parameters_of_full_size_equal_those_of_transformers(name):
    count, config = parameters(name, {"num_experts_per_tok": 6} if name == "deepseek_v2" else {})
    assert from_config(config, "config.json").params == count
    assert count == LARGE.get(name, count)


def test_published_parameters_of_qwen3():
    assert from_config({**QWEN3_600M, "model_type": "qwen3"}, "config.json").params == 596_049_920


@pytest.mark.parametrize("name", ["mamba", "mamba2", "jamba", "falcon_mamba", "llama4_text", "gemma3", "rwkv", "mt5"])
def test_families_without_a_model_are_refused_by_name(name):
    with pytest.raises(UsageError, match=f"model_type '{name}' is not modelled; modelled are model_type gpt2, bert"):
        from_config({**TINY, "model_type": name}, "config.json")


def test_configurations_without_a_family_are_refused():
    with pytest.raises(UsageError, match="has neither model_type nor family"):
        from_config(TINY, "config.json")
    with pytest.raises(UsageError, match="family 'ict' is not modelled"):
        from_config({**TINY, "family": "ict"}, "run.json")


@pytest.mark.parametrize(
    ("name", "changes", "words"),
    [
        ("llama", {"num_local_experts": 8}, "num_local_experts 8: what this changes in a llama is not modelled"),
        ("llama", {"sliding_window": 512}, "sliding_window 512"),
        ("bert", {"add_cross_attention": True}, "add_cross_attention True"),
        ("bert", {"position_embedding_type": "relative_key"}, "position_embedding_type 'relative_key'"),
        ("deepseek_v3", {"moe_layer_freq": 2}, "moe_layer_freq 2"),
        ("qwen3", {"layer_types": ["linear_attention"] * 3, "use_sliding_window": True}, "layer_types linear_att"),
        ("gemma2", {"layer_types": ["full_attention"]}, "layer_types has 1 entries"),
        ("llama", {"clip_qkv": 8.0, "embedding_multiplier": 12.0}, "clip_qkv 8.0, embedding_multiplier 12.0"),
        ("llama", {"num_key_value_heads": 3}, "do not go together"),
        ("llama", {"head_dim": "wide"}, "no whole number"),
        ("mixtral", {"num_local_experts": 2, "num_experts_per_tok": 4}, "4 of 2 experts a token do not go together"),
        ("llama", {"hidden_size": 0}, "hidden must be whole numbers above 0"),
        ("llama", {"num_hidden_layers": 10**18}, "at most 100,000 layers"),
        ("llama", {"vocab_size": 10**18}, "vocabulary 1000000000000000000: must be at most"),
        ("llama", {"intermediate_size": None}, r"missing ffn \(intermediate_size\)"),
    ],
)
def test_keys_that_are_not_modelled_are_refused(name, changes, words):
    with pytest.raises(UsageError, match=words):
        from_config({**GROUPED, **changes, "model_type": name}, "config.json")


def test_no_key_is_both_read_and_irrelevant():
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


def test_a_window_makes_local_blocks_cheaper():
    times = costs("gemma2", sliding_window=256)
    assert times["layers.0.attention"] < 0.8 * times["layers.1.attention"]
    assert times["layers.0.mlp"] == times["layers.1.mlp"]
    assert len({costs("mistral", sliding_window=None)[f"layers.{i}.attention"] for i in range(3)}) == 1


def test_dense_and_expert_blocks_cost_what_a_token_meets():
    latent = {**LATENT, "q_lora_rank": 64, "num_experts_per_tok": 2, "moe_intermediate_size": 256}
    times = costs("deepseek_v3", **{**latent, "first_k_dense_replace": 1, "intermediate_size": 8192})
    assert times["layers.0.mlp"] > 2 * times["layers.1.mlp"]
    more = costs("deepseek_v3", **{**latent, "n_routed_experts": 8, "moe_intermediate_size": 2048})
    assert more["layers.1.mlp"] < 2 * costs("deepseek_v3", **{**latent, "moe_intermediate_size": 2048})["layers.1.mlp"]


def test_runs_of_our_trainer_are_read():
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
