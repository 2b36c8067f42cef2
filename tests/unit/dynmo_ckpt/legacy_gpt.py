"""Writes legacy Megatron GPT checkpoints for tests, with torch.save, from native parameters."""

from __future__ import annotations

import argparse
from enum import Enum

import numpy as np
import torch

NAMES = {
    "attention.norm": "input_layernorm",
    "attention.qkv": "self_attention.query_key_value",
    "attention.dense": "self_attention.dense",
    "mlp.norm": "post_attention_layernorm",
    "mlp.fc1": "mlp.dense_h_to_4h",
    "mlp.fc2": "mlp.dense_4h_to_h",
}
SPLIT = {"attention.qkv.weight": 0, "attention.qkv.bias": 0, "attention.dense.weight": 1}
SPLIT |= {"mlp.fc1.weight": 0, "mlp.fc1.bias": 0, "mlp.fc2.weight": 1}


class ModelType(Enum):
    """Megatron's enum, which later files contain."""

    encoder_or_decoder = 1


ModelType.__module__ = "megatron.core.enums"


def rows_of_version(value, heads, version):
    """Rows of one tensor-parallel rank, from the native order [heads, 3, head_dim] to that of the version."""
    grouped = value.reshape(heads, 3, -1, *value.shape[1:])
    if version == 0:
        grouped = np.moveaxis(grouped, 1, 0)
    elif version == 1:
        grouped = np.moveaxis(grouped, 1, 2)
    return np.ascontiguousarray(grouped).reshape(value.shape)


def layer(p, i, m, rank, tp, version):
    result = {}
    for ours, theirs in NAMES.items():
        for kind in ("weight", "bias"):
            value = p[f"layers.{i}.{ours}.{kind}"]
            dim = SPLIT.get(f"{ours}.{kind}")
            if dim is not None:
                value = np.split(value, tp, axis=dim)[rank]
            if ours == "attention.qkv":
                value = rows_of_version(value, m["num_attention_heads"] // tp, version)
            result[f"{theirs}.{kind}"] = torch.from_numpy(np.ascontiguousarray(value))
    return result


def chunk_state(p, m, layers, first, last, rank, tp, version, container, pipelined):
    """The ``model`` of one chunk: ``layers`` are global numbers, stored from 0 on."""
    word = torch.from_numpy(np.split(p["embedding.word.weight"], tp)[rank].copy())
    blocks = {}
    for local, i in enumerate(layers):
        for name, value in layer(p, i, m, rank, tp, version).items():
            blocks[f"layers.{local}.{name}"] = value
    state = {"language_model": {container: blocks}}
    if first:
        position = torch.from_numpy(p["embedding.position.weight"])
        embedding = {"word_embeddings": {"weight": word}, "position_embeddings": {"weight": position}}
        state["language_model"] = {"embedding": embedding, container: blocks}
    if last:
        blocks["final_layernorm.weight"] = torch.from_numpy(p["head.norm.weight"])
        blocks["final_layernorm.bias"] = torch.from_numpy(p["head.norm.bias"])
        if not m["tied_embeddings"]:
            head = torch.from_numpy(np.split(p["head.weight"], tp)[rank].copy())
            state["language_model"]["output_layer"] = {"weight": head}
        elif pipelined:
            state["word_embeddings_for_head"] = {"weight": word.clone()}
    return state


def save(directory, p, m, *, tp=1, stages=None, virtual=1, version=3.0, args=True, rename=None, is_zip=True, **extra):
    """Write an iteration; ``stages``: layers of each chunk in layer order, workers x virtual of them."""
    stages = stages or [m["num_layers"]]
    workers = len(stages) // virtual
    starts = np.cumsum([0, *stages])
    iteration = directory / "iter_0000300"
    for rank in range(tp):
        for stage in range(workers):
            chunks = []
            for v in range(virtual):
                at = v * workers + stage
                layers = range(starts[at], starts[at + 1])
                container = "encoder" if version >= 3 else "transformer"
                ends = at == 0, at == len(stages) - 1
                chunks.append(chunk_state(p, m, layers, *ends, rank, tp, version, container, workers > 1))
            document = {"iteration": 300, "optimizer": {"state": {0: {"exp_avg": torch.zeros(3)}}}}
            numpy_state = np.random.RandomState(0).get_state()
            document["rng_state"] = [{"np_rng_state": numpy_state, "torch_rng_state": torch.zeros(4).byte()}]
            if version:
                document["checkpoint_version"] = version
            if args:
                document["args"] = argparse.Namespace(
                    num_attention_heads=m["num_attention_heads"],
                    layernorm_epsilon=m["layernorm_epsilon"],
                    bias_gelu_fusion=m["activation"] == "gelu_tanh",
                    params_dtype=torch.float16,
                    orig_vocab_size=m["vocab_size"],
                    model_type=ModelType.encoder_or_decoder,
                    **extra,
                )
            document |= {"model": chunks[0]} if virtual == 1 else {f"model{v}": c for v, c in enumerate(chunks)}
            if rename:
                document = rename(document)
            folder = iteration / (f"mp_rank_{rank:02d}" if workers == 1 else f"mp_rank_{rank:02d}_{stage:03d}")
            folder.mkdir(parents=True)
            torch.save(document, folder / "model_optim_rng.pt", _use_new_zipfile_serialization=is_zip)
    (directory / "latest_checkpointed_iteration.txt").write_text("300")
    return iteration
