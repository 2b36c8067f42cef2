"""Optimizer state of Megatron-core's decoders: by name, in flat buckets of each topology, and as it is written."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from typer.testing import CliRunner

from dynmo_ckpt.cli import app
from dynmo_ckpt.converters.registry import open_checkpoint
from dynmo_ckpt.converters.torch_dcp import open_dcp
from dynmo_ckpt.formats.choices import ReadOptions
from dynmo_ckpt.io.errors import CorruptError, UnsupportedError
from dynmo_ckpt.operations.reference_model import load_array
from dynmo_ckpt.torch_save import distributed
from tests.tables import table
from tests.unit.dynmo_ckpt.megatron.test_core_decoder import EXPERTS, LAYER, LAYERS, opened, state

WITH = ReadOptions(with_optimizer=True)
STEPS = 7
KINDS = {"param": 1, "exp_avg": 2, "exp_avg_sq": 3}
ROUTER, FC1, FC2 = (
    f"mlp.{name}.weight" for name in ("router", "experts.experts.linear_fc1", "experts.experts.linear_fc2")
)
BIASED = {"moe_router_score_function": "sigmoid", "moe_router_enable_expert_bias": True}
BIAS = {f"{LAYER}mlp.router.expert_bias": np.full((LAYERS, EXPERTS), 0.5, np.float32)}


def half(tensors):
    return {
        name: value if name.endswith("expert_bias") else value.astype(np.float16) for name, value in tensors.items()
    }


def by_name(tensors, master="param", prefix=""):
    """The state of ``fully_reshardable``; each kind is a multiple of the weights."""
    kinds = {(master if kind == "param" else kind): factor for kind, factor in KINDS.items()}
    trained = {name: value for name, value in tensors.items() if not name.endswith("expert_bias")}
    return half(tensors) | {
        f"{prefix}optimizer.state.{kind}.{name}": factor * value
        for kind, factor in kinds.items()
        for name, value in trained.items()
    }


def groups(step=STEPS):
    return {"optimizer": {"param_groups": [{"step": step}, {"step": step}]}}


def buckets(tensors, *, stages, experts, fused, grouped, skip=None):
    """The state of ``dp_reshardable``: of each model-parallel rank the parameters, last first, at multiples of 64."""
    found = {}
    share = EXPERTS // experts
    for stage in range(stages):
        dense, own = [], [[] for _ in range(experts)]
        if stage == 0:
            dense.append(tensors["embedding.word_embeddings.weight"])
        for layer in range(stage * LAYERS // stages, (stage + 1) * LAYERS // stages):

            def part(name, layer=layer):
                return tensors[LAYER + name][layer]

            norm, qkv = (part(f"self_attention.linear_qkv.{each}") for each in ("layer_norm_weight", "weight"))
            dense += [part("self_attention.linear_proj.weight"), norm] if fused else [norm]
            dense += [qkv] if fused else [part("self_attention.linear_proj.weight"), qkv]
            dense += [part("pre_mlp_layernorm.weight"), part(ROUTER)]
            for rank in range(experts):
                numbers = range(rank * share, (rank + 1) * share)
                one_by_one = [part(name)[j] for j in numbers for name in (FC1, FC2)]
                together = [part(name)[j] for name in (FC1, FC2) for j in numbers]
                (dense if experts == 1 else own[rank]).extend(together if grouped else one_by_one)
        if stage == stages - 1:
            dense += [tensors["decoder.final_layernorm.weight"], tensors["output_layer.weight"]]
        ranks = [("chained_0." if experts > 1 else "", stage, dense)]
        ranks += [("chained_1.", stage * experts + rank, each) for rank, each in enumerate(own) if experts > 1]
        for prefix, rank, parameters in ranks:
            flat = np.zeros(0, np.float32)
            for parameter in reversed(parameters):
                flat = np.concatenate([flat, np.zeros(-len(flat) % 64, np.float32), parameter.reshape(-1)])
            place = f"{prefix}optimizer.distributed.dp_group_idx_{rank}.gbuf_idx_0.dtype_bf16.bucket_idx_0"
            found |= {f"{place}.{kind}": factor * flat for kind, factor in KINDS.items() if (prefix, rank) != skip}
    return found


def arrays(found):
    return {name: load_array(found, name) for name in found.names("parameter", "buffer", "optimizer")}


def assert_equal(found, expected):
    assert set(found) == set(expected)
    assert all(np.array_equal(found[name], value) for name, value in expected.items())


@pytest.mark.parametrize(("master", "prefix"), [("param", ""), ("fp32_param", ""), ("param", "chained_0.")])
def test_state_by_name_is_that_of_its_weights(tmp_path, master, prefix):
    tensors = state() | BIAS
    optimizer = {0: groups(), 1: groups()} if prefix else groups()
    found = opened(tmp_path / "c", by_name(tensors, master, prefix), WITH, common={"optimizer": optimizer}, **BIASED)
    values = arrays(found)
    weights = [name for name in values if f"{name}.exp_avg" in values]
    assert set(found.manifest["optimizer"]["steps"]) == set(weights)
    assert set(found.manifest["optimizer"]["steps"].values()) == {STEPS}
    assert [name for name in found.weights() if name not in weights] == [
        f"layers.{i}.mlp.router.expert_bias" for i in range(LAYERS)
    ]
    assert {values[name].dtype for name in weights} == {np.dtype(np.float32)}
    for name in weights:
        assert np.array_equal(values[f"{name}.exp_avg"], 2 * values[name])
        assert np.array_equal(values[f"{name}.exp_avg_sq"], 3 * values[name])
    # Against the checkpoint itself: gate and up of one expert, and a tensor of all layers.
    fc1 = tensors[LAYER + FC1][1, 2]
    assert np.array_equal(np.concatenate([values[f"layers.1.mlp.experts.2.{x}.weight"] for x in ("gate", "up")]), fc1)


@table("fused", [False, True])
@table("grouped", [False, True])
@table("experts", [1, EXPERTS])
@table("stages", [1, LAYERS])
def test_flat_buckets_have_the_state_by_name(tmp_path, stages, experts, grouped, fused):
    tensors = state()
    common = {"optimizer": groups()}
    expected = opened(tmp_path / "a", by_name(tensors), WITH, common=common)
    sizes = {"pipeline_model_parallel_size": stages, "expert_model_parallel_size": experts}
    flat = buckets(tensors, stages=stages, experts=experts, fused=fused, grouped=grouped)
    found = opened(tmp_path / "b", half(tensors) | flat, WITH, common=common, **sizes)
    assert_equal(arrays(found), arrays(expected))


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"skip": ("chained_1.", 1)}, CorruptError, r"state of the ranks \[0, 2\], expected \[0, 1, 2\]"),
        ({"experts": 1}, UnsupportedError, r"no known order of 13 weights rounds to them"),
        ({"tensor_model_parallel_size": 2}, UnsupportedError, "3 experts on 2 tensor-parallel and 3 .* --no-optimizer"),
        ({"expert_model_parallel_size": 2}, UnsupportedError, "3 experts on 1 tensor-parallel and 2 .* --no-optimizer"),
        ({"seed": 1}, UnsupportedError, r"no known order of .* weights rounds to them; .* --no-optimizer"),
    ],
)
def test_flat_buckets_that_do_not_fit_are_refused(tmp_path, changes, error, message):
    sizes = {"expert_model_parallel_size": EXPERTS, "tensor_model_parallel_size": 1}
    built = {"stages": 1, "experts": EXPERTS, "fused": True, "grouped": True}
    sizes |= {name: value for name, value in changes.items() if name in sizes}
    built |= {name: value for name, value in changes.items() if name in ("skip", "experts")}
    tensors = state()
    # Of other weights: each element is negated.
    factor = -1 if "seed" in changes else 1
    flat = {name: factor * value for name, value in buckets(tensors, **built).items()}
    with pytest.raises(error, match=message):
        opened(tmp_path / "c", half(tensors) | flat, WITH, common={"optimizer": groups()}, **sizes)


def test_state_without_a_moment_of_a_weight_is_refused(tmp_path):
    whole = by_name(state())
    one = {name: value for name, value in whole.items() if name != f"optimizer.state.exp_avg_sq.{LAYER}{FC2}"}
    with pytest.raises(UnsupportedError, match=r"experts\.linear_fc2\.weight"):
        opened(tmp_path / "one", one, WITH, common={"optimizer": groups()})
    all_of_them = {name: value for name, value in whole.items() if "exp_avg_sq" not in name}
    with pytest.raises(UnsupportedError, match=r"no float32 exp_avg_sq of each weight; .* --no-optimizer"):
        opened(tmp_path / "all", all_of_them, WITH, common={"optimizer": groups()})


def converted(source, target, *words):
    done = CliRunner().invoke(app, ["convert", str(source), str(target), "--with-optimizer", *words])
    assert done.exit_code == 0, done.exception or done.output


@pytest.mark.parametrize("limit", [2**31, 600])
def test_written_state_has_what_megatrons_optimizers_request(tmp_path, monkeypatch, limit):
    """Both names of the masters, parameter groups that they find, and chunks that a storage can hold."""
    monkeypatch.setattr(distributed, "MAX_CHUNK_BYTES", limit)
    tensors = state() | BIAS
    opened(tmp_path / "in", by_name(tensors), WITH, common={"optimizer": groups()}, **BIASED)
    converted(tmp_path / "in", tmp_path / "native", "--to", "native")
    converted(tmp_path / "native", tmp_path / "out", "--to", "dcp", "--dtype", "bf16")
    found = open_dcp(tmp_path / "out", None)
    trained = {name for name in tensors if not name.endswith("expert_bias")}
    for prefix in ("param", "fp32_param", "exp_avg", "exp_avg_sq"):
        own = {name for name in found.tensors if name.startswith(f"optimizer.state.{prefix}.")}
        assert own == {f"optimizer.state.{prefix}.{name}" for name in trained}
    common = torch.load(found.directory / "common.pt", weights_only=False)
    listed = common["optimizer"]["optimizer"]["param_groups"]
    assert [(each["wd_mult"], each["lr_mult"], each["step"]) for each in listed] == [(1.0, 1.0, 7), (0.0, 1.0, 7)]
    for each in listed:
        # Megatron-core finds a group by these, and takes its parameters from the optimizer.
        assert (each["is_expert_parallel"], each["is_decoupled_lr"]) == (False, False)
        assert "params" not in each
    assert common["optimizer"]["optimizer"]["state"] == {"common_step": STEPS}
    again, _ = open_checkpoint(tmp_path / "out", options=WITH)
    native, _ = open_checkpoint(tmp_path / "native")
    assert_equal(arrays(again), arrays(native))


def test_groups_without_decay_are_two_groups(tmp_path):
    """A run without weight decay: Megatron-core still finds both groups by their multiplier."""
    opened(tmp_path / "in", by_name(state()), WITH, common={"optimizer": groups()}, weight_decay=0.0)
    converted(tmp_path / "in", tmp_path / "out", "--to", "dcp")
    common = torch.load(open_dcp(tmp_path / "out", None).directory / "common.pt", weights_only=False)
    found = [(each["weight_decay"], each["wd_mult"]) for each in common["optimizer"]["optimizer"]["param_groups"]]
    assert found == [(0.0, 1.0), (0.0, 0.0)]
