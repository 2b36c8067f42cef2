"""A causal model as one chain of items that reads token after token, keeping what it needs of what it has read.

Shapes in names: B sequences, T new tokens, C tokens that are left, D model width, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from .blocks import Embedding, Head, SelfAttention
from .early_exit import LEFT, Exit, LiveTokens, live_tokens
from .items import ItemSpec, ModelFamily, output_of
from .mixture_of_depths import RoutedBlock


@dataclass
class Cache:
    """What was read: how many tokens, and what each item keeps of them (keys and values, for each sequence)."""

    tokens: int = 0
    kept: dict[str, Any] = field(default_factory=dict)


class Decoder:
    """The modules of all items, in evaluation mode, on one device; reads at most ``max_tokens``."""

    def __init__(self, family: ModelFamily, modules: Mapping[str, nn.Module], max_tokens: int) -> None:
        self.max_tokens = max_tokens
        self.items = family.items
        self.modules = {item.name: modules[item.name].eval() for item in family.items}

    @torch.inference_mode()
    def read(self, ids_BT: torch.Tensor, cache: Cache) -> torch.Tensor:
        """Read new tokens behind the cached ones; the logits of the last one, ``[B, V]``. The cache grows by T.

        Tokens that leave at an exit are not computed by the items behind it.
        """
        positions_BT = torch.arange(cache.tokens, cache.tokens + ids_BT.shape[1], device=ids_BT.device)
        positions_BT = positions_BT.expand_as(ids_BT)
        x = ids_BT
        left_BT = torch.zeros(ids_BT.shape, device=ids_BT.device)
        for item in self.items:
            module = self.modules[item.name]
            if isinstance(module, Embedding):
                x = module.embed(x, past=cache.tokens)
            elif isinstance(module, Head):
                x = module.logits(x[:, -1:])[:, 0]
            elif LEFT in item.reads:
                x, left_BT = self._read_live(item, x, left_BT, positions_BT, cache)
            else:
                before = x
                x, cache.kept[item.name] = _extend(module, x, cache.kept.get(item.name), positions_BT)
                left_BT = _after_exit(module, before, x, left_BT)
        cache.tokens += ids_BT.shape[1]
        return x

    def _read_live(
        self, item: ItemSpec, x_BTD: torch.Tensor, left_BT: torch.Tensor, positions_BT: torch.Tensor, cache: Cache
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """One item on the tokens that are left, sequence by sequence: each has read another number of tokens."""
        kept = cache.kept.setdefault(item.name, [None] * len(x_BTD))
        module = self.modules[item.name]
        rows, lefts = [], []
        for number, (x_1TD, left_1T) in enumerate(zip(x_BTD.split(1), left_BT.split(1), strict=True)):
            if bool((left_1T == 0).any()):
                chosen = live_tokens(left_1T)
                x_1CD = chosen.take(x_1TD)
                places = chosen.take(positions_BT[number : number + 1])
                y_1CD, kept[number] = _extend(module, x_1CD, kept[number], places)
                leaves_1C = _after_exit(module, x_1CD, y_1CD, torch.zeros_like(places, dtype=left_1T.dtype))
                x_1TD = chosen.put(x_1TD, y_1CD)
                left_1T = left_1T.scatter_add(1, chosen.index_BC, leaves_1C)
            rows.append(x_1TD)
            lefts.append(left_1T)
        return torch.cat(rows), torch.cat(lefts)


def _extend(module: nn.Module, x_BTD: torch.Tensor, kept: Any, positions_BT: torch.Tensor) -> tuple[torch.Tensor, Any]:
    """An item on new tokens, and what it keeps of all."""
    if isinstance(module, SelfAttention | RoutedBlock):
        extended: tuple[torch.Tensor, Any] = module.extend(x_BTD, kept, positions_BT)
        return extended
    run = module.plain if isinstance(module, LiveTokens) else module
    y_BTD: torch.Tensor = output_of(run(x_BTD))
    return y_BTD, None


def _after_exit(
    module: nn.Module, before_BTD: torch.Tensor, after_BTD: torch.Tensor, left_BT: torch.Tensor
) -> torch.Tensor:
    """``left_BT`` with the tokens that leave at the item's exit, where it has one."""
    exit_ = module._modules.get("exit")
    if not isinstance(exit_, Exit):
        return left_BT
    leaves_BT: torch.Tensor = exit_(before_BTD, after_BTD, None, left_BT == 0)[0]
    return left_BT + leaves_BT.to(left_BT.dtype)
