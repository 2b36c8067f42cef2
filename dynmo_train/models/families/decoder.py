"""Models of one causal stream, whose shape is data: GPT, Llama, Mistral, Mixtral, Qwen, Gemma, Phi, OLMo.

``gpt.py`` and ``llama.py`` are names of shapes: they differ by the values that fields have where nothing else is given.

    normalization      layernorm, rmsnorm, rmsnorm_1p          norm_placement   pre, sandwich, post
    position_embedding learned, rotary                         qk_norm          head, projection
    activation         of ACTIVATIONS and GATED                *_bias           of attention and MLP

Attentions may differ by layer: ``layer_types`` states which have the sliding window, and the base of those alone may be
another one, ``local_rotary_base``; ``no_rope_freq`` has 1 for each layer whose queries and keys are not rotated.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any, ClassVar, Self, TypeVar

import torch
from torch import nn

from ...config.parse import repeat_pattern
from ..attention.documents import STARTS, PackedAttention, PackedLatentAttention
from ..attention.latent_attention import LatentAttention, LatentShape
from ..attention.positions import Rotary
from ..attention.self_attention import SelfAttention
from ..experts.moe_shape import MoeShape
from ..layer_list import ItemSpec
from ..layers.gated import ClampedSwiglu
from ..layers.norms import Multiplied, RmsNorm, RmsNorm1p
from ..vocabulary.embedding import Embedding, PackedEmbedding
from ..vocabulary.head import Head
from .family import HEAD, WORD, Builders, Family, ModelDims, chain_items
from .multi_token import PREFIX, PredictionLayer, prediction_items, prediction_ties

if TYPE_CHECKING:
    from ...config import Config

PRE, SANDWICH, POST = "pre", "sandwich", "post"
HEAD_NORM, PROJECTION_NORM = "head", "projection"
CLAMPED_SWIGLU, QUICK_GEGLU = "clamped_swiglu", "quick_geglu"
FULL_ATTENTION, SLIDING_ATTENTION = "full_attention", "sliding_attention"
RMS_NORMS: Mapping[str, Callable[..., nn.Module]] = {"rmsnorm": RmsNorm, "rmsnorm_1p": RmsNorm1p}
STATED_AS_THEY_ARE = (
    "normalization",
    "norm_placement",
    "attention_bias",
    "mlp_bias",
    "qk_norm",
    "position_embedding",
    "rotary_base",
    "rotary_fraction",
    "sliding_window",
    "embedding_scale",
    "attention_scale",
    "local_rotary_base",
    "attn_logit_softcapping",
    "final_logit_softcapping",
    "attention_sinks",
    "swiglu_alpha",
    "swiglu_limit",
    "swiglu_offset",
    "softmax_off_by_one",
    "residual_multiplier",
    "logits_scaling",
)


@dataclass(frozen=True, kw_only=True)
class DecoderShape(ModelDims):
    """Shape of a decoder; fields without a comment are those of a manifest's ``model`` (``formats/checkpoint.md``).

    How it reads samples of several documents (the last three before ``moe``) is not stored in a checkpoint.
    """

    num_layers: int
    num_key_value_heads: int | None = None
    head_dim: int | None = None
    normalization: str = "layernorm"
    norm_placement: str = PRE
    attention_bias: str = "all"
    mlp_bias: bool = True
    qk_norm: str | None = None
    position_embedding: str = "learned"
    rotary_base: float = 10000.0
    rotary_scaling: Mapping[str, Any] | None = None
    rotary_fraction: float = 1.0
    sliding_window: int | None = None
    layer_types: tuple[str, ...] | None = None
    local_rotary_base: float | None = None
    no_rope_freq: tuple[int, ...] | None = None
    residual_multiplier: float = 1.0
    logits_scaling: float = 1.0
    attn_logit_softcapping: float | None = None
    final_logit_softcapping: float | None = None
    attention_sinks: bool = False
    swiglu_alpha: float = 1.702
    swiglu_limit: float = 7.0
    swiglu_offset: float = 1.0
    softmax_off_by_one: bool = False
    tied_embeddings: bool = True
    embedding_scale: float = 1.0
    attention_scale: float | None = None
    reset_position_ids: bool = False
    reset_attention_mask: bool = False
    eod_mask_loss: bool = False
    moe: MoeShape | None = None
    latent: LatentShape | None = None
    mtp_num_layers: int = 0
    mtp_loss_scaling_factor: float = 0.1

    @classmethod
    def from_config(cls, config: Config, **own: Any) -> Self:
        """The sizes of a run."""
        model, data = config.model, config.data
        return super().from_config(
            config,
            activation=model.activation,
            num_key_value_heads=model.num_query_groups,
            head_dim=model.kv_channels,
            sliding_window=model.attention_window,
            layer_types=layer_types_of(model.layer_type_pattern, model.num_layers),
            no_rope_freq=model.layers_without_rotation,
            tied_embeddings=not model.untie_embeddings_and_output_weights,
            position_embedding=model.position_embedding_type,
            attention_bias="all" if model.add_bias_linear else "qkv" if model.add_qkv_bias else "none",
            # Of the latents, which always have norms: not of heads.
            qk_norm=None if model.qk_norm == "none" or model.multi_latent_attention else model.qk_norm,
            rotary_scaling=model.rotary_scaling_object,
            rotary_fraction=model.rotary_percent,
            reset_position_ids=data.resets_positions,
            reset_attention_mask=data.resets_attention,
            eod_mask_loss=data.masks_loss,
            moe=MoeShape.from_config(config),
            latent=LatentShape.from_config(config),
            **own,
        )

    @classmethod
    def from_manifest(cls, model: Mapping[str, Any]) -> Self:
        """The sizes that the ``model`` object of a manifest states."""
        shape = super().from_manifest(model)
        lists: Mapping[str, Any] = {name: getattr(shape, name) for name in ("layer_types", "no_rope_freq")}
        found: dict[str, Any] = {name: tuple(each) for name, each in lists.items() if each is not None}
        return replace(shape, **found)

    def is_local(self, layer: int) -> bool:
        """Whether the attention of a layer, counted from 0, has the sliding window."""
        if self.sliding_window is None:
            return False
        return self.layer_types is None or self.layer_types[layer] == SLIDING_ATTENTION

    def rotary_of(self, layer: int) -> Rotary | None:
        """The rotation of queries and keys in a layer, if it has one; a base of local layers has no scaling."""
        if self.position_embedding == "learned" or (self.no_rope_freq is not None and self.no_rope_freq[layer]):
            return None
        if self.local_rotary_base is not None and self.is_local(layer):
            return Rotary(self.rotary_width, self.local_rotary_base)
        return Rotary(self.rotary_width, self.rotary_base, self.rotary_scaling)

    @property
    def head_width(self) -> int:
        """Size of a head in elements."""
        if self.latent is not None:
            return self.latent.key_width
        return self.head_dim or self.hidden_size // self.num_attention_heads

    @property
    def groups(self) -> int:
        """Number of key-value heads."""
        if self.latent is not None:
            return self.num_attention_heads
        return self.num_key_value_heads or self.num_attention_heads

    @property
    def rotary_width(self) -> int:
        """Number of the elements of a head that are rotated."""
        if self.latent is not None:
            return self.latent.qk_pos_emb_head_dim
        return int(self.head_width * self.rotary_fraction)

    def stated(self) -> dict[str, object]:
        """The fields of a manifest that describe a decoder, by name."""
        scaling = None if self.rotary_scaling is None else dict(self.rotary_scaling)
        return {
            "num_key_value_heads": self.groups,
            "head_dim": self.head_width,
            "rotary_scaling": scaling,
            "layer_types": None if self.layer_types is None else list(self.layer_types),
            "no_rope_freq": None if self.no_rope_freq is None else list(self.no_rope_freq),
            **{name: getattr(self, name) for name in STATED_AS_THEY_ARE},
        }

    def plain(self) -> Self:
        """The same sizes with what else a model of this name has."""
        defaults: dict[str, Any] = {field.name: field.default for field in fields(self) if field.name in self.stated()}
        return replace(self, **defaults)


Shape = TypeVar("Shape", bound=DecoderShape)


def layer_types_of(pattern: Sequence[str] | None, num_layers: int) -> tuple[str, ...] | None:
    """The types of all layers, by a pattern that repeats; None where all have the window, if the model has one.

    Args:
        pattern: ``full_attention`` and ``sliding_attention`` by layer; None means the window in all layers.
        num_layers: number of layers.
    """
    if pattern is None:
        return None
    types = tuple(repeat_pattern(pattern, num_layers))
    return None if set(types) == {SLIDING_ATTENTION} else types


def layer_number(name: str) -> int:
    """The number of the layer that an item is a part of, by its name: 7 of ``layers.7.attention``; 0 for others."""
    words = name.split(".")
    return int(words[1]) if words[0] == "layers" else 0


class Decoder(Family[Shape]):
    """A decoder; satisfies ``layer_list.ModelFamily``. A subclass has the name of its shape."""

    always: ClassVar[tuple[str, ...]] = ()
    """Fields that a manifest always states; the others where the value is not that of the subclass's shape."""

    @cached_property
    def items(self) -> tuple[ItemSpec, ...]:
        """``embedding``, two items a layer, ``head``; every item may begin a stage."""
        shape = self.shape
        moe = shape.moe
        items = chain_items(
            shape.num_layers,
            tied=shape.tied_embeddings,
            embedding_inputs=("ids", STARTS) if self._resets_position_table else ("ids",),
            attention_inputs=(STARTS,) if self._packs_attention else (),
            head_inputs=("labels", "loss_mask") if shape.eod_mask_loss else ("labels",),
            mlp_metrics=moe.metrics if moe else (),
        )
        *blocks, head = (
            replace(item, metrics=()) if item.kind == "mlp" and self._moe_of(item.name) is None else item
            for item in items
        )
        further = prediction_items(
            shape.mtp_num_layers,
            tied_to="embedding" if shape.tied_embeddings else "head",
            inputs=(*head.inputs, STARTS) if self._packs_attention else head.inputs,
            metrics=self._further_metrics,
        )
        return (*blocks, *further, head)

    @property
    def _further_metrics(self) -> tuple[tuple[str, int], ...]:
        """Metrics of the MLPs of multi-token prediction, which are as that of the last block."""
        moe = self.shape.moe
        return moe.metrics if moe is not None and moe.has_experts(self.shape.num_layers) else ()

    def _moe_of(self, item: str) -> MoeShape | None:
        """The experts of an MLP by its full name; None where it is dense."""
        stack, layer, *_ = item.split(".")
        moe, number = self.shape.moe, self.shape.num_layers if stack == PREFIX else int(layer)
        return moe if moe is not None and moe.has_experts(number) else None

    @property
    def _learns_positions(self) -> bool:
        return self.shape.position_embedding == "learned"

    @property
    def _resets_position_table(self) -> bool:
        return self.shape.reset_position_ids and self._learns_positions

    @property
    def _packs_attention(self) -> bool:
        return self.shape.reset_attention_mask or (self.shape.reset_position_ids and not self._learns_positions)

    def builders(self, name: str) -> Builders:
        """Layers that read where documents begin, where the run asks for it."""
        # A further prediction is as the last block.
        layer = self.shape.num_layers - 1 if name.startswith(f"{PREFIX}.") else layer_number(name)
        builders = dict(super().builders(name))
        builders["attention"] = lambda device: SelfAttention(**self.attention_options(device, layer))
        if self._resets_position_table:
            builders["embedding"] = lambda device: PackedEmbedding(**self.embedding_options(device))
        packed: dict[str, Any] = {}
        if self._packs_attention:
            packed = {
                "reset_positions": self.shape.reset_position_ids,
                "reset_mask": self.shape.reset_attention_mask,
            }
            builders["attention"] = lambda device: PackedAttention(**packed, **self.attention_options(device, layer))
        if self.shape.latent is not None:
            kind = PackedLatentAttention if packed else LatentAttention
            builders["attention"] = lambda device: kind(**packed, **self.latent_options(device))
        builders["mlp"] = lambda device: self.mlp(device, self._moe_of(name))
        if name.startswith(f"{PREFIX}."):
            depth = name.rpartition(".")[2]
            builders[depth] = lambda device: self._prediction(builders, int(depth), device)
        return builders

    def _prediction(self, builders: Builders, depth: int, device: torch.device) -> PredictionLayer:
        """A depth of multi-token prediction."""
        shape = self.shape
        layer = PredictionLayer(
            depth=depth,
            depths=shape.mtp_num_layers,
            loss_scale=shape.mtp_loss_scaling_factor,
            final_norm=self.norm(device) if depth == 0 else None,
            norms=(self.norm(device), self.norm(device)),
            embedding=Embedding(**{**self.embedding_options(device), "positions": 0}),
            attention=builders["attention"](device),
            mlp=builders["mlp"](device),
            head=Head(**self.head_options(device)),
            width=shape.hidden_size,
            device=device,
        )
        item = next(each for each in self.items if each.name == f"{PREFIX}.{depth}")
        layer.reads_mask, layer.metrics = "loss_mask" in item.inputs, item.metrics
        return layer

    @property
    def ties(self) -> Mapping[str, str]:
        """The head's weight is tied to the word table, unless embeddings are untied; copies of further predictions."""
        shape = self.shape
        own = {HEAD: WORD} if shape.tied_embeddings else {}
        norm = ("head.norm.weight", "head.norm.bias") if shape.normalization == "layernorm" else ("head.norm.weight",)
        return {**prediction_ties(shape.mtp_num_layers, WORD, own.get(HEAD, HEAD), norm), **own}

    def num_layers_at(self, item: str) -> int:
        """All blocks form one stack."""
        return self.shape.num_layers

    def norm(self, device: torch.device) -> nn.Module:
        """A normalization of the residual stream."""
        return self._norm_of(self.shape.hidden_size, device)

    def _norm_of(self, width: int, device: torch.device) -> nn.Module:
        kind = RMS_NORMS.get(self.shape.normalization)
        eps = self.shape.layernorm_epsilon
        return nn.LayerNorm(width, eps=eps, device=device) if kind is None else kind(width, eps=eps, device=device)

    def _norms(self, device: torch.device) -> dict[str, nn.Module | None]:
        """The normalizations before and after a sublayer; a factor on its output takes the place of the latter."""
        placement, factor = self.shape.norm_placement, self.shape.residual_multiplier
        plain = None if factor == 1.0 else Multiplied(factor)
        return {
            "norm": nn.Identity() if placement == POST else self.norm(device),
            "post_norm": plain if placement == PRE else self.norm(device),
        }

    def embedding_options(self, device: torch.device) -> dict[str, Any]:
        """Adds the scale; models with rotary positions have no table of them."""
        options = {**super().embedding_options(device), "scale": self.shape.embedding_scale}
        return options if self._learns_positions else {**options, "positions": 0}

    def attention_options(self, device: torch.device, layer: int = 0) -> dict[str, Any]:
        """Adds grouped queries, positions, norms, biases, and the sliding window of a layer.

        Args:
            device: where the parameters are created.
            layer: number of the layer, from 0.
        """
        shape = self.shape
        widths = {
            HEAD_NORM: (shape.head_width, shape.head_width),
            PROJECTION_NORM: (shape.num_attention_heads * shape.head_width, shape.groups * shape.head_width),
        }.get(shape.qk_norm or "")
        return {
            **super().attention_options(device),
            **self._norms(device),
            "groups": shape.groups,
            "head_width": shape.head_width,
            "bias": shape.attention_bias == "all",
            "qkv_bias": shape.attention_bias != "none",
            "query_norm": None if widths is None else self._norm_of(widths[0], device),
            "key_norm": None if widths is None else self._norm_of(widths[1], device),
            "scale": shape.attention_scale,
            "rotary": shape.rotary_of(layer),
            "window": shape.sliding_window if shape.is_local(layer) else None,
            "softcap": shape.attn_logit_softcapping,
            "sinks": shape.attention_sinks,
            "off_by_one": shape.softmax_off_by_one,
        }

    def latent_options(self, device: torch.device) -> dict[str, Any]:
        """Arguments of ``latent_attention.LatentAttention``.

        Raises:
            ValueError: the model has another attention.
        """
        shape, latent = self.shape, self.shape.latent
        if latent is None:
            raise ValueError("the model has no latent attention")
        return {
            "latent": latent,
            "width": shape.hidden_size,
            "heads": shape.num_attention_heads,
            **self._norms(device),
            "rotary": Rotary(latent.qk_pos_emb_head_dim, shape.rotary_base, shape.rotary_scaling),
            "scale": shape.attention_scale or latent.scale(shape.rotary_scaling),
            "bias": shape.attention_bias == "all",
            "down_bias": shape.attention_bias != "none",
            "window": shape.sliding_window,
            "dropout": shape.hidden_dropout,
            "attention_dropout": shape.attention_dropout,
            "device": device,
        }

    def mlp_options(self, device: torch.device) -> dict[str, Any]:
        """Adds the norms and the bias."""
        shape, options = self.shape, super().mlp_options(device)
        if shape.activation == CLAMPED_SWIGLU:
            options["activation"] = ClampedSwiglu(shape.swiglu_alpha, shape.swiglu_limit, shape.swiglu_offset)
        if shape.activation == QUICK_GEGLU:
            options["activation"] = ClampedSwiglu(shape.swiglu_alpha, math.inf, shape.swiglu_offset)
        return {**options, **self._norms(device), "bias": shape.mlp_bias}

    def head_options(self, device: torch.device) -> dict[str, Any]:
        """Adds the soft cap of the logits, and their divisor as a factor on the input."""
        shape = self.shape
        return {
            **super().head_options(device),
            "softcap": shape.final_logit_softcapping,
            "scale": 1.0 / shape.logits_scaling,
        }

    def own_manifest(self) -> dict[str, object]:
        """Number of blocks, what the model has and others of its name have not, and the experts."""
        shape = self.shape
        # Readers of versions without a field must refuse a model that needs it.
        plain = shape.plain().stated()
        always = (*self.always, "head_dim", "num_key_value_heads") if shape.latent is not None else self.always
        own = {name: value for name, value in shape.stated().items() if name in always or value != plain[name]}
        parts = [part.manifest() for part in (shape.latent, shape.moe) if part is not None]
        if shape.mtp_num_layers:
            parts.append({"mtp_num_layers": shape.mtp_num_layers})
        return {
            "num_layers": shape.num_layers,
            **own,
            **{name: value for part in parts for name, value in part.items()},
        }
