"""GPT-2/3: learned positions, pre-normalization, tanh GELU, tied embeddings (Radford et al. 2019, section 2.3)."""

from __future__ import annotations

from dataclasses import dataclass

from ...config.extensions import FamilySpec
from .decoder import Decoder, DecoderShape


@dataclass(frozen=True, kw_only=True)
class GptShape(DecoderShape):
    """Shape of a GPT."""

    activation: str = "gelu_tanh"


class Gpt(Decoder[GptShape]):
    """The GPT family."""

    name = "gpt"


FAMILY = FamilySpec(
    from_config=lambda config: Gpt(GptShape.from_config(config)),
    from_manifest=lambda model: Gpt(GptShape.from_manifest(model)),
)
