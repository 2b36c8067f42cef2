"""The base class of model families, and their common sizes.

A subclass overrides what differs from a GPT; ``llama.py`` is the shortest one. A family of one residual stream has the
layer list ``embedding``, ``layers.N.attention`` and ``layers.N.mlp``, ``head``:

    Family.items         names, reads, writes, inputs (chain_items)
    Family.build(name)   builders(name)[last word of the name](device) ─▶ initialise: weights drawn by (seed, name)
    Family.ties          copy ─▶ owner: head.weight ─▶ embedding.word.weight
    Family.manifest      the ``model`` object of a checkpoint
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any, ClassVar, Generic, Self, TypeVar

import torch
from torch import nn

from ...parallel.seeding import stable_seed
from ..attention.latent_attention import LatentShape
from ..attention.self_attention import SelfAttention
from ..experts.moe import MoeMlp
from ..experts.moe_shape import MoeShape
from ..layer_list import LOSS, ItemSpec, has_vocabulary_rows
from ..layer_list import split_dim as split_dim_of
from ..layers.feed_forward import Mlp
from ..vocabulary.embedding import Embedding
from ..vocabulary.head import Head

if TYPE_CHECKING:
    from ...config import Config

WORD = "embedding.word.weight"
HEAD = "head.weight"
Builders = Mapping[str, Callable[[torch.device], nn.Module]]
# Fields of ``ModelDims`` that a manifest's ``model`` object has under the same names.
STATED = (
    "hidden_size",
    "ffn_hidden_size",
    "num_attention_heads",
    "max_position_embeddings",
    "vocab_size",
    "padded_vocab_size",
    "layernorm_epsilon",
    "activation",
)


@dataclass(frozen=True, kw_only=True)
class ModelDims:
    """The sizes that every family has. Widths in elements, dropouts as probabilities."""

    hidden_size: int
    ffn_hidden_size: int
    num_attention_heads: int
    max_position_embeddings: int
    vocab_size: int
    padded_vocab_size: int
    layernorm_epsilon: float = 1e-5
    activation: str = "gelu"
    hidden_dropout: float = 0.1
    attention_dropout: float = 0.1
    init_method_std: float = 0.02
    seed: int = 1234

    @classmethod
    def from_config(cls, config: Config, **own: Any) -> Self:
        """The sizes of a run: options of the same names as the fields, and ``own``, what a family adds to them."""
        model, names = config.model, {field.name for field in fields(cls)}
        shared = {name: getattr(model, name) for name in names - own.keys() if hasattr(model, name)}
        shared |= {"padded_vocab_size": config.padded_vocab_size, "seed": config.training.seed}
        return cls(**shared, **own)

    @classmethod
    def from_manifest(cls, model: Mapping[str, Any]) -> Self:
        """The sizes that the ``model`` object of a manifest states."""
        names = {field.name for field in fields(cls)}
        stated = {name: value for name, value in model.items() if name in names}
        if "moe" in names:
            stated["moe"] = MoeShape.of_manifest(model)
        if "latent" in names:
            stated["latent"] = LatentShape.of_manifest(model)
        return cls(**stated)


Shape = TypeVar("Shape", bound=ModelDims)


class Family(ABC, Generic[Shape]):
    """A model family with its sizes; satisfies ``layer_list.ModelFamily``.

    A subclass defines ``name``, ``items``, ``num_layers_at``, ``own_manifest``, and what differs from a GPT: ``ties``,
    the options of its layers, and its ``builders``.
    """

    name: ClassVar[str]
    bias: ClassVar[bool] = True

    def __init__(self, shape: Shape) -> None:
        self.shape = shape

    @property
    @abstractmethod
    def items(self) -> tuple[ItemSpec, ...]:
        """The layer list, in order."""

    @property
    def ties(self) -> Mapping[str, str]:
        """The head's weight is tied to the word table."""
        return {HEAD: WORD}

    @abstractmethod
    def num_layers_at(self, item: str) -> int:
        """Number of blocks of the item's stack, which scales the initial weights that end a residual branch."""

    def build(self, name: str, device: torch.device) -> nn.Module:
        """Build one item; its initial weights depend on the seed and the name alone, never on placement."""
        kind = name.rpartition(".")[2]
        module = self.builders(name)[kind](device)
        std = self.shape.init_method_std
        # Matrices that end a residual branch are scaled by 1/sqrt(2 layers) (GPT-2, section 2.3).
        ending_std = std if kind == "head" else std / math.sqrt(2 * self.num_layers_at(name))
        initialise(
            name,
            module,
            seed=self.shape.seed,
            std=std,
            ending_std=ending_std,
            ties=self.ties,
            vocabulary=self.shape.vocab_size,
        )
        return module

    def builders(self, name: str) -> Builders:
        """Last word of an item's name -> what builds its module; ``name`` is the full name of the item to build."""
        return {
            "embedding": lambda device: Embedding(**self.embedding_options(device)),
            "attention": lambda device: SelfAttention(**self.attention_options(device)),
            "mlp": lambda device: self.mlp(device),
            "head": lambda device: Head(**self.head_options(device)),
        }

    def norm(self, device: torch.device) -> nn.Module:
        """A normalization of the residual stream."""
        return nn.LayerNorm(self.shape.hidden_size, eps=self.shape.layernorm_epsilon, device=device)

    def embedding_options(self, device: torch.device) -> dict[str, Any]:
        """Arguments of ``Embedding``."""
        shape = self.shape
        return {
            "vocabulary": shape.padded_vocab_size,
            "width": shape.hidden_size,
            "positions": shape.max_position_embeddings,
            "dropout": shape.hidden_dropout,
            "device": device,
        }

    def attention_options(self, device: torch.device) -> dict[str, Any]:
        """Arguments of ``SelfAttention``."""
        shape = self.shape
        return {
            "width": shape.hidden_size,
            "heads": shape.num_attention_heads,
            "norm": self.norm(device),
            "bias": self.bias,
            "dropout": shape.hidden_dropout,
            "attention_dropout": shape.attention_dropout,
            "device": device,
        }

    def mlp_options(self, device: torch.device) -> dict[str, Any]:
        """Arguments of ``feed_forward.Mlp``."""
        shape = self.shape
        return {
            "width": shape.hidden_size,
            "inner": shape.ffn_hidden_size,
            "activation": shape.activation,
            "norm": self.norm(device),
            "bias": self.bias,
            "dropout": shape.hidden_dropout,
            "device": device,
        }

    def mlp(self, device: torch.device, moe: MoeShape | None = None) -> nn.Module:
        """The MLP of a block, or its experts."""
        options = self.mlp_options(device)
        if moe is None:
            return Mlp(**options)
        return MoeMlp(moe=moe, **{**options, "inner": moe.ffn_size or options["inner"]})

    def head_options(self, device: torch.device) -> dict[str, Any]:
        """Arguments of ``head.Head``."""
        shape = self.shape
        return {
            "width": shape.hidden_size,
            "rows": shape.padded_vocab_size,
            "vocabulary": shape.vocab_size,
            "norm": self.norm(device),
            "device": device,
        }

    def split_dim(self, parameter: str) -> int | None:
        """The dimension along which tensor parallelism splits a parameter; see ``layer_list.split_dim``."""
        return split_dim_of(parameter)

    def manifest(self) -> dict[str, object]:
        """The ``model`` object of a checkpoint's manifest."""
        stated = {field: getattr(self.shape, field) for field in STATED}
        return {"family": self.name, "tied_embeddings": HEAD in self.ties, **stated, **self.own_manifest()}

    @abstractmethod
    def own_manifest(self) -> dict[str, object]:
        """Fields of the manifest that are not in ``STATED``; ``num_layers`` is required."""


def chain_items(
    num_layers: int,
    *,
    tied: bool,
    embedding_inputs: tuple[str, ...] = ("ids",),
    attention_inputs: tuple[str, ...] = (),
    head_inputs: tuple[str, ...] = ("labels",),
    mlp_metrics: tuple[tuple[str, int], ...] = (),
    head_metrics: tuple[tuple[str, int], ...] = (),
) -> tuple[ItemSpec, ...]:
    """The items of one stream, in order; every item may begin a stage.

    Args:
        num_layers: number of blocks.
        tied: whether the head has a copy of the word table.
        embedding_inputs: names of the batch tensors that the embedding reads.
        attention_inputs: names of the batch tensors that every attention reads.
        head_inputs: names of the batch tensors that the head reads.
        mlp_metrics: names and lengths of the metrics of every MLP.
        head_metrics: names and lengths of the metrics of the head.
    """
    items = [
        ItemSpec(
            name="embedding", layer="embedding", kind="embedding", cut_before=True, reads=(), inputs=embedding_inputs
        )
    ]
    for index in range(num_layers):
        layer = f"layers.{index}"
        items.append(
            ItemSpec(name=f"{layer}.attention", layer=layer, kind="attention", cut_before=True, inputs=attention_inputs)
        )
        items.append(ItemSpec(name=f"{layer}.mlp", layer=layer, kind="mlp", cut_before=True, metrics=mlp_metrics))
    items.append(
        ItemSpec(
            name="head",
            layer="head",
            kind="head",
            cut_before=True,
            tied_to="embedding" if tied else None,
            writes=LOSS,
            inputs=head_inputs,
            metrics=head_metrics,
        )
    )
    return tuple(items)


ENDS_BRANCH = ("dense.weight", "fc2.weight")


def initialise(
    name: str,
    module: nn.Module,
    *,
    seed: int,
    std: float,
    ending_std: float,
    ties: Mapping[str, str],
    vocabulary: int,
) -> None:
    """Draw the matrices of an item, in place; vectors keep the values of their modules.

    Args:
        name: name of the item.
        module: the item's module; on the meta device nothing is drawn.
        seed: of the run.
        std: standard deviation of the matrices.
        ending_std: standard deviation of the matrices that end a residual branch.
        ties: a tied copy is drawn by the name of its owner, so that both have the same values.
        vocabulary: number of true token ids; rows of padding are zero.
    """
    if any(parameter.device.type == "meta" for parameter in module.parameters()):
        return
    for child, parameter in module.named_parameters():
        if parameter.dim() < 2:
            continue
        full = f"{name}.{child}"
        # A copy is drawn again, not sent: its rank need not know where the owner is.
        # A generator of its own for each parameter, on CPU: the values do not depend on which items a rank builds, on
        # their order, or on the device.
        generator = torch.Generator().manual_seed(stable_seed(seed, "initial", ties.get(full, full)))
        drawn = torch.randn(parameter.shape, generator=generator)
        with torch.no_grad():
            parameter.copy_(drawn * (ending_std if child.endswith(ENDS_BRANCH) else std))
            if has_vocabulary_rows(full):
                parameter[vocabulary:] = 0
