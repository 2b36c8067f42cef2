"""Keys and values of earlier tokens, for incremental decoding.

Shapes in names: B sequences, T new tokens, S all tokens so far, G key-value groups, K head width.
"""

from __future__ import annotations

import torch

KeysValues = tuple[torch.Tensor, torch.Tensor]


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
