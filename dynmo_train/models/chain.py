"""The layer list of a model with one stream: ``embedding``, ``layers.N.attention`` and ``layers.N.mlp``, ``head``."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import nn

from .initial import initialise
from .items import LOSS, ItemSpec

WORD = "embedding.word.weight"
HEAD = "head.weight"


def chain_items(
    num_layers: int,
    *,
    tied: bool,
    embedding_inputs: tuple[str, ...] = ("ids",),
    attention_inputs: tuple[str, ...] = (),
    head_inputs: tuple[str, ...] = ("labels",),
    mlp_figures: tuple[tuple[str, int], ...] = (),
    head_figures: tuple[tuple[str, int], ...] = (),
) -> tuple[ItemSpec, ...]:
    """The items in order; every item may begin a stage. The keywords say what of the batch each kind is called with."""
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
        items.append(ItemSpec(name=f"{layer}.mlp", layer=layer, kind="mlp", cut_before=True, figures=mlp_figures))
    items.append(
        ItemSpec(
            name="head",
            layer="head",
            kind="head",
            cut_before=True,
            tied_to="embedding" if tied else None,
            writes=LOSS,
            inputs=head_inputs,
            figures=head_figures,
        )
    )
    return tuple(items)


def build_item(
    name: str,
    device: torch.device,
    builders: Mapping[str, Callable[[torch.device], nn.Module]],
    *,
    seed: int,
    std: float,
    ending_std: float,
    ties: Mapping[str, str],
) -> nn.Module:
    """Build the item ``name`` by its kind and draw its weights; matrices that end a branch get ``ending_std``."""
    kind = name.rpartition(".")[2]
    module = builders[kind](device)
    initialise(name, module, seed=seed, std=std, ending_std=std if kind == "head" else ending_std, ties=ties)
    return module
