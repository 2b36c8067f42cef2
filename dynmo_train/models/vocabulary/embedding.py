"""The first item of a model: embeddings of words, positions and token types.

    ids_BT ─▶ Embedding ─▶ x_BTD ─▶ SelfAttention ─▶ x_BTD ─▶ Mlp ─▶ x_BTD ─▶ ... ─▶ Head ─▶ loss
                                    x + dense(attention(norm(x)))  x + fc2(activation(fc1(norm(x))))

Shapes in names: B samples, T tokens, D model width.
"""

from __future__ import annotations

import torch
from torch import nn

from ...parallel.context_parallel import ContextRegion
from ...parallel.random_stream import item_dropout
from ..attention.documents import positions_in_documents
from ..attention.positions import add_positions
from .embedding_grad import PendingRows, look_up


class Embedding(nn.Module):
    """Tables of tokens and, where a model has them, positions and token types: ids ``[B, T]`` to ``[B, T, D]``.

    Args:
        vocabulary: rows of the word table, padding included.
        width: model width D.
        device: where the parameters are created.
        positions: rows of the position table; 0 means no table.
        tokentypes: rows of the token-type table; 0 means no table.
        dropout: dropout probability of the output.
        scale: factor on the rows of the word table; a tied head reads them without it.
    """

    def __init__(
        self,
        *,
        vocabulary: int,
        width: int,
        device: torch.device,
        positions: int = 0,
        tokentypes: int = 0,
        dropout: float = 0.0,
        scale: float = 1.0,
    ) -> None:
        super().__init__()
        self.scale = scale
        self.word = nn.Embedding(vocabulary, width, device=device)
        self.position = nn.Embedding(positions, width, device=device) if positions else None
        self.tokentype = nn.Embedding(tokentypes, width, device=device) if tokentypes else None
        self.dropout = dropout
        # Set by the item store: where gradients of the word table are collected by token.
        self.pending: PendingRows | None = None
        self.context: ContextRegion | None = None  # set by ``join_context``

    def embed(
        self, ids_BT: torch.Tensor, types_BT: torch.Tensor | None = None, past: int | torch.Tensor = 0
    ) -> torch.Tensor:
        """Sum of the word, position and token-type embeddings, ``[B, T, D]``.

        Args:
            ids_BT: int64 token ids, ``[B, T]``.
            types_BT: int64 token types, ``[B, T]``, where the model has them.
            past: position of the first token, or the positions of all, int64 ``[B, T]``.
        """
        x_BTD: torch.Tensor
        if self.pending is None or not self.word.weight.requires_grad:
            x_BTD = self.word(ids_BT)
        else:
            # A dense gradient of the table in every microbatch would be mostly zeros; see ``embedding_grad``.
            x_BTD = look_up(self.word.weight, ids_BT, self.pending)
        if self.scale != 1.0:
            # Rounded to the dtype of the stream first, as Gemma's is.
            x_BTD = x_BTD * torch.full((), self.scale, dtype=x_BTD.dtype, device=x_BTD.device)
        x_BTD = add_positions(x_BTD, ids_BT, self.position, past, self.context)
        if self.tokentype is not None and types_BT is not None:
            x_BTD = x_BTD + self.tokentype(types_BT)
        return x_BTD

    def forward(self, ids_BT: torch.Tensor, types_BT: torch.Tensor | None = None) -> torch.Tensor:
        """``embed`` from position 0, with dropout: ``ids_BT`` and ``types_BT``, int64 ``[B, T]``, to ``[B, T, D]``."""
        return item_dropout(self.embed(ids_BT, types_BT), self.dropout, self.training)


class PackedEmbedding(Embedding):
    """An embedding whose positions begin again with each document."""

    def forward(self, ids_BT: torch.Tensor, starts_BT: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        """``embed`` with positions in documents, with dropout.

        Args:
            ids_BT: int64 token ids, ``[B, T]``.
            starts_BT: int64 ``[B, T]``, where the document of each token begins.

        Returns:
            ``[B, T, D]``.
        """
        x_BTD = self.embed(ids_BT, past=positions_in_documents(starts_BT, self.context))
        return item_dropout(x_BTD, self.dropout, self.training)
