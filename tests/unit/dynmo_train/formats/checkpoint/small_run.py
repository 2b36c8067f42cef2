"""A small run's state and its checkpoint, for the tests in this folder."""

from __future__ import annotations

import torch

from dynmo_train.formats.checkpoint import RunMetadata, build_manifest, commit, new_staging, write_shard
from dynmo_train.formats.checkpoint.manifest import whole_index
from dynmo_train.formats.checkpoint.writer import dtype_name

MODEL = {
    "family": "gpt",
    "num_layers": 2,
    "hidden_size": 8,
    "ffn_hidden_size": 32,
    "num_attention_heads": 2,
    "max_position_embeddings": 6,
    "vocab_size": 10,
    "padded_vocab_size": 12,
    "layernorm_epsilon": 1e-5,
    "activation": "gelu_tanh",
    "tied_embeddings": True,
}
PARTITION = [["embedding", "layers.0"], ["layers.1.attention", "layers.1.mlp", "head"]]


def parameters(seed=0):
    g = torch.Generator().manual_seed(seed)
    h, f = 8, 32
    shapes = {"embedding.word.weight": (12, h), "embedding.position.weight": (6, h)}
    for i in range(2):
        a, m = f"layers.{i}.attention", f"layers.{i}.mlp"
        shapes |= {f"{a}.norm.weight": (h,), f"{a}.norm.bias": (h,), f"{a}.qkv.weight": (3 * h, h)}
        shapes |= {f"{a}.qkv.bias": (3 * h,), f"{a}.dense.weight": (h, h), f"{a}.dense.bias": (h,)}
        shapes |= {f"{m}.norm.weight": (h,), f"{m}.norm.bias": (h,), f"{m}.fc1.weight": (f, h), f"{m}.fc1.bias": (f,)}
        shapes |= {f"{m}.fc2.weight": (h, f), f"{m}.fc2.bias": (h,)}
    shapes |= {"head.norm.weight": (h,), "head.norm.bias": (h,)}
    return {name: torch.randn(shape, generator=g) for name, shape in shapes.items()}


def state(seed=0):
    """All tensors with their roles: parameters, optimizer state, and one mask of an odd number of bytes' alignment."""
    tensors = {name: ("parameter", tensor) for name, tensor in parameters(seed).items()}
    for name, (_, tensor) in list(tensors.items()):
        tensors[f"{name}.exp_avg"] = ("optimizer", tensor * 0.1)
        tensors[f"{name}.exp_avg_sq"] = ("optimizer", tensor**2)
    tensors["layers.0.mlp.fc1.weight.mask"] = ("mask", tensors["layers.0.mlp.fc1.weight"][1] > 0)
    return tensors


def facts(step, **changes):
    names = list(parameters())
    values = {
        "run_id": "test",
        "step": step,
        "consumed_train_samples": step * 4,
        "model": MODEL,
        "topology": {
            "tensor_parallel_size": 1,
            "pipeline_parallel_size": 2,
            "data_parallel_size": 1,
            "virtual_stages_per_worker": 1,
            "schedule": "1f1b",
            "world_size": 2,
            "partition": PARTITION,
        },
        "dynamic": {"frozen_items": ["embedding"], "pruning": None, "sparse_thresholds": {"csr": 0.85}},
        "ties": {"head.weight": "embedding.word.weight"},
        "optimizer": {
            "type": "adamw",
            "steps": dict.fromkeys(names, step),
            "groups": [{"name": "decay", "weight_decay": 0.01, "parameters": names}],
        },
        "data": None,
        "rng": {"scheme": "hash(seed,step,microbatch,item)", "seed": 1},
    }
    return RunMetadata(**(values | changes))


def write_rank(staging, filename, tensors):
    checksums = write_shard(staging, filename, {name: tensor for name, (_, tensor) in tensors.items()})
    return [
        {
            "name": name,
            "dtype": dtype_name(tensor.dtype),
            "shape": list(tensor.shape),
            "role": role,
            "file": filename,
            "key": name,
            "index": whole_index(tensor.shape),
            "crc32": checksums[name],
        }
        for name, (role, tensor) in tensors.items()
    ]


def save(checkpoints_dir, step, tensors=None):
    """One checkpoint as two pipeline ranks write it."""
    tensors = state(step) if tensors is None else tensors
    staging = new_staging(checkpoints_dir, step)
    reports = []
    for rank, items in enumerate((("embedding.", "layers.0."), ("layers.1.", "head."))):
        mine = {name: value for name, value in tensors.items() if name.startswith(items)}
        for kind, roles in (("model", ("parameter", "mask", "buffer")), ("optimizer", ("optimizer",))):
            part = {name: value for name, value in mine.items() if value[0] in roles}
            reports.append(write_rank(staging, f"{kind}-p{rank:03d}-t00.safetensors", part))
    manifest = build_manifest(facts(step), reports, written_by="test", expected=list(parameters()))
    return commit(checkpoints_dir, step, staging, manifest)
