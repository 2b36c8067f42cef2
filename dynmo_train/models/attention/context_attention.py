"""Causal attention of a context-parallel rank: its two chunks attend to the keys of all ranks up to themselves.

The heads are in two halves: while one attends, the keys of the other are on their way. Heads do not depend on one
another, so that this changes no bit.

Shapes in names: B samples, T tokens of this rank, c tokens of a chunk, S keys of a chunk, H heads, G key-value groups,
K head width, M documents of a chunk.
"""

from __future__ import annotations

from typing import NamedTuple, Protocol

import torch
import torch.nn.functional as F

from ...parallel.context_parallel import ContextRegion
from .varlen import attend_sequences, sample_offsets, window_mask

HEAD_PARTS = 2
"""Parts that heads are gathered in: more parts hide more of the first gather, but leave a GPU with small kernels."""


class CausalAttention(Protocol):
    """What :func:`attend_context` reads of ``SelfAttention``."""

    window: int | None
    scale: float | None
    sinks: torch.Tensor | None

    def has_kernel(self, q_BHTK: torch.Tensor) -> bool:
        """Whether sequences of variable length have a kernel for ``q_BHTK`` ``[B, H, T, K]``."""

    def weighted_values(
        self, q_BHTK: torch.Tensor, k_BGSK: torch.Tensor, v_BGSK: torch.Tensor, mask: torch.Tensor | None, causal: bool
    ) -> torch.Tensor:
        """Attend with ``q_BHTK``, ``k_BGSK``, ``v_BGSK`` and ``mask``: ``[B, H, T, K]``."""


class DocumentSizes(NamedTuple):
    """Sizes of the documents in a chunk, over the samples of a step; kernels need them, and must not ask the device.

    Attributes:
        most: documents of the fullest sample.
        queries: tokens of the longest document within the chunk.
        keys: the most keys of a document, or keys before the first one.
    """

    most: int
    queries: int
    keys: int


class Documents(NamedTuple):
    """Documents that a token must not attend beyond.

    Attributes:
        starts_BT: int64 ``[B, T]``, place in the sample where the document of each token of this rank begins.
        sizes: of both chunks; None where they are not known, for a mask.
    """

    starts_BT: torch.Tensor
    sizes: tuple[DocumentSizes, ...] | None


def document_sizes(starts_NT: torch.Tensor, context: ContextRegion) -> tuple[DocumentSizes, ...]:
    """The sizes for both chunks of this rank.

    Args:
        starts_NT: int64 ``[N, T]``, as in :class:`Documents`, of all samples of a step, on the CPU.
        context: ranks that share the tokens.
    """
    places_T = context.positions(starts_NT.shape[1], starts_NT.device)
    sizes = []
    for starts_Nc, places_c in zip(starts_NT.chunk(2, dim=1), places_T.chunk(2), strict=True):
        is_first_Nc, index_c = _is_first(starts_Nc), torch.arange(len(places_c))
        begins_Nc = torch.where(is_first_Nc, index_c, 0).cummax(1).values
        keys = max(int((places_c - starts_Nc).max()) + 1, int(starts_Nc[:, 0].max()))
        sizes.append(DocumentSizes(int(is_first_Nc.sum(1).max()), int((index_c - begins_Nc).max()) + 1, keys))
    return tuple(sizes)


def _is_first(starts_Bc: torch.Tensor) -> torch.Tensor:
    """Whether a token is the first one of its document in the chunk, bool ``[B, c]``."""
    return F.pad(starts_Bc[:, 1:] != starts_Bc[:, :-1], (1, 0), value=True)


def document_chunk_offsets(starts_Bc: torch.Tensor, keys: int, most: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Where the documents of a chunk begin in its queries and in the keys up to its end.

    The keys before the first document are a sequence without queries::

        places       0  1  2  3 | 4  5  6  7      a chunk of 4 queries, 8 keys
        starts       0  0  2  2 | 2  5  5  5
        queries                 [ 0][ 1  2  3]    offsets 0, 0, 1, 4
        keys        [0  1][2  3   4][5  6  7]     offsets 0, 2, 5, 8

    Args:
        starts_Bc: int64 ``[B, c]``, as in :class:`Documents`.
        keys: S.
        most: documents of the fullest sample; the others have empty documents at their end.

    Returns:
        int32 ``[B * (most + 1) + 1]`` each.
    """
    B, c = starts_Bc.shape
    device = starts_Bc.device
    first_BM = torch.where(_is_first(starts_Bc), torch.arange(c, device=device), c).sort(1).values[:, :most]
    keys_BM = F.pad(starts_Bc, (0, 1), value=keys).gather(1, first_BM)
    samples_B = torch.arange(B, device=device)[:, None]
    offsets = ((F.pad(each, (1, 0)) + samples_B * size, size) for each, size in ((first_BM, c), (keys_BM, keys)))
    queries, ends = (F.pad(each.reshape(-1), (0, 1), value=B * size).int() for each, size in offsets)
    return queries, ends


def document_chunk_mask(starts_Bc: torch.Tensor, places_c: torch.Tensor, keys: int, window: int) -> torch.Tensor:
    """Causal mask of a chunk within documents, bool ``[B, 1, c, S]``.

    Args:
        starts_Bc: int64 ``[B, c]``, as in :class:`Documents`.
        places_c: int64 ``[c]``, places of the queries in the sample.
        keys: S.
        window: keys that a query attends to, itself included.
    """
    places_S = torch.arange(keys, device=starts_Bc.device)
    first_Bc = torch.maximum(starts_Bc, places_c - window + 1)
    return ((places_S <= places_c[:, None]) & (places_S >= first_Bc[:, :, None]))[:, None]


def attend_context(
    q_BHTK: torch.Tensor,
    k_BGTK: torch.Tensor,
    v_BGTK: torch.Tensor,
    context: ContextRegion,
    attention: CausalAttention,
    documents: Documents | None = None,
) -> torch.Tensor:
    """Return the attention before the output layer, ``[B, T, H * K]``.

    Args:
        q_BHTK: queries of this rank, ``[B, H, T, K]``.
        k_BGTK: keys of this rank, ``[B, G, T, K]``.
        v_BGTK: values of this rank, ``[B, G, T, K]``.
        context: ranks that share the tokens.
        attention: the module.
        documents: where a token attends to its own document only.
    """
    # The sinks are of all heads of the module.
    parts = HEAD_PARTS if k_BGTK.shape[1] % HEAD_PARTS == 0 and attention.sinks is None else 1
    split = zip(k_BGTK.chunk(parts, dim=1), v_BGTK.chunk(parts, dim=1), strict=True)
    started = [context.start_gather(k, v) for k, v in split]
    heads = []
    for q, each in zip(q_BHTK.chunk(parts, dim=1), started, strict=True):
        keys, values = each.wait()
        heads.append(_attend_chunks(q, keys, values, context, attention, documents))
    return torch.cat(heads, dim=2) if parts > 1 else heads[0]


def _attend_chunks(
    q_BHTK: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    context: ContextRegion,
    attention: CausalAttention,
    documents: Documents | None,
) -> torch.Tensor:
    """:func:`attend_context` with the keys and values of all tokens."""
    B, _, T, _ = q_BHTK.shape
    chunk, device = T // 2, q_BHTK.device
    uses_kernel = attention.has_kernel(q_BHTK)
    parts = []
    for number, (q, S) in enumerate(zip(q_BHTK.chunk(2, dim=2), context.keys_of_chunks(T), strict=True)):
        k, v = keys[:, :, :S], values[:, :, :S]
        window = attention.window or S
        starts = None if documents is None else documents.starts_BT[:, number * chunk : (number + 1) * chunk]
        if uses_kernel and (documents is None or documents.sizes is not None):
            # The kernel aligns the causal mask to the last key, and the last query is the last key.
            span = (window - 1 if window < S else -1, 0)
            offsets, longest = (sample_offsets(B, chunk, device), sample_offsets(B, S, device)), (chunk, S)
            if starts is not None and documents is not None and documents.sizes is not None:
                sizes = documents.sizes[number]
                offsets, longest = document_chunk_offsets(starts, S, sizes.most), (sizes.queries, sizes.keys)
            parts.append(attend_sequences(q, k, v, offsets, longest, window=span, scale=attention.scale))
        else:
            if starts is None:
                mask = window_mask(chunk, S, window, device)
            else:
                mask = document_chunk_mask(starts, torch.arange(S - chunk, S, device=device), S, window)
            parts.append(attention.weighted_values(q, k, v, mask, False).transpose(1, 2).flatten(2))
    return torch.cat(parts, dim=1)
