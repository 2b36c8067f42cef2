"""A causal model as one chain of items that reads token after token, keeping the keys and values of what it has read.

Shapes in names: B sequences, T new tokens, D model width, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import nn

from .blocks import Embedding, Head, KeysValues, SelfAttention
from .items import ModelFamily, output_of

Cache = dict[str, KeysValues]


class Decoder:
    """The modules of all items, in evaluation mode, on one device; reads at most ``max_tokens``."""

    def __init__(self, family: ModelFamily, modules: Mapping[str, nn.Module], max_tokens: int) -> None:
        self.max_tokens = max_tokens
        self.modules = {item.name: modules[item.name].eval() for item in family.items}

    @torch.inference_mode()
    def read(self, ids_BT: torch.Tensor, cache: Cache) -> torch.Tensor:
        """Read new tokens behind the cached ones; the logits of the last one, ``[B, V]``. The cache grows by T."""
        past = next((keys.shape[2] for keys, _ in cache.values()), 0)
        x = ids_BT
        for name, module in self.modules.items():
            if isinstance(module, Embedding):
                x = module.embed(x, past=past)
            elif isinstance(module, SelfAttention):
                x, cache[name] = module.extend(x, cache.get(name))
            elif isinstance(module, Head):
                x = module.logits(x[:, -1:])[:, 0]
            else:
                x = output_of(module(x))
        return x
