"""Optimizer state in flat buffers: Megatron's distributed optimizer, and DeepSpeed's ZeRO, laid out by their rules."""

import math
import runpy
from pathlib import Path

import numpy as np
import pytest
import torch

from dynmo_ckpt.faults import CorruptError, UnsupportedError
from dynmo_ckpt.legacy import LegacyOptions
from dynmo_ckpt.options import SourceKind
from dynmo_ckpt.reference_model import load_array
from dynmo_ckpt.sources import open_any

HERE = Path(__file__).parent
build = runpy.run_path(str(HERE / "build.py"))
legacy = runpy.run_path(str(HERE / "legacy_build.py"))
WITH = LegacyOptions(with_optimizer=True)
KEYS = ("param", "exp_avg", "exp_avg_sq")


def flat_tensors(state, prefix=""):
    found = {}
    for name, value in state.items():
        found |= {prefix + name: value} if isinstance(value, torch.Tensor) else flat_tensors(value, f"{prefix}{name}.")
    return found


def ceil_to(value, step):
    return -(-value // step) * step


def whole_buffer(weights, replicas):
    """2023: reverse order, one behind the other, padded for the replicas."""
    flat = torch.cat([w.reshape(-1).float() for w in reversed(weights.values())])
    return torch.nn.functional.pad(flat, (0, -len(flat) % replicas))


def in_buckets(weights, replicas, size):
    """Early 2024: buckets of at least two weights, each padded for the replicas."""
    buckets, held = [], []
    for w in reversed(weights.values()):
        held.append(w.reshape(-1).float())
        if sum(map(len, held)) >= size and len(held) > 1:
            buckets.append(torch.cat(held))
            held = []
    if held:
        buckets.append(torch.cat(held))
    return [torch.nn.functional.pad(b, (0, -len(b) % replicas)) for b in buckets], [len(b) for b in buckets]


def joined(weights, size, shared):
    """From 2024: weights at multiples of 64, the shared embedding apart, no padding between buckets."""
    buckets, held = [], torch.zeros(0)
    for name, w in reversed(weights.items()):
        held = torch.nn.functional.pad(held, (0, -len(held) % 64))
        if name in shared and len(held):
            buckets.append(held)
            held = torch.zeros(0)
        held = torch.cat([held, w.reshape(-1).float()])
        if name in shared or (size and len(held) >= size):
            buckets.append(held)
            held = torch.zeros(0)
    return torch.cat([*buckets, held])


SHARED = ("language_model.embedding.word_embeddings.weight", "word_embeddings_for_head.weight")


def world(form, weights, size, chunk):
    kinds = {"param": weights, "exp_avg": {n: 2 * w.float() for n, w in weights.items()}}
    kinds["exp_avg_sq"] = {n: w.float() ** 2 for n, w in weights.items()}
    if form == "2023":
        return {chunk: {torch.float32: {k: whole_buffer(v, 8) for k, v in kinds.items()}}}
    if form == "buckets":
        found = {k: in_buckets(v, 8, size) for k, v in kinds.items()}
        return {chunk: {torch.float32: {k: v[0] for k, v in found.items()}}, "told": found["param"][1]}
    held = {k: joined(v, size if form == "joined" else None, SHARED) for k, v in kinds.items()}
    return {chunk: {(torch.bfloat16, torch.float32): {**held, "numel_unpadded": len(held["param"])}}}


def save_distributed(path, m, p, form, *, change=lambda found: found, **where):
    """A checkpoint of half-precision weights whose state the distributed optimizer wrote."""
    legacy["ModelType"].__module__ = legacy["__name__"]
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
            if "told" in tree:
                told = tree.pop("told")
                tree.setdefault("per_bucket_numel_unpadded", []).append({torch.float32: told})
        states.append(change(tree))
        document["optimizer"] = {"optimizer": {"param_groups": [{"step": 9, "lr": 1e-4}] * 2}}
        return document

    half = {name: value.astype(np.float16) for name, value in p.items()}
    iteration = legacy["save"](path, half, m, rename=rename, **where)
    for folder, tree in zip(sorted(iteration.iterdir(), key=lambda d: d.name), states, strict=True):
        torch.save(tree, folder / "distrib_optim.pt")
    return {name: value.astype(np.float32) for name, value in half.items()}


def is_state_of(found, p):
    assert all(np.array_equal(load_array(found, name), value) for name, value in p.items())
    assert all(np.array_equal(load_array(found, f"{name}.exp_avg"), 2 * value) for name, value in p.items())
    assert all(np.array_equal(load_array(found, f"{name}.exp_avg_sq"), value**2) for name, value in p.items())
    assert set(found.manifest["optimizer"]["steps"].values()) == {9}


@pytest.mark.parametrize("form", ["2023", "buckets", "joined", "joined-in-one"])
@pytest.mark.parametrize("where", [{}, {"tp": 2, "stages": [1, 2]}, {"stages": [1, 1, 1, 0], "virtual": 2}])
def test_files_of_the_distributed_optimizer(tmp_path, form, where):
    m = build["model"]()
    p = save_distributed(tmp_path, m, build["parameters"](m), form, **where)
    is_state_of(open_any(tmp_path, SourceKind.AUTO, None, legacy=WITH)[0], p)


def shifted(tree):
    held = next(iter(tree[0].values()))
    held["param"] = held["param"].roll(1)
    return tree


def shorter(tree):
    held = next(iter(tree[0].values()))
    return {0: {torch.float32: {key: value[:-300] for key, value in held.items()}}}


def uneven(tree):
    held = next(iter(tree[0].values()))
    held["exp_avg"] = held["exp_avg"][:-1]
    return tree


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        (shifted, UnsupportedError, "no known way"),
        (shorter, UnsupportedError, "no known way"),
        (uneven, CorruptError, "not of one length"),
        (lambda tree: tree | {1: tree[0]}, UnsupportedError, "2 buffers for 1 chunks"),
        (lambda tree: {0: {torch.float32: {"param": 3}}}, CorruptError, "no flat param"),
    ],
)
def test_buffers_that_do_not_fit_are_refused(tmp_path, change, error, message):
    m = build["model"]()
    save_distributed(tmp_path, m, build["parameters"](m), "2023", change=change)
    with pytest.raises(error, match=message):
        open_any(tmp_path, SourceKind.AUTO, None, legacy=WITH)


def save_replicas(path, m, p, replicas):
    """2022: each replica's own file, with its range of the buffer in parts of weights, by group."""
    legacy["ModelType"].__module__ = legacy["__name__"]
    half = {name: value.astype(np.float16) for name, value in p.items()}

    def rename(document):
        del document["args"].model_type, document["optimizer"]
        return document

    iteration = legacy["save"](path, half, m, rename=rename)
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
        held = {"optimizer": {"optimizer": inner, "shard_fp32_from_float16_groups": groups}}
        torch.save(held, iteration / f"mp_rank_00_{replica:03d}" / "optim.pt")
    return {name: value.astype(np.float32) for name, value in half.items()}


@pytest.mark.parametrize("replicas", [1, 3, 7])
def test_files_of_each_replica(tmp_path, replicas):
    m = build["model"]()
    p = save_replicas(tmp_path, m, build["parameters"](m), replicas)
    is_state_of(open_any(tmp_path, SourceKind.AUTO, None, legacy=WITH)[0], p)


def test_a_replica_that_is_missing_is_refused(tmp_path):
    m = build["model"]()
    save_replicas(tmp_path, m, build["parameters"](m), 3)
    last = tmp_path / "iter_0000300" / "mp_rank_00_002"
    (last / "optim.pt").unlink()
    with pytest.raises(CorruptError, match="parts of other weights"):
        open_any(tmp_path, SourceKind.AUTO, None, legacy=WITH)
