"""GPT-2/3: learned positions, pre-normalization, tanh GELU, tied embeddings (Radford et al. 2019, section 2.3)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, ClassVar, Self, TypeVar

import torch
from torch import nn

from ..config.extensions import FamilySpec
from .documents import STARTS, PackedAttention, PackedEmbedding
from .family import HEAD, WORD, Builders, Family, ModelDims, chain_items
from .layer_list import ItemSpec
from .moe import MoeShape

if TYPE_CHECKING:
    from ..config import Config


@dataclass(frozen=True, kw_only=True)
class GptShape(ModelDims):
    """Sizes of a GPT, and how it reads samples of several documents, which a checkpoint does not store."""

    num_layers: int
    activation: str = "gelu_tanh"
    tied_embeddings: bool = True
    sliding_window: int | None = None
    reset_position_ids: bool = False
    reset_attention_mask: bool = False
    eod_mask_loss: bool = False
    moe: MoeShape | None = None

    @classmethod
    def from_config(cls, config: Config, **own: Any) -> Self:
        """The sizes of a run."""
        data = config.data
        return super().from_config(
            config,
            sliding_window=config.model.attention_window,
            tied_embeddings=not config.model.untie_embeddings_and_output_weights,
            reset_position_ids=data.reset_position_ids,
            reset_attention_mask=data.reset_attention_mask,
            eod_mask_loss=data.eod_mask_loss,
            moe=MoeShape.from_config(config),
            **own,
        )


Shape = TypeVar("Shape", bound=GptShape)


class Gpt(Family[Shape]):
    """The GPT family; satisfies ``layer_list.ModelFamily``."""

    name = "gpt"
    learns_positions: ClassVar[bool] = True

    @cached_property
    def items(self) -> tuple[ItemSpec, ...]:
        """``embedding``, two items a layer, ``head``; every item may begin a stage."""
        shape = self.shape
        moe = shape.moe
        return chain_items(
            shape.num_layers,
            tied=shape.tied_embeddings,
            embedding_inputs=("ids", STARTS) if self._resets_position_table else ("ids",),
            attention_inputs=(STARTS,) if self._packs_attention else (),
            head_inputs=("labels", "loss_mask") if shape.eod_mask_loss else ("labels",),
            mlp_metrics=moe.metrics if moe else (),
        )

    @property
    def _resets_position_table(self) -> bool:
        return self.shape.reset_position_ids and self.learns_positions

    @property
    def _packs_attention(self) -> bool:
        return self.shape.reset_attention_mask or (self.shape.reset_position_ids and not self.learns_positions)

    def builders(self, name: str) -> Builders:
        """Layers that read where documents begin, where the run asks for it."""
        builders = dict(super().builders(name))
        if self._resets_position_table:
            builders["embedding"] = lambda device: PackedEmbedding(**self.embedding_options(device))
        if self._packs_attention:
            builders["attention"] = lambda device: PackedAttention(
                reset_positions=self.shape.reset_position_ids,
                reset_mask=self.shape.reset_attention_mask,
                **self.attention_options(device),
            )
        return builders

    @property
    def ties(self) -> Mapping[str, str]:
        """The head's weight is tied to the word table, unless embeddings are untied."""
        return {HEAD: WORD} if self.shape.tied_embeddings else {}

    def num_layers_at(self, item: str) -> int:
        """All blocks form one stack."""
        return self.shape.num_layers

    def attention_options(self, device: torch.device) -> dict[str, Any]:
        """Adds the sliding window."""
        return {**super().attention_options(device), "window": self.shape.sliding_window}

    def mlp(self, device: torch.device, moe: MoeShape | None = None) -> nn.Module:
        """The MLP of a block, or its experts."""
        return super().mlp(device, moe or self.shape.moe)

    def own_manifest(self) -> dict[str, object]:
        """Number of blocks, the sliding window, and the experts."""
        shape = self.shape
        # Readers of versions without windows must not read such a model.
        window = {} if shape.sliding_window is None else {"sliding_window": shape.sliding_window}
        return {"num_layers": shape.num_layers, **window, **(shape.moe.manifest() if shape.moe else {})}


FAMILY = FamilySpec(
    from_config=lambda config: Gpt(GptShape.from_config(config)),
    from_manifest=lambda model: Gpt(GptShape.from_manifest(model)),
)
