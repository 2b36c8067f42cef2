"""torch's distributed checkpoints, written by torch itself under the names of Megatron-core, transformers and Meta."""

import argparse
import json
import os
import pickle
import warnings

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp

from dynmo_ckpt.converters.registry import open_checkpoint
from dynmo_ckpt.formats.choices import ReadOptions
from dynmo_ckpt.huggingface.models import hf_config
from dynmo_ckpt.io.errors import CorruptError, NoOptimizerStateError, UnsafePickleError, UnsupportedError
from dynmo_ckpt.operations.reference_model import load_array
from tests.unit.dynmo_ckpt import families, native_checkpoints

BOTH = ("weight", "bias")
CORE = {
    "attention.norm": "self_attention.linear_qkv.layer_norm_",
    "attention.qkv": "self_attention.linear_qkv.",
    "attention.dense": "self_attention.linear_proj.",
    "mlp.norm": "mlp.linear_fc1.layer_norm_",
    "mlp.fc1": "mlp.linear_fc1.",
    "mlp.fc2": "mlp.linear_fc2.",
}


def same(found, p):
    p = native_checkpoints.true_rows(found.manifest["model"]["vocab_size"], p)
    return all(np.array_equal(load_array(found, name), value) for name, value in p.items())


def save(directory, state, common=None):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch warns that it saves in a single process
        dcp.save({name: torch.from_numpy(np.array(value)) for name, value in state.items()}, checkpoint_id=directory)
    if common is not None:
        torch.save(common, directory / "common.pt")


def core(m, p, *, stacked=True):
    """The names and shapes of Megatron-core's GPT, as its ``sharded_state_dict`` gives them."""
    p = dict(p)
    state = {"embedding.word_embeddings.weight": p["embedding.word.weight"]}
    if "embedding.position.weight" in p:
        state["embedding.position_embeddings.weight"] = p["embedding.position.weight"]
    for i in range(m["num_layers"]):
        if "layers.0.mlp.gate.weight" in p:
            both = [p[f"layers.{i}.mlp.{part}.weight"] for part in ("gate", "up")]
            p[f"layers.{i}.mlp.fc1.weight"] = np.concatenate(both)
    for ours, theirs in CORE.items():
        for kind in BOTH:
            if f"layers.0.{ours}.{kind}" in p:
                layers = [p[f"layers.{i}.{ours}.{kind}"] for i in range(m["num_layers"])]
                one = {f"decoder.layers.{i}.{theirs}{kind}": layer for i, layer in enumerate(layers)}
                state |= {f"decoder.layers.{theirs}{kind}": np.stack(layers)} if stacked else one
    state |= {f"decoder.final_layernorm.{k}": p[f"head.norm.{k}"] for k in BOTH if f"head.norm.{k}" in p}
    if "head.weight" in p:
        state["output_layer.weight"] = p["head.weight"]
    return state


def arguments(m, **more):
    return argparse.Namespace(
        num_attention_heads=m["num_attention_heads"],
        orig_vocab_size=m["vocab_size"],
        norm_epsilon=m["layernorm_epsilon"],
        max_position_embeddings=m["max_position_embeddings"],
        params_dtype=torch.bfloat16,
        bias_gelu_fusion=m["activation"] == "gelu_tanh",
        weight_decay=0.1,
        **more,
    )


def of_llama(m):
    return {
        "swiglu": True,
        "normalization": "RMSNorm",
        "position_embedding_type": "rope",
        "group_query_attention": True,
        "num_query_groups": m["num_key_value_heads"],
        "kv_channels": m["head_dim"],
        "rotary_base": m["rotary_base"],
    }


@pytest.mark.parametrize("stacked", [True, False])
@pytest.mark.parametrize("tied", [True, False])
def test_open_dcp_megatron_core_gpt_has_all_tensors(tmp_path, stacked, tied):
    m = native_checkpoints.model(tied_embeddings=tied)
    p = native_checkpoints.parameters(m)
    run = tmp_path / "run"
    common = {"args": arguments(m), "iteration": 40, "checkpoint_version": 3.0}
    save(run / "iter_0000040", core(m, p, stacked=stacked), common)
    (run / "latest_checkpointed_iteration.txt").write_text("40")
    for path in (run, run / "iter_0000040"):
        found, _ = open_checkpoint(path)
        assert dict(found.manifest["model"]) == m
        assert found.manifest["step"] == 40
        assert same(found, p)


@pytest.mark.parametrize(
    ("further", "epsilon", "message"),
    [(999_999_999, 1e-5, "one of layer 999,999,999 of the encoder"), (0, float("nan"), "norm_epsilon = nan")],
)
def test_open_dcp_endless_layers_and_no_number_are_refused(tmp_path, further, epsilon, message):
    m = native_checkpoints.model()
    state = core(m, native_checkpoints.parameters(m), stacked=False)
    state[f"decoder.layers.{further}.mlp.linear_fc1.bias"] = state["decoder.layers.0.mlp.linear_fc1.bias"]
    save(tmp_path / "c", state, {"args": arguments(m | {"layernorm_epsilon": epsilon}), "iteration": 1})
    with pytest.raises(UnsupportedError, match=message):
        open_checkpoint(tmp_path / "c")


def test_open_dcp_megatron_core_llama_has_all_tensors(tmp_path):
    m = families.llama()
    p = families.parameters(m)
    save(tmp_path / "c", core(m, p), {"args": arguments(m, **of_llama(m)), "iteration": 2})
    found, _ = open_checkpoint(tmp_path / "c")
    assert {k: found.manifest["model"][k] for k in m} == m
    assert same(found, p)


def with_moments(state):
    moments = {f"optimizer.state.exp_avg.{name}": 2 * value for name, value in state.items()}
    moments |= {f"optimizer.state.exp_avg_sq.{name}": value**2 for name, value in state.items()}
    masters = {f"optimizer.state.fp32_param.{name}": value for name, value in state.items()}
    return {name: value.astype(np.float16) for name, value in state.items()} | moments | masters


def test_open_dcp_megatron_core_state_has_moments_and_steps(tmp_path):
    m = native_checkpoints.model()
    p = native_checkpoints.parameters(m)
    optimizer = {"optimizer": {"param_groups": [{"step": 7, "params": []}], "state": {"common_step": 7}}}
    common = {"args": arguments(m), "iteration": 7, "optimizer": optimizer}
    save(tmp_path / "c", with_moments(core(m, p)), common)
    found, _ = open_checkpoint(tmp_path / "c", options=ReadOptions(with_optimizer=True))
    assert same(found, p)
    p = native_checkpoints.true_rows(m["vocab_size"], p)
    assert all(np.array_equal(load_array(found, f"{name}.exp_avg"), 2 * value) for name, value in p.items())
    assert all(np.array_equal(load_array(found, f"{name}.exp_avg_sq"), value**2) for name, value in p.items())
    assert set(found.manifest["optimizer"]["steps"].values()) == {7}
    weights, _ = open_checkpoint(tmp_path / "c")
    assert weights.names("optimizer") == []
    assert {weights.tensors[name].dtype for name in p} == {"F16"}


# The order of the parameters in Megatron-core's layers with norms of their own, and of Transformer Engine.
ORDERS = {
    "own": ("attention.norm", "attention.dense", "attention.qkv", "mlp.norm", "mlp.fc1", "mlp.fc2"),
    "fused": ("attention.dense", "attention.norm", "attention.qkv", "mlp.norm", "mlp.fc1", "mlp.fc2"),
}


def buckets(m, p, *, tp=1, pp=1, order="own"):
    """Flat buffers of each model-parallel rank, the last parameter first, each at a multiple of 64 elements."""
    state = {}
    share = m["num_layers"] // pp
    for rank in range(tp * pp):
        stage, part = divmod(rank, tp)
        names = ["embedding.word.weight", "embedding.position.weight"] if stage == 0 else []
        for i in range(stage * share, (stage + 1) * share):
            names += [f"layers.{i}.{module}.{kind}" for module in ORDERS[order] for kind in BOTH]
        names += ["head.norm.weight", "head.norm.bias"] if stage == pp - 1 else []
        names += ["embedding.word.weight"] if stage == pp - 1 and pp > 1 else []
        for kind, change in (("param", 1), ("exp_avg", 2), ("exp_avg_sq", 3)):
            flat = []
            for name in reversed(names):
                dim = native_checkpoints.split_dim(name)
                value = p[name] if dim is None else np.split(p[name], tp, axis=dim)[part]
                flat += [0.0] * (-len(flat) % 64) + list((value * change).reshape(-1))
            key = f"optimizer.distributed.dp_group_idx_{rank}.gbuf_idx_0.dtype_(torch.bfloat16, torch.float32)"
            state[f"{key}.bucket_idx_0.{kind}"] = np.array(flat, np.float32)
    return state


def flat_checkpoint(directory, m, p, *, tp=1, pp=1, order="own", **changes):
    state = {name: value.astype(np.float16) for name, value in core(m, p).items()}
    sizes = {"tensor_model_parallel_size": tp, "pipeline_model_parallel_size": pp}
    common = {"args": arguments(m, **sizes | changes), "iteration": 7}
    save(directory, state | buckets(m, p, tp=tp, pp=pp, order=order), common)


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize(("tp", "pp"), [(1, 1), (2, 1), (1, 2), (2, 2)])
def test_open_dcp_flat_buckets_of_every_topology(tmp_path, tp, pp, order):
    m = native_checkpoints.model(num_layers=4)
    p = native_checkpoints.parameters(m)
    flat_checkpoint(tmp_path / "c", m, p, tp=tp, pp=pp, order=order)
    found, _ = open_checkpoint(tmp_path / "c", options=ReadOptions(with_optimizer=True))
    assert same(found, p)
    p = native_checkpoints.true_rows(m["vocab_size"], p)
    assert all(np.array_equal(load_array(found, f"{name}.exp_avg"), 2 * value) for name, value in p.items())
    assert all(np.array_equal(load_array(found, f"{name}.exp_avg_sq"), 3 * value) for name, value in p.items())
    assert set(found.manifest["optimizer"]["steps"].values()) == {7}


def test_open_dcp_flat_buckets_with_padding_for_replicas(tmp_path):
    """As ``fully_sharded_bucket_space`` of releases before 0.14: a bucket ends at a multiple of the replicas."""
    m = native_checkpoints.model(num_layers=2)
    p = native_checkpoints.parameters(m)
    padded = {name: np.append(flat, np.full(77, 9, np.float32)) for name, flat in buckets(m, p).items()}
    save(tmp_path / "c", core(m, p) | padded, {"args": arguments(m), "iteration": 7})
    found, _ = open_checkpoint(tmp_path / "c", options=ReadOptions(with_optimizer=True))
    assert same(found, p)
    p = native_checkpoints.true_rows(m["vocab_size"], p)
    assert all(np.array_equal(load_array(found, f"{name}.exp_avg"), 2 * value) for name, value in p.items())


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        (
            {"decoder_first_pipeline_num_layers": 1},
            UnsupportedError,
            "decoder_first_pipeline_num_layers.*--no-optimizer",
        ),
        ({"pipeline_model_parallel_size": 3}, UnsupportedError, "4 layers on 3 stages.*--no-optimizer"),
        ({"pipeline_model_parallel_size": 1}, CorruptError, "has the optimizer state of the ranks"),
        ({"tensor_model_parallel_size": 0}, CorruptError, "positive integer"),
    ],
)
def test_open_dcp_flat_buckets_that_do_not_fit_are_refused(tmp_path, changes, error, message):
    m = native_checkpoints.model(num_layers=4)
    flat_checkpoint(tmp_path / "c", m, native_checkpoints.parameters(m), pp=2, **changes)
    with pytest.raises(error, match=message):
        open_checkpoint(tmp_path / "c", options=ReadOptions(with_optimizer=True))
    assert open_checkpoint(tmp_path / "c")[0].manifest["optimizer"] is None  # the weights alone


def test_open_dcp_flat_buckets_of_other_weights_are_refused(tmp_path):
    m = native_checkpoints.model(num_layers=2)
    p = native_checkpoints.parameters(m)
    state = core(m, p) | buckets(m, native_checkpoints.parameters(m, seed=5))
    save(tmp_path / "c", state, {"args": arguments(m), "iteration": 7})
    with pytest.raises(UnsupportedError, match=r"no known order of .* weights rounds to them"):
        open_checkpoint(tmp_path / "c", options=ReadOptions(with_optimizer=True))


def test_open_dcp_unknown_optimizer_state_is_refused(tmp_path):
    m = native_checkpoints.model()
    state = core(m, native_checkpoints.parameters(m)) | {
        "optimizer.distributed.dp_group_idx_0.exp_avg": np.zeros(9, np.float32)
    }
    save(tmp_path / "c", state, {"args": arguments(m), "iteration": 7})
    with pytest.raises(UnsupportedError, match="--dist-ckpt-optim-fully-reshardable"):
        open_checkpoint(tmp_path / "c", options=ReadOptions(with_optimizer=True))


def flattened(value, grid):
    """``value`` as Megatron-core before 0.14 stored a tensor of flat shards: a grid of the ranks' parts, each flat."""
    parts = value
    for dim, cells in enumerate(grid):
        shape = parts.shape
        at = 2 * dim
        parts = parts.reshape(*shape[:at], cells, shape[at] // cells, *shape[at + 1 :])
    dims = len(grid)
    return parts.transpose([*range(0, 2 * dims, 2), *range(1, 2 * dims, 2)]).reshape(*grid, -1)


def test_open_dcp_flat_shards_get_their_shape_back(tmp_path):
    m = native_checkpoints.model()
    p = native_checkpoints.parameters(m)
    whole = with_moments(core(m, p))
    state, shapes = {}, {}
    for name, value in whole.items():
        if not name.startswith("optimizer."):
            state[name] = value
            continue
        # Layers are stacked; columns are split over two ranks, where a matrix has even ones.
        grid = [m["num_layers"] if ".layers." in name and dim == 0 else 1 for dim in range(value.ndim)]
        grid[-1] *= 2 if value.ndim > 1 and value.shape[-1] % 2 == 0 else 1
        state[name], shapes[name] = flattened(value, grid), value.shape
    save(tmp_path / "c", state, {"args": arguments(m), "iteration": 7})
    path = tmp_path / "c" / ".metadata"
    metadata = pickle.loads(path.read_bytes())  # noqa: S301 - of this test
    metadata.mcore_data = {
        name: {"nd_reformulated_orig_global_shape": tuple(shape)} for name, shape in shapes.items()
    } | {"model": {}}
    path.write_bytes(pickle.dumps(metadata))
    found, _ = open_checkpoint(tmp_path / "c", options=ReadOptions(with_optimizer=True))
    assert same(found, p)
    p = native_checkpoints.true_rows(m["vocab_size"], p)
    assert all(np.array_equal(load_array(found, f"{name}.exp_avg"), 2 * value) for name, value in p.items())
    name = "optimizer.state.exp_avg.decoder.layers.mlp.linear_fc1.weight"
    for wrong in ((7, 5), (3, 40, 17), (0, 0, 0), ()):
        metadata.mcore_data[name] = {"nd_reformulated_orig_global_shape": wrong}
        path.write_bytes(pickle.dumps(metadata))
        with pytest.raises(CorruptError, match="cannot have the shape"):
            open_checkpoint(tmp_path / "c", options=ReadOptions(with_optimizer=True))


def test_open_dcp_common_state_is_an_object(tmp_path):
    """Releases without ``common.pt`` store its contents as ``common_state``."""
    m = native_checkpoints.model()
    p = native_checkpoints.parameters(m)
    state = {name: torch.from_numpy(value) for name, value in core(m, p).items()}
    state["common_state/shard_0_1"] = [{"args": arguments(m), "iteration": 9, "checkpoint_version": 3.0}]
    # As the planner of Megatron-core, which stores a list of one object as it is.
    planner = dcp.DefaultSavePlanner(flatten_state_dict=False)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.save(state, checkpoint_id=tmp_path / "c", planner=planner)
    found, _ = open_checkpoint(tmp_path / "c")
    assert found.manifest["step"] == 9
    assert dict(found.manifest["model"]) == m
    assert same(found, p)


def test_open_dcp_names_of_transformers_and_meta(tmp_path):
    from transformers import LlamaConfig, LlamaForCausalLM

    m = families.llama()
    config = hf_config(m, "float32", None)
    torch.manual_seed(0)
    theirs = LlamaForCausalLM(LlamaConfig.from_dict(config))
    state = {name: value.numpy() for name, value in theirs.state_dict().items()}
    for place, prefix in (("plain", ""), ("wrapped", "model."), ("compiled", "state.model._orig_mod.")):
        save(tmp_path / place, {prefix + name: value for name, value in state.items()})
    config_path = tmp_path / "config"
    config_path.mkdir()
    (config_path / "config.json").write_text(json.dumps(config))
    options = ReadOptions(config=config_path)
    found = [open_checkpoint(tmp_path / place, options=options)[0] for place in ("plain", "wrapped", "compiled")]
    words = {name: load_array(found[0], name) for name in found[0].names("parameter")}
    vocabulary = m["vocab_size"]
    assert np.array_equal(words["embedding.word.weight"][:vocabulary], state["model.embed_tokens.weight"])
    assert all(same(each, words) for each in found)
    heads, width = m["num_attention_heads"], m["head_dim"]

    def pairs(value, count):
        return value.reshape(count, 2, width // 2, -1).swapaxes(1, 2).reshape(value.shape)

    meta = {"tok_embeddings.weight": state["model.embed_tokens.weight"], "norm.weight": state["model.norm.weight"]}
    meta["output.weight"] = state["lm_head.weight"]
    for i in range(m["num_layers"]):
        at, to = f"model.layers.{i}", f"layers.{i}"
        meta[f"{to}.attention.wq.weight"] = pairs(state[f"{at}.self_attn.q_proj.weight"], heads)
        meta[f"{to}.attention.wk.weight"] = pairs(state[f"{at}.self_attn.k_proj.weight"], m["num_key_value_heads"])
        meta[f"{to}.attention.wv.weight"] = state[f"{at}.self_attn.v_proj.weight"]
        meta[f"{to}.attention.wo.weight"] = state[f"{at}.self_attn.o_proj.weight"]
        meta[f"{to}.attention_norm.weight"] = state[f"{at}.input_layernorm.weight"]
        meta[f"{to}.ffn_norm.weight"] = state[f"{at}.post_attention_layernorm.weight"]
        for one, other in (("w1", "gate"), ("w3", "up"), ("w2", "down")):
            meta[f"{to}.feed_forward.{one}.weight"] = state[f"{at}.mlp.{other}_proj.weight"]
    save(tmp_path / "meta", meta)
    assert same(open_checkpoint(tmp_path / "meta", options=options)[0], words)
    with pytest.raises(Exception, match="give --config"):
        open_checkpoint(tmp_path / "meta")


def test_open_checkpoint_absent_optional_state_gives_weights(tmp_path):
    m = families.llama()
    config = hf_config(m, "float32", None)
    table = np.zeros((m["vocab_size"], m["hidden_size"]), np.float32)
    state = {"model.embed_tokens.weight": table}
    save(tmp_path / "meta", {"tok_embeddings.weight": table})
    save(tmp_path / "trained", state | {"optimizer.state.w.exp_avg": np.zeros(1, np.float32)})
    (tmp_path / "config.json").write_text(json.dumps(config))
    options = ReadOptions(config=tmp_path, with_optimizer=True)
    with pytest.raises(NoOptimizerStateError, match="has no optimizer state"):
        open_checkpoint(tmp_path / "meta", options=options)
    with pytest.raises(UnsupportedError, match="of Megatron-core and torchtitan only") as refused:
        open_checkpoint(tmp_path / "trained", options=options)
    assert not isinstance(refused.value, NoOptimizerStateError)


def rewrite(directory, change):
    """The metadata, unpickled by torch's own classes, changed and pickled again."""
    path = directory / ".metadata"
    metadata = pickle.loads(path.read_bytes())  # noqa: S301 - our own, written by this test
    change(metadata)
    path.write_bytes(pickle.dumps(metadata))


def halves(directory, names):
    """Make one tensor of two chunks out of ``NAME.0`` and ``NAME.1``, as two ranks would have written it."""

    def join(metadata):
        entries, places = metadata.state_dict_metadata, metadata.storage_data
        for name in names:
            upper, lower = entries.pop(f"{name}.0"), entries.pop(f"{name}.1")
            rows = upper.size[0]
            lower.chunks[0].offsets = torch.Size([rows, *[0] * (len(upper.size) - 1)])
            upper.chunks.append(lower.chunks[0])
            upper.size = torch.Size([rows + lower.size[0], *upper.size[1:]])
            entries[name] = upper
            for part, chunk in enumerate(upper.chunks):
                index = next(key for key in places if key.fqn == f"{name}.{part}")
                places[type(index)(name, chunk.offsets)] = places.pop(index)

    rewrite(directory, join)


def test_open_dcp_chunks_of_several_ranks_are_merged(tmp_path):
    m = native_checkpoints.model()
    p = native_checkpoints.parameters(m)
    state = core(m, p, stacked=False)
    cut = {}
    for name, value in state.items():
        cut[f"{name}.0"], cut[f"{name}.1"] = value[:3], value[3:]
    save(tmp_path / "c", cut, {"args": arguments(m), "iteration": 1})
    halves(tmp_path / "c", list(state))
    assert same(open_checkpoint(tmp_path / "c")[0], p)


def saved(tmp_path):
    m = native_checkpoints.model()
    save(tmp_path / "c", core(m, native_checkpoints.parameters(m)), {"args": arguments(m), "iteration": 1})
    return tmp_path / "c"


def first(table):
    return next(iter(table.values()))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda d: setattr(first(d.storage_data), "relative_path", "../x"), "must be a plain file name"),
        (lambda d: setattr(first(d.storage_data), "offset", 10**12), "expected"),
        (lambda d: setattr(first(d.storage_data), "length", 40), "not a file of torch.save"),
        (lambda d: d.storage_data.popitem(), "no file is recorded"),
        (lambda d: first(d.state_dict_metadata).chunks.clear(), "exactly once"),
        (
            lambda d: first(d.state_dict_metadata).chunks.append(first(d.state_dict_metadata).chunks[0]),
            "must cover the tensor exactly once",
        ),
        (lambda d: setattr(first(d.state_dict_metadata), "size", torch.Size([1, 1])), "exceeds the shape"),
        (lambda d: setattr(d, "storage_data", 3), "not the metadata of a distributed"),
    ],
)
def test_open_dcp_unfitting_metadata_is_refused(tmp_path, change, message):
    directory = saved(tmp_path)
    rewrite(directory, change)
    with pytest.raises(CorruptError, match=message):
        open_checkpoint(directory)


def test_open_dcp_compressed_tensor_is_refused(tmp_path):
    directory = saved(tmp_path)
    rewrite(directory, lambda d: setattr(first(d.storage_data), "transform_descriptors", ["zstd"]))
    with pytest.raises(UnsupportedError, match="zstd"):
        open_checkpoint(directory)


class Call:
    """Pickles as a call."""

    def __init__(self, path):
        self.path = str(path)

    def __reduce__(self):
        return os.mkdir, (self.path,)


def test_open_dcp_executes_nothing(tmp_path):
    directory = saved(tmp_path)
    rewrite(directory, lambda d: setattr(d, "planner_data", Call(tmp_path / "made")))
    with pytest.raises(UnsafePickleError, match="mkdir"):
        open_checkpoint(directory)
    assert not (tmp_path / "made").exists()


def test_open_torch_truncated_file_is_refused(tmp_path):
    directory = saved(tmp_path)
    file = max(directory.glob("*.distcp"))
    file.write_bytes(file.read_bytes()[:-100])
    with pytest.raises(CorruptError):
        open_checkpoint(directory)
