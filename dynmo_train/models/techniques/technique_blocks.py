"""Techniques that change the model: mixture of depths, early exit and sparse attention around any family of one stream.

Sparse attention also works with families of two stacks whose self-attention has no relative bias (T5 with learned
positions). Parameters keep their names:

    technique           item                                    parameters
    mixture of depths   layers.N (one item, never split)        layers.N.attention.*, layers.N.mlp.*, + router.weight
    early exit          layers.N.mlp, or the routed layers.N    + exit.head.*, all tied to the head's,
                                                                + exit.classifier.* with that measure
    sparse attention    layers.N.attention                      none
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from ...config.extensions import TechniqueSpec
from ...parallel.seeding import stable_seed
from ..attention.hashed_attention import HashedAttention
from ..attention.self_attention import SelfAttention
from ..layer_list import HIDDEN, BoundaryShape, ItemSpec, ModelFamily
from . import early_exit, mixture_of_depths
from .early_exit import EXITED, Exit, ExitSettings, run_on_active_tokens
from .mixture_of_depths import DepthSettings, RoutedBlock

if TYPE_CHECKING:
    from ...config import Config
    from ...config.sections.techniques import ExitConfig


@dataclass(frozen=True, kw_only=True)
class SparseAttentionSettings:
    """Hash-bucketed attention in every block: number of hash buckets (even), and queries and keys of a block."""

    buckets: int
    block: int


@dataclass(frozen=True, kw_only=True)
class DynamicSettings:
    """The techniques that change a model; None where one is off."""

    depths: DepthSettings | None = None
    exits: ExitSettings | None = None
    sparse_attention: SparseAttentionSettings | None = None

    @classmethod
    def from_config(cls, config: Config) -> DynamicSettings:
        """The techniques of a run that change its model."""
        depth, exits, attention = config.depth, config.exits, config.attention
        return cls(
            depths=None
            if depth.mod_capacity is None
            else DepthSettings(
                capacity=depth.mod_capacity, every=depth.mod_every, aux_weight=depth.mod_router_loss_weight
            ),
            exits=ExitSettings(
                layers=exits.exit_layers,
                loss_weight=exits.early_exit_loss_weight,
                threshold=exits.early_exit_threshold,
                measure=exits.early_exit_measure,
                token_share=exits.early_exit_loss_tokens,
                vocabulary_samples=exits.early_exit_loss_vocabulary,
                layer_weights=_layer_weights(exits),
                propagate=exits.early_exit_key_values == "propagate",
            )
            if exits.exit_layers
            else None,
            sparse_attention=SparseAttentionSettings(
                buckets=attention.sparse_attention_buckets, block=attention.sparse_attention_block
            )
            if attention.sparse_attention
            else None,
        )

    @classmethod
    def of_document(cls, document: Mapping[str, Any]) -> DynamicSettings:
        """Read what :meth:`document` returned."""
        exits: dict[str, Any] = {
            name: tuple(value) if isinstance(value, list) else value
            for name, value in (document.get("exits") or {}).items()
        }
        return cls(
            depths=DepthSettings(**document["depths"]) if document.get("depths") else None,
            exits=ExitSettings(**exits) if exits else None,
            sparse_attention=SparseAttentionSettings(**document["sparse_attention"])
            if document.get("sparse_attention")
            else None,
        )

    def document(self) -> dict[str, Any]:
        """JSON values for a manifest: the techniques that are on."""
        parts = {name: value for name, value in asdict(self).items() if value is not None}
        return {
            name: {k: list(v) if isinstance(v, tuple) else v for k, v in part.items()} for name, part in parts.items()
        }


def _layer_weights(exits: ExitConfig) -> tuple[float, ...]:
    """The loss weight of each exit; empty where ``--early-exit-loss-weight`` is divided equally."""
    if exits.exit_layer_weight == "depth":
        return early_exit.depth_weights(exits.exit_layers, exits.early_exit_loss_weight)
    return exits.layer_weights


def block_of(item: ItemSpec) -> int | None:
    """The number of the block that an item of a one-stream model is a part of; None for embedding and head."""
    prefix, _, number = item.layer.rpartition(".")
    return int(number) if prefix == "layers" else None


class DynamicFamily:
    """``base`` with techniques; satisfies ``layer_list.ModelFamily``.

    Args:
        base: a family of one stream whose blocks are an attention and an MLP; for sparse attention alone, any.
        seed: of the run.
        width: of the model.
        std: standard deviation of the initial weights of routers.
    """

    def __init__(self, base: ModelFamily, settings: DynamicSettings, *, seed: int, width: int, std: float) -> None:
        self.base, self.settings, self.seed, self.width, self.std = base, settings, seed, width, std

    @cached_property
    def items(self) -> tuple[ItemSpec, ...]:
        """The layer list: a routed block is one item; after an exit every block reads which tokens have exited."""
        listed: list[ItemSpec] = []
        for item in self.base.items:
            number = block_of(item)
            depths = self.settings.depths
            if number is None or depths is None or not depths.routed(number):
                listed.append(item)
            elif item.kind == "attention":
                listed.append(replace(item, name=item.layer, kind="layer", metrics=mixture_of_depths.METRICS))
            else:
                # The MLP of a routed block: it is a part of the item of its attention.
                block = listed[-1]
                listed[-1] = replace(block, metrics=(*item.metrics, *block.metrics))
        return tuple(self._with_exits(listed))

    def _with_exits(self, listed: list[ItemSpec]) -> list[ItemSpec]:
        exits = self.settings.exits
        if exits is None:
            return listed
        changed: list[ItemSpec] = []
        classified = early_exit.CLASSIFIER_METRICS if exits.measure == "classifier" else ()
        for item in listed:
            number = block_of(item)
            # Before the first exit all tokens are active, so no mask crosses those boundaries.
            if number is not None and number > exits.layers[0]:
                item = replace(item, reads=(*item.reads, EXITED))
            if number in exits.layers and item.kind in ("mlp", "layer"):
                item = replace(
                    item,
                    side=(EXITED,),
                    inputs=(*item.inputs, "labels"),
                    metrics=(*item.metrics, *early_exit.METRICS, *classified),
                    tied_to="head",
                )
            changed.append(item)
        return changed

    @cached_property
    def ties(self) -> Mapping[str, str]:
        """The ties of the base family, and all parameters of the exits."""
        exits = self.settings.exits
        ties = dict(self.base.ties)
        if exits is None:
            return ties
        head = self.base.build("head", torch.device("meta"))
        names = [name for name, _ in head.named_parameters()]
        base = self.base.ties
        # In list order: the exits come before the head.
        at_exits = {
            f"{self._exit_item(layer)}.exit.head.{name}": base.get(f"head.{name}", f"head.{name}")
            for layer in exits.layers
            for name in names
        }
        return {**at_exits, **ties}

    def _exit_item(self, layer: int) -> str:
        """The item that the exit after a block is a part of."""
        depths = self.settings.depths
        return f"layers.{layer}" if depths is not None and depths.routed(layer) else f"layers.{layer}.mlp"

    def build(self, name: str, device: torch.device) -> nn.Module:
        """Build one item; its initial weights depend on the seed and the name alone, never on placement."""
        item = next(each for each in self.items if each.name == name)
        if item.kind == "layer" and block_of(item) is not None:
            module: nn.Module = self._routed(name, device)
        else:
            module = self.base.build(name, device)
            self._make_sparse(name, module)
        exits = self.settings.exits
        if exits is not None and EXITED in item.side:
            head = self.base.build("head", device)
            module.add_module("exit", Exit(head, exits, block_of(item) or 0, self.width, device))
        if EXITED in (*item.reads, *item.side):
            run_on_active_tokens(module, item, propagate=exits is not None and exits.propagate)
        return module

    def _make_sparse(self, name: str, module: nn.Module) -> None:
        sparse = self.settings.sparse_attention
        if sparse is not None and isinstance(module, SelfAttention):
            module.sparse = HashedAttention(buckets=sparse.buckets, block=sparse.block, seed=self.seed, name=name)

    def _routed(self, name: str, device: torch.device) -> RoutedBlock:
        attention, mlp = (self.base.build(f"{name}.{part}", device) for part in ("attention", "mlp"))
        self._make_sparse(f"{name}.attention", attention)
        depths = self.settings.depths
        if depths is None:
            raise ValueError(f"{name} is not an item: no block is routed")
        block = RoutedBlock(attention, mlp, depths, self.width, device)
        router = attention.get_parameter("router.weight")
        # The base family does not know this weight. Its own seed leaves the other weights as they are without routing.
        if device.type != "meta":
            seed = stable_seed(self.seed, "initial", f"{name}.attention.router.weight")
            drawn = torch.randn(router.shape, generator=torch.Generator().manual_seed(seed))
            with torch.no_grad():
                router.copy_(drawn * self.std)
        return block

    def split_dim(self, parameter: str) -> int | None:
        """As in the base family; an exit's head is split as the head, routers and classifiers are replicated."""
        _, is_exit, of_head = parameter.partition(".exit.")
        return (
            None
            if ".router." in parameter or ".classifier." in parameter
            else self.base.split_dim(of_head if is_exit else parameter)
        )

    def manifest(self) -> dict[str, object]:
        """The ``model`` object of a checkpoint's manifest, with the techniques that change the model."""
        return {**self.base.manifest(), "x_dynamic": self.settings.document()}


def _wrap_family(config: Config, family: ModelFamily) -> ModelFamily:
    settings, model = DynamicSettings.from_config(config), config.model
    if settings == DynamicSettings():
        return family
    return DynamicFamily(
        family, settings, seed=config.training.seed, width=model.hidden_size, std=model.init_method_std
    )


def _wrap_stored(model: Mapping[str, Any], family: ModelFamily) -> ModelFamily:
    if "x_dynamic" not in model:
        return family
    # The seed and the spread of initial weights do not matter to a model that is read.
    settings = DynamicSettings.of_document(model["x_dynamic"])
    return DynamicFamily(family, settings, seed=0, width=model["hidden_size"], std=0.0)


def _wrap_boundary(config: Config, boundary: BoundaryShape) -> BoundaryShape:
    if not config.exits.exit_layers:
        return boundary
    return replace(boundary, shapes={**boundary.shapes, EXITED: boundary.shapes[HIDDEN][:2]})


TECHNIQUE = TechniqueSpec(wrap_family=_wrap_family, wrap_stored=_wrap_stored, wrap_boundary=_wrap_boundary)
