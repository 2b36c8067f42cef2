"""Several documents in one sample: positions that begin again, and attention within a document.

Megatron's ``--reset-position-ids`` and ``--reset-attention-mask``. One tensor of the batch has everything: for each
token, the place in its sample where its document begins.

    ids_BT       a  b  eod  c  d  e  eod  f
    starts_BT    0  0   0   3  3  3   3   7      same document: equal starts
    positions    0  1   2   0  1  2   3   0      place - start

With context parallelism a rank has these tensors for its own tokens; places are still those in the whole sample.

On CUDA in half precision, attention runs on the documents as sequences of variable length: no mask is read, and no
score between documents is computed. Elsewhere the mask is a boolean tensor.

Shapes in names: B samples, T tokens, N = B*T, D model width, H heads, G key-value groups, K head width, M documents.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F

from ...parallel.context_parallel import ContextRegion
from ...parallel.random_stream import item_dropout
from .context_attention import Documents, DocumentSizes, attend_context, document_sizes
from .latent_attention import LatentAttention
from .self_attention import SelfAttention
from .varlen import CAUSAL, attend_sequences, window_mask

# The batch tensor; ``data/gpt_dataset.py`` computes it.
STARTS = "document_starts"


def positions_in_documents(starts_BT: torch.Tensor, context: ContextRegion | None = None) -> torch.Tensor:
    """Position of each token in its document, int64 ``[B, T]``.

    Args:
        starts_BT: int64 ``[B, T]``, where the document of each token begins.
        context: ranks that share the tokens of a sample; None where each has all.
    """
    tokens, device = starts_BT.shape[1], starts_BT.device
    places_T = torch.arange(tokens, device=device) if context is None else context.positions(tokens, device)
    return places_T - starts_BT


def document_mask(starts_BT: torch.Tensor) -> torch.Tensor:
    """Causal mask within documents, bool ``[B, 1, T, T]``, from ``starts_BT``, int64 ``[B, T]``."""
    tokens = starts_BT.shape[1]
    causal_TT = torch.ones(tokens, tokens, dtype=torch.bool, device=starts_BT.device).tril()
    return ((starts_BT[:, :, None] == starts_BT[:, None, :]) & causal_TT)[:, None]


def document_offsets(starts_BT: torch.Tensor, most: int) -> torch.Tensor:
    """First token of each document of a microbatch, as attention of variable length reads it.

    Args:
        starts_BT: int64 ``[B, T]``.
        most: documents of the fullest sample; the others have empty documents at their end, so that no size depends on
            values on the device.

    Returns:
        int32 ``[B * most + 1]``, ascending; the last is the number of tokens.
    """
    B, T = starts_BT.shape
    places_T = torch.arange(T, device=starts_BT.device)
    begins_BM = torch.where(starts_BT == places_T, places_T, T).sort(1).values[:, :most]
    begins_M = (begins_BM + torch.arange(B, device=starts_BT.device)[:, None] * T).reshape(-1)
    return F.pad(begins_M, (0, 1), value=B * T).int()


class PackedAttention(SelfAttention):
    """Causal attention in samples of several documents.

    Args:
        reset_positions: whether rotary positions begin again with each document.
        reset_mask: whether a token attends to tokens of its own document only.
        options: arguments of ``SelfAttention``.
    """

    def __init__(self, *, reset_positions: bool, reset_mask: bool, **options: Any) -> None:
        super().__init__(**options)
        self.reset_positions, self.reset_mask = reset_positions, reset_mask
        self.most_documents, self.longest_document = 0, 0
        self.chunk_sizes: tuple[DocumentSizes, ...] | None = None

    def prepare_batch(self, inputs: Mapping[str, torch.Tensor]) -> None:
        """Find out the sizes that kernels need and the device must not be asked for.

        Args:
            inputs: Batch of a step by name, tensors ``[samples, T]`` on the CPU.
        """
        starts_BT = inputs[STARTS]
        if self.context is not None:
            self.chunk_sizes = document_sizes(starts_BT, self.context)
            return
        is_first_BT = starts_BT == torch.arange(starts_BT.shape[1])
        self.most_documents = int(is_first_BT.sum(1).max())
        self.longest_document = int(positions_in_documents(starts_BT).max()) + 1

    def forward(self, x_BTD: torch.Tensor, starts_BT: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        """Apply the sublayer with its residual.

        Args:
            x_BTD: the residual stream, ``[B, T, D]``.
            starts_BT: int64 ``[B, T]``, where the document of each token begins.

        Returns:
            The residual stream after the sublayer, ``[B, T, D]``.
        """
        positions = positions_in_documents(starts_BT, self.context) if self.reset_positions else 0
        q, k, v = self.project(x_BTD, positions)
        if self.context is not None:
            documents = Documents(starts_BT, self.chunk_sizes) if self.reset_mask else None
            y_BTD = self.output(attend_context(q, k, v, self.context, self, documents))
        elif not self.reset_mask:
            y_BTD = self.output(self._window_heads(q, k, v, self.window or q.shape[2]))
        elif self.most_documents and self.has_kernel(q):
            y_BTD = self._attend_varlen(q, k, v, starts_BT)
        else:
            mask = document_mask(starts_BT)
            if self.window is not None:
                mask = mask & window_mask(q.shape[2], q.shape[2], self.window, q.device)
            y_BTD = self.attend(q, k, v, mask, False)
        return x_BTD + item_dropout(y_BTD, self.dropout, self.training)

    def _attend_varlen(
        self, q_BHTK: torch.Tensor, k_BGTK: torch.Tensor, v_BGTK: torch.Tensor, starts_BT: torch.Tensor
    ) -> torch.Tensor:
        """See :meth:`attend`; the documents are sequences of their own."""
        offsets = document_offsets(starts_BT, self.most_documents)
        longest = self.longest_document
        window = CAUSAL if self.window is None else (self.window - 1, 0)
        y_BTR = attend_sequences(
            q_BHTK, k_BGTK, v_BGTK, (offsets, offsets), (longest, longest), window=window, scale=self.scale
        )
        return self.output(y_BTR)


class PackedLatentAttention(PackedAttention, LatentAttention):
    """Multi-head latent attention in samples of several documents."""
