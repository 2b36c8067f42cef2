"""Gather a selection of each sample's tokens, and scatter the results back: unselected tokens cost nothing.

Shapes in names: B samples, T tokens of a sample, C selected tokens of the fullest sample, D model width.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F

TILE_ROWS = 128
"""Rows of a tile of matrix products on CUDA: products of a part of a tile take the time of the whole."""


@dataclass(frozen=True, kw_only=True)
class TokenSelection:
    """Selected tokens of each sample, in order.

    Attributes:
        index_BC: int64 positions; those of real entries ascend, the others are padding.
        real_BC: bool, false for padding entries.
    """

    index_BC: torch.Tensor
    real_BC: torch.Tensor

    def take(self, x: torch.Tensor) -> torch.Tensor:
        """The selected tokens of ``x``: of ``[B, T]`` or ``[B, T, D]``, ``[B, C]`` or ``[B, C, D]``."""
        index = self.index_BC if x.dim() == 2 else self.index_BC[..., None].expand(-1, -1, x.shape[-1])
        return x.gather(1, index)

    def put(self, x_BTD: torch.Tensor, y_BCD: torch.Tensor) -> torch.Tensor:
        """``x_BTD`` ``[B, T, D]`` with the selected tokens replaced by those of ``y_BCD`` ``[B, C, D]``."""
        # Entries of padding write their own value back: no position occurs twice, so the scatter is
        # deterministic.
        updated_BCD = torch.where(self.real_BC[..., None], y_BCD, self.take(x_BTD))
        return x_BTD.scatter(1, self.index_BC[..., None].expand_as(updated_BCD), updated_BCD)


def _first(index_BT: torch.Tensor, count: int) -> torch.Tensor:
    """A copy of the first ``count`` entries of each sample.

    torch.compile guards on the strides of a view, which depend on how many tokens are selected. Of one sample a view is
    contiguous, with the stride of the longer row, and ``contiguous`` returns it.
    """
    return index_BT[:, :count].clone(memory_format=torch.contiguous_format)


def select_tokens(keep_BT: torch.Tensor) -> TokenSelection:
    """Select the tokens where ``keep_BT``, bool ``[B, T]``, is true; C is their largest number in a sample, at least 1.

    Without any token one padding entry remains, so that the weights that process it still get gradients, of zero.
    """
    counts_B = keep_BT.sum(1)
    entries = max(1, int(counts_B.max()))
    # Stable: selected tokens first, both groups in their order.
    index_BT = torch.argsort(keep_BT.logical_not().to(torch.uint8), dim=1, stable=True)
    places_C = torch.arange(entries, device=keep_BT.device)
    return TokenSelection(index_BC=_first(index_BT, entries), real_BC=places_C < counts_B[:, None])


def select_all(samples: int, tokens: int, device: torch.device) -> TokenSelection:
    """Select every token of ``samples`` samples of ``tokens`` tokens, on a device."""
    index_BT = torch.arange(tokens, device=device).expand(samples, -1)
    return TokenSelection(index_BC=index_BT, real_BC=torch.ones_like(index_BT, dtype=torch.bool))


def order_tokens(keep_BT: torch.Tensor) -> TokenSelection:
    """Select as :func:`select_tokens`, with an entry for each token: the host need not read how many are selected.

    Args:
        keep_BT: bool ``[B, T]``, true for tokens to select; C is T.
    """
    index_BT = torch.argsort(keep_BT.logical_not().to(torch.uint8), dim=1, stable=True)
    return TokenSelection(index_BC=index_BT, real_BC=keep_BT.gather(1, index_BT))


def select_top(scores_BT: torch.Tensor, count: int, entries: int | None = None) -> TokenSelection:
    """Select the highest scores of each sample, in token order; of equals the first.

    Args:
        scores_BT: ``[B, T]``.
        count: number of selected tokens.
        entries: number of entries C, at least ``count``; the last ones are padding. None means ``count``.
    """
    order_BT = torch.argsort(scores_BT, dim=1, descending=True, stable=True)
    index_BC = _first(order_BT, count).sort(dim=1).values
    real_BC = torch.ones_like(index_BC, dtype=torch.bool)
    if entries is not None and entries > count:
        # Padding comes last, so that no selected token sees it through a causal mask.
        index_BC = torch.cat([index_BC, order_BT[:, count:entries]], dim=1)
        real_BC = F.pad(real_BC, (0, entries - count))
    return TokenSelection(index_BC=index_BC, real_BC=real_BC)


def whole_tiles(samples: int, count: int, tokens: int, rows: int = TILE_ROWS) -> int:
    """The least number of entries of a sample, from ``count`` on, with which all samples fill whole tiles of rows.

    Args:
        samples: number of samples.
        count: selected tokens of each.
        tokens: tokens of each; at most these are selected.
        rows: rows of a tile.
    """
    step = rows // math.gcd(samples, rows)
    return min(tokens, -(-count // step) * step)
