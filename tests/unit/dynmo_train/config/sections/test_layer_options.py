"""Options of DeepSeek's layers: blocks with experts, latent attention, YaRN, multi-token prediction."""

from __future__ import annotations

import pytest

from dynmo_train._common.errors import UsageError
from dynmo_train.config import config_of, validate
from dynmo_train.config.layer_freq import parse_layer_freq
from dynmo_train.models.registry import boundary_of, family_of, family_of_manifest
from tests.tables import table
from tests.unit.dynmo_train.config.compat.test_translate import config_from
from tests.unit.dynmo_train.config.small_config import SMALL

MEGATRON = (
    "--num-layers 4 --hidden-size 64 --num-attention-heads 4 --seq-length 32 --max-position-embeddings 32"
    " --micro-batch-size 1 --global-batch-size 1 --lr 1e-4 --train-iters 10 --vocab-size 100 --data-path d"
    " --swiglu --normalization RMSNorm --disable-bias-linear --position-embedding-type rope"
    " --untie-embeddings-and-output-weights --multi-latent-attention --qk-layernorm --q-lora-rank 24 --kv-lora-rank 16"
    " --qk-head-dim 12 --qk-pos-emb-head-dim 8 --v-head-dim 10 --num-experts 8 --moe-layer-freq ([0]*1+[1]*3)"
    " --moe-ffn-hidden-size 20 --moe-shared-expert-intermediate-size 20 --moe-router-score-function sigmoid"
    " --moe-router-topk 4 --moe-router-enable-expert-bias --moe-router-topk-scaling-factor 2.5"
    " --moe-router-num-groups 4 --moe-router-group-topk 2 --mtp-num-layers 2 --mtp-loss-scaling-factor 0.3"
    " --rotary-scaling-factor 40 --mscale 1.0 --mscale-all-dim 1.0"
)


def test_megatron_script_of_a_deepseek_gives_its_shape():
    config, _ = config_from(MEGATRON)
    assert not validate(config, 1)
    family = family_of(config)
    manifest = family.manifest()
    expected = {
        "q_lora_rank": 24,
        "kv_lora_rank": 16,
        "qk_head_dim": 12,
        "qk_pos_emb_head_dim": 8,
        "v_head_dim": 10,
        "rotary_interleaved": True,
        "head_dim": 20,
        "num_key_value_heads": 4,
        "qk_norm": None,
        "moe_layer_pattern": [0, 1, 1, 1],
        "moe_ffn_hidden_size": 20,
        "mtp_num_layers": 2,
        "ffn_hidden_size": 128,
    }
    assert {name: manifest.get(name) for name in expected} == expected
    assert manifest["rotary_scaling"] == {
        "rope_type": "yarn",
        "factor": 40.0,
        "original_max_position_embeddings": 4096,
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
    }
    assert family_of_manifest(manifest).manifest() == manifest
    assert family.shape.mtp_loss_scaling_factor == 0.3
    assert [item.name for item in family.items[-3:]] == ["mtp.0", "mtp.1", "head"]
    assert [bool(item.metrics) for item in family.items if item.kind == "mlp"] == [False, True, True, True]
    assert boundary_of(config).shapes["prediction"] == (1, 32, 64)


def test_one_factor_of_yarn_alone_gives_megatrons_magnitude():
    """Its quotient of both magnitudes: transformers ignores one factor without the other."""
    config, _ = config_from(MEGATRON.replace("--mscale-all-dim 1.0", "--mscale-all-dim 0"))
    assert config.model.rotary_scaling_object["attention_factor"] == pytest.approx(0.1 * 3.6888794541139363 + 1)
    assert "mscale_all_dim" not in config.model.rotary_scaling_object


@pytest.mark.parametrize(
    ("text", "pattern"),
    [
        ("1", (1, 1, 1, 1)),
        ("2", (1, 0, 1, 0)),
        ("3", (1, 0, 0, 1)),
        ("[0]*1+[1]*3", (0, 1, 1, 1)),
        ("([0]+[1])*2", (0, 1, 0, 1)),
        (" [ 0, 1 ] * 2 ", (0, 1, 0, 1)),
        ("[1]*2*2", (1, 1, 1, 1)),
    ],
)
def test_parse_layer_freq_is_megatrons_expression(text, pattern):
    assert parse_layer_freq(text, 4) == pattern


@table(
    ("text", "message"),
    [
        ("0", "must be a number or a list"),
        ("[0]*4", "no block has experts"),
        ("[1]*3", "has 3 entries; must have --num-layers 4"),
        ("[2]*4", "entries must be 0 or 1"),
        ("[1]*9999999", "has more than 100,000 entries"),
        ("[]*9999999", "has 0 entries"),
        ("[1]**4", "expected a number after"),
        ("[1]*4]", "unexpected"),
        ("__import__('os')", "unexpected '_'"),
        ("(" * 5000, "more than 4,096 characters"),
        ("(" * 4000, "is nested more than 32 times"),
        ("[1]*3+", "found 'the end'"),
        ("", "found 'the end'"),
    ],
)
def test_parse_layer_freq_of_another_form_is_refused(text, message):
    with pytest.raises(UsageError, match=message.replace("(", r"\(")):
        parse_layer_freq(text, 4)


LATENT = {"family": "llama", "multi_latent_attention": True}
EXPERTS = {"family": "llama", "num_experts": 8}


@table(
    ("options", "message"),
    [
        ({"family": "gpt", "multi_latent_attention": True}, "requires --position-embedding-type rotary"),
        ({"family": "bert", "multi_latent_attention": True}, "requires family gpt or llama"),
        ({**LATENT, "num_query_groups": 2}, "--num-query-groups"),
        ({**LATENT, "qk_pos_emb_head_dim": 5}, "must be even"),
        ({**LATENT, "qk_norm": "projection"}, "normalizes the latents"),
        ({**LATENT, "rotary_scaling_factor": 2.0, "use_rope_scaling": True}, "cannot be combined"),
        ({"family": "llama", "rotary_interleaved": True}, "requires --multi-latent-attention"),
        ({"family": "llama", "kv_lora_rank": 8}, "without --multi-latent-attention"),
        ({"family": "llama", "rotary_scaling_factor": 2.0}, "without --rope-type yarn"),
        ({"family": "llama", "moe_layer_freq": "2"}, "without --num-experts"),
        ({**EXPERTS, "moe_layer_freq": "[1]"}, "--moe-layer-freq"),
        ({**EXPERTS, "moe_router_topk": 3, "moe_router_num_groups": 4, "moe_router_group_topk": 2}, "or use"),
        (
            {**EXPERTS, "moe_router_num_groups": 4, "moe_router_group_topk": 2, "moe_router_group_experts": 3},
            "at most the 2 experts of a group",
        ),
        ({"family": "gpt", "mtp_num_layers": 1}, "requires --position-embedding-type rotary"),
    ],
)
def test_combination_without_an_implementation_is_refused(options, message):
    problems = validate(config_of(**{**SMALL, **options}), 1)
    assert any(message in str(problem) for problem in problems), problems


@pytest.mark.parametrize("family", ["gpt", "llama"])
def test_manifest_of_a_plain_model_states_none_of_these_fields(family):
    stated = family_of(config_of(**SMALL, family=family, num_experts=4)).manifest()
    new = {"kv_lora_rank", "rotary_interleaved", "mtp_num_layers", "moe_layer_pattern", "moe_ffn_hidden_size"}
    assert not {*new, "moe_router_group_experts"} & stated.keys()
