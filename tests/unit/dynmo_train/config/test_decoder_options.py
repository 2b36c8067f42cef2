"""Options of decoders: what a shape has, what combines, and flags of Megatron-LM that become them."""

from __future__ import annotations

import pytest

from dynmo_train._common.errors import UsageError
from dynmo_train.config import config_of, validate
from dynmo_train.config.parse import parse_rotary_scaling
from dynmo_train.models.registry import family_of, family_of_manifest
from tests.unit.dynmo_train.config.small_config import SMALL
from tests.unit.dynmo_train.config.test_compat import config_from

MEGATRON = (
    "--num-layers 2 --hidden-size 64 --num-attention-heads 4 --seq-length 32 --max-position-embeddings 32"
    " --micro-batch-size 1 --global-batch-size 1 --lr 1e-4 --train-iters 10 --vocab-size 100 --data-path d"
    " --swiglu --normalization RMSNorm --group-query-attention --num-query-groups 2 --position-embedding-type rope"
    " --rotary-base 500000 --disable-bias-linear --add-qkv-bias --qk-layernorm --rotary-percent 0.5"
    " --untie-embeddings-and-output-weights"
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


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"family": "gpt", "rotary_base": 500.0}, "requires --position-embedding-type rotary"),
        ({"family": "bert", "qk_norm": "head"}, "requires family gpt or llama"),
        ({"family": "llama", "rotary_percent": 0.2}, "must be even for rotary embeddings"),
        (
            {"family": "llama", "use_rope_scaling": True, "rotary_scaling": '{"rope_type": "linear", "factor": 2}'},
            "cannot be combined with --rotary-scaling",
        ),
        ({"family": "llama", "qk_norm": "projection", "tensor_model_parallel_size": 2}, "a norm over all heads"),
    ],
)
def test_options_that_do_not_fit_together_are_refused(options, message):
    size = options.get("tensor_model_parallel_size", 1)
    problems = validate(config_of(**SMALL, **options), size)
    assert any(message in str(each) for each in problems), problems
