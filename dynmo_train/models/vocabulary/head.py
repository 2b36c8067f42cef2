"""The head of a language model: the last item of every layer list.

Shapes in names: B samples, T tokens, D model width, V vocabulary.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from ...parallel.tensor_parallel import TensorRegion
from ..layers.linear import BiasedProduct
from ..layers.softcap import soft_cap
from .cross_entropy import mean_linear_cross_entropy


class Head(nn.Module):
    """Final normalization, projection to the vocabulary, and the loss: its cost is measured as the head's.

    Where embeddings are tied, the weight is this item's own copy of the word table. The gradients of both copies are
    added once a step, whichever ranks have the two items. Rows of padding take no part in the product.

    Args:
        width: model width D.
        rows: rows of the weight, padding included.
        vocabulary: number of true token ids V.
        norm: normalization before the projection.
        device: where the parameters are created.
        bias: whether the projection has a bias.
        scale: factor on the normalized input (T5 scales by ``D^-0.5`` where embeddings are tied).
        softcap: the logits are capped to ``softcap * tanh(logits / softcap)``; None means that they are not.
    """

    bias: nn.Parameter | None

    def __init__(
        self,
        *,
        width: int,
        rows: int,
        vocabulary: int,
        norm: nn.Module,
        device: torch.device,
        bias: bool = False,
        scale: float = 1.0,
        softcap: float | None = None,
    ) -> None:
        super().__init__()
        self.norm = norm
        self.weight = nn.Parameter(torch.empty(rows, width, device=device))
        self.bias = nn.Parameter(torch.zeros(rows, device=device)) if bias else None
        self.vocabulary, self.scale, self.softcap = vocabulary, scale, softcap
        # What the backward multiplies the loss by, with the loss scale; the stage sets it in each step.
        self.loss_factor = 1.0
        self.region: TensorRegion | None = None
        self.packed: BiasedProduct | None = None  # with the rows of true token ids; set by ``packed_linear``

    def features(self, x_BTD: torch.Tensor) -> torch.Tensor:
        """The input of the projection, ``[B, T, D]``, from the residual stream ``x_BTD`` ``[B, T, D]``."""
        x_BTD = self.norm(x_BTD)
        return x_BTD if self.scale == 1.0 else x_BTD * self.scale

    def logits(self, x_BTD: torch.Tensor) -> torch.Tensor:
        """Logits ``[B, T, V]`` over the true vocabulary; where it is sharded, every rank gets all of them.

        Args:
            x_BTD: the residual stream, ``[B, T, D]``.
        """
        if self.region is not None:
            cut_BTV = F.linear(self.region.enter(self.features(x_BTD)), self.weight, self.bias)
            return soft_cap(self.region.gather_vocabulary(cut_BTV)[..., : self.vocabulary], self.softcap)
        bias = None if self.bias is None else self.bias[: self.vocabulary]
        if self.packed is not None:
            return soft_cap(self.packed(self.features(x_BTD), bias), self.softcap)
        return soft_cap(F.linear(self.features(x_BTD), self.weight[: self.vocabulary], bias), self.softcap)

    def local_rows(self) -> tuple[torch.Tensor, torch.Tensor | None, int]:
        """Weight and bias of this rank's rows without padding, and the token id of the first row."""
        first = 0 if self.region is None else self.region.rank * self.weight.shape[0]
        real = min(max(self.vocabulary - first, 0), self.weight.shape[0])
        return self.weight[:real], None if self.bias is None else self.bias[:real], first

    def forward(
        self, x_BTD: torch.Tensor, labels_BT: torch.Tensor, counts_BT: torch.Tensor | None = None
    ) -> torch.Tensor:
        """The mean cross-entropy of the microbatch, a scalar, over the tokens that count.

        Args:
            x_BTD: the residual stream, ``[B, T, D]``; with sequence parallelism this rank's tokens.
            labels_BT: int64 ``[B, T]``, ids of the next tokens; of all tokens on every rank.
            counts_BT: ``[B, T]``, 1 where a token counts, else 0; None means that all count.
        """
        return mean_linear_cross_entropy(
            self.features(x_BTD),
            self.weight,
            self.bias,
            labels_BT,
            counts_BT,
            self.vocabulary,
            self.region,
            self.loss_factor,
            self.softcap,
        )
