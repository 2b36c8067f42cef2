"""T5 in one layer list: an encoder, then a decoder that attends to it (Raffel et al. 2020, arXiv:1910.10683).

With learned positions it is Megatron's (layer norms, biases, GELU, a bias on the head); with relative ones it is T5's
own (RMSNorm, no biases, unscaled attention, a tied head whose input is scaled by ``D^-0.5``).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal

import torch
from torch import nn

from .blocks import CrossAttention, Embedding, Head, Mlp, SelfAttention
from .initial import initialise
from .items import LOSS, ItemSpec
from .items import split_dim as split_dim_of
from .positions import RelativeBias

WORD, POSITION = "encoder.embedding.word.weight", "encoder.embedding.position.weight"
ENCODER, DECODER = "encoder", "decoder"


@dataclass(frozen=True, kw_only=True)
class T5Shape:
    """Everything that fixes a T5's arithmetic. Widths in elements, dropouts as probabilities."""

    num_encoder_layers: int
    num_decoder_layers: int
    hidden_size: int
    ffn_hidden_size: int
    num_attention_heads: int
    head_dim: int
    max_position_embeddings: int
    vocab_size: int
    padded_vocab_size: int
    position_embedding: Literal["learned", "relative"] = "learned"
    relative_buckets: int = 32
    relative_max_distance: int = 128
    activation: str = "gelu"
    layernorm_epsilon: float = 1e-5
    hidden_dropout: float = 0.1
    attention_dropout: float = 0.1
    init_method_std: float = 0.02
    seed: int = 1234

    @property
    def is_relative(self) -> bool:
        """Whether it is T5's own arithmetic rather than Megatron's."""
        return self.position_embedding == "relative"


class T5:
    """The T5 family over one shape; satisfies ``items.ModelFamily``."""

    def __init__(self, shape: T5Shape) -> None:
        self.shape = shape

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
                    inputs=("encoder_seen",),
                    tied_to="encoder.layers.0.attention" if self.shape.is_relative and index else None,
                    **common,
                )
            )
            items.append(ItemSpec(name=f"{layer}.mlp", layer=layer, kind="mlp", reads=(ENCODER,), **common))
        # The norm belongs to the last layer: it is no layer that a stage could be given.
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
                    inputs=("encoder_seen",),
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
            inputs=("labels", "counts"),
        )
        return [*items, head]

    @property
    def ties(self) -> Mapping[str, str]:
        """One word table for encoder, decoder and head; one table of positions, or one of distances each side."""
        ties = {"decoder.embedding.word.weight": WORD}
        if not self.shape.is_relative:
            ties["decoder.embedding.position.weight"] = POSITION
        else:
            sides = ((ENCODER, self.shape.num_encoder_layers), (DECODER, self.shape.num_decoder_layers))
            for side, layers in sides:
                table = "attention.relative.weight"
                ties |= {f"{side}.layers.{n}.{table}": f"{side}.layers.0.{table}" for n in range(1, layers)}
        return {**ties, "head.weight": WORD}

    def build(self, name: str, device: torch.device) -> nn.Module:
        """Build one item; its initial weights depend on the seed and the name alone, never on placement."""
        shape = self.shape
        builders = {
            "embedding": self._embedding,
            "attention": lambda device: self._attention(device, causal=name.startswith(DECODER)),
            "cross_attention": self._cross_attention,
            "mlp": self._mlp,
            "norm": self._norm,
            "head": self._head,
        }
        kind = name.rpartition(".")[2]
        module = builders[kind](device)
        layers = shape.num_encoder_layers if name.startswith(ENCODER) else shape.num_decoder_layers
        std = shape.init_method_std
        ending_std = std / math.sqrt(2 * layers)
        initialise(name, module, seed=shape.seed, std=std, ending_std=ending_std, ties=self.ties)
        return module

    def _norm(self, device: torch.device) -> nn.Module:
        shape = self.shape
        kind = nn.RMSNorm if shape.is_relative else nn.LayerNorm
        return kind(shape.hidden_size, eps=shape.layernorm_epsilon, device=device)

    def _embedding(self, device: torch.device) -> nn.Module:
        shape = self.shape
        return Embedding(
            vocabulary=shape.padded_vocab_size,
            width=shape.hidden_size,
            positions=0 if shape.is_relative else shape.max_position_embeddings,
            dropout=shape.hidden_dropout,
            device=device,
        )

    def _attention_options(self, device: torch.device) -> dict[str, Any]:
        shape = self.shape
        return {
            "width": shape.hidden_size,
            "heads": shape.num_attention_heads,
            "head_width": shape.head_dim,
            "norm": self._norm(device),
            "bias": not shape.is_relative,
            "dropout": shape.hidden_dropout,
            "attention_dropout": shape.attention_dropout,
            "device": device,
        }

    def _attention(self, device: torch.device, *, causal: bool) -> nn.Module:
        shape = self.shape
        relative = None
        if shape.is_relative:
            relative = RelativeBias(
                shape.relative_buckets, shape.num_attention_heads, shape.relative_max_distance, device
            )
        return SelfAttention(causal=causal, relative=relative, **self._attention_options(device))

    def _cross_attention(self, device: torch.device) -> nn.Module:
        return CrossAttention(scaled=not self.shape.is_relative, **self._attention_options(device))

    def _mlp(self, device: torch.device) -> nn.Module:
        shape = self.shape
        return Mlp(
            width=shape.hidden_size,
            inner=shape.ffn_hidden_size,
            activation=shape.activation,
            norm=self._norm(device),
            bias=not shape.is_relative,
            dropout=shape.hidden_dropout,
            device=device,
        )

    def _head(self, device: torch.device) -> nn.Module:
        shape = self.shape
        return Head(
            width=shape.hidden_size,
            rows=shape.padded_vocab_size,
            vocabulary=shape.vocab_size,
            norm=self._norm(device),
            bias=not shape.is_relative,
            scale=shape.hidden_size**-0.5 if shape.is_relative else 1.0,
            device=device,
        )

    def split_dim(self, parameter: str) -> int | None:
        """Heads, MLP width and vocabulary are cut; norms and positions are not."""
        return split_dim_of(parameter)

    def manifest(self) -> dict[str, object]:
        """The ``model`` object of a checkpoint's manifest."""
        shape = self.shape
        return {
            "family": "t5",
            "num_layers": shape.num_encoder_layers,
            "num_encoder_layers": shape.num_encoder_layers,
            "num_decoder_layers": shape.num_decoder_layers,
            "hidden_size": shape.hidden_size,
            "ffn_hidden_size": shape.ffn_hidden_size,
            "num_attention_heads": shape.num_attention_heads,
            "head_dim": shape.head_dim,
            "max_position_embeddings": shape.max_position_embeddings,
            "vocab_size": shape.vocab_size,
            "padded_vocab_size": shape.padded_vocab_size,
            "layernorm_epsilon": shape.layernorm_epsilon,
            "normalization": "rmsnorm" if shape.is_relative else "layernorm",
            "activation": shape.activation,
            "position_embedding": shape.position_embedding,
            "tied_embeddings": True,
            **(
                {"relative_buckets": shape.relative_buckets, "relative_max_distance": shape.relative_max_distance}
                if shape.is_relative
                else {}
            ),
        }
