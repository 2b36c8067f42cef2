"""Legacy Megatron files of BERT, T5 and Llama for tests, written from the definition of each tensor-parallel layer."""

from __future__ import annotations

import argparse

import numpy as np
import torch


def torched(value):
    return torch.from_numpy(np.ascontiguousarray(value))


def rows(value, groups, version, parts=3):
    """Rows [groups, parts, width] in the order of a version: 0 [parts, groups, width], 1 [groups, width, parts]."""
    grouped = value.reshape(groups, parts, -1, *value.shape[1:])
    order = {0: (1, 0, 2), 1: (0, 2, 1)}.get(version, (0, 1, 2))
    return grouped.transpose(*order, *range(3, grouped.ndim)).reshape(value.shape)


def part(value, rank, tp, dim):
    return np.split(value, tp, axis=dim)[rank]


def both(p, ours, theirs):
    return {f"{theirs}.{k}": p[f"{ours}.{k}"] for k in ("weight", "bias") if f"{ours}.{k}" in p}


def attention(p, name, theirs, m, rank, tp, version):
    result = {}
    groups = m.get("num_key_value_heads", m["num_attention_heads"])
    each = m["num_attention_heads"] // groups + 2
    for k in ("weight", "bias"):
        if f"{name}.qkv.{k}" in p:
            local = part(p[f"{name}.qkv.{k}"], rank, tp, 0)
            result[f"{theirs}.query_key_value.{k}"] = rows(local, groups // tp, version, each)
    result[f"{theirs}.dense.weight"] = part(p[f"{name}.dense.weight"], rank, tp, 1)
    if f"{name}.dense.bias" in p:
        result[f"{theirs}.dense.bias"] = p[f"{name}.dense.bias"]
    return result


def mlp(p, name, m, rank, tp):
    if m["family"] == "llama":
        first = np.concatenate([part(p[f"{name}.{k}.weight"], rank, tp, 0) for k in ("gate", "up")])
        result = {"mlp.dense_h_to_4h.weight": first}
    else:
        result = {f"mlp.dense_h_to_4h.{k}": part(p[f"{name}.fc1.{k}"], rank, tp, 0) for k in ("weight", "bias")}
        result["mlp.dense_4h_to_h.bias"] = p[f"{name}.fc2.bias"]
    return result | {"mlp.dense_4h_to_h.weight": part(p[f"{name}.fc2.weight"], rank, tp, 1)}


def layer(p, name, m, rank, tp, version, norms):
    result = both(p, f"{name}.attention.norm", norms[0])
    result |= attention(p, f"{name}.attention", "self_attention", m, rank, tp, version)
    if f"{name}.cross_attention.query.weight" in p:
        cross, heads = f"{name}.cross_attention", m["num_attention_heads"]
        result |= both(p, f"{cross}.norm", norms[1])
        for k in ("weight", "bias"):
            result[f"inter_attention.query.{k}"] = part(p[f"{cross}.query.{k}"], rank, tp, 0)
            pair = part(p[f"{cross}.key_value.{k}"], rank, tp, 0)
            result[f"inter_attention.key_value.{k}"] = rows(pair, heads // tp, version, 2)
        result["inter_attention.dense.weight"] = part(p[f"{cross}.dense.weight"], rank, tp, 1)
        result["inter_attention.dense.bias"] = p[f"{cross}.dense.bias"]
        norms = (norms[0], "post_inter_attention_layernorm")
    return result | both(p, f"{name}.mlp.norm", norms[1]) | mlp(p, f"{name}.mlp", m, rank, tp)


def stack(p, prefix, layers, m, rank, tp, version, norms):
    return {
        f"layers.{local}.{name}": value
        for local, i in enumerate(layers)
        for name, value in layer(p, f"{prefix}layers.{i}", m, rank, tp, version, norms).items()
    }


def embedding(p, prefix, rank, tp):
    result = {"word_embeddings": {"weight": part(p[f"{prefix}embedding.word.weight"], rank, tp, 0)}}
    for ours, theirs in (("position", "position_embeddings"), ("tokentype", "tokentype_embeddings")):
        if f"{prefix}embedding.{ours}.weight" in p:
            result[theirs] = {"weight": p[f"{prefix}embedding.{ours}.weight"]}
    return result


def chunk(p, m, stages, stage, rank, tp, version):
    """The ``model`` of a stage; ``stages`` are pairs of ranges of the encoder's and the decoder's layers."""
    family, (encoder, decoder) = m["family"], stages[stage]
    suffix = "norm" if family == "llama" else "layernorm"
    norms = (f"input_{suffix}", f"post_attention_{suffix}")
    last = stage == len(stages) - 1
    final = f"final_{suffix}"
    prefix = "encoder." if family == "t5" else ""
    language, state = {}, {}
    if len(encoder):
        language["encoder"] = stack(p, prefix, encoder, m, rank, tp, version, norms)
    if len(decoder):
        language["decoder"] = stack(p, "decoder.", decoder, m, rank, tp, version, norms)
    if stage == 0 or (len(decoder) and decoder[0] == 0):
        language["embedding"] = embedding(p, prefix, rank, tp)
    if family == "t5" and len(encoder) and encoder[-1] == m["num_layers"] - 1:
        language["encoder"] |= both(p, "encoder.norm", final)
    if last:
        language["decoder" if family == "t5" else "encoder"] |= both(p, "head.norm", final)
        if family == "llama":
            language["output_layer"] = {"weight": part(p["head.weight"], rank, tp, 0)}
        else:
            state["lm_head"] = {"bias": part(p["head.bias"], rank, tp, 0)}
            state["lm_head"] |= both(p, "head.dense", "dense") | both(p, "head.dense_norm", "layernorm")
            if "embedding" not in language:
                state["word_embeddings_for_head"] = embedding(p, prefix, rank, tp)["word_embeddings"]
        if "head.binary.weight" in p:
            language["pooler"] = both(p, "head.pooler", "dense")
            state["binary_head"] = {k: p[f"head.binary.{k}"] for k in ("weight", "bias")}
    return {"language_model": language, **state}


def tensors(value):
    return {k: tensors(v) for k, v in value.items()} if isinstance(value, dict) else torched(value)


def save(directory, p, m, *, tp=1, stages, version=3.0):
    for rank in range(tp):
        for stage in range(len(stages)):
            args = {"num_attention_heads": m["num_attention_heads"], "orig_vocab_size": m["vocab_size"]}
            args |= {"layernorm_epsilon": m["layernorm_epsilon"], "bias_gelu_fusion": m["activation"] == "gelu_tanh"}
            if m["family"] == "llama":
                args |= {"swiglu": True, "normalization": "RMSNorm", "use_rotary_position_embeddings": True}
                args |= {"group_query_attention": True, "num_query_groups": m["num_key_value_heads"]}
                args |= {"kv_channels": m["head_dim"], "max_position_embeddings": m["max_position_embeddings"]}
                args |= {"rotary_base": int(m["rotary_base"]), "rotary_percent": 1.0}
            document = {"iteration": 7, "args": argparse.Namespace(**args)}
            document |= {"checkpoint_version": version} if version else {}
            document["model"] = tensors(chunk(p, m, stages, stage, rank, tp, version))
            folder = f"mp_rank_{rank:02d}" + (f"_{stage:03d}" if len(stages) > 1 else "")
            (directory / "iter_0000007" / folder).mkdir(parents=True)
            torch.save(document, directory / "iter_0000007" / folder / "model_optim_rng.pt")
    (directory / "latest_checkpointed_iteration.txt").write_text("7")
