"""Initial weights: a function of the seed and the parameter's name alone, so that placement cannot change them."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import nn

from ..parallel.seeding import stable_seed
from .items import has_vocabulary_rows

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
    """Draw the matrices of an item; vectors keep what their layers gave them.

    Args:
        name: of the item.
        std: of every matrix but those that end a residual branch, which get ``ending_std``.
        ties: a copy is drawn as the weight that it copies.
        vocabulary: true rows of the vocabulary; rows of padding behind them are zero.
    """
    if any(parameter.device.type == "meta" for parameter in module.parameters()):
        return
    for child, parameter in module.named_parameters():
        if parameter.dim() < 2:
            continue
        full = f"{name}.{child}"
        generator = torch.Generator().manual_seed(stable_seed(seed, "initial", ties.get(full, full)))
        drawn = torch.randn(parameter.shape, generator=generator)
        with torch.no_grad():
            parameter.copy_(drawn * (ending_std if child.endswith(ENDS_BRANCH) else std))
            if has_vocabulary_rows(full):
                parameter[vocabulary:] = 0
