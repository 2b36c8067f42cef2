"""transformers' Megatron BERT for a shape of ours: its configuration, and its encoder's parameters from our blocks."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from transformers import MegatronBertConfig

from dynmo_train.models.families.family import ModelDims


def config_of(shape: ModelDims, num_layers: int) -> MegatronBertConfig:
    return MegatronBertConfig(
        vocab_size=shape.vocab_size,
        hidden_size=shape.hidden_size,
        num_hidden_layers=num_layers,
        num_attention_heads=shape.num_attention_heads,
        intermediate_size=shape.ffn_hidden_size,
        hidden_act="gelu",
        max_position_embeddings=shape.max_position_embeddings,
        type_vocab_size=2,
        layer_norm_eps=shape.layernorm_epsilon,
    )


def both(values: Mapping[str, torch.Tensor], pairs: Mapping[str, str]) -> dict[str, torch.Tensor]:
    """Weights and biases of modules: their names to ours."""
    return {f"{t}.{kind}": values[f"{o}.{kind}"] for t, o in pairs.items() for kind in ("weight", "bias")}


def encoder(
    values: Mapping[str, torch.Tensor], shape: ModelDims, num_layers: int, *, tower: str = "", norm: str
) -> dict[str, torch.Tensor]:
    """Embeddings and blocks of a BERT under ``{tower}bert.``; ``norm`` is our name of the last normalisation."""
    bert = f"{tower}bert"
    out = {
        f"{bert}.embeddings.word_embeddings.weight": values[f"{tower}embedding.word.weight"][: shape.vocab_size],
        f"{bert}.embeddings.position_embeddings.weight": values[f"{tower}embedding.position.weight"],
        f"{bert}.embeddings.token_type_embeddings.weight": values[f"{tower}embedding.tokentype.weight"],
    }
    pairs = {f"{bert}.encoder.ln": norm}
    for n in range(num_layers):
        theirs, ours = f"{bert}.encoder.layer.{n}", f"{tower}layers.{n}"
        pairs |= {
            f"{theirs}.attention.ln": f"{ours}.attention.norm",
            f"{theirs}.attention.output.dense": f"{ours}.attention.dense",
            f"{theirs}.ln": f"{ours}.mlp.norm",
            f"{theirs}.intermediate.dense": f"{ours}.mlp.fc1",
            f"{theirs}.output.dense": f"{ours}.mlp.fc2",
        }
        for kind in ("weight", "bias"):
            qkv = values[f"{ours}.attention.qkv.{kind}"].unflatten(0, (shape.num_attention_heads, 3, -1))
            for place, part in enumerate(("query", "key", "value")):
                out[f"{theirs}.attention.self.{part}.{kind}"] = qkv[:, place].flatten(0, 1)
    return out | both(values, pairs)
