"""Dynamic sparse attention: a query attends to the keys of its hash bucket, by a block mask of each forward.

Queries and keys are hashed by direction (angular LSH: Andoni et al. 2015, arXiv:1509.02897; Kitaev et al. 2020,
arXiv:2001.04451, section 2) and sorted by bucket. Only blocks of the sorted score matrix that contain a query and a key
of the same bucket are computed (Pagliardini et al. 2023, arXiv:2306.01160, section 3.2).

    q, k ─▶ hash_directions ─▶ sort by (bucket, position) ─▶ HashMask ─┬─▶ attend_by_gather (SDPA on gathered blocks)
                                                                       └─▶ FlexAttention (CUDA, without dropout)

Shapes in names: B samples, H heads, T queries, S keys (T = S here), K head width, Q and J blocks of queries and keys,
P = B*H, G block rows with the same number of blocks, L rows of a block.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F

from ..parallel.random_stream import normal
from ..parallel.seeding import stable_seed


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
class HashMask:
    """Which key each query attends to, and which blocks of the sorted scores that needs.

    Rows are padded to whole blocks. Padding sorts last: its bucket is ``buckets``, which no token has.

    Attributes:
        block: rows and columns of a block.
        causal: whether a query attends to earlier keys and its own only.
        q_order_PT: int64 position of each sorted query.
        k_order_PT: int64 position of each sorted key.
        q_bucket_PT: buckets of the sorted queries, ascending.
        k_bucket_PT: buckets of the sorted keys, ascending.
        key_mask_PT: bool, false for sorted keys that no query may attend to.
        blocks_PQJ: bool, whether a block is computed.
    """

    block: int
    causal: bool
    q_order_PT: torch.Tensor
    k_order_PT: torch.Tensor
    q_bucket_PT: torch.Tensor
    k_bucket_PT: torch.Tensor
    key_mask_PT: torch.Tensor
    blocks_PQJ: torch.Tensor

    def allowed(self, p: Any, query: Any, key: Any) -> torch.Tensor:
        """Whether a sorted query attends to a sorted key; arguments are index tensors that broadcast."""
        same = self.q_bucket_PT[p, query] == self.k_bucket_PT[p, key]
        if self.causal:
            same = same & (self.q_order_PT[p, query] >= self.k_order_PT[p, key])
        return same & self.key_mask_PT[p, key]

    def flex_mask(self, batch: int, heads: int) -> Any:
        """The same mask for ``torch.nn.attention.flex_attention``; ``batch`` is B, ``heads`` is H, with P = B*H."""
        from torch.nn.attention.flex_attention import BlockMask

        counts = self.blocks_PQJ.sum(-1, dtype=torch.int32).view(batch, heads, -1)
        # FlexAttention wants the numbers of the computed blocks first in each row; a stable sort keeps them ascending.
        first = torch.argsort(self.blocks_PQJ.logical_not().to(torch.uint8), dim=-1, stable=True).to(torch.int32)

        def mask_mod(b: Any, h: Any, query: Any, key: Any) -> torch.Tensor:
            return self.allowed(b * heads + h, query, key)

        indices = first.view(batch, heads, *first.shape[1:])
        return BlockMask.from_kv_blocks(counts, indices, BLOCK_SIZE=self.block, mask_mod=mask_mod)


def hash_mask(
    q_bucket_PT: torch.Tensor, k_bucket_PT: torch.Tensor, key_mask_PT: torch.Tensor, *, block: int, causal: bool
) -> HashMask:
    """Sort by bucket and position, and find the blocks that contain a query and a key of the same bucket.

    Args:
        q_bucket_PT: int64 bucket of each query by position, ``[P, T]``; T is a multiple of ``block``.
        k_bucket_PT: int64 bucket of each key by position, ``[P, T]``.
        key_mask_PT: bool by position, ``[P, T]``, false for keys that no query may attend to.
        block: rows and columns of a block.
        causal: whether a query attends to earlier keys and its own only.
    """
    P = len(q_bucket_PT)
    # A stable sort by bucket keeps positions ascending within a bucket.
    q_sorted, q_order = q_bucket_PT.sort(dim=1, stable=True)
    k_sorted, k_order = k_bucket_PT.sort(dim=1, stable=True)
    q_blocks, k_blocks = q_sorted.view(P, -1, block), k_sorted.view(P, -1, block)
    # Rows are sorted, so the buckets of a block are a range: first to last row. Two ranges are compared, not all pairs.
    overlaps = (q_blocks[:, :, None, 0] <= k_blocks[:, None, :, -1]) & (
        k_blocks[:, None, :, 0] <= q_blocks[:, :, None, -1]
    )
    if causal:
        # A block of keys that are all later than the last query of a block has no allowed score.
        latest_PQ = q_order.view(P, -1, block).amax(-1)
        earliest_PJ = k_order.view(P, -1, block).amin(-1)
        overlaps = overlaps & (earliest_PJ[:, None, :] <= latest_PQ[:, :, None])
    return HashMask(
        block=block,
        causal=causal,
        q_order_PT=q_order,
        k_order_PT=k_order,
        q_bucket_PT=q_sorted,
        k_bucket_PT=k_sorted,
        key_mask_PT=key_mask_PT.gather(1, k_order),
        blocks_PQJ=overlaps,
    )


def attend_by_gather(
    q_PTK: torch.Tensor, k_PTK: torch.Tensor, v_PTK: torch.Tensor, mask: HashMask, *, dropout: float
) -> torch.Tensor:
    """Attention over sorted rows, ``[P, T, K]``; a query without any key gets 0.

    Block rows with the same number of blocks are computed together, so that no other block is computed.

    Args:
        q_PTK: sorted queries, ``[P, T, K]``.
        k_PTK: sorted keys, ``[P, T, K]``.
        v_PTK: sorted values, ``[P, T, K]``.
        mask: which scores exist.
        dropout: dropout probability of the attention weights.
    """
    P, T, K = q_PTK.shape
    L = mask.block
    Q = T // L
    counts = mask.blocks_PQJ.sum(-1).view(-1)
    q_rows, k_rows, v_rows = (x.reshape(P * Q, L, K) for x in (q_PTK, k_PTK, v_PTK))
    inner = torch.arange(L, device=q_PTK.device)
    done: list[torch.Tensor] = []
    where: list[torch.Tensor] = []
    for count in counts.unique().tolist():
        # Grouped by number of blocks, so that no row is padded: one product per number that occurs.
        rows_G = (counts == count).nonzero()[:, 0]
        where.append(rows_G)
        if count == 0:
            done.append(torch.zeros(len(rows_G), L, K, dtype=q_PTK.dtype, device=q_PTK.device))
            continue
        p_G = rows_G // Q
        j_GC = mask.blocks_PQJ.view(P * Q, -1)[rows_G].nonzero()[:, 1].view(-1, count)
        blocks_GC = p_G[:, None] * Q + j_GC
        query_GL = (rows_G % Q)[:, None] * L + inner
        key_GM = (j_GC[..., None] * L + inner).flatten(1)
        allowed_GLM = mask.allowed(p_G[:, None, None], query_GL[:, :, None], key_GM[:, None, :])
        any_GL1 = allowed_GLM.any(-1, keepdim=True)
        y_GLK = F.scaled_dot_product_attention(
            q_rows[rows_G][:, None],
            k_rows[blocks_GC].flatten(1, 2)[:, None],
            v_rows[blocks_GC].flatten(1, 2)[:, None],
            # A softmax over no key is NaN: such a row attends to all keys here, and is zeroed below.
            attn_mask=(allowed_GLM | ~any_GL1)[:, None],
            dropout_p=dropout,
        )[:, 0]
        done.append(y_GLK * any_GL1)
    back = torch.argsort(torch.cat(where))
    return torch.cat(done)[back].view(P, T, K)


@dataclass(frozen=True, kw_only=True)
class HashedAttention:
    """Hash-bucketed block-sparse attention.

    Attributes:
        buckets: number of hash buckets, even.
        block: queries and keys of a block.
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
    ) -> HashMask:
        """The mask of these queries and keys; draws the axes.

        Args:
            q_BHTK: queries, ``[B, H, T, K]``.
            k_BHTK: keys, ``[B, H, T, K]``.
            key_mask_BT: bool ``[B, T]``, true for keys that may be attended to; None means all.
            causal: whether a query attends to earlier keys and its own only.
            training: whether the axes are drawn from the item's random numbers.
        """
        B, H, T, K = q_BHTK.shape
        # The same axes for both: a query and a key of equal direction must be in one bucket.
        axes_HKR = self.draw_axes(H, K, q_BHTK.device, training=training)
        extra = -T % self.block
        q_bucket, k_bucket = (
            F.pad(hash_directions(x, axes_HKR), (0, extra), value=self.buckets).flatten(0, 1) for x in (q_BHTK, k_BHTK)
        )
        key_mask = (
            torch.ones(B, T, dtype=torch.bool, device=q_BHTK.device) if key_mask_BT is None else key_mask_BT.bool()
        )
        key_mask_PT = F.pad(key_mask, (0, extra)).repeat_interleave(H, dim=0)
        return hash_mask(q_bucket, k_bucket, key_mask_PT, block=self.block, causal=causal)

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
    ) -> torch.Tensor:
        """Attention of each query to the keys of its bucket, ``[B, H, T, K]``; 0 where there is none.

        FlexAttention runs on CUDA where no attention weight is dropped (it has no dropout, and no backward on CPU).

        Args:
            q_BHTK: queries, ``[B, H, T, K]``.
            k_BHTK: keys, ``[B, H, T, K]``.
            v_BHTK: values, ``[B, H, T, K]``.
            key_mask_BT: bool ``[B, T]``, true for keys that may be attended to; None means all.
            causal: whether a query attends to earlier keys and its own only.
            dropout: dropout probability of the attention weights.
            training: whether the axes are drawn from the item's random numbers.
        """
        B, H, T, K = q_BHTK.shape
        mask = self.mask(q_BHTK, k_BHTK, key_mask_BT, causal=causal, training=training)
        extra = -T % self.block

        def sorted_rows(x_BHTK: torch.Tensor, order_PT: torch.Tensor) -> torch.Tensor:
            padded = F.pad(x_BHTK, (0, 0, 0, extra)).flatten(0, 1)
            return padded.gather(1, order_PT[..., None].expand(-1, -1, K))

        q, k, v = (
            sorted_rows(x, order)
            for x, order in (
                (q_BHTK, mask.q_order_PT),
                (k_BHTK, mask.k_order_PT),
                (v_BHTK, mask.k_order_PT),
            )
        )
        if q.device.type == "cuda" and dropout == 0.0:
            y = _attend_by_flex(q, k, v, mask, B, H)
        else:
            y = attend_by_gather(q, k, v, mask, dropout=dropout)
        back_PT = torch.argsort(mask.q_order_PT, dim=1)[:, :T]
        return y.gather(1, back_PT[..., None].expand(-1, -1, K)).view(B, H, T, K)


def _attend_by_flex(
    q_PTK: torch.Tensor, k_PTK: torch.Tensor, v_PTK: torch.Tensor, mask: HashMask, batch: int, heads: int
) -> torch.Tensor:
    """``attend_by_gather`` by a compiled FlexAttention, for CUDA."""
    from torch.nn.attention.flex_attention import flex_attention

    q, k, v = (x.unflatten(0, (batch, heads)) for x in (q_PTK, k_PTK, v_PTK))
    y: Any = torch.compile(flex_attention)(q, k, v, block_mask=mask.flex_mask(batch, heads))
    # A query that sees nothing: FlexAttention gives 0 there as well.
    return torch.as_tensor(y).flatten(0, 1)
