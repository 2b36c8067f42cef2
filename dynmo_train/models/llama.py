"""Llama 2 and 3 and Mixtral: RMSNorm, rotary positions, gated SiLU, grouped queries, an untied head, no biases.

Touvron et al. 2023 (arXiv:2307.09288), Grattafiori et al. 2024 (arXiv:2407.21783); Jiang et al. 2024
(arXiv:2401.04088).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Self

import torch
from torch import nn

from ..config.extensions import FamilySpec
from .gpt import Gpt, GptShape
from .norms import RmsNorm
from .positions import Rotary

if TYPE_CHECKING:
    from ..config import Config


@dataclass(frozen=True, kw_only=True)
class LlamaShape(GptShape):
    """Sizes of a Llama."""

    num_key_value_heads: int
    head_dim: int
    rotary_base: float = 10000.0
    rotary_scaling: Mapping[str, Any] | None = None
    activation: str = "swiglu"
    tied_embeddings: bool = False
    hidden_dropout: float = 0.0
    attention_dropout: float = 0.0

    @classmethod
    def from_config(cls, config: Config, **own: Any) -> Self:
        """The sizes of a run."""
        model = config.model
        # Llama 3.1's own values; only the factor differs between its sizes.
        scaling = {
            "rope_type": "llama3",
            "factor": model.rope_scaling_factor,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8192,
        }
        return super().from_config(
            config,
            num_key_value_heads=model.num_query_groups,
            head_dim=model.kv_channels,
            rotary_scaling=scaling if model.use_rope_scaling else None,
            **own,
        )


class Llama(Gpt[LlamaShape]):
    """The Llama family: a GPT's layer list with other layers."""

    name = "llama"
    bias = False
    learns_positions = False

    def norm(self, device: torch.device) -> nn.Module:
        """RMSNorm."""
        return RmsNorm(self.shape.hidden_size, eps=self.shape.layernorm_epsilon, device=device)

    def embedding_options(self, device: torch.device) -> dict[str, Any]:
        """No position table."""
        return {**super().embedding_options(device), "positions": 0}

    def attention_options(self, device: torch.device) -> dict[str, Any]:
        """Adds grouped queries and rotary positions."""
        shape = self.shape
        return {
            **super().attention_options(device),
            "groups": shape.num_key_value_heads,
            "head_width": shape.head_dim,
            "rotary": Rotary(shape.head_dim, shape.rotary_base, shape.rotary_scaling),
        }

    def own_manifest(self) -> dict[str, object]:
        """A GPT's fields, and those of a Llama."""
        shape = self.shape
        return {
            **super().own_manifest(),
            "num_key_value_heads": shape.num_key_value_heads,
            "head_dim": shape.head_dim,
            "normalization": "rmsnorm",
            "position_embedding": "rotary",
            "rotary_base": shape.rotary_base,
            "rotary_scaling": None if shape.rotary_scaling is None else dict(shape.rotary_scaling),
        }


FAMILY = FamilySpec(
    from_config=lambda config: Llama(LlamaShape.from_config(config)),
    from_manifest=lambda model: Llama(LlamaShape.from_manifest(model)),
)
