"""A reference writer of native checkpoints for tests: numpy, safetensors and json only, none of the project's code."""

from __future__ import annotations

import itertools
import json
import re
import zlib

import numpy as np
from safetensors.numpy import save_file

DTYPES = {"float32": "F32", "float16": "F16", "bool": "BOOL", "int64": "I64"}
STATE_NAMES = ("exp_avg", "exp_avg_sq", "momentum_buffer", "row_var", "col_var", "variance")
STATE_OF_ROWS = r"\.(exp_avg|exp_avg_sq|momentum_buffer|row_var|variance|mask)$"
SPLIT = {"qkv.weight": 0, "qkv.bias": 0, "attention.dense.weight": 1, "fc1.weight": 0, "fc1.bias": 0, "fc2.weight": 1}
SPLIT |= {"embedding.word.weight": 0, "head.weight": 0}


def model(**changes):
    return {
        "family": "gpt",
        "num_layers": 3,
        "hidden_size": 16,
        "ffn_hidden_size": 40,
        "num_attention_heads": 4,
        "max_position_embeddings": 12,
        "vocab_size": 29,
        "padded_vocab_size": 32,
        "layernorm_epsilon": 1e-5,
        "activation": "gelu_tanh",
        "tied_embeddings": True,
    } | changes


def parameters(m, seed=0, dtype=np.float32):
    rng = np.random.default_rng(seed)
    h, f = m["hidden_size"], m["ffn_hidden_size"]
    shapes = {"embedding.word.weight": (m["padded_vocab_size"], h)}
    shapes["embedding.position.weight"] = (m["max_position_embeddings"], h)
    for i in range(m["num_layers"]):
        a, b = f"layers.{i}.attention", f"layers.{i}.mlp"
        shapes |= {f"{a}.norm.weight": (h,), f"{a}.norm.bias": (h,), f"{a}.qkv.weight": (3 * h, h)}
        shapes |= {f"{a}.qkv.bias": (3 * h,), f"{a}.dense.weight": (h, h), f"{a}.dense.bias": (h,)}
        shapes |= {f"{b}.norm.weight": (h,), f"{b}.norm.bias": (h,), f"{b}.fc1.weight": (f, h), f"{b}.fc1.bias": (f,)}
        shapes |= {f"{b}.fc2.weight": (h, f), f"{b}.fc2.bias": (h,)}
    shapes |= {"head.norm.weight": (h,), "head.norm.bias": (h,)}
    if not m["tied_embeddings"]:
        shapes["head.weight"] = (m["padded_vocab_size"], h)
    return {name: rng.normal(0, 0.3, shape).astype(dtype) for name, shape in shapes.items()}


def true_rows(rows, tensors):
    """The tensors without the rows that pad the vocabulary: as checkpoints store them, and as readers give them."""
    padded = re.compile(r"(.*\.)?embedding\.word\.weight|head\.(weight|bias)")
    cut = {name for name in tensors if padded.fullmatch(re.sub(STATE_OF_ROWS, "", name))}
    return {name: value[:rows] if name in cut else value for name, value in tensors.items()}


def masks(tensors, sparsity=0.5, seed=1):
    rng = np.random.default_rng(seed)
    names = [name for name in tensors if name.startswith("layers.") and tensors[name].ndim == 2]
    return {f"{name}.mask": rng.random(tensors[name].shape) >= sparsity for name in names}


def optimizer_state(tensors, kind="adamw"):
    """The state of an optimizer, float32 by tensor name."""
    state = {}
    for name, value in tensors.items():
        if kind == "sgd" or (kind == "muon" and value.ndim == 2 and name.startswith("layers.")):
            state[f"{name}.momentum_buffer"] = (value * 0.1).astype(np.float32)
            continue
        if kind == "adafactor" and value.ndim == 2:
            squares = value.astype(np.float32) ** 2
            state[f"{name}.row_var"] = squares.mean(1, keepdims=True)
            state[f"{name}.col_var"] = squares.mean(0, keepdims=True)
            continue
        if kind == "adafactor":
            state[f"{name}.variance"] = value.astype(np.float32) ** 2
            continue
        state[f"{name}.exp_avg"] = (value * 0.1).astype(np.float32)
        state[f"{name}.exp_avg_sq"] = (value.astype(np.float32)) ** 2
    return state


def role_of(name):
    last = name.rpartition(".")[2]
    return "mask" if last == "mask" else "optimizer" if last in STATE_NAMES else "parameter"


def even_stages(m, stages):
    items = ["embedding", *(f"layers.{i}" for i in range(m["num_layers"])), "head"]
    cuts = [len(items) * s // stages for s in range(stages + 1)]
    return [items[a:b] for a, b in itertools.pairwise(cuts)]


def split_dim(name):
    base = name.rpartition(".")[0] if role_of(name) != "parameter" else name
    # A factor has one element in one of the dimensions, which cannot be split.
    whole = {"row_var": 1, "col_var": 0}.get(name.rpartition(".")[2])
    return next((dim for suffix, dim in SPLIT.items() if base.endswith(suffix) and dim != whole), None)


def save(directory, tensors, m, *, partition=None, tp=1, step=8, files=None, optimizer="adamw", **changes):
    """Write ``tensors`` as a checkpoint directory. ``files``: other files' bytes by path. Returns the manifest."""
    directory.mkdir(parents=True)
    partition = partition or even_stages(m, 2)
    shards, entries = {}, {}
    for name, value in tensors.items():
        stage = next(s for s, items in enumerate(partition) if any(name.startswith(f"{item}.") for item in items))
        dim = split_dim(name) if tp > 1 else None
        parts = [value] if dim is None else np.split(value, tp, axis=dim)
        role, at = role_of(name), 0
        entry = {"dtype": DTYPES[value.dtype.name], "shape": list(value.shape), "role": role, "split_dim": dim}
        entry["shards"] = []
        for rank, part in enumerate(parts):
            file = f"{'optimizer' if role == 'optimizer' else 'model'}-p{stage:03d}-t{rank:02d}.safetensors"
            part = np.ascontiguousarray(part)
            shards.setdefault(file, {})[name] = part
            index = [[0, size] for size in value.shape]
            if dim is not None:
                index[dim] = [at, at + part.shape[dim]]
                at += part.shape[dim]
            crc = f"{zlib.crc32(part.tobytes()):08x}"
            entry["shards"].append({"file": file, "key": name, "index": index, "crc32": crc})
        entries[name] = entry
    for file, arrays in shards.items():
        save_file(arrays, directory / file)
    for file, payload in (files or {}).items():
        (directory / file).parent.mkdir(parents=True, exist_ok=True)
        (directory / file).write_bytes(payload)
    document = manifest(m, entries, partition, tp, step, optimizer=optimizer, **changes)
    document["files"] = {
        path.relative_to(directory).as_posix(): {
            "bytes": path.stat().st_size,
            "crc32": f"{zlib.crc32(path.read_bytes()):08x}",
        }
        for path in sorted(directory.rglob("*"))
        if path.is_file()
    }
    (directory / "manifest.json").write_bytes(sealed(document))
    return document


def manifest(m, entries, partition, tp, step, optimizer="adamw", **changes):
    stored = [name for name, entry in entries.items() if entry["role"] == "parameter"]
    has_state = any(entry["role"] == "optimizer" for entry in entries.values())
    steps = {"type": optimizer, "steps": dict.fromkeys(stored, step)}
    pruned = any(entry["role"] == "mask" for entry in entries.values())
    return {
        "format": "dynmo.checkpoint",
        "version": 1,
        "written_by": "test",
        "created_utc": "2026-01-01T00:00:00Z",
        "manifest_crc32": "00000000",
        "run_id": "test",
        "step": step,
        "consumed_train_samples": 4 * step,
        "model": m,
        "topology": {
            "tensor_parallel_size": tp,
            "pipeline_parallel_size": len(partition),
            "data_parallel_size": 1,
            "virtual_stages_per_worker": 1,
            "schedule": "1f1b",
            "world_size": tp * len(partition),
            "partition": partition,
        },
        "dynamic": {
            "frozen_items": ["embedding"] if m["family"] != "t5" else [],
            "pruning": {"sparsity": 0.5, "sparsity_by_item": {}} if pruned else None,
            "sparse_thresholds": {},
        },
        "tensors": entries,
        "ties": {"head.weight": "embedding.word.weight"} if m["tied_embeddings"] else {},
        "optimizer": (steps | {"groups": [{"name": "all", "weight_decay": 0.1, "parameters": stored}]})
        if has_state
        else None,
        "data": {"seed": 1, "split": "969,30,1", "sequence_length": 12, "prefix": "corpus"},
        "rng": {"scheme": "hash(seed,step,microbatch,item)", "seed": 7},
    } | changes


def sealed(document):
    blank = json.dumps({**document, "manifest_crc32": "00000000"}, indent=1).encode()
    return blank.replace(b'"00000000"', f'"{zlib.crc32(blank):08x}"'.encode(), 1)
