"""Optimizer state in flat buffers: Megatron's distributed optimizer, and DeepSpeed's ZeRO, in their layouts."""

import argparse
import math
import sys
import types
from unittest import mock

import numpy as np
import pytest
import torch

from dynmo_ckpt.converters.deepspeed import is_deepspeed
from dynmo_ckpt.converters.registry import open_checkpoint
from dynmo_ckpt.formats.choices import ReadOptions
from dynmo_ckpt.io.errors import CorruptError, UnsupportedError
from dynmo_ckpt.operations.reference_model import load_array
from tests.tables import table
from tests.unit.dynmo_ckpt import legacy_gpt, native_checkpoints

WITH = ReadOptions(with_optimizer=True)
KEYS = ("param", "exp_avg", "exp_avg_sq")


def flat_tensors(state, prefix=""):
    found = {}
    for name, value in state.items():
        found |= {prefix + name: value} if isinstance(value, torch.Tensor) else flat_tensors(value, f"{prefix}{name}.")
    return found


def ceil_to(value, step):
    return -(-value // step) * step


def whole_buffer(weights, replicas):
    """2023: reverse order, concatenated, padded for the data-parallel ranks."""
    flat = torch.cat([w.reshape(-1).float() for w in reversed(weights.values())])
    return torch.nn.functional.pad(flat, (0, -len(flat) % replicas))


def in_buckets(weights, replicas, size):
    """Early 2024: buckets of two or more weights, each padded for the data-parallel ranks."""
    buckets, buffers = [], []
    for w in reversed(weights.values()):
        buffers.append(w.reshape(-1).float())
        if sum(map(len, buffers)) >= size and len(buffers) > 1:
            buckets.append(torch.cat(buffers))
            buffers = []
    if buffers:
        buckets.append(torch.cat(buffers))
    return [torch.nn.functional.pad(b, (0, -len(b) % replicas)) for b in buckets], [len(b) for b in buckets]


def joined(weights, size, shared):
    """From 2024: weights at multiples of 64, the shared embedding apart, no padding between buckets."""
    buckets, buffers = [], torch.zeros(0)
    for name, w in reversed(weights.items()):
        buffers = torch.nn.functional.pad(buffers, (0, -len(buffers) % 64))
        if name in shared and len(buffers):
            buckets.append(buffers)
            buffers = torch.zeros(0)
        buffers = torch.cat([buffers, w.reshape(-1).float()])
        if name in shared or (size and len(buffers) >= size):
            buckets.append(buffers)
            buffers = torch.zeros(0)
    return torch.cat([*buckets, buffers])


SHARED = ("language_model.embedding.word_embeddings.weight", "word_embeddings_for_head.weight")


def world(form, weights, size, chunk):
    kinds = {"param": weights, "exp_avg": {n: 2 * w.float() for n, w in weights.items()}}
    kinds["exp_avg_sq"] = {n: w.float() ** 2 for n, w in weights.items()}
    if form == "2023":
        return {chunk: {torch.float32: {k: whole_buffer(v, 8) for k, v in kinds.items()}}}
    if form == "buckets":
        found = {k: in_buckets(v, 8, size) for k, v in kinds.items()}
        return {chunk: {torch.float32: {k: v[0] for k, v in found.items()}}, "recorded": found["param"][1]}
    buffers = {k: joined(v, size if form == "joined" else None, SHARED) for k, v in kinds.items()}
    return {chunk: {(torch.bfloat16, torch.float32): {**buffers, "numel_unpadded": len(buffers["param"])}}}


def save_distributed(path, m, p, form, *, change=lambda found: found, **where):
    """A checkpoint of half-precision weights whose state the distributed optimizer wrote."""
    states = []

    def rename(document):
        del document["args"].model_type
        names = ["model"] if "model" in document else sorted(k for k in document if k.startswith("model"))
        size = 3000
        document["args"].ddp_bucket_size, document["args"].data_parallel_size = size, 8
        tree = {"buckets_coalesced": True}
        for chunk, name in enumerate(names):
            weights = flat_tensors(document[name])
            tree |= world(form, weights, size, chunk)
            if "recorded" in tree:
                recorded = tree.pop("recorded")
                tree.setdefault("per_bucket_numel_unpadded", []).append({torch.float32: recorded})
        states.append(change(tree))
        document["optimizer"] = {"optimizer": {"param_groups": [{"step": 9, "lr": 1e-4}] * 2}}
        return document

    half = {name: value.astype(np.float16) for name, value in p.items()}
    iteration = legacy_gpt.save(path, half, m, rename=rename, **where)
    for folder, tree in zip(sorted(iteration.iterdir(), key=lambda d: d.name), states, strict=True):
        torch.save(tree, folder / "distrib_optim.pt")
    return {name: value.astype(np.float32) for name, value in half.items()}


def is_state_of(found, p):
    p = native_checkpoints.true_rows(found.manifest["model"]["vocab_size"], p)
    assert all(np.array_equal(load_array(found, name), value) for name, value in p.items())
    assert all(np.array_equal(load_array(found, f"{name}.exp_avg"), 2 * value) for name, value in p.items())
    assert all(np.array_equal(load_array(found, f"{name}.exp_avg_sq"), value**2) for name, value in p.items())
    assert set(found.manifest["optimizer"]["steps"].values()) == {9}


@table("form", ["2023", "buckets", "joined", "joined-in-one"])
@table("where", [{}, {"tp": 2, "stages": [1, 2]}, {"stages": [1, 1, 1, 0], "virtual": 2}])
def test_open_distributed_optimizer_of_each_release(tmp_path, form, where):
    m = native_checkpoints.model()
    p = save_distributed(tmp_path, m, native_checkpoints.parameters(m), form, **where)
    is_state_of(open_checkpoint(tmp_path, options=WITH)[0], p)


def shifted(tree):
    buffers = next(iter(tree[0].values()))
    buffers["param"] = buffers["param"].roll(1)
    return tree


def shorter(tree):
    buffers = next(iter(tree[0].values()))
    return {0: {torch.float32: {key: value[:-300] for key, value in buffers.items()}}}


def uneven(tree):
    buffers = next(iter(tree[0].values()))
    buffers["exp_avg"] = buffers["exp_avg"][:-1]
    return tree


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        (shifted, UnsupportedError, "unknown layout"),
        (shorter, UnsupportedError, "unknown layout"),
        (uneven, CorruptError, "different lengths"),
        (lambda tree: tree | {1: tree[0]}, UnsupportedError, "2 buffers for 1 chunks"),
        (lambda tree: {0: {torch.float32: {"param": 3}}}, CorruptError, "no flat buffer param"),
    ],
)
def test_open_distributed_optimizer_unfitting_buffers_are_refused(tmp_path, change, error, message):
    m = native_checkpoints.model()
    save_distributed(tmp_path, m, native_checkpoints.parameters(m), "2023", change=change)
    with pytest.raises(error, match=message):
        open_checkpoint(tmp_path, options=WITH)


def save_replicas(path, m, p, replicas):
    """2022: each replica's own file, with its range of the buffer in parts of weights, by group."""
    half = {name: value.astype(np.float16) for name, value in p.items()}

    def rename(document):
        del document["args"].model_type, document["optimizer"]
        return document

    iteration = legacy_gpt.save(path, half, m, rename=rename)
    folder = iteration / "mp_rank_00"
    (folder / "model_optim_rng.pt").rename(folder / "model_rng.pt")
    weights = flat_tensors(torch.load(folder / "model_rng.pt", weights_only=False)["model"])
    total = sum(w.numel() for w in weights.values())
    share = math.ceil(total / replicas)
    for replica in range(replicas):
        groups, end = [[], []], total
        for w in weights.values():
            begin = end - w.numel()
            low, high = max(begin, replica * share), min(end, (replica + 1) * share)
            if low < high:
                groups[w.dim() < 2].append(w.reshape(-1).float()[low - begin : high - begin].clone())
            end = begin
        groups = [group for group in groups if group]
        state, described = {}, []
        for group in groups:
            described.append({"params": list(range(len(state), len(state) + len(group))), "step": 9})
            for part in group:
                state[len(state)] = {"exp_avg": 2 * part, "exp_avg_sq": part**2}
        inner = {"state": state, "param_groups": described}
        (iteration / f"mp_rank_00_{replica:03d}").mkdir()
        buffers = {"optimizer": {"optimizer": inner, "shard_fp32_from_float16_groups": groups}}
        torch.save(buffers, iteration / f"mp_rank_00_{replica:03d}" / "optim.pt")
    return {name: value.astype(np.float32) for name, value in half.items()}


@pytest.mark.parametrize("replicas", [1, 3, 7])
def test_open_distributed_optimizer_of_2022(tmp_path, replicas):
    m = native_checkpoints.model()
    p = save_replicas(tmp_path, m, native_checkpoints.parameters(m), replicas)
    is_state_of(open_checkpoint(tmp_path, options=WITH)[0], p)


def test_open_distributed_optimizer_missing_rank_is_refused(tmp_path):
    m = native_checkpoints.model()
    save_replicas(tmp_path, m, native_checkpoints.parameters(m), 3)
    last = tmp_path / "iter_0000300" / "mp_rank_00_002"
    (last / "optim.pt").unlink()
    with pytest.raises(CorruptError, match="its parts are not those of"):
        open_checkpoint(tmp_path, options=WITH)


class Address:
    """DeepSpeed's record of the slice of a parameter."""

    def __init__(self, begin, count):
        self.numel, self.start = count, begin


Address.__module__, Address.__qualname__ = "deepspeed.utils.tensor_fragment", "fragment_address"


def dump(value, path):
    """Save, with ``Address`` under the name that it has with DeepSpeed."""
    names = ["deepspeed", "deepspeed.utils", "deepspeed.utils.tensor_fragment"]
    modules = {name: types.ModuleType(name) for name in names}
    modules[names[-1]].fragment_address = Address
    with mock.patch.dict(sys.modules, modules):
        torch.save(value, path)


def groups_of(weights):
    return [{n: w for n, w in weights.items() if (w.dim() > 1) is wide} for wide in (True, False)]


def partitions(values, replicas):
    """ZeRO 1 and 2: the concatenated, padded values of a group in equal parts, and the slices of parameters in each."""
    flat = torch.cat([value.reshape(-1).float() for value in values.values()])
    share = ceil_to(len(flat), 2 * replicas) // replicas
    parts = list(torch.nn.functional.pad(flat, (0, share * replicas - len(flat))).split(share))
    places, at = [{} for _ in parts], 0
    for name, value in values.items():
        for replica in range(replicas):
            begin, end = max(at, replica * share), min(at + value.numel(), (replica + 1) * share)
            if begin < end:
                places[replica][name] = Address(begin - replica * share, end - begin)
        at += value.numel()
    return parts, places


def thirds(values, replicas):
    """ZeRO 3: an equal part of every weight for each replica."""
    shares = [[] for _ in range(replicas)]
    for value in values.values():
        flat = value.reshape(-1).float()
        flat = torch.nn.functional.pad(flat, (0, -len(flat) % replicas))
        for share, part in zip(shares, flat.chunk(replicas), strict=True):
            share.append(part)
    return [torch.cat(share) for share in shares], [{} for _ in shares]


def save_shards(step, weights, rank, *, stage, replicas, recorded=False, bf16=False):
    """The optimizer's shards of a model-parallel rank; returns the shapes for the model's file."""
    groups = groups_of(weights)
    cut = thirds if stage == 3 else partitions
    kinds = [lambda w: w.float(), lambda w: 2 * w.float(), lambda w: w.float() ** 2]
    buffers = [[cut({n: kind(w) for n, w in group.items()}, replicas) for group in groups] for kind in kinds]
    for replica in range(replicas):
        of = [[group[0][replica] for group in kind] for kind in buffers]
        state = {g: {"step": 9, "exp_avg": of[1][g], "exp_avg_sq": of[2][g]} for g in range(len(groups))}
        inner = {"state": state, "param_groups": [{"lr": 1e-4, "params": [g]} for g in state]}
        document = {"zero_stage": stage, "partition_count": replicas if stage == 3 else [replicas] * len(groups)}
        document["fp32_flat_groups" if stage == 3 else "single_partition_of_fp32_groups"] = of[0]
        document["optimizer_state_dict" if stage == 3 else "base_optimizer_state"] = inner
        if recorded:
            document["param_slice_mappings"] = [group[1][replica] for group in buffers[0]]
        name = f"{'bf16_' if bf16 else ''}zero_pp_rank_{replica}_mp_rank_{rank:02d}_optim_states.pt"
        dump({"optimizer_state_dict": document, "ds_version": "0.9"}, step / name)
    return [{n: w.shape for n, w in group.items()} for group in groups]


def head_of(m, **more):
    args = argparse.Namespace(num_attention_heads=m["num_attention_heads"], orig_vocab_size=m["vocab_size"])
    return {"iteration": 300, "args": args, "checkpoint_version": 3.0, "global_steps": 300} | more


def save_modules(directory, m, p, tp, *, stage, replicas=3, **options):
    """One module for each tensor rank."""
    step = directory / "global_step300"
    step.mkdir(parents=True)
    (directory / "latest").write_text("global_step300")
    half = {name: value.astype(np.float16) for name, value in p.items()}
    for rank in range(tp):
        state = legacy_gpt.chunk_state(half, m, range(m["num_layers"]), True, True, rank, tp, 3.0, "encoder", False)
        weights = flat_tensors(state)
        shapes = save_shards(step, weights, rank, stage=stage, replicas=replicas, **options)
        if stage < 3:
            torch.save(head_of(m, module=weights, param_shapes=shapes), step / f"mp_rank_{rank:02d}_model_states.pt")
            continue
        empty = {name: torch.zeros(0) for name in weights}
        for replica in range(replicas):
            name = f"zero_pp_rank_{replica}_mp_rank_{rank:02d}_model_states.pt"
            torch.save(head_of(m, module=empty, param_shapes=shapes), step / name)
    return {name: value.astype(np.float32) for name, value in half.items()}


@pytest.mark.parametrize("tp", [1, 2])
@pytest.mark.parametrize(("stage", "recorded"), [(1, True), (2, False), (3, False)])
def test_open_zero_stages_give_weights_and_state(tmp_path, tp, stage, recorded):
    m = native_checkpoints.model()
    p = save_modules(tmp_path, m, native_checkpoints.parameters(m), tp, stage=stage, recorded=recorded, bf16=stage == 1)
    assert is_deepspeed(tmp_path)
    is_state_of(open_checkpoint(tmp_path, options=WITH)[0], p)
    weights, remarks = open_checkpoint(tmp_path)
    stored = native_checkpoints.true_rows(m["vocab_size"], p)
    assert all(np.array_equal(load_array(weights, name), value) for name, value in stored.items())
    assert any("ZeRO 3" in remark for remark in remarks) is (stage == 3)
    assert weights.tensors["head.norm.bias"].dtype == ("F32" if stage == 3 else "F16")


@pytest.mark.parametrize("tp", [1, 2])
def test_open_zero_1_of_a_pipeline(tmp_path, tp):
    m = native_checkpoints.model()
    p = native_checkpoints.parameters(m)
    half = {name: value.astype(np.float16) for name, value in p.items()}
    step = tmp_path / "global_step300"
    step.mkdir()
    (tmp_path / "latest").write_text("global_step300")
    last = 4 + m["num_layers"]
    for rank in range(tp):
        state = legacy_gpt.chunk_state(half, m, range(m["num_layers"]), True, True, rank, tp, 3.0, "encoder", False)
        language = state["language_model"]
        embedding = {f"{k}.weight": v["weight"] for k, v in language["embedding"].items()}
        blocks = language["encoder"]
        layers = {1: embedding, last + 1: embedding}
        for i in range(m["num_layers"]):
            start = f"layers.{i}."
            layers[3 + i] = {k.removeprefix(start): v for k, v in blocks.items() if k.startswith(start)}
        layers[last] = {k: blocks[f"final_layernorm.{k}"] for k in ("weight", "bias")}
        for number, tensors in layers.items():
            torch.save(tensors, step / f"layer_{number:02d}-model_{rank:02d}-model_states.pt")
        workers = [[1, 3, 4], [5, last, last + 1]]
        for worker, numbers in enumerate(workers):
            own = {}
            for number in numbers:
                prefix = "tied_modules.embed." if number in (1, last + 1) else f"{number}."
                own |= {prefix + name: value for name, value in layers[number].items()}
            at = worker * tp + rank
            shapes = save_shards(step, own, at, stage=1, replicas=2, recorded=True, bf16=True)
            head = head_of(m, module=None, param_shapes=shapes)
            torch.save(head, step / f"mp_rank_{at:02d}_model_states.pt")
    found, _ = open_checkpoint(tmp_path, options=WITH)
    is_state_of(found, {name: value.astype(np.float32) for name, value in half.items()})


def edit(path, change):
    document = torch.load(path, weights_only=False)
    change(document)
    torch.save(document, path)


@pytest.mark.parametrize(
    ("stage", "file", "change", "message"),
    [
        (2, "zero_pp_rank_1_mp_rank_00_optim_states.pt", None, "must be 0 to 1"),
        (2, "zero_pp_rank_2_mp_rank_00_optim_states.pt", None, "has 2 of 3 optimizer shards"),
        (
            3,
            "zero_pp_rank_0_mp_rank_00_model_states.pt",
            lambda d: d["param_shapes"][0].popitem(),
            "each shard must",
        ),
        (2, "mp_rank_00_model_states.pt", lambda d: d["param_shapes"].pop(), "flat groups for 1 parameter groups"),
        (2, "mp_rank_00_model_states.pt", lambda d: d["param_shapes"][0].update(x=(9, 9)), "ends at element"),
        (
            2,
            "mp_rank_00_model_states.pt",
            lambda d: d["module"].update({NORM: d["module"][NORM] + 1}),
            "does not round",
        ),
        (2, "mp_rank_00_model_states.pt", lambda d: d["param_shapes"][0].update(x="y"), "has the shape 'y'"),
    ],
)
def test_open_zero_unfitting_shards_are_refused(tmp_path, stage, file, change, message):
    m = native_checkpoints.model()
    save_modules(tmp_path, m, native_checkpoints.parameters(m), 1, stage=stage)
    path = tmp_path / "global_step300" / file
    edit(path, change) if change else path.unlink()
    with pytest.raises(CorruptError, match=message):
        open_checkpoint(tmp_path, options=WITH)


NORM = "language_model.encoder.final_layernorm.bias"
