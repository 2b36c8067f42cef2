"""Decoders of Megatron-core: arguments both ways, names of several programs, and refusals by name."""

from __future__ import annotations

import argparse

import numpy as np
import pytest

from dynmo_ckpt.converters.registry import open_checkpoint
from dynmo_ckpt.converters.torch_dcp import write_core
from dynmo_ckpt.formats.choices import ReadOptions, WriteOptions
from dynmo_ckpt.io.errors import CorruptError, UnsupportedError
from dynmo_ckpt.maps.decoder_fields import decoder_fields
from dynmo_ckpt.megatron.arguments import check_args
from dynmo_ckpt.megatron.core_decoder import check_decoder, decoder_args
from dynmo_ckpt.megatron.core_rotary import rotary_args, rotary_of_args
from dynmo_ckpt.megatron.core_router import router_args, router_of_args
from dynmo_ckpt.operations.reference_model import load_array
from tests.tables import table
from tests.unit.dynmo_ckpt import families, native_checkpoints
from tests.unit.dynmo_ckpt.converters.test_torch_dcp import save

WIDTH, HEADS, GROUPS, HEAD, INNER, EXPERTS, LAYERS = 16, 4, 2, 4, 12, 3, 2
ARGS = {
    "num_attention_heads": HEADS,
    "num_query_groups": GROUPS,
    "group_query_attention": True,
    "kv_channels": HEAD,
    "max_position_embeddings": 32,
    "vocab_size": 50,
    "norm_epsilon": 1e-6,
    "swiglu": True,
    "normalization": "RMSNorm",
    "position_embedding_type": "rope",
    "add_bias_linear": False,
    "num_experts": EXPERTS,
    "moe_router_topk": 2,
}
LAYER = "decoder.layers."


def state(*, singleton=False, **changes):
    """Random tensors of a small model with experts, by the names of Megatron-core's stacked layers, or one by one."""
    rng = np.random.default_rng(0)

    def some(*shape):
        return rng.standard_normal(shape).astype(np.float32)

    found = {"embedding.word_embeddings.weight": some(64, WIDTH), "output_layer.weight": some(64, WIDTH)}
    found["decoder.final_layernorm.weight"] = some(WIDTH)
    layers = {
        "self_attention.linear_qkv.layer_norm_weight": (WIDTH,),
        "self_attention.linear_qkv.weight": ((HEADS + 2 * GROUPS) * HEAD, WIDTH),
        "self_attention.linear_proj.weight": (WIDTH, HEADS * HEAD),
        "pre_mlp_layernorm.weight": (WIDTH,),
        "mlp.router.weight": (EXPERTS, WIDTH),
        "mlp.experts.experts.linear_fc1.weight": (EXPERTS, 2 * INNER, WIDTH),
        "mlp.experts.experts.linear_fc2.weight": (EXPERTS, WIDTH, INNER),
    }
    for name, shape in layers.items():
        whole = some(LAYERS, *shape)
        if not singleton:
            found[LAYER + name] = whole
            continue
        for i, layer in enumerate(whole):
            if ".experts." not in name:
                found[f"{LAYER}{i}.{name}"] = layer
            for j in range(EXPERTS if ".experts." in name else 0):
                each = f"{LAYER}{i}.{name.replace('.experts.linear', f'.experts.{j}.linear')}"
                halves = {"_w": layer[j][:INNER], "_v": layer[j][INNER:]} if "fc1" in name else {"": layer[j]}
                found |= {each + end: half for end, half in halves.items()}
    return found | changes


def opened(path, tensors, options=None, common=None, **changes):
    save(path, tensors, {"args": argparse.Namespace(**ARGS | changes), "iteration": 1, **(common or {})})
    return open_checkpoint(path, options=options or ReadOptions())[0]


def arrays(found):
    return {name: load_array(found, name) for name in found.weights()}


@pytest.mark.parametrize("spelling", ["fused", "one by one"])
def test_names_of_other_programs_give_the_same_tensors(tmp_path, spelling):
    expected = arrays(opened(tmp_path / "a", state()))
    other = state(singleton=spelling == "one by one")
    if spelling == "fused":
        other = {name.replace("pre_mlp_layernorm.", "mlp.linear_fc1.layer_norm_"): v for name, v in other.items()}
    found = arrays(opened(tmp_path / "b", other))
    assert set(found) == set(expected)
    assert all(np.array_equal(found[name], value) for name, value in expected.items())
    gate = found["layers.1.mlp.experts.2.gate.weight"]
    assert np.array_equal(gate, state()["decoder.layers.mlp.experts.experts.linear_fc1.weight"][1, 2, :INNER])


def test_tensor_under_two_names_is_refused(tmp_path):
    twice = {f"{LAYER}mlp.linear_fc1.layer_norm_weight": np.ones((LAYERS, WIDTH), np.float32)}
    with pytest.raises(CorruptError, match=r"pre_mlp_layernorm\.weight under two names"):
        opened(tmp_path / "c", state(**twice))


def test_half_of_a_projection_and_a_missing_expert_are_refused(tmp_path):
    parts = state(singleton=True)
    fc1 = f"{LAYER}0.mlp.experts.experts.0.linear_fc1.weight_v"
    with pytest.raises(CorruptError, match="one of the halves"):
        opened(tmp_path / "half", {name: value for name, value in parts.items() if name != fc1})
    without = {name: value for name, value in parts.items() if "1.mlp.experts.experts.0.linear_fc2" not in name}
    with pytest.raises(CorruptError, match="must have the numbers 0 to 1"):
        opened(tmp_path / "expert", without)


@pytest.mark.parametrize("stack", ["decoder", "mtp"])
def test_layers_beyond_a_gap_are_refused_at_once(tmp_path, stack):
    """Of the number alone, a list of a billion layers would be made."""
    further = {f"{stack}.layers.999999999.mlp.router.weight": np.zeros((EXPERTS, WIDTH), np.float32)}
    with pytest.raises(UnsupportedError, match="one of layer 999,999,999"):
        opened(tmp_path / "c", state(singleton=True) | further)


def test_ignored_arguments_are_those_that_would_be_refused(tmp_path):
    """``moe_*`` skips an argument of a fork, and leaves the router as it was trained."""
    router = {"moe_router_score_function": "sigmoid", "moe_router_topk_scaling_factor": 2.5}
    options = ReadOptions(ignore_config=("moe_*",))
    found = opened(tmp_path / "c", state(), options, **router, moe_of_a_fork=1, moe_latent_size=4)
    expected = opened(tmp_path / "e", state(), **router)
    assert found.manifest["model"] == expected.manifest["model"]
    assert found.manifest["model"]["moe_router_score_function"] == "sigmoid"


@table(
    ("changes", "message"),
    [
        ({"moe_apply_probs_on_input": True}, "moe_apply_probs_on_input = True"),
        ({"moe_router_load_balancing_type": "sinkhorn"}, "moe_router_load_balancing_type = sinkhorn"),
        ({"moe_expert_capacity_factor": 1.5}, "moe_expert_capacity_factor = 1.5"),
        ({"moe_latent_size": 8}, "moe_latent_size = 8"),
        ({"softmax_type": "other"}, "softmax_type = other"),
        ({"normalization": "LayerNorm"}, "normalization = LayerNorm"),
        ({"num_experts": 4}, "do not fit the 3 rows"),
        ({"moe_router_topk": 4}, "do not fit the 3 rows"),
        ({"moe_router_num_groups": 2, "moe_router_group_topk": 1}, "do not fit 3 experts"),
        ({"window_size": (3, 1)}, r"window_size = \(3, 1\): must be \(LEFT, 0\)"),
        ({"window_size": (3, 0), "window_attn_skip_freq": [1]}, "must fit 2 layers"),
        ({"norm_epsilon": float("nan")}, "norm_epsilon = nan"),
        ({"position_embedding_type": "yarn", "mscale": float("nan")}, "mscale = nan"),
        ({"softmax_type": "other"}, "softmax_type = vanilla or learnable or off-by-one only"),
        ({"kv_channels": "4"}, "kv_channels = '4': must be a positive integer"),
        ({"rotary_base": "many"}, "rotary_base = 'many': must be a number"),
        ({"swiglu": False}, "neither swiglu nor quick_geglu"),
    ],
)
def test_arguments_that_dynmo_does_not_compute_are_refused(tmp_path, changes, message):
    with pytest.raises(UnsupportedError, match=message):
        opened(tmp_path / "c", state(), **changes)


LATENT = {"multi_latent_attention": True, "q_lora_rank": 4, "kv_lora_rank": 4, "qk_head_dim": 4, "v_head_dim": 4}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({}, "do not record qk_pos_emb_head_dim"),
        ({"qk_pos_emb_head_dim": 2}, "without qk_layernorm"),
        ({"qk_pos_emb_head_dim": 2, "qk_layernorm": True, "norm_epsilon": 1e-5}, "normalize latents with 1e-06 only"),
    ],
)
def test_latent_attention_with_other_norms_is_refused(tmp_path, changes, message):
    with pytest.raises(UnsupportedError, match=message):
        opened(tmp_path / "c", state(), **LATENT | changes)


ROTATIONS = {
    "llama3": {"rope_type": "llama3", "factor": 32.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0},
    "linear": {"rope_type": "linear", "factor": 4.0},
    "yarn": {"rope_type": "yarn", "factor": 4.0, "beta_fast": 32.0, "beta_slow": 1.0},
    "yarn of GPT-OSS": {"rope_type": "yarn", "factor": 32.0, "beta_fast": 32.0, "beta_slow": 1.0, "truncate": False},
    "yarn with a factor": {
        "rope_type": "yarn",
        "factor": 4.0,
        "beta_fast": 16.0,
        "beta_slow": 2.0,
        "attention_factor": 1.1,
    },
}


@pytest.mark.parametrize("kind", ROTATIONS)
def test_rotations_return_from_arguments(kind):
    scaling = {"original_max_position_embeddings": 8192, **ROTATIONS[kind]} if kind != "linear" else ROTATIONS[kind]
    model = families.llama(rotary_scaling=scaling, rotary_base=5e5)
    back = rotary_of_args("c", rotary_args(model, decoder_fields(model)))
    assert back["rotary_base"] == 5e5
    assert back["rotary_scaling"].keys() == scaling.keys()
    assert all(back["rotary_scaling"][name] == pytest.approx(value) for name, value in scaling.items())


@pytest.mark.parametrize(
    ("scaling", "message"),
    [
        ({"rope_type": "dynamic", "factor": 2.0}, "rotary scaling dynamic is unsupported, only llama3, linear, yarn"),
        (
            {**ROTATIONS["llama3"], "original_max_position_embeddings": 4096},
            r"\{'original_max_position_embeddings': 4096\}",
        ),
    ],
)
def test_rotations_that_megatron_lacks_are_refused(scaling, message):
    model = families.llama(rotary_scaling=scaling)
    with pytest.raises(UnsupportedError, match=message) as refused:
        rotary_args(model, decoder_fields(model))
    assert "None" not in str(refused.value)


def test_router_returns_from_arguments():
    model = families.llama(num_experts=8, moe_top_k=4, moe_aux_loss_coeff=0.5, moe_routing="topk")
    model |= {"moe_router_score_function": "sigmoid", "moe_router_enable_expert_bias": True}
    model |= {"moe_router_topk_scaling_factor": 2.5, "moe_router_num_groups": 4, "moe_router_group_topk": 2}
    back = router_of_args("c", router_args(model), 8)
    assert back == {name: value for name, value in model.items() if name.startswith("moe_")}
    with pytest.raises(UnsupportedError, match="that of the best 2"):
        router_args(model | {"moe_router_group_experts": 1})


@table(
    ("field", "value"),
    [
        ("normalization", "rmsnorm_1p"),
        ("norm_placement", "sandwich"),
        ("norm_placement", "post"),
        ("qk_norm", "projection"),
        ("embedding_scale", 4.0),
        ("attention_scale", 0.5),
        ("final_logit_softcapping", 30.0),
        ("local_rotary_base", 1e4),
        ("activation", "geglu"),
        ("mlp_bias", True),
    ],
)
def test_fields_that_megatron_lacks_are_refused_by_name(field, value):
    with pytest.raises(
        UnsupportedError, match=r"Megatron-core: \w+ = .* is not supported, only .*; use --to hf or native"
    ):
        check_decoder(families.llama(**{field: value}))


def test_written_arguments_are_those_that_are_read(tmp_path):
    found = opened(tmp_path / "a", state(), window_size=(3, 0), window_attn_skip_freq=2)
    model = dict(found.manifest["model"])
    assert model["sliding_window"] == 4
    assert model["layer_types"] == ["sliding_attention", "full_attention"]
    assert check_args("c", "decoder", decoder_args(model))
    plan = write_core(found, WriteOptions())
    assert [file.name for file in plan.files] == ["iter_0000001/__0_0.distcp", "iter_0000001/common.pt"]


def test_extra_state_of_every_linear_layer_is_written(tmp_path):
    m = families.llama()
    p = native_checkpoints.true_rows(m["vocab_size"], families.parameters(m))
    native_checkpoints.save(tmp_path / "native", p, m, ties=families.ties(m))
    found, _ = open_checkpoint(tmp_path / "native")
    metadata = write_core(found, WriteOptions()).small_files["iter_0000008/.metadata"]
    for module in ("self_attention.linear_qkv", "self_attention.linear_proj", "mlp.linear_fc1", "mlp.linear_fc2"):
        assert f"decoder.layers.{module}._extra_state/shard_1_{m['num_layers']}".encode() in metadata
