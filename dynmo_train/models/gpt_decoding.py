"""A GPT as one chain of items that reads token after token, keeping the keys and values of what it has read.

Shapes in names: B sequences, T new tokens, P past tokens, D model width, H heads, K head width, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
import torch.nn.functional as F
from torch import nn

from .gpt import Attention, Embedding, Gpt, Head

Cache = dict[str, tuple[torch.Tensor, torch.Tensor]]


class GptDecoder:
    """The modules of all items, in evaluation mode, on one device."""

    def __init__(self, family: Gpt, modules: Mapping[str, nn.Module]) -> None:
        self.max_tokens = family.shape.max_position_embeddings
        self.modules = {item.name: modules[item.name].eval() for item in family.items}

    @torch.inference_mode()
    def read(self, ids_BT: torch.Tensor, cache: Cache) -> torch.Tensor:
        """Read new tokens behind the cached ones; the logits of the last one, ``[B, V]``. The cache grows by T."""
        past = next((keys.shape[2] for keys, _ in cache.values()), 0)
        x = ids_BT
        for name, module in self.modules.items():
            if isinstance(module, Embedding):
                positions_T = torch.arange(past, past + x.shape[1], device=x.device)
                x = module.word(x) + module.position(positions_T)
            elif isinstance(module, Attention):
                x = _attend(module, x, name, cache)
            elif isinstance(module, Head):
                x = module.logits(x[:, -1:])[:, 0]
            else:
                x = module(x)
        return x


def _attend(module: Attention, x_BTD: torch.Tensor, name: str, cache: Cache) -> torch.Tensor:
    """The attention sublayer with its residual; every new token sees the past and the new ones up to itself."""
    B, T, D = x_BTD.shape
    qkv = module.qkv(module.norm(x_BTD)).view(B, T, module.heads, 3, D // module.heads)
    q_BHTK, k, v = (part.transpose(1, 2) for part in qkv.unbind(3))
    if name in cache:
        k, v = torch.cat([cache[name][0], k], dim=2), torch.cat([cache[name][1], v], dim=2)
    cache[name] = k, v
    past = k.shape[2] - T
    mask_TP = torch.ones(T, past + T, dtype=torch.bool, device=x_BTD.device).tril(past)
    y_BHTK = F.scaled_dot_product_attention(q_BHTK, k, v, attn_mask=mask_TP)
    y_BTD: torch.Tensor = module.dense(y_BHTK.transpose(1, 2).reshape(B, T, D))
    return x_BTD + y_BTD
