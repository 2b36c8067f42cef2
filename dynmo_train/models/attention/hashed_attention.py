"""Dynamic sparse attention: a query attends to the keys of its hash bucket, redrawn in each forward.

Queries and keys are hashed by direction (angular LSH: Andoni et al. 2015, arXiv:1509.02897; Kitaev et al. 2020,
arXiv:2001.04451, section 2) and sorted by bucket and position (Pagliardini et al. 2023, arXiv:2306.01160, section 3.2).
Then the keys of a query are one range of the sorted keys, also under a causal mask: they begin where its bucket begins,
and end behind the last key of the bucket that is not later than the query. Keys under the padding mask are in a bucket
of their own, which no query has. Two integers per query are the whole mask; no mask of T x T is built:

    q, k ─▶ hash_directions ─▶ sort ─▶ HashMask ─┬─▶ TileTable ─▶ attend_by_tiles   (CPU, or with dropout)
                                                 └─▶ TileLists ─▶ attend_by_lists   (FlexAttention on CUDA)

``attend_by_tiles`` cuts the queries of each bucket into tiles. A tile needs the first keys of its bucket up to the end
of its last query, so that a causal mask saves half of the scores of a large bucket. Tiles with the same number of key
blocks are one batched product. The shapes follow the data, which costs nothing on CPU.

``attend_by_lists`` has constant shapes: tiles are cut from all sorted rows, whatever their buckets, and the key tiles
of each are a list in a tensor. The host reads nothing, and another selection compiles nothing.

Shapes in names: B samples, H heads, T queries, S keys (T = S here), K head width, P = B*H, N buckets and one end, Q and
J tiles of queries and keys, L rows of a tile, G tiles with the same number of key blocks, M keys of such a tile.

With a sliding window the keys of a query begin behind those of its bucket that are before the window: still one range.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F

from ...parallel.random_stream import normal
from ...parallel.seeding import stable_seed
from .hashed_tiles import PLAIN_SCORES, ScoreRules, attend_by_tiles, take_rows, tile_table

FLEX_TILE = 128
"""Tiles of FlexAttention are multiples of this: its kernels read the keys of 128 rows at a time."""

SMALLEST_TILE = 16


def hash_directions(x_BHTK: torch.Tensor, axes_HKR: torch.Tensor) -> torch.Tensor:
    """The bucket of each vector, int64 ``[B, H, T]``, 0 to 2R - 1: the nearest of R random axes and their opposites.

    Args:
        x_BHTK: queries or keys, ``[B, H, T, K]``.
        axes_HKR: random axes of each head, float32 ``[H, K, R]``, of :meth:`HashedAttention.draw_axes`.
    """
    # In float32 in every precision: rounding in bf16 would move vectors near a border to another bucket.
    along_BHTR = torch.einsum("bhtk,hkr->bhtr", x_BHTK.detach().float(), axes_HKR)
    return torch.cat([along_BHTR, -along_BHTR], dim=-1).argmax(-1)


@dataclass(frozen=True, kw_only=True)
class TileLists:
    """The mask of all samples and heads as tile lists of constant shapes, for FlexAttention.

    Attributes:
        tile: rows and columns of a tile L; the rows are padded to whole tiles.
        first_BHT: int32 first sorted key of each sorted query.
        end_BHT: int32 end of its keys; padding rows have none.
        counts_BHQ: int32 number of key tiles that a query tile needs in part.
        indices_BHQJ: int32 numbers of these tiles first in each row.
        full_counts_BHQ: int32 number of key tiles that all queries of the tile attend to as a whole.
        full_indices_BHQJ: int32 numbers of these tiles first in each row.
    """

    tile: int
    first_BHT: torch.Tensor
    end_BHT: torch.Tensor
    counts_BHQ: torch.Tensor
    indices_BHQJ: torch.Tensor
    full_counts_BHQ: torch.Tensor
    full_indices_BHQJ: torch.Tensor


@dataclass(frozen=True, kw_only=True)
class HashMask:
    """The keys that each query attends to: one range of the sorted keys.

    Attributes:
        q_order_PT: int64 position of each sorted query.
        k_order_PT: int64 position of each sorted key.
        q_edges_PN: int64 number of sorted queries before each bucket; the last entry is T.
        k_edges_PN: int64 number of sorted keys before each bucket. The last bucket has the masked keys, and no query.
        bucket_PT: int64 bucket of each sorted query.
        first_PT: int64 first sorted key of each sorted query.
        end_PT: int64 end of the keys of each sorted query; ``first_PT`` where there are none.
    """

    q_order_PT: torch.Tensor
    k_order_PT: torch.Tensor
    q_edges_PN: torch.Tensor
    k_edges_PN: torch.Tensor
    bucket_PT: torch.Tensor
    first_PT: torch.Tensor
    end_PT: torch.Tensor

    def allowed(self) -> torch.Tensor:
        """Whether a sorted query attends to a sorted key, bool ``[P, T, S]``; for tests."""
        keys = torch.arange(self.end_PT.shape[1], device=self.end_PT.device)
        return (self.first_PT[..., None] <= keys) & (keys < self.end_PT[..., None])

    def tile_lists(self, tile: int, heads: int) -> TileLists:
        """The mask as lists of tiles.

        Args:
            tile: rows and columns of a tile.
            heads: number of heads H.
        """
        P, T = self.first_PT.shape
        first_PT, end_PT = (F.pad(x.int(), (0, -T % tile)) for x in (self.first_PT, self.end_PT))
        first, end = (x.view(P, -1, tile, 1) for x in (first_PT, end_PT))
        begin_J = torch.arange(0, first_PT.shape[1], tile, device=first.device)
        stop_J = begin_J + tile
        needed_PQJ = ((first < end) & (first < stop_J) & (begin_J < end)).any(2)
        full_PQJ = ((first <= begin_J) & (stop_J <= end)).all(2)
        counts, indices = _ordered(needed_PQJ & ~full_PQJ)
        full_counts, full_indices = _ordered(full_PQJ)
        by_head = (-1, heads)
        return TileLists(
            tile=tile,
            first_BHT=first_PT.unflatten(0, by_head),
            end_BHT=end_PT.unflatten(0, by_head),
            counts_BHQ=counts.unflatten(0, by_head),
            indices_BHQJ=indices.unflatten(0, by_head),
            full_counts_BHQ=full_counts.unflatten(0, by_head),
            full_indices_BHQJ=full_indices.unflatten(0, by_head),
        )


def _ordered(tiles_PQJ: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The number of true entries of each row, and their places in ascending order, followed by the other places."""
    places = torch.argsort(tiles_PQJ.logical_not().to(torch.uint8), dim=-1, stable=True)
    return tiles_PQJ.sum(-1, dtype=torch.int32), places.to(torch.int32)


def hash_mask(
    q_bucket_PT: torch.Tensor,
    k_bucket_PT: torch.Tensor,
    key_mask_PT: torch.Tensor | None,
    *,
    buckets: int,
    causal: bool,
    begins_PT: torch.Tensor | None = None,
) -> HashMask:
    """Sort by bucket and position, and find the range of keys of each query.

    Args:
        q_bucket_PT: int64 bucket of each query by position, ``[P, T]``.
        k_bucket_PT: int64 bucket of each key by position, ``[P, T]``.
        key_mask_PT: bool by position, ``[P, T]``, false for keys that no query may attend to; None means all.
        buckets: number of buckets.
        causal: whether a query attends to earlier keys and its own only.
        begins_PT: int64 first key in the window of each query by position, ``[P, T]``; None means no window.
    """
    P, T = q_bucket_PT.shape
    if key_mask_PT is not None:
        k_bucket_PT = k_bucket_PT.masked_fill(~key_mask_PT, buckets)
    places_T = torch.arange(T, device=q_bucket_PT.device)
    # One number for bucket and position: no two are equal, so the order needs no stable sort.
    q_sorted, k_sorted = ((x * T + places_T).sort(dim=1).values for x in (q_bucket_PT, k_bucket_PT))
    edges = (torch.arange(buckets + 2, device=q_sorted.device) * T).expand(P, -1).contiguous()
    q_edges, k_edges = (torch.searchsorted(x, edges) for x in (q_sorted, k_sorted))
    bucket_PT = q_sorted // T
    end_PT = torch.searchsorted(k_sorted, q_sorted, right=True) if causal else k_edges.gather(1, bucket_PT + 1)
    first_PT = k_edges.gather(1, bucket_PT)
    if begins_PT is not None:
        first_PT = torch.searchsorted(k_sorted, bucket_PT * T + begins_PT.gather(1, q_sorted % T))
    return HashMask(
        q_order_PT=q_sorted % T,
        k_order_PT=k_sorted % T,
        q_edges_PN=q_edges,
        k_edges_PN=k_edges,
        bucket_PT=bucket_PT,
        first_PT=first_PT,
        end_PT=end_PT,
    )


def attend_by_lists(
    q_BHTK: torch.Tensor,
    k_BHTK: torch.Tensor,
    v_BHTK: torch.Tensor,
    lists: TileLists,
    *,
    scale: float | None = None,
    compiled: bool = True,
) -> torch.Tensor:
    """Attention of each query to its keys by FlexAttention, ``[B, H, T, K]``; a query without any key gets 0.

    Another selection changes the contents of tensors only: a shape is compiled once, and the host reads nothing.

    Args:
        q_BHTK: sorted queries, padded to whole tiles, ``[B, H, T, K]``.
        k_BHTK: sorted keys, padded likewise.
        v_BHTK: sorted values, padded likewise.
        lists: the tiles to compute.
        scale: factor on the scores; None means ``K^-0.5``.
        compiled: whether to compile. The backward needs it, and CUDA.
    """
    attend = _compiled(flex_by_lists) if compiled else flex_by_lists
    return attend(
        q_BHTK,
        k_BHTK,
        v_BHTK,
        lists.tile,
        (lists.first_BHT, lists.end_BHT),
        (lists.counts_BHQ, lists.indices_BHQJ),
        (lists.full_counts_BHQ, lists.full_indices_BHQJ),
        scale,
    )


@cache
def _compiled(function: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    # One wrapper for all layers: they share its graphs. A length that differs is compiled for itself.
    compiled: Callable[..., torch.Tensor] = torch.compile(function, dynamic=False, fullgraph=True)
    return compiled


def flex_by_lists(
    q_BHTK: torch.Tensor,
    k_BHTK: torch.Tensor,
    v_BHTK: torch.Tensor,
    tile: int,
    ranges: tuple[torch.Tensor, torch.Tensor],
    partial: tuple[torch.Tensor, torch.Tensor],
    full: tuple[torch.Tensor, torch.Tensor],
    scale: float | None = None,
) -> torch.Tensor:
    """The graph of :func:`attend_by_lists`.

    Args:
        q_BHTK: queries, ``[B, H, T, K]``.
        k_BHTK: keys, ``[B, H, T, K]``.
        v_BHTK: values, ``[B, H, T, K]``.
        tile: rows and columns of a tile.
        ranges: first key and end of the keys of each query, as in ``TileLists``.
        partial: counts and indices of the key tiles that a mask cuts, as in ``TileLists``.
        full: counts and indices of the whole key tiles.
        scale: factor on the scores; None means ``K^-0.5``.
    """
    # All tensors are arguments of the graph. A block mask that is made outside of it holds another function in each
    # forward, which a guard would compare.
    from torch.nn.attention.flex_attention import BlockMask, flex_attention

    first_BHT, end_BHT = ranges

    def mask_mod(b: Any, h: Any, query: Any, key: Any) -> Any:
        return (first_BHT[b, h, query] <= key) & (key < end_BHT[b, h, query])

    block_mask = BlockMask.from_kv_blocks(*partial, *full, BLOCK_SIZE=tile, mask_mod=mask_mod)
    y_BHTK: Any = flex_attention(q_BHTK, k_BHTK, v_BHTK, block_mask=block_mask, scale=scale)
    return torch.as_tensor(y_BHTK)


@dataclass(frozen=True, kw_only=True)
class HashedAttention:
    """Hash-bucketed block-sparse attention.

    Attributes:
        buckets: number of hash buckets, even.
        block: largest number of rows of a tile; on CUDA rounded up to a multiple of ``FLEX_TILE``.
        seed: of the axes in evaluation. Training draws them in each forward from the item's random numbers.
        name: name of the item, part of the evaluation's seed.
        part: which of ``parts`` equal slices of the heads this rank has under tensor parallelism. Evaluation uses the
            axes of all heads; in training each rank draws its own, like dropout within a tensor-parallel region.
        parts: number of slices.
    """

    buckets: int
    block: int
    seed: int
    name: str
    part: int = 0
    parts: int = 1

    def tile(self, tokens: int) -> int:
        """The rows of a tile of :func:`attend_by_tiles` for a number of tokens."""
        # Keys are copied once per tile of queries, and a causal mask saves all but half a tile: measured from 512 to
        # 8,192 tokens, a quarter of a bucket is best. Smaller tiles than 32 need a bucket that does not fill one.
        per_bucket = -(-tokens // self.buckets)
        rows = max(per_bucket // 4, min(per_bucket, 2 * SMALLEST_TILE))
        return min(self.block, -(-rows // SMALLEST_TILE) * SMALLEST_TILE)

    def draw_axes(self, heads: int, head_width: int, device: torch.device, *, training: bool) -> torch.Tensor:
        """Draw the random axes whose directions are the buckets of queries and keys.

        Args:
            heads: number of local heads H.
            head_width: width of a head K.
            device: device of the result.
            training: whether to draw from the item's random numbers, which gives other axes in each call; else the axes
                depend on ``seed`` and ``name`` only.

        Returns:
            float32 ``[H, K, R]``, with R half of ``buckets``.
        """
        shape = (heads, head_width, self.buckets // 2)
        if training:
            return normal(shape, device)
        generator = torch.Generator().manual_seed(stable_seed(self.seed, "buckets", self.name))
        # The axes of all heads are drawn on CPU, so that they do not depend on the tensor-parallel size.
        whole = torch.randn((heads * self.parts, *shape[1:]), generator=generator)
        return whole.chunk(self.parts)[self.part].to(device)

    def mask(
        self,
        q_BHTK: torch.Tensor,
        k_BHTK: torch.Tensor,
        key_mask_BT: torch.Tensor | None,
        *,
        causal: bool,
        training: bool,
        rules: ScoreRules = PLAIN_SCORES,
    ) -> HashMask:
        """The mask of these queries and keys; draws the axes.

        Args:
            q_BHTK: queries, ``[B, H, T, K]``.
            k_BHTK: keys, ``[B, H, T, K]``.
            key_mask_BT: bool ``[B, T]``, true for keys that may be attended to; None means all.
            causal: whether a query attends to earlier keys and its own only.
            training: whether the axes are drawn from the item's random numbers.
            rules: of the scores, with the window.
        """
        B, H, T, K = q_BHTK.shape
        # The same axes for both: a query and a key of equal direction must be in one bucket.
        axes_HKR = self.draw_axes(H, K, q_BHTK.device, training=training)
        q_bucket, k_bucket = (hash_directions(x, axes_HKR).flatten(0, 1) for x in (q_BHTK, k_BHTK))
        key_mask_PT = None if key_mask_BT is None else key_mask_BT.bool().repeat_interleave(H, dim=0)
        begins_BT = rules.begins(B, T, q_BHTK.device)
        begins_PT = None if begins_BT is None else begins_BT.repeat_interleave(H, dim=0)
        return hash_mask(q_bucket, k_bucket, key_mask_PT, buckets=self.buckets, causal=causal, begins_PT=begins_PT)

    def attend(
        self,
        q_BHTK: torch.Tensor,
        k_BHTK: torch.Tensor,
        v_BHTK: torch.Tensor,
        key_mask_BT: torch.Tensor | None,
        *,
        causal: bool,
        dropout: float,
        training: bool,
        rules: ScoreRules = PLAIN_SCORES,
    ) -> torch.Tensor:
        """Attention of each query to the keys of its bucket, ``[B, H, T, K]``; 0 where there is none.

        FlexAttention runs on CUDA where no attention weight is dropped (it has no dropout, and no backward on CPU).
        With dropout, a soft cap or sinks the shapes follow the data on CUDA as well, so that the host waits for them.

        Args:
            q_BHTK: queries, ``[B, H, T, K]``.
            k_BHTK: keys, ``[B, H, T, K]``.
            v_BHTK: values, ``[B, H, T, K]``.
            key_mask_BT: bool ``[B, T]``, true for keys that may be attended to; None means all.
            causal: whether a query attends to earlier keys and its own only.
            dropout: dropout probability of the attention weights.
            training: whether the axes are drawn from the item's random numbers.
            rules: of the scores, with the window.
        """
        mask = self.mask(q_BHTK, k_BHTK, key_mask_BT, causal=causal, training=training, rules=rules)
        if q_BHTK.device.type == "cuda" and dropout == 0.0 and not rules.is_eager:
            tile = -(-self.block // FLEX_TILE) * FLEX_TILE
            return attend_sorted(q_BHTK, k_BHTK, v_BHTK, mask, tile=tile, scale=rules.scale)
        q, k, v = (x.flatten(0, 1) for x in (q_BHTK, k_BHTK, v_BHTK))
        table = tile_table(mask, self.tile(q_BHTK.shape[2]))
        y_PTK = attend_by_tiles(q, k, v, table, dropout=dropout, rules=rules)
        return y_PTK.view(q_BHTK.shape)


def attend_sorted(
    q_BHTK: torch.Tensor,
    k_BHTK: torch.Tensor,
    v_BHTK: torch.Tensor,
    mask: HashMask,
    *,
    tile: int,
    scale: float | None = None,
    compiled: bool = True,
) -> torch.Tensor:
    """Sort and pad rows, attend by tile lists, and put the rows back, ``[B, H, T, K]``.

    Args:
        q_BHTK: queries by position, ``[B, H, T, K]``.
        k_BHTK: keys by position.
        v_BHTK: values by position.
        mask: keys of each query.
        tile: rows of a tile.
        scale: factor on the scores; None means ``K^-0.5``.
        compiled: as in :func:`attend_by_lists`.
    """
    B, H, T, K = q_BHTK.shape

    def take(x_BHTK: torch.Tensor, index_PT: torch.Tensor, inverse_PT: torch.Tensor) -> torch.Tensor:
        offset = torch.arange(B * H, device=index_PT.device)[:, None] * T
        index, inverse = ((each + offset).flatten() for each in (index_PT, inverse_PT))
        return take_rows(x_BHTK.reshape(-1, K), index, inverse).view(B, H, T, K)

    q_back, k_back = (torch.argsort(order, dim=1) for order in (mask.q_order_PT, mask.k_order_PT))
    q, k, v = (
        F.pad(take(x, order, back), (0, 0, 0, -T % tile))
        for x, order, back in (
            (q_BHTK, mask.q_order_PT, q_back),
            (k_BHTK, mask.k_order_PT, k_back),
            (v_BHTK, mask.k_order_PT, k_back),
        )
    )
    y_BHTK = attend_by_lists(q, k, v, mask.tile_lists(tile, H), scale=scale, compiled=compiled)
    return take(y_BHTK[:, :, :T], q_back, mask.q_order_PT)
