"""Some tokens of each sample, taken out of the stream, worked on, and put back: what is left out costs nothing.

Shapes in names: B samples, T tokens of a sample, C tokens taken at most, D model width.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True, kw_only=True)
class TokenSelection:
    """Tokens of each sample, in their order.

    Attributes:
        index_BC: positions; the first ones of each row ascend, the others only fill the row up.
        real_BC: false where an entry only fills the row up.
    """

    index_BC: torch.Tensor
    real_BC: torch.Tensor

    def take(self, x: torch.Tensor) -> torch.Tensor:
        """The chosen tokens of ``[B, T]`` or ``[B, T, D]``: ``[B, C]`` or ``[B, C, D]``."""
        index = self.index_BC if x.dim() == 2 else self.index_BC[..., None].expand(-1, -1, x.shape[-1])
        return x.gather(1, index)

    def put(self, x_BTD: torch.Tensor, y_BCD: torch.Tensor) -> torch.Tensor:
        """``x_BTD`` with the chosen tokens replaced by those of ``y_BCD``."""
        updated_BCD = torch.where(self.real_BC[..., None], y_BCD, self.take(x_BTD))
        return x_BTD.scatter(1, self.index_BC[..., None].expand_as(updated_BCD), updated_BCD)


def select_tokens(keep_BT: torch.Tensor) -> TokenSelection:
    """The tokens that ``keep_BT`` (boolean) marks; a row has as many entries as the fullest, one at least.

    One entry remains where no token is kept at all, so that the weights behind it always get gradients, of zero.
    """
    counts_B = keep_BT.sum(1)
    entries = max(1, int(counts_B.max()))
    # Stable: the kept ones first, each group in its order.
    index_BT = torch.argsort(keep_BT.logical_not().to(torch.uint8), dim=1, stable=True)
    places_C = torch.arange(entries, device=keep_BT.device)
    return TokenSelection(index_BC=index_BT[:, :entries], real_BC=places_C < counts_B[:, None])


def select_top(scores_BT: torch.Tensor, count: int) -> TokenSelection:
    """The ``count`` tokens of the highest scores in each sample, in their order; of equal ones the earlier."""
    order_BT = torch.argsort(scores_BT, dim=1, descending=True, stable=True)
    index_BC = order_BT[:, :count].sort(dim=1).values
    return TokenSelection(index_BC=index_BC, real_BC=torch.ones_like(index_BC, dtype=torch.bool))
