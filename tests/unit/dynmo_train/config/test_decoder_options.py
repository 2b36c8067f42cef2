"""Options of decoders: what a shape has, what combines, and flags of Megatron-LM that become them."""

from __future__ import annotations

import json

import pytest
import torch

from dynmo_train._common.document import DocumentError
from dynmo_train._common.errors import UsageError
from dynmo_train.config import config_of, validate
from dynmo_train.config.parse import parse_layer_types, parse_rotary_scaling
from dynmo_train.config.task_command import check_model_flags
from dynmo_train.models.registry import family_of, family_of_manifest
from tests.tables import table
from tests.unit.dynmo_train.config.compat.test_translate import config_from
from tests.unit.dynmo_train.config.small_config import SMALL

MEGATRON = (
    "--num-layers 2 --hidden-size 64 --num-attention-heads 4 --seq-length 32 --max-position-embeddings 32"
    " --micro-batch-size 1 --global-batch-size 1 --lr 1e-4 --train-iters 10 --vocab-size 100 --data-path d"
    " --swiglu --normalization RMSNorm --group-query-attention --num-query-groups 2 --position-embedding-type rope"
    " --rotary-base 500000 --disable-bias-linear --add-qkv-bias --qk-layernorm --rotary-percent 0.5"
    " --untie-embeddings-and-output-weights"
)


LONGROPE = json.dumps(
    {
        "rope_type": "longrope",
        "factor": 2,
        "original_max_position_embeddings": 16,
        "short_factor": [1.0],
        "long_factor": [2.0],
    }
)


def test_megatron_script_of_a_qwen_gives_its_shape():
    config, _ = config_from(MEGATRON)
    manifest = family_of(config).manifest()
    expected = {
        "family": "gpt",
        "activation": "swiglu",
        "normalization": "rmsnorm",
        "num_key_value_heads": 2,
        "position_embedding": "rotary",
        "rotary_base": 500000.0,
        "rotary_fraction": 0.5,
        "attention_bias": "qkv",
        "mlp_bias": False,
        "qk_norm": "head",
        "tied_embeddings": False,
        "ffn_hidden_size": 128,
    }
    assert {name: manifest.get(name) for name in expected} == expected
    assert family_of_manifest(manifest).manifest() == manifest


GEMMA = {
    "attention_window": 8,
    "layer_types": "sliding,full",
    "local_rotary_base": 100.0,
    "attn_logit_softcapping": 50.0,
    "final_logit_softcapping": 30.0,
    "attention_dropout": 0.0,
    "no_rope_freq": "2",
    "residual_multiplier": 0.25,
    "logits_scaling": 8.0,
}


def test_layers_of_a_pattern_are_stated_one_by_one():
    config = config_of(**SMALL, **GEMMA, family="llama")
    family = family_of(config)
    manifest = family.manifest()
    layers = config.model.num_layers
    assert manifest["layer_types"] == [("sliding_attention", "full_attention")[at % 2] for at in range(layers)]
    assert [manifest[name] for name in ("sliding_window", "local_rotary_base")] == [8, 100.0]
    assert [manifest[f"{name}_logit_softcapping"] for name in ("attn", "final")] == [50.0, 30.0]
    attentions = [family.build(f"layers.{at}.attention", torch.device("meta")) for at in range(layers)]
    assert [each.window for each in attentions] == [(8, None)[at % 2] for at in range(layers)]
    # Every second layer has full attention, and no rotation.
    assert [each.rotary and each.rotary.base for each in attentions] == [(100.0, None)[at % 2] for at in range(layers)]
    assert manifest["no_rope_freq"] == [at % 2 for at in range(layers)]
    assert [manifest[name] for name in ("residual_multiplier", "logits_scaling")] == [0.25, 8.0]
    assert attentions[0].post_norm(torch.ones(())) == 0.25
    assert family.build("head", torch.device("meta")).scale == 1 / 8
    assert family_of_manifest(manifest).manifest() == manifest


def test_pattern_of_sliding_layers_alone_is_a_window():
    stated = family_of(config_of(**SMALL, family="llama", attention_window=8, layer_types="sliding")).manifest()
    assert "layer_types" not in stated
    assert stated["sliding_window"] == 8


@pytest.mark.parametrize("text", ["sliding,local", "", "full,,chunked", "full " * 100_001])
def test_unknown_types_of_layers_are_refused(text):
    with pytest.raises(UsageError, match="must be full or sliding by layer"):
        parse_layer_types(text)


def test_types_of_layers_on_a_command_line_agree_with_the_checkpoint():
    model = {"layer_types": ["sliding_attention", "full_attention", "sliding_attention"]}
    check_model_flags({"layer_types": "sliding,full"}, model, "run")
    check_model_flags({"no_rope_freq": "3"}, {"no_rope_freq": [0, 0, 1]}, "run")
    with pytest.raises(DocumentError, match="--layer-types"):
        check_model_flags({"layer_types": "full,sliding"}, model, "run")


@pytest.mark.parametrize("family", ["gpt", "llama"])
def test_manifest_of_a_plain_model_states_no_further_field(family):
    stated = family_of(config_of(**SMALL, family=family)).manifest()
    new = {"norm_placement", "qk_norm", "attention_bias", "mlp_bias", "rotary_fraction", "embedding_scale"}
    assert not new & stated.keys()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("yarn", "must be a JSON object"),
        ('{"rope_type": "other"}', "must be one of linear, dynamic, llama3, yarn, longrope"),
        ('{"rope_type": "yarn", "factor": 2}', "lacks original_max_position_embeddings"),
        ('{"rope_type": "linear", "factor": 2, "mscale": 1}', "unknown fields mscale"),
        ('{"rope_type": "linear", "factor": -2}', "must be a positive number"),
        ('{"rope_type": "linear", "factor": 1e999}', "must be a JSON object"),
        ('{"rope_type": "linear", "factor": 1' + "0" * 400 + "}", "must be a positive number"),
        ('{"rope_type": "linear", "factor": true}', "must be a positive number"),
    ],
)
def test_invalid_rotary_scaling_is_refused(text, message):
    with pytest.raises(UsageError, match=message):
        parse_rotary_scaling(text)


@table(
    ("options", "message"),
    [
        ({"family": "gpt", "rotary_base": 500.0}, "requires --position-embedding-type rotary"),
        ({"family": "bert", "qk_norm": "head"}, "requires family gpt or llama"),
        ({"family": "llama", "rotary_percent": 0.2}, "must be even for rotary embeddings"),
        (
            {"family": "llama", "use_rope_scaling": True, "rotary_scaling": '{"rope_type": "linear", "factor": 2}'},
            "cannot be combined with --rotary-scaling",
        ),
        ({"family": "llama", "layer_types": "sliding,full"}, "requires --attention-window"),
        ({"family": "llama", "layer_types": "other", "attention_window": 8}, "must be full or sliding"),
        ({"family": "llama", "local_rotary_base": 10.0}, "requires --attention-window"),
        ({"family": "gpt", "no_rope_freq": "2"}, "requires --position-embedding-type rotary"),
        ({"family": "llama", "no_rope_freq": "[1]"}, "has 1 entries; must have --num-layers"),
        ({"family": "llama", "residual_multiplier": 2.0, "norm_placement": "post"}, "use pre"),
        ({"family": "gpt", **GEMMA}, "requires --position-embedding-type rotary"),
        (
            {"family": "llama", "attn_logit_softcapping": 5.0, "attention_dropout": 0.1, "sparse_attention": True},
            "--sparse-attention and --attention-dropout 0.1",
        ),
        (
            {"family": "llama", "attention_sinks": True, "attention_dropout": 0.1, "context_parallel_size": 2},
            "--context-parallel-size and --attention-dropout 0.1",
        ),
        ({"family": "llama", "swiglu_limit": 2.0}, "requires --activation clamped_swiglu"),
        ({"family": "bert", "attention_sinks": True}, "requires family gpt or llama"),
        ({"family": "llama", "rotary_scaling": LONGROPE}, "must be 8, one for two elements"),
        ({"family": "llama", "qk_norm": "projection", "tensor_model_parallel_size": 2}, "a norm over all heads"),
    ],
)
def test_options_that_do_not_fit_together_are_refused(options, message):
    size = options.get("tensor_model_parallel_size", 1)
    problems = validate(config_of(**SMALL, **options), size)
    assert any(message in str(each) for each in problems), problems
