"""Attention over sequences of variable length: documents, padding and windows without a mask of scores.

A boolean mask rules flash attention out. On CUDA in half precision sequences are therefore given by the places where
they begin, in one row of tokens; no size depends on values on the device, so that the host does not wait::

    tokens     sample 0: a b c d . .     sample 1: e f . . . .       (. is padding, at the end of a sample)
    offsets    0       4   6         8       12                      sample, padding, sample, padding, end

The padding of a sample is a sequence of its own, which nothing reads. In cross-attention it has keys and no queries.

Shapes in names: B samples, T queries, S keys of a sample, H heads, G key-value groups, K head width, N tokens of all
samples, Q sequences.
"""

from __future__ import annotations

import inspect
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F

WIDEST_HEAD = 256
FULL = (-1, -1)
CAUSAL = (-1, 0)


def has_kernel(q_BHTK: torch.Tensor, dropout: float) -> bool:
    """Whether attention over sequences of variable length has a kernel for these queries.

    Args:
        q_BHTK: queries, ``[B, H, T, K]``.
        dropout: dropout probability of the attention weights, 0 to 1.
    """
    width = q_BHTK.shape[-1]
    half = q_BHTK.dtype in (torch.bfloat16, torch.float16)
    fits = width % 8 == 0 and width <= WIDEST_HEAD
    # Meta tensors run the same path, so that tests see it without a device.
    return q_BHTK.device.type in ("cuda", "meta") and half and fits and dropout == 0.0


def padded_offsets(mask_BS: torch.Tensor) -> torch.Tensor:
    """Where the keys of each sample and its padding begin, int32 ``[2B + 1]``.

    Args:
        mask_BS: bool ``[B, S]``, true for the first tokens of a sample, false for its padding.
    """
    B, S = mask_BS.shape
    begins_B = torch.arange(0, B * S, S, device=mask_BS.device)
    return _offsets(begins_B, begins_B + mask_BS.sum(1), B * S)


def whole_offsets(samples: int, tokens: int, device: torch.device) -> torch.Tensor:
    """Offsets of queries that go with :func:`padded_offsets` of other keys, int32 ``[2B + 1]``; the padding has none.

    Args:
        samples: B.
        tokens: T.
        device: of the result.
    """
    begins_B = torch.arange(0, samples * tokens, tokens, device=device)
    return _offsets(begins_B, begins_B + tokens, samples * tokens)


def sample_offsets(samples: int, tokens: int, device: torch.device) -> torch.Tensor:
    """Where each sample begins, for samples without padding, int32 ``[B + 1]``.

    Args:
        samples: B.
        tokens: T.
        device: of the result.
    """
    return torch.arange(0, (samples + 1) * tokens, tokens, device=device, dtype=torch.int32)


def window_mask(tokens: int, keys: int, window: int, device: torch.device) -> torch.Tensor:
    """Causal mask of a sliding window, bool ``[T, S]``; the last query is the last key.

    Args:
        tokens: T.
        keys: S.
        window: keys that a query attends to, itself included.
        device: of the result.
    """
    return (
        torch.ones(tokens, keys, dtype=torch.bool, device=device).tril(keys - tokens).triu(keys - tokens - window + 1)
    )


def window_begins(places_BT: torch.Tensor, window: int) -> torch.Tensor:
    """Index of the first token in the window of each of some selected tokens, int64 ``[B, T]``.

    The window is over places in the sample, whichever of the tokens between are selected::

        places   0  2  3  7  8      window 4
        begins   0  0  0  3  3

    Args:
        places_BT: int64 places, ascending; those of padding, behind the last selected token, are any.
        window: places that a token attends to, its own included.
    """
    # The places of padding may be lower: they must not count as tokens before a window.
    ascending_BT = places_BT.cummax(1).values
    return torch.searchsorted(ascending_BT, places_BT - window, right=True)


def selected_window_mask(places_BT: torch.Tensor, window: int) -> torch.Tensor:
    """Causal mask of a window over places, bool ``[B, 1, T, T]``.

    Args:
        places_BT: as in :func:`window_begins`.
        window: places that a token attends to, its own included.
    """
    index_T = torch.arange(places_BT.shape[1], device=places_BT.device)
    begins_BT = window_begins(places_BT, window)
    return ((index_T <= index_T[:, None]) & (index_T >= begins_BT[..., None]))[:, None]


def _offsets(begins_B: torch.Tensor, ends_B: torch.Tensor, end: int) -> torch.Tensor:
    return F.pad(torch.stack([begins_B, ends_B], dim=1).flatten(), (0, 1), value=end).int()


def attend_sequences(
    q_BHTK: torch.Tensor,
    k_BGSK: torch.Tensor,
    v_BGSK: torch.Tensor,
    offsets: tuple[torch.Tensor, torch.Tensor],
    longest: tuple[int, int],
    *,
    window: tuple[int, int] = FULL,
    scale: float | None = None,
) -> torch.Tensor:
    """Attention of each sequence of queries to the sequence of keys of the same number.

    Args:
        q_BHTK: queries, ``[B, H, T, K]``.
        k_BGSK: keys, ``[B, G, S, K]``.
        v_BGSK: values, ``[B, G, S, K]``.
        offsets: where the sequences of queries, and of keys, begin in the tokens of all samples, int32 ``[Q + 1]``.
        longest: tokens of the longest sequence of queries, and of keys, or more.
        window: tokens before and after itself that a query attends to; -1 means all.
        scale: factor on the scores; None means ``K^-0.5``.

    Returns:
        ``[B, T, H * K]``.
    """
    B, H, T, K = q_BHTK.shape
    groups = k_BGSK.shape[1]
    options = _options(window, grouped=groups != H)
    if groups != H and not options.get("enable_gqa"):
        k_BGSK, v_BGSK = (each.repeat_interleave(H // groups, dim=1) for each in (k_BGSK, v_BGSK))
    q, k, v = (each.transpose(1, 2).flatten(0, 1) for each in (q_BHTK, k_BGSK, v_BGSK))
    y_NHK: torch.Tensor = _varlen()(q, k, v, *offsets, *longest, scale=scale, **options)
    return y_NHK.view(B, T, H * K)


def _varlen() -> Any:
    from torch.nn.attention.varlen import varlen_attn  # a private kernel before torch 2.10

    return varlen_attn


@cache
def _options(window: tuple[int, int], *, grouped: bool) -> dict[str, Any]:
    """Window and grouped queries as this torch spells them: grouped queries from 2.13, windows from 2.11."""
    names = inspect.signature(_varlen()).parameters
    shape: dict[str, Any] = {"window_size": window} if "window_size" in names else {"is_causal": window == CAUSAL}
    return shape | ({"enable_gqa": True} if grouped and "enable_gqa" in names else {})
