"""Sparse rows of DynMo's pruning, Megatron-DeepSpeed's files and llama2.c's, each written from its definition."""

import argparse
import struct

import numpy as np
import pytest
import torch

from dynmo_ckpt.converters.registry import open_checkpoint
from dynmo_ckpt.formats.choices import ReadOptions
from dynmo_ckpt.io.errors import CorruptError, UnsupportedError
from dynmo_ckpt.operations.reference_model import load_array
from tests.unit.dynmo_ckpt import families, legacy_gpt, native_checkpoints


def same(found, p):
    p = native_checkpoints.true_rows(found.manifest["model"]["vocab_size"], p)
    return all(np.array_equal(load_array(found, name), value) for name, value in p.items())


def sparse(document, pruned):
    """The document with the weights of ``pruned`` as sparse rows, under DynMo's names."""
    blocks = document["model"]["language_model"]["encoder"]
    for name, dense in pruned.items():
        base = name.removesuffix(".weight")
        del blocks[name]
        base = base.replace("dense_h_to_4h", "to_4h").replace("dense_4h_to_h", "to_h")
        rows, columns = np.nonzero(dense)
        offsets = np.searchsorted(rows, np.arange(len(dense) + 1))
        blocks[f"{base}.values"] = torch.from_numpy(dense[rows, columns])
        blocks[f"{base}.row_offsets"] = torch.from_numpy(offsets.astype(np.int32))
        blocks[f"{base}.column_indices"] = torch.from_numpy(columns.astype(np.int16))
        blocks[f"{base}.row_indices"] = torch.from_numpy(np.argsort(-np.diff(offsets)).astype(np.int16))
    return document


def save_sparse(tmp_path, change=lambda document: document):
    m = native_checkpoints.model()
    p = native_checkpoints.parameters(m)
    pruned = {}
    for i in range(m["num_layers"]):
        for ours, theirs in (("fc1", "dense_h_to_4h"), ("fc2", "dense_4h_to_h")):
            weight = p[f"layers.{i}.mlp.{ours}.weight"]
            weight[np.random.default_rng(i).random(weight.shape) < 0.9] = 0
            weight[1] = 0
            pruned[f"layers.{i}.mlp.{theirs}.weight"] = weight
    tmp_path.mkdir(exist_ok=True)

    def rename(document):
        del document["args"].model_type
        return change(sparse(document, pruned))

    legacy_gpt.save(tmp_path, p, m, rename=rename)
    return m, p


def test_open_sparse_rows_gives_dense_weights(tmp_path):
    m, p = save_sparse(tmp_path)
    found, remarks = open_checkpoint(tmp_path)
    assert dict(found.manifest["model"]) == m
    assert same(found, p)
    assert found.names("mask") == []
    assert "converted 6 sparse weights" in remarks[0]


def test_open_sparse_rows_with_sparse_option_keeps_masks(tmp_path):
    m, p = save_sparse(tmp_path)
    found, _ = open_checkpoint(tmp_path, options=ReadOptions(sparse=True))
    assert len(found.names("mask")) == 2 * m["num_layers"]
    weights = [name.removesuffix(".mask") for name in found.names("mask")]
    assert all(np.array_equal(load_array(found, f"{name}.mask"), p[name] != 0) for name in weights)
    density = sum(np.count_nonzero(p[name]) for name in weights) / sum(p[name].size for name in weights)
    assert found.manifest["dynamic"]["pruning"]["sparsity"] == pytest.approx(1 - density)


def alter(suffix, change):
    def altered(document):
        blocks = document["model"]["language_model"]["encoder"]
        name = next(name for name in blocks if name.endswith(suffix))
        blocks[name] = change(blocks[name])
        return document

    return altered


@pytest.mark.parametrize(
    ("suffix", "change", "message"),
    [
        ("row_offsets", lambda x: x + 1, "row offsets"),
        ("column_indices", lambda x: x + 16, "the matrix has 16"),
        ("column_indices", lambda x: x * 0, "has a column index twice"),
        ("values", lambda x: x[:-1], "row offsets"),
    ],
)
def test_open_invalid_sparse_rows_is_refused(tmp_path, suffix, change, message):
    save_sparse(tmp_path, alter(suffix, change))
    with pytest.raises(CorruptError, match=message):
        open_checkpoint(tmp_path)


def save_deepspeed(directory, m, p, tp, *, pipelined=True):
    """Layer files, or with ``pipelined=False`` one module for each tensor rank."""
    step = directory / "global_step300"
    step.mkdir(parents=True)
    (directory / "latest").write_text("global_step300")
    args = argparse.Namespace(num_attention_heads=m["num_attention_heads"], orig_vocab_size=m["vocab_size"])
    for rank in range(tp):
        whole = legacy_gpt.chunk_state(p, m, range(m["num_layers"]), True, True, rank, tp, 3.0, "encoder", False)
        head = {"iteration": 300, "args": args, "checkpoint_version": 3.0, "dp_world_size": 2}
        head["module"] = None if pipelined else whole
        torch.save(head, step / f"mp_rank_{rank:02d}_model_states.pt")
        torch.save(
            {"optimizer_state_dict": {"zero_stage": 1}}, step / f"zero_pp_rank_0_mp_rank_{rank:02d}_optim_states.pt"
        )
        if not pipelined:
            continue
        language = whole["language_model"]
        embedding = {f"{k}.weight": v["weight"] for k, v in language["embedding"].items()}
        layers = {1: embedding}
        for i in range(m["num_layers"]):
            prefix = f"layers.{i}."
            blocks = language["encoder"].items()
            layers[3 + i] = {k.removeprefix(prefix): v for k, v in blocks if k.startswith(prefix)}
        last = 4 + m["num_layers"]
        layers[last] = {k: language["encoder"][f"final_layernorm.{k}"] for k in ("weight", "bias")}
        layers[last + 1] = dict(embedding)
        for number, tensors in layers.items():
            torch.save(tensors, step / f"layer_{number:02d}-model_{rank:02d}-model_states.pt")
    return step


@pytest.mark.parametrize("tp", [1, 2])
@pytest.mark.parametrize("pipelined", [True, False])
def test_open_deepspeed_layer_files_and_modules(tmp_path, tp, pipelined):
    m = native_checkpoints.model(num_layers=11)
    p = native_checkpoints.parameters(m)
    save_deepspeed(tmp_path / "in", m, p, tp, pipelined=pipelined)
    found, _ = open_checkpoint(tmp_path / "in")
    assert dict(found.manifest["model"]) == m
    assert found.manifest["step"] == 300
    assert set(found.tensors) == set(p)
    assert same(found, p)


def test_open_deepspeed_missing_or_unknown_files_are_refused(tmp_path):
    m = native_checkpoints.model()
    step = save_deepspeed(tmp_path, m, native_checkpoints.parameters(m), 2)
    (step / "layer_04-model_01-model_states.pt").unlink()
    with pytest.raises(CorruptError, match=r"layer 4 has no files of the tensor-parallel ranks \[1\]"):
        open_checkpoint(tmp_path)
    for rank in range(2):
        torch.save({"gate.weight": torch.zeros(3, 3, 3)}, step / f"layer_04-model_{rank:02d}-model_states.pt")
    with pytest.raises(UnsupportedError, match="layer 4 is not a layer of a GPT"):
        open_checkpoint(tmp_path)


def interleaved(value, heads):
    """Rows of each head from halves to neighbouring pairs."""
    return value.reshape(heads, 2, -1, value.shape[-1]).transpose(0, 2, 1, 3).reshape(value.shape)


def save_llama2c(path, m, p):
    heads, groups, width = m["num_attention_heads"], m["num_key_value_heads"], m["head_dim"]
    vocab = m["vocab_size"] if m["tied_embeddings"] else -m["vocab_size"]
    sizes = (m["hidden_size"], m["ffn_hidden_size"], m["num_layers"], heads, groups, vocab)
    layers = range(m["num_layers"])
    q, k, v = [], [], []
    for i in layers:
        qkv = p[f"layers.{i}.attention.qkv.weight"].reshape(groups, heads // groups + 2, width, -1)
        q.append(interleaved(qkv[:, :-2].reshape(heads * width, -1), heads))
        k.append(interleaved(qkv[:, -2].reshape(groups * width, -1), groups))
        v.append(qkv[:, -1].reshape(groups * width, -1))

    def every(name):
        return [p[f"layers.{i}.{name}.weight"] for i in layers]

    stacks = [p["embedding.word.weight"][: m["vocab_size"]], *every("attention.norm"), *q, *k, *v]
    stacks += [*every("attention.dense"), *every("mlp.norm"), *every("mlp.gate"), *every("mlp.fc2"), *every("mlp.up")]
    stacks += [p["head.norm.weight"], np.zeros((m["max_position_embeddings"], width), np.float32)]
    if not m["tied_embeddings"]:
        stacks.append(p["head.weight"][: m["vocab_size"]])
    payload = b"".join(np.ascontiguousarray(each).tobytes() for each in stacks)
    path.write_bytes(struct.pack("<7i", *sizes, m["max_position_embeddings"]) + payload)


@pytest.mark.parametrize("tied", [True, False])
def test_open_llama2c_has_all_tensors(tmp_path, tied):
    m = families.llama(tied_embeddings=tied, vocab_size=32)
    p = families.parameters(m)
    save_llama2c(tmp_path / "model.bin", m, p)
    found, _ = open_checkpoint(tmp_path / "model.bin", options=ReadOptions(make_vocab_size_divisible_by=32))
    assert dict(found.manifest["model"]) == m
    assert same(found, p)


@pytest.mark.parametrize("payload", [b"", b"\0" * 28, struct.pack("<7i", 16, 24, 3, 4, 2, 32, 12) + b"\0" * 40])
def test_open_invalid_llama2c_file_is_refused(tmp_path, payload):
    (tmp_path / "model.bin").write_bytes(payload)
    with pytest.raises(CorruptError, match="header"):
        open_checkpoint(tmp_path / "model.bin")


def moments(state):
    """Masters and moments for every weight of a rank, as Megatron's optimizer of 16-bit weights stores them."""
    tensors = []

    def walk(value):
        for inner in value.values():
            tensors.append(inner) if isinstance(inner, torch.Tensor) else walk(inner)

    walk(state)
    groups = [[t for t in tensors if t.dim() > 1], [t for t in tensors if t.dim() == 1]]
    masters = [[t.float() for t in group] for group in groups]
    numbered, per_group = {}, []
    for group in masters:
        per_group.append(list(range(len(numbered), len(numbered) + len(group))))
        for master in group:
            numbered[len(numbered)] = {"step": 7, "exp_avg": master * 2, "exp_avg_sq": master**2}
    inner = {"state": numbered, "param_groups": [{"params": n, "lr": 1e-4} for n in per_group]}
    return {"optimizer": inner, "fp32_from_fp16_params": masters, "grad_scaler": {"scale": 1.0}}


def save_with_optimizer(path, m, p, change=lambda document: document):
    def rename(document):
        del document["args"].model_type
        document["optimizer"] = moments(document["model"])
        return change(document)

    legacy_gpt.save(path, p, m, tp=2, stages=[1, 2], version=0, rename=rename, weight_decay=0.1)


def test_open_legacy_with_optimizer_gives_masters_and_moments(tmp_path):
    m = native_checkpoints.model()
    p = native_checkpoints.parameters(m)
    save_with_optimizer(tmp_path, m, p)
    found, _ = open_checkpoint(tmp_path, options=ReadOptions(with_optimizer=True))
    assert same(found, p)
    assert len(found.names("optimizer")) == 2 * len(p)
    p = native_checkpoints.true_rows(m["vocab_size"], p)
    assert all(np.array_equal(load_array(found, f"{name}.exp_avg"), 2 * value) for name, value in p.items())
    assert all(np.array_equal(load_array(found, f"{name}.exp_avg_sq"), value**2) for name, value in p.items())
    assert set(found.manifest["optimizer"]["steps"].values()) == {7}
    assert [group["weight_decay"] for group in found.manifest["optimizer"]["groups"]] == [0.1, 0.0]


def in_another_order(document):
    groups = document["optimizer"]["optimizer"]["param_groups"]
    groups[0]["params"] = groups[0]["params"][::-1]
    return document


def fewer(document):
    document["optimizer"]["optimizer"]["param_groups"][1]["params"].pop()
    return document


def other_steps(document):
    document["optimizer"]["optimizer"]["state"][3]["step"] = 8
    return document


def flat_buffers(document):
    document["optimizer"] = {"optimizer": {"state": [], "param_groups": []}}
    return document


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        (in_another_order, CorruptError, "expected F32"),
        (fewer, CorruptError, "do not have the numbers of weights"),
        (other_steps, CorruptError, r"\[7, 8\] optimizer steps"),
        (flat_buffers, UnsupportedError, "no Adam state for each weight"),
    ],
)
def test_open_legacy_unfitting_optimizer_state_is_refused(tmp_path, change, error, message):
    m = native_checkpoints.model()
    save_with_optimizer(tmp_path, m, native_checkpoints.parameters(m), change)
    with pytest.raises(error, match=message):
        open_checkpoint(tmp_path, options=ReadOptions(with_optimizer=True))
