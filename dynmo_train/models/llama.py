"""Llama 2 and 3 and Mixtral: RMSNorm, rotary positions, gated SiLU, grouped queries, a head of its own, no biases.

Touvron et al. 2023 (arXiv:2307.09288), Grattafiori et al. 2024 (arXiv:2407.21783); Jiang et al. 2024
(arXiv:2401.04088).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import nn

from .blocks import Embedding, Head, Mlp, SelfAttention
from .chain import HEAD, WORD, build_item, chain_items
from .experts import MoeMlp, MoeShape
from .items import ItemSpec
from .items import split_dim as split_dim_of
from .positions import Rotary


@dataclass(frozen=True, kw_only=True)
class LlamaShape:
    """Everything that fixes a Llama's arithmetic. Widths in elements, dropouts as probabilities."""

    num_layers: int
    hidden_size: int
    ffn_hidden_size: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    max_position_embeddings: int
    vocab_size: int
    padded_vocab_size: int
    layernorm_epsilon: float = 1e-5
    rotary_base: float = 10000.0
    rotary_scaling: Mapping[str, Any] | None = None
    tied_embeddings: bool = False
    moe: MoeShape | None = None
    hidden_dropout: float = 0.0
    attention_dropout: float = 0.0
    init_method_std: float = 0.02
    seed: int = 1234


class Llama:
    """The Llama family over one shape; satisfies ``items.ModelFamily``."""

    def __init__(self, shape: LlamaShape) -> None:
        self.shape = shape

    @cached_property
    def items(self) -> tuple[ItemSpec, ...]:
        """``embedding``, two items a layer, ``head``."""
        moe = self.shape.moe
        tied = self.shape.tied_embeddings
        return chain_items(self.shape.num_layers, tied=tied, mlp_figures=moe.figures if moe else ())

    @property
    def ties(self) -> Mapping[str, str]:
        """None, unless the head shares the word table."""
        return {HEAD: WORD} if self.shape.tied_embeddings else {}

    def build(self, name: str, device: torch.device) -> nn.Module:
        """Build one item; its initial weights depend on the seed and the name alone, never on placement."""
        shape = self.shape
        return build_item(
            name,
            device,
            {"embedding": self._embedding, "attention": self._attention, "mlp": self._mlp, "head": self._head},
            seed=shape.seed,
            std=shape.init_method_std,
            ending_std=shape.init_method_std / math.sqrt(2 * shape.num_layers),
            ties=self.ties,
        )

    def _norm(self, device: torch.device) -> nn.Module:
        return nn.RMSNorm(self.shape.hidden_size, eps=self.shape.layernorm_epsilon, device=device)

    def _embedding(self, device: torch.device) -> nn.Module:
        shape = self.shape
        return Embedding(
            vocabulary=shape.padded_vocab_size, width=shape.hidden_size, dropout=shape.hidden_dropout, device=device
        )

    def _attention(self, device: torch.device) -> nn.Module:
        shape = self.shape
        return SelfAttention(
            width=shape.hidden_size,
            heads=shape.num_attention_heads,
            groups=shape.num_key_value_heads,
            head_width=shape.head_dim,
            norm=self._norm(device),
            bias=False,
            dropout=shape.hidden_dropout,
            attention_dropout=shape.attention_dropout,
            rotary=Rotary(shape.head_dim, shape.rotary_base, shape.rotary_scaling),
            device=device,
        )

    def _mlp(self, device: torch.device) -> nn.Module:
        shape = self.shape
        common: dict[str, Any] = {
            "width": shape.hidden_size,
            "inner": shape.ffn_hidden_size,
            "activation": "swiglu",
            "norm": self._norm(device),
            "bias": False,
            "dropout": shape.hidden_dropout,
            "device": device,
        }
        return Mlp(**common) if shape.moe is None else MoeMlp(moe=shape.moe, **common)

    def _head(self, device: torch.device) -> nn.Module:
        shape = self.shape
        return Head(
            width=shape.hidden_size,
            rows=shape.padded_vocab_size,
            vocabulary=shape.vocab_size,
            norm=self._norm(device),
            device=device,
        )

    def split_dim(self, parameter: str) -> int | None:
        """Heads, MLP width and vocabulary are cut; norms and routers are not."""
        return split_dim_of(parameter)

    def manifest(self) -> dict[str, object]:
        """The ``model`` object of a checkpoint's manifest."""
        shape = self.shape
        return {
            "family": "llama",
            "num_layers": shape.num_layers,
            "hidden_size": shape.hidden_size,
            "ffn_hidden_size": shape.ffn_hidden_size,
            "num_attention_heads": shape.num_attention_heads,
            "num_key_value_heads": shape.num_key_value_heads,
            "head_dim": shape.head_dim,
            "max_position_embeddings": shape.max_position_embeddings,
            "vocab_size": shape.vocab_size,
            "padded_vocab_size": shape.padded_vocab_size,
            "layernorm_epsilon": shape.layernorm_epsilon,
            "normalization": "rmsnorm",
            "activation": "swiglu",
            "position_embedding": "rotary",
            "rotary_base": shape.rotary_base,
            "rotary_scaling": None if shape.rotary_scaling is None else dict(shape.rotary_scaling),
            "tied_embeddings": shape.tied_embeddings,
            **(shape.moe.manifest() if shape.moe else {}),
        }
