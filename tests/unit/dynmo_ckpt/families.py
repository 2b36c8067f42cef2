"""Small models of each family for tests: the manifest's ``model`` and random parameters under DynMo's names."""

from __future__ import annotations

import numpy as np

COMMON = {"hidden_size": 16, "ffn_hidden_size": 24, "num_attention_heads": 4, "max_position_embeddings": 12}
COMMON |= {"vocab_size": 29, "padded_vocab_size": 32, "layernorm_epsilon": 1e-5}

T5 = {"head_dim": 4, "normalization": "layernorm"}


def llama(**changes):
    m = {"family": "llama", "num_layers": 3, **COMMON, "num_key_value_heads": 2, "head_dim": 4, "activation": "swiglu"}
    m |= {"normalization": "rmsnorm", "position_embedding": "rotary", "rotary_base": 10000.0, "rotary_scaling": None}
    return m | {"tied_embeddings": False} | changes


def bert(**changes):
    m = {"family": "bert", "num_layers": 3, **COMMON, "activation": "gelu", "tied_embeddings": True}
    return m | {"num_tokentypes": 2, "binary_head": True} | changes


def t5(**changes):
    m = {"family": "t5", "num_layers": 2, "num_encoder_layers": 2, "num_decoder_layers": 3, **COMMON}
    return m | {"activation": "gelu", "position_embedding": "learned", "tied_embeddings": True, **T5} | changes


def ties(m):
    if m["family"] == "t5":
        word, position = (f"encoder.embedding.{kind}.weight" for kind in ("word", "position"))
        copies = {"decoder.embedding.word.weight": word, "decoder.embedding.position.weight": position}
        return copies | {"head.weight": word}
    return {"head.weight": "embedding.word.weight"} if m["tied_embeddings"] else {}


def linear(name, rows, columns, bias=True):
    return {f"{name}.weight": (rows, columns)} | ({f"{name}.bias": (rows,)} if bias else {})


def norm(name, h, bias=True):
    return {f"{name}.weight": (h,)} | ({f"{name}.bias": (h,)} if bias else {})


def block(name, m):
    h, f, llama_ = m["hidden_size"], m["ffn_hidden_size"], m["family"] == "llama"
    width = m.get("head_dim", h // m["num_attention_heads"])
    heads = m["num_attention_heads"]
    total = (heads + 2 * m.get("num_key_value_heads", heads)) * width
    shapes = norm(f"{name}.attention.norm", h, not llama_) | linear(f"{name}.attention.qkv", total, h, not llama_)
    shapes |= linear(f"{name}.attention.dense", h, heads * width, not llama_) | norm(f"{name}.mlp.norm", h, not llama_)
    experts = m.get("num_experts", 0)
    if experts:
        shapes |= {f"{name}.mlp.router.weight": (experts, h)}
    for inner in [f"{name}.mlp.experts.{j}" for j in range(experts)] or [f"{name}.mlp"]:
        if llama_:
            shapes |= linear(f"{inner}.gate", f, h, False) | linear(f"{inner}.up", f, h, False)
            shapes |= linear(f"{inner}.fc2", h, f, False)
        else:
            shapes |= linear(f"{inner}.fc1", f, h) | linear(f"{inner}.fc2", h, f)
    return shapes


def parameters(m, seed=0, dtype=np.float32):
    h, v, s = m["hidden_size"], m["padded_vocab_size"], m["max_position_embeddings"]
    prefix = "encoder." if m["family"] == "t5" else ""
    shapes = {f"{prefix}embedding.word.weight": (v, h)}
    if m["family"] != "llama":
        shapes[f"{prefix}embedding.position.weight"] = (s, h)
    if m.get("num_tokentypes"):
        shapes["embedding.tokentype.weight"] = (m["num_tokentypes"], h)
    for i in range(m["num_layers"]):
        shapes |= block(f"{prefix}layers.{i}", m)
    if m["family"] == "t5":
        shapes |= norm("encoder.norm", h)
        for i in range(m["num_decoder_layers"]):
            name = f"decoder.layers.{i}"
            cross = f"{name}.cross_attention"
            shapes |= block(name, m) | norm(f"{cross}.norm", h) | linear(f"{cross}.query", h, h)
            shapes |= linear(f"{cross}.key_value", 2 * h, h) | linear(f"{cross}.dense", h, h)
    shapes |= norm("head.norm", h, m["family"] != "llama")
    if m["family"] == "bert":
        shapes |= linear("head.dense", h, h) | norm("head.dense_norm", h)
    if m["family"] in ("bert", "t5"):
        shapes |= {"head.bias": (v,)}
    if m.get("binary_head"):
        shapes |= linear("head.pooler", h, h) | linear("head.binary", 2, h)
    if not m["tied_embeddings"]:
        shapes["head.weight"] = (v, h)
    rng = np.random.default_rng(seed)
    return {name: rng.normal(0, 0.3, shape).astype(dtype) for name, shape in shapes.items()}
