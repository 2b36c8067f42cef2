"""Tiles of bucketed attention: the queries of each bucket in tiles, with the key blocks that each needs.

See ``hashed_attention.py``. The shapes follow the data, which costs nothing on CPU. A tile begins at the block with the
first key of any of its queries: the first of the bucket, or with a sliding window a later one.

Shapes in names: B samples, H heads, T queries and keys, K head width, P = B*H, N buckets and one end, Q tiles of
queries, L rows of a tile, G tiles with the same number of key blocks, M keys of such a tile.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F

from .eager_attention import tile_attention
from .varlen import window_begins

if TYPE_CHECKING:
    from .hashed_attention import HashMask


class _TakeRows(torch.autograd.Function):
    """``x[index]``, whose backward is ``gradient[inverse]``, a gather instead of a scatter.

    Each row of ``x`` is taken once, apart from entries of ``index`` whose gradient does not count. Rows of ``x`` that
    are not taken are ``padding``.
    """

    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, index: torch.Tensor, inverse: torch.Tensor, padding: torch.Tensor | None
    ) -> torch.Tensor:
        ctx.save_for_backward(inverse, padding)
        return x.index_select(0, index)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:
        inverse, padding = ctx.saved_tensors
        gradient = gradients[0].index_select(0, inverse)
        return gradient if padding is None else gradient.index_fill_(0, padding, 0.0), None, None, None


def take_rows(
    x: torch.Tensor, index: torch.Tensor, inverse: torch.Tensor, padding: torch.Tensor | None = None
) -> torch.Tensor:
    """Rows ``index`` of ``x``, whose gradient is a gather too.

    Args:
        x: ``[rows, ...]``.
        index: int64 row of each entry.
        inverse: int64 entry of each row of ``x``.
        padding: int64 rows of ``x`` whose gradient does not count; None means that there are none.
    """
    taken: torch.Tensor = _TakeRows.apply(x, index, inverse, padding)  # type: ignore[no-untyped-call]
    return taken


@dataclass(frozen=True, kw_only=True)
class Slots:
    """Rows of buckets in blocks of L slots, each bucket in blocks of its own; ``rows[entry]`` is the row of a slot.

    Attributes:
        entry: int64 row of each slot, ``[slots]``; of padding slots any.
        slot: int64 slot of each row, ``[P*T]``.
        padding: int64 slots without a row.
        block_PN: int64 first block of each bucket.
        counts: int64 number of rows of each block.
        bucket: int64 bucket of each block, counted over all P, ``[blocks]``.
    """

    entry: torch.Tensor
    slot: torch.Tensor
    padding: torch.Tensor
    block_PN: torch.Tensor
    counts: torch.Tensor
    bucket: torch.Tensor


def bucket_slots(order_PT: torch.Tensor, edges_PN: torch.Tensor, tile: int) -> Slots:
    """Cut the rows of each bucket into blocks.

    Args:
        order_PT: int64 position of each sorted row, ``[P, T]``.
        edges_PN: int64 number of sorted rows before each bucket, and the end of the last, ``[P, N]``.
        tile: rows of a block L.
    """
    P, T = order_PT.shape
    device = order_PT.device
    rows_PN = edges_PN.diff(dim=1).flatten()
    blocks_PN = (rows_PN + tile - 1) // tile
    block_PN = blocks_PN.cumsum(0) - blocks_PN
    bucket = torch.arange(len(blocks_PN), device=device).repeat_interleave(blocks_PN)
    offset = (torch.arange(len(bucket), device=device) - block_PN[bucket]) * tile
    first_row = torch.arange(P, device=device).repeat_interleave(edges_PN.shape[1] - 1) * T + edges_PN[:, :-1].flatten()
    sorted_row = (first_row[bucket] + offset)[:, None] + torch.arange(tile, device=device)
    counts = (rows_PN[bucket] - offset).clamp(max=tile)
    is_row = torch.arange(tile, device=device) < counts[:, None]
    by_row = (order_PT + torch.arange(P, device=device)[:, None] * T).flatten()
    entry = torch.where(is_row, by_row[sorted_row.clamp(max=P * T - 1)], 0).flatten()
    slot = torch.empty(P * T, dtype=torch.int64, device=device)
    taken = is_row.flatten().nonzero()[:, 0]
    slot[entry[taken]] = taken
    padding = is_row.flatten().logical_not().nonzero()[:, 0]
    return Slots(entry=entry, slot=slot, padding=padding, block_PN=block_PN, counts=counts, bucket=bucket)


@dataclass(frozen=True, kw_only=True)
class TileTable:
    """The products of :func:`attend_by_tiles`: query tiles, sorted by their number of key blocks.

    Attributes:
        tile: rows of a tile and of a block of keys L.
        queries: slots of the queries, in the order of the tiles.
        keys: slots of the keys.
        key_blocks: int64 numbers of the key blocks of all tiles, one tile after another.
        begins_QL: int64 first key of each query slot, counted from the first key of its tile; 0 where it has no key.
        keys_QL: int64 end of the keys of each query slot, counted likewise; 0 where it has no key, and for padding.
        groups: number of tiles, and number of key blocks of each, per group.
    """

    tile: int
    queries: Slots
    keys: Slots
    key_blocks: torch.Tensor
    begins_QL: torch.Tensor
    keys_QL: torch.Tensor
    groups: tuple[tuple[int, int], ...]


def tile_table(mask: HashMask, tile: int) -> TileTable:
    """Cut the queries of each bucket into tiles, and list the key blocks that each needs.

    Args:
        mask: keys of each query.
        tile: rows of a tile.
    """
    queries = bucket_slots(mask.q_order_PT, mask.q_edges_PN, tile)
    keys = bucket_slots(mask.k_order_PT, mask.k_edges_PN, tile)
    device = mask.end_PT.device
    # By position, as slots name rows: first key and end of each query, counted from the first key of its bucket.
    bucket_first_PT = mask.k_edges_PN.gather(1, mask.bucket_PT)
    begins_QL, keys_QL = (
        torch.empty_like(x).scatter_(1, mask.q_order_PT, x - bucket_first_PT).flatten()[queries.entry].view(-1, tile)
        for x in (mask.first_PT, mask.end_PT)
    )
    is_empty_QL = (torch.arange(tile, device=device) >= queries.counts[:, None]) | (begins_QL >= keys_QL)
    # From the block with the first key of any query, to that with the last.
    first_Q = begins_QL.masked_fill(is_empty_QL, torch.iinfo(torch.int64).max).amin(1) // tile
    blocks_Q = (keys_QL.masked_fill(is_empty_QL, 0).amax(1) + tile - 1) // tile
    first_Q = torch.minimum(first_Q, blocks_Q)
    blocks_Q = blocks_Q - first_Q
    begins_QL, keys_QL = ((x - first_Q[:, None] * tile).masked_fill_(is_empty_QL, 0) for x in (begins_QL, keys_QL))
    order_Q = torch.argsort(blocks_Q, stable=True)
    blocks_Q = blocks_Q[order_Q]
    sizes, tiles = blocks_Q.unique_consecutive(return_counts=True)
    before = torch.arange(int(blocks_Q.sum()), device=device)
    start = blocks_Q.cumsum(0) - blocks_Q
    first_key_block = keys.block_PN[queries.bucket[order_Q]] + first_Q[order_Q]
    key_blocks = (first_key_block - start).repeat_interleave(blocks_Q) + before
    entry_QL = queries.entry.view(-1, tile)[order_Q]
    place_Q = torch.argsort(order_Q)
    begins_QL, keys_QL = begins_QL[order_Q], keys_QL[order_Q]
    queries = replace(
        queries,
        entry=entry_QL.flatten(),
        slot=place_Q[queries.slot // tile] * tile + queries.slot % tile,
        padding=place_Q[queries.padding // tile] * tile + queries.padding % tile,
        counts=queries.counts[order_Q],
        bucket=queries.bucket[order_Q],
    )
    return TileTable(
        tile=tile,
        queries=queries,
        keys=keys,
        key_blocks=key_blocks,
        begins_QL=begins_QL,
        keys_QL=keys_QL,
        groups=tuple(zip(tiles.tolist(), sizes.tolist(), strict=True)),
    )


@dataclass(frozen=True)
class ScoreRules:
    """What a model does with scores, and which are near enough.

    Attributes:
        scale: factor on the scores; None means ``K^-0.5``.
        softcap: the scores are capped to ``softcap * tanh(scores / softcap)``; None means that they are not.
        sinks_H: logit of each head's sink, ``[H]``; None means none.
        window: positions that a token of a causal model attends to, its own included; None means all.
        positions_BT: int64 ``[B, T]`` of selected tokens; None means 0, 1, 2, ...
    """

    scale: float | None = None
    softcap: float | None = None
    sinks_H: torch.Tensor | None = None
    window: int | None = None
    positions_BT: torch.Tensor | None = None

    @property
    def is_eager(self) -> bool:
        """Whether no fused kernel computes these scores."""
        return self.softcap is not None or self.sinks_H is not None

    def begins(self, samples: int, tokens: int, device: torch.device) -> torch.Tensor | None:
        """First key in the window of each query, int64 ``[samples, tokens]`` on a device; None without a window."""
        if self.window is None:
            return None
        if self.positions_BT is not None:
            return window_begins(self.positions_BT, self.window)
        return (torch.arange(tokens, device=device) - self.window + 1).clamp(min=0).expand(samples, -1)


PLAIN_SCORES = ScoreRules()


def attend_by_tiles(
    q_PTK: torch.Tensor,
    k_PTK: torch.Tensor,
    v_PTK: torch.Tensor,
    table: TileTable,
    *,
    dropout: float,
    rules: ScoreRules = PLAIN_SCORES,
) -> torch.Tensor:
    """Attention of each query to its keys, ``[P, T, K]``; a query without any key gets 0.

    Args:
        q_PTK: queries by position, ``[P, T, K]``.
        k_PTK: keys by position, ``[P, T, K]``.
        v_PTK: values by position, ``[P, T, K]``.
        table: the products to compute.
        dropout: dropout probability of the attention weights; must be 0 with a soft cap or sinks.
        rules: of the scores.

    Raises:
        ValueError: a dropout with a soft cap or sinks.
    """
    if dropout and rules.is_eager:
        raise ValueError("attention in buckets with a soft cap or sinks has no dropout of its weights")
    P, T, K = q_PTK.shape
    L, queries, keys = table.tile, table.queries, table.keys
    q_QLK = take_rows(q_PTK.reshape(P * T, K), queries.entry, queries.slot).view(-1, L, K)
    # A block is one row of L * K numbers: copying and adding rows of K numbers takes several times as long.
    k_blocks, v_blocks = (
        take_rows(x.reshape(P * T, K), keys.entry, keys.slot).view(-1, L * K)[table.key_blocks] for x in (k_PTK, v_PTK)
    )
    tiles, sizes = zip(*table.groups, strict=True)
    rows = [count * size for count, size in table.groups]
    sinks_Q: torch.Tensor | None = None
    if rules.sinks_H is not None:
        # Buckets are numbered head by head of one sample after another.
        head_Q = queries.bucket // (len(keys.block_PN) // P) % len(rules.sinks_H)
        sinks_Q = rules.sinks_H.float()[head_Q]
    begins, sinks = table.begins_QL.split(tiles), sinks_Q.split(tiles) if sinks_Q is not None else (None,) * len(tiles)
    done: list[torch.Tensor] = []
    for q_GLK, begins_GL, keys_GL, sinks_G, k_rows, v_rows, size in zip(
        q_QLK.split(tiles),
        begins,
        table.keys_QL.split(tiles),
        sinks,
        k_blocks.split(rows),
        v_blocks.split(rows),
        sizes,
        strict=True,
    ):
        if size == 0:
            done.append(torch.zeros_like(q_GLK))
            continue
        # A softmax over no key is NaN: such a query attends to the first key here, and is zeroed below.
        places_M = torch.arange(size * L, device=q_GLK.device)
        allowed_GLM = (places_M >= begins_GL[..., None]) & (places_M < keys_GL.clamp(min=1)[..., None])
        k_GMK, v_GMK = k_rows.view(-1, size * L, K), v_rows.view(-1, size * L, K)
        if rules.is_eager:
            y_GLK = tile_attention(
                q_GLK, k_GMK, v_GMK, allowed_GLM, scale=rules.scale, cap=rules.softcap, sinks_G=sinks_G
            )
        else:
            y_GLK = F.scaled_dot_product_attention(
                q_GLK[:, None],
                k_GMK[:, None],
                v_GMK[:, None],
                attn_mask=allowed_GLM[:, None],
                dropout_p=dropout,
                scale=rules.scale,
            )[:, 0]
        done.append(y_GLK)
    y = take_rows(torch.cat(done).view(-1, K), queries.slot, queries.entry, queries.padding)
    is_empty = (table.keys_QL.flatten() == 0)[queries.slot]
    return y.masked_fill(is_empty[:, None], 0.0).view(P, T, K)
