"""Keys and values of earlier tokens, for incremental decoding.

Where a layer skips tokens of a sequence, the cache of one with a sliding window has their positions too: the window is
over positions, not over cached keys.

Shapes in names: B sequences, T new tokens, S all tokens so far, G key-value groups, K head width.
"""

from __future__ import annotations

import torch

from .varlen import window_mask

KeysValues = tuple[torch.Tensor, torch.Tensor]
Past = tuple[torch.Tensor, ...]
"""Keys and values ``[B, G, S, K]``; with a sliding window also the positions of their tokens, int64 ``[B, S]``."""


def append_keys(
    past: Past | None,
    k_BGTK: torch.Tensor,
    v_BGTK: torch.Tensor,
    positions_BT: torch.Tensor | None,
    window: int | None,
) -> tuple[Past, torch.Tensor]:
    """Append keys and values of new tokens to those of the tokens before.

    Args:
        past: of the tokens before; None where there are none.
        k_BGTK: keys of the new tokens, ``[B, G, T, K]``.
        v_BGTK: values of the new tokens, ``[B, G, T, K]``.
        positions_BT: int64 ``[B, T]`` of the new tokens; None means those after the tokens before.
        window: positions that a token attends to, itself included; None means all.

    Returns:
        The cache of all tokens, and the causal mask of the new ones, bool ``[T, S]`` or ``[B, 1, T, S]``.
    """
    before = 0 if past is None else past[0].shape[2]
    (B, _, tokens, _), device = k_BGTK.shape, k_BGTK.device
    new: Past = (k_BGTK, v_BGTK)
    if past is not None:
        new = torch.cat([past[0], k_BGTK], dim=2), torch.cat([past[1], v_BGTK], dim=2)
    causal_TS = window_mask(tokens, before + tokens, before + tokens, device)
    if window is None:
        return new, causal_TS
    if positions_BT is None:
        positions_BT = torch.arange(before, before + tokens, device=device).expand(B, -1)
    places_BS = positions_BT if past is None else torch.cat([past[2], positions_BT], dim=1)
    near_BTS = positions_BT[..., None] - places_BS[:, None] < window
    return (*new, places_BS), causal_TS & near_BTS[:, None]


class KVCache:
    """Keys and values ``[B, G, S, K]`` of up to ``tokens`` tokens; the memory is allocated once.

    Concatenation would copy all earlier keys and values for each new token.

    Args:
        tokens: maximum number of tokens of a sequence.

    Attributes:
        used: number of tokens so far, S.
    """

    def __init__(self, tokens: int) -> None:
        self._tokens, self.used = tokens, 0
        self._keys: torch.Tensor | None = None
        self._values: torch.Tensor | None = None

    def extend(self, k_BGTK: torch.Tensor, v_BGTK: torch.Tensor) -> KeysValues:
        """Append keys and values of new tokens.

        Args:
            k_BGTK: keys of the new tokens, ``[B, G, T, K]``.
            v_BGTK: values of the new tokens, ``[B, G, T, K]``.

        Returns:
            Keys and values of all tokens, ``[B, G, S, K]`` each; views, which the next call does not change.
        """
        if self._keys is None or self._values is None:
            B, groups, _, K = k_BGTK.shape
            self._keys = k_BGTK.new_empty(B, groups, self._tokens, K)
            self._values = v_BGTK.new_empty(B, groups, self._tokens, v_BGTK.shape[-1])
        begin, self.used = self.used, self.used + k_BGTK.shape[2]
        self._keys[:, :, begin : self.used] = k_BGTK
        self._values[:, :, begin : self.used] = v_BGTK
        return self._keys[:, :, : self.used], self._values[:, :, : self.used]

    def truncate(self, tokens: int) -> None:
        """Forget the tokens after the first ``tokens`` ones."""
        self.used = min(self.used, tokens)
