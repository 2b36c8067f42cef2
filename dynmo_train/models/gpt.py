"""GPT-2/3: learned positions, pre-normalization, tanh GELU, tied embeddings (Radford et al. 2019, section 2.3)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, Self, TypeVar

import torch
from torch import nn

from ..config.extensions import FamilySpec
from .family import HEAD, WORD, Family, ModelDims, chain_items
from .layer_list import ItemSpec
from .moe import MoeShape

if TYPE_CHECKING:
    from ..config import Config


@dataclass(frozen=True, kw_only=True)
class GptShape(ModelDims):
    """Sizes of a GPT."""

    num_layers: int
    activation: str = "gelu_tanh"
    tied_embeddings: bool = True
    moe: MoeShape | None = None

    @classmethod
    def from_config(cls, config: Config, **own: Any) -> Self:
        """The sizes of a run."""
        tied = not config.model.untie_embeddings_and_output_weights
        return super().from_config(config, tied_embeddings=tied, moe=MoeShape.from_config(config), **own)


Shape = TypeVar("Shape", bound=GptShape)


class Gpt(Family[Shape]):
    """The GPT family; satisfies ``layer_list.ModelFamily``."""

    name = "gpt"

    @cached_property
    def items(self) -> tuple[ItemSpec, ...]:
        """``embedding``, two items a layer, ``head``; every item may begin a stage."""
        shape = self.shape
        moe = shape.moe
        return chain_items(shape.num_layers, tied=shape.tied_embeddings, mlp_metrics=moe.metrics if moe else ())

    @property
    def ties(self) -> Mapping[str, str]:
        """The head's weight is tied to the word table, unless embeddings are untied."""
        return {HEAD: WORD} if self.shape.tied_embeddings else {}

    def num_layers_at(self, item: str) -> int:
        """All blocks form one stack."""
        return self.shape.num_layers

    def mlp(self, device: torch.device, moe: MoeShape | None = None) -> nn.Module:
        """The MLP of a block, or its experts."""
        return super().mlp(device, moe or self.shape.moe)

    def own_manifest(self) -> dict[str, object]:
        """Number of blocks, and the experts."""
        shape = self.shape
        return {"num_layers": shape.num_layers, **(shape.moe.manifest() if shape.moe else {})}


FAMILY = FamilySpec(
    from_config=lambda config: Gpt(GptShape.from_config(config)),
    from_manifest=lambda model: Gpt(GptShape.from_manifest(model)),
)
