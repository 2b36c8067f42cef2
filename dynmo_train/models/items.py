"""The layer list: what an item is, whatever the model family.

Shapes in names: B samples of a microbatch, T tokens, D model width, O and I rows and columns of a weight.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import nn

from .linear import PrunableLinear


@dataclass(frozen=True, kw_only=True)
class ItemSpec:
    """One item of the layer list, at the finest granularity.

    Attributes:
        name: for life; parameters extend it (``layers.7.mlp`` owns ``layers.7.mlp.fc1.weight``).
        layer: the layer that it is a part of (``layers.7``).
        kind: ``embedding``, ``attention``, ``mlp`` or ``head``.
        cut_before: whether the model lets a stage begin here.
        tied_to: the item that owns a weight that this one shares, or None.
    """

    name: str
    layer: str
    kind: str
    cut_before: bool
    tied_to: str | None = None


@dataclass(frozen=True, kw_only=True)
class BoundaryShape:
    """The one static shape of every tensor that crosses a stage boundary, ``[B, T, D]``, and its type."""

    batch: int
    tokens: int
    width: int
    dtype: torch.dtype = torch.float32


class ModelFamily(Protocol):
    """What the engine asks of a model family: a pure description and a builder of single items."""

    @property
    def items(self) -> tuple[ItemSpec, ...]:
        """The layer list, in order."""

    @property
    def ties(self) -> Mapping[str, str]:
        """Parameter that is a copy -> parameter that owns the value."""

    def build(self, name: str, device: torch.device) -> nn.Module:
        """Build one item with its initial weights, which depend on the seed and the name alone."""

    def split_dim(self, parameter: str) -> int | None:
        """The dimension that tensor parallelism cuts of a parameter, by its global name; None where each rank has all.

        A module whose weight is cut along 0 gives out a part of its outputs, along 1 it takes a part of its inputs.
        """

    def manifest(self) -> dict[str, object]:
        """The ``model`` object of a checkpoint's manifest."""


def masks_of(name: str, module: nn.Module) -> dict[str, PrunableLinear]:
    """The prunable weights of an item: global parameter name -> the layer that holds it, in module order."""
    return {
        f"{name}.{child}.weight": layer for child, layer in module.named_modules() if isinstance(layer, PrunableLinear)
    }


def parameters_of(name: str, module: nn.Module) -> dict[str, nn.Parameter]:
    """The parameters of an item by global name, in module order."""
    return {f"{name}.{child}": parameter for child, parameter in module.named_parameters()}
