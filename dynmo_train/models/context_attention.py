"""Causal attention of a context-parallel rank: its two chunks attend to the keys of all ranks up to themselves.

Shapes in names: B samples, T tokens of this rank, S keys of a chunk, H heads, G key-value groups, K head width.
"""

from __future__ import annotations

from typing import Protocol

import torch

from ..parallel.context_parallel import ContextRegion
from .varlen import attend_sequences, has_kernel, sample_offsets, window_mask


class CausalAttention(Protocol):
    """What :func:`attend_context` reads of ``SelfAttention``."""

    window: int | None
    scale: float | None
    attention_dropout: float
    training: bool

    def weighted_values(
        self, q_BHTK: torch.Tensor, k_BGSK: torch.Tensor, v_BGSK: torch.Tensor, mask: torch.Tensor | None, causal: bool
    ) -> torch.Tensor:
        """Attend with ``q_BHTK``, ``k_BGSK``, ``v_BGSK`` and ``mask``: ``[B, H, T, K]``."""


def attend_context(
    q_BHTK: torch.Tensor,
    k_BGTK: torch.Tensor,
    v_BGTK: torch.Tensor,
    context: ContextRegion,
    attention: CausalAttention,
) -> torch.Tensor:
    """Return the attention before the output layer, ``[B, T, H * K]``.

    Args:
        q_BHTK: queries of this rank, ``[B, H, T, K]``.
        k_BGTK: keys of this rank, ``[B, G, T, K]``.
        v_BGTK: values of this rank, ``[B, G, T, K]``.
        context: ranks that share the tokens.
        attention: the module.
    """
    B, _, T, _ = q_BHTK.shape
    keys, values = context.gather(k_BGTK, v_BGTK)
    uses_kernel = has_kernel(q_BHTK, attention.attention_dropout if attention.training else 0.0)
    parts = []
    for q, S in zip(q_BHTK.chunk(2, dim=2), context.keys_of_chunks(T), strict=True):
        k, v, chunk = keys[:, :, :S], values[:, :, :S], T // 2
        window = attention.window or S
        if uses_kernel:
            # The kernel aligns the causal mask to the last key, and the last query is the last key.
            offsets = sample_offsets(B, chunk, q.device), sample_offsets(B, S, q.device)
            span = (window - 1 if window < S else -1, 0)
            parts.append(attend_sequences(q, k, v, offsets, (chunk, S), window=span, scale=attention.scale))
        else:
            mask = window_mask(chunk, S, window, q.device)
            parts.append(attention.weighted_values(q, k, v, mask, False).transpose(1, 2).flatten(2))
    return torch.cat(parts, dim=1)
