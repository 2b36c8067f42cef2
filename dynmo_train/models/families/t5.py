"""T5 in one layer list: an encoder, then a decoder that attends to it (Raffel et al. 2020, arXiv:1910.10683).

With learned positions it is Megatron's (layer norms, biases, GELU, a bias on the head); with relative ones it is T5's
own (RMSNorm, no biases, unscaled attention, a tied head whose input is scaled by ``D^-0.5``).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, Literal, Self

import torch
from torch import nn

from ...config.extensions import FamilySpec
from ..attention.cross_attention import CrossAttention
from ..attention.positions import RelativeBias
from ..attention.self_attention import SelfAttention
from ..layer_list import LOSS, BoundaryShape, ItemSpec
from ..layers.norms import RmsNorm
from .family import Builders, Family, ModelDims

if TYPE_CHECKING:
    from ...config import Config

WORD, POSITION = "encoder.embedding.word.weight", "encoder.embedding.position.weight"
ENCODER, DECODER = "encoder", "decoder"


@dataclass(frozen=True, kw_only=True)
class T5Shape(ModelDims):
    """Sizes of a T5."""

    num_encoder_layers: int
    num_decoder_layers: int
    head_dim: int
    position_embedding: Literal["learned", "relative"] = "learned"
    relative_buckets: int = 32
    relative_max_distance: int = 128

    @classmethod
    def from_config(cls, config: Config, **own: Any) -> Self:
        """The sizes of a run."""
        model = config.model
        relative = model.position_embedding_type == "relative"
        return super().from_config(
            config,
            num_encoder_layers=model.num_layers,
            num_decoder_layers=model.decoder_num_layers,
            head_dim=model.kv_channels,
            position_embedding="relative" if relative else "learned",
            relative_buckets=model.relative_attention_num_buckets,
            relative_max_distance=model.relative_attention_max_distance,
            activation="relu" if relative else model.activation,
            **own,
        )

    @property
    def is_relative(self) -> bool:
        """Whether it is T5's own arithmetic rather than Megatron's."""
        return self.position_embedding == "relative"


class T5(Family[T5Shape]):
    """The T5 family; satisfies ``layer_list.ModelFamily``."""

    name = "t5"

    @cached_property
    def items(self) -> tuple[ItemSpec, ...]:
        """Embedding, two items a layer and a norm in the encoder; embedding and three items a layer in the decoder."""
        shape = self.shape
        return (*self._encoder_items(), *self._decoder_items(shape.num_decoder_layers))

    def _encoder_items(self) -> list[ItemSpec]:
        common: dict[str, Any] = {"cut_before": True, "writes": ENCODER}
        name = "encoder.embedding"
        items = [ItemSpec(name=name, layer=name, kind="embedding", reads=(), inputs=("encoder_ids",), **common)]
        for index in range(self.shape.num_encoder_layers):
            layer = f"encoder.layers.{index}"
            items.append(
                ItemSpec(
                    name=f"{layer}.attention",
                    layer=layer,
                    kind="attention",
                    reads=(ENCODER,),
                    inputs=("encoder_attention_mask",),
                    tied_to="encoder.layers.0.attention" if self.shape.is_relative and index else None,
                    **common,
                )
            )
            items.append(ItemSpec(name=f"{layer}.mlp", layer=layer, kind="mlp", reads=(ENCODER,), **common))
        # Part of the last layer: a stage of its own would have almost no work.
        last = f"encoder.layers.{self.shape.num_encoder_layers - 1}"
        items.append(ItemSpec(name="encoder.norm", layer=last, kind="layer", reads=(ENCODER,), **common))
        return items

    def _decoder_items(self, num_layers: int) -> list[ItemSpec]:
        common: dict[str, Any] = {"cut_before": True, "writes": DECODER}
        name, owner = "decoder.embedding", "encoder.embedding"
        items = [
            ItemSpec(
                name=name, layer=name, kind="embedding", reads=(), inputs=("decoder_ids",), tied_to=owner, **common
            )
        ]
        for index in range(num_layers):
            layer = f"decoder.layers.{index}"
            items.append(
                ItemSpec(
                    name=f"{layer}.attention",
                    layer=layer,
                    kind="attention",
                    reads=(DECODER,),
                    tied_to="decoder.layers.0.attention" if self.shape.is_relative and index else None,
                    **common,
                )
            )
            items.append(
                ItemSpec(
                    name=f"{layer}.cross_attention",
                    layer=layer,
                    kind="cross_attention",
                    reads=(DECODER, ENCODER),
                    inputs=("encoder_attention_mask",),
                    **common,
                )
            )
            items.append(ItemSpec(name=f"{layer}.mlp", layer=layer, kind="mlp", reads=(DECODER,), **common))
        head = ItemSpec(
            name="head",
            layer="head",
            kind="head",
            cut_before=True,
            tied_to=owner,
            reads=(DECODER,),
            writes=LOSS,
            inputs=("labels", "loss_mask"),
        )
        return [*items, head]

    @property
    def ties(self) -> Mapping[str, str]:
        """One word table for encoder, decoder and head; one position table, or one relative-bias table per stack."""
        ties = {"decoder.embedding.word.weight": WORD}
        if not self.shape.is_relative:
            ties["decoder.embedding.position.weight"] = POSITION
        else:
            sides = ((ENCODER, self.shape.num_encoder_layers), (DECODER, self.shape.num_decoder_layers))
            for side, layers in sides:
                table = "attention.relative.weight"
                ties |= {f"{side}.layers.{n}.{table}": f"{side}.layers.0.{table}" for n in range(1, layers)}
        return {**ties, "head.weight": WORD}

    @property
    def bias(self) -> bool:  # type: ignore[override] # by shape
        """T5's own arithmetic has no biases."""
        return not self.shape.is_relative

    def num_layers_at(self, item: str) -> int:
        """Encoder and decoder are separate stacks."""
        return self.shape.num_encoder_layers if item.startswith(ENCODER) else self.shape.num_decoder_layers

    def builders(self, name: str) -> Builders:
        """Causal or bidirectional self-attention by the stack of ``name``, cross-attention, and the encoder's norm."""
        return {
            **super().builders(name),
            "attention": lambda device: self._attention(device, causal=name.startswith(DECODER)),
            "cross_attention": lambda device: CrossAttention(
                scaled=not self.shape.is_relative, **self.attention_options(device)
            ),
            "norm": self.norm,
        }

    def norm(self, device: torch.device) -> nn.Module:
        """RMSNorm in T5's own arithmetic."""
        shape = self.shape
        kind = RmsNorm if shape.is_relative else nn.LayerNorm
        return kind(shape.hidden_size, eps=shape.layernorm_epsilon, device=device)

    def embedding_options(self, device: torch.device) -> dict[str, Any]:
        """Positions only where they are learned."""
        positions = 0 if self.shape.is_relative else self.shape.max_position_embeddings
        return {**super().embedding_options(device), "positions": positions}

    def attention_options(self, device: torch.device) -> dict[str, Any]:
        """Adds the head width."""
        return {**super().attention_options(device), "head_width": self.shape.head_dim}

    def _attention(self, device: torch.device, *, causal: bool) -> nn.Module:
        shape = self.shape
        relative = None
        if shape.is_relative:
            relative = RelativeBias(
                shape.relative_buckets, shape.num_attention_heads, shape.relative_max_distance, device
            )
        return SelfAttention(causal=causal, relative=relative, **self.attention_options(device))

    def head_options(self, device: torch.device) -> dict[str, Any]:
        """Megatron's head has a bias; the original T5 scales the input."""
        shape = self.shape
        scale = shape.hidden_size**-0.5 if shape.is_relative else 1.0
        return {**super().head_options(device), "bias": self.bias, "scale": scale}

    def own_manifest(self) -> dict[str, object]:
        """Both stacks, and the position embedding."""
        shape = self.shape
        relative = {"relative_buckets": shape.relative_buckets, "relative_max_distance": shape.relative_max_distance}
        return {
            "num_layers": shape.num_encoder_layers,
            "num_encoder_layers": shape.num_encoder_layers,
            "num_decoder_layers": shape.num_decoder_layers,
            "head_dim": shape.head_dim,
            "normalization": "rmsnorm" if shape.is_relative else "layernorm",
            "position_embedding": shape.position_embedding,
            **(relative if shape.is_relative else {}),
        }


def _boundary(config: Config) -> BoundaryShape:
    model, batch = config.model, config.training.micro_batch_size
    return BoundaryShape(
        shapes={
            ENCODER: (batch, model.seq_length, model.hidden_size),
            DECODER: (batch, model.decoder_seq_length, model.hidden_size),
            LOSS: (),
        }
    )


FAMILY = FamilySpec(
    from_config=lambda config: T5(T5Shape.from_config(config)),
    from_manifest=lambda model: T5(T5Shape.from_manifest(model)),
    boundary=_boundary,
    like="t5",
)
