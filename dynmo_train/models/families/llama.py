"""Llama 2 and 3 and Mistral: RMSNorm, rotary positions, gated SiLU, grouped queries, an untied head, no biases.

Touvron et al. 2023 (arXiv:2307.09288), Grattafiori et al. 2024 (arXiv:2407.21783); Jiang et al. 2024
(arXiv:2401.04088).
"""

from __future__ import annotations

from dataclasses import dataclass

from ...config.extensions import FamilySpec
from .decoder import Decoder, DecoderShape


@dataclass(frozen=True, kw_only=True)
class LlamaShape(DecoderShape):
    """Shape of a Llama."""

    normalization: str = "rmsnorm"
    attention_bias: str = "none"
    mlp_bias: bool = False
    position_embedding: str = "rotary"
    activation: str = "swiglu"
    tied_embeddings: bool = False
    hidden_dropout: float = 0.0
    attention_dropout: float = 0.0


class Llama(Decoder[LlamaShape]):
    """The Llama family."""

    name = "llama"
    always = (
        "num_key_value_heads",
        "head_dim",
        "normalization",
        "position_embedding",
        "rotary_base",
        "rotary_scaling",
    )


FAMILY = FamilySpec(
    from_config=lambda config: Llama(LlamaShape.from_config(config)),
    from_manifest=lambda model: Llama(LlamaShape.from_manifest(model)),
)
