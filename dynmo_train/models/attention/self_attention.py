"""Attention of a token to the tokens of its sample, which most model families have.

The module reads its number of heads off its weights, never off the configuration. So a tensor-parallel slice of an
item, or an item with pruned heads, runs the same code. What computes the weighted values depends on the call: torch's
fused kernels, sequences of variable length, a context-parallel rank's chunks, hashed tiles, or chunks of scores.

Shapes in names: B samples, T tokens, S tokens that are attended to, D model width, H heads, G key-value groups, K head
width.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from ...parallel.context_parallel import ContextRegion
from ...parallel.random_stream import item_dropout
from ..layers.linear import PrunableLinear
from ..layers.norms import normalize_heads
from .context_attention import attend_context
from .eager_attention import eager_attention
from .hashed_attention import HashedAttention
from .hashed_tiles import ScoreRules
from .key_values import KVCache, Past, append_keys
from .positions import RelativeBias, Rotary
from .varlen import attend_sequences, has_kernel, padded_offsets, sample_offsets, selected_window_mask, window_mask

CosSin = tuple[torch.Tensor, torch.Tensor]


def _reads_grouped_keys(device: torch.device, mask: torch.Tensor | None, dropout: float) -> bool:
    """Whether torch has a fused kernel that reads the keys of a group once for all its queries.

    Where it has none, torch repeats the keys itself, and computes all scores at once.
    """
    return dropout == 0.0 if device.type == "cpu" else mask is None


class SelfAttention(nn.Module):
    """``x + post_norm(dense(attention(norm(x))))``, where most models have one of the two norms.

    The rows of ``qkv`` are grouped by key-value group, ``[G, H/G + 2, K]``: the group's queries, its key, its value;
    without grouped queries (G = H) that is ``[H, 3, K]``.

    Args:
        width: model width D.
        heads: query heads H.
        norm: normalization before the sublayer; ``nn.Identity`` where there is none.
        device: where the parameters are created.
        groups: key-value groups G; None means H.
        head_width: K; None means D / H.
        bias: whether ``dense`` has a bias.
        qkv_bias: whether ``qkv`` has a bias; None means as ``dense``.
        post_norm: normalization of the sublayer's output, before dropout and residual; None means none.
        query_norm: normalization of the queries before the rotation, of each head or of all heads together (by the
            length of its weight); None means none.
        key_norm: normalization of the keys.
        scale: factor on the scores; None means ``K^-0.5``, or 1 with ``relative``.
        causal: whether a token attends to itself and earlier tokens only.
        dropout: dropout probability of the output.
        attention_dropout: dropout probability of the attention weights.
        rotary: rotates queries and keys by their position.
        relative: bias added to the scores by distance; scores are then not scaled (Raffel et al. 2020, section 2.1).
        window: keys that a token of a causal model attends to, itself included; None means all.
        softcap: the scores are capped to ``softcap * tanh(scores / softcap)``; None means that they are not.
        sinks: whether each head has a learned logit ``sinks [H]``, which takes part of the softmax without a value.
        off_by_one: whether that logit is 0, and not learned.
    """

    def __init__(
        self,
        *,
        width: int,
        heads: int,
        norm: nn.Module,
        device: torch.device,
        groups: int | None = None,
        head_width: int | None = None,
        bias: bool = True,
        qkv_bias: bool | None = None,
        post_norm: nn.Module | None = None,
        query_norm: nn.Module | None = None,
        key_norm: nn.Module | None = None,
        scale: float | None = None,
        causal: bool = True,
        dropout: float = 0.0,
        attention_dropout: float = 0.0,
        rotary: Rotary | None = None,
        relative: RelativeBias | None = None,
        window: int | None = None,
        softcap: float | None = None,
        sinks: bool = False,
        off_by_one: bool = False,
    ) -> None:
        super().__init__()
        self.window, self.softcap = window, softcap
        self.off_by_one = off_by_one
        self.sinks: torch.Tensor | None = nn.Parameter(torch.zeros(heads, device=device)) if sinks else None
        self.head_width = head_width or width // heads
        groups = groups or heads
        self.queries_per_group = heads // groups
        self.norm, self.post_norm = norm, post_norm
        self.query_norm, self.key_norm = query_norm, key_norm
        rows = (heads + 2 * groups) * self.head_width
        self.qkv = PrunableLinear(width, rows, device, bias=bias if qkv_bias is None else qkv_bias)
        self.dense = PrunableLinear(heads * self.head_width, width, device, bias=bias)
        self.relative = relative
        self.rotary, self.causal = rotary, causal
        self.scale = scale if relative is None else 1.0
        self.dropout, self.attention_dropout = dropout, attention_dropout
        self.sparse: HashedAttention | None = None
        self.context: ContextRegion | None = None  # set by ``join_context``

    def project(
        self, x_BTD: torch.Tensor, past: int | torch.Tensor = 0, cos_sin: CosSin | None = None
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Queries ``[B, H, T, K]``, keys and values ``[B, G, T, K]``.

        Args:
            x_BTD: the residual stream, ``[B, T, D]``.
            past: position of the first token; for tokens that are not consecutive their positions, int64 ``[B, T]``.
            cos_sin: precomputed rotation of :meth:`Rotary.cos_sin`; ``past`` is then ignored.
        """
        per, K = self.queries_per_group, self.head_width
        rows_BTR = self.qkv(self.norm(x_BTD))
        B, T, _ = rows_BTR.shape  # of all tokens, where the stream is cut along them
        # The number of groups is read off the weight: a tensor-parallel slice has fewer of them.
        grouped = rows_BTR.view(B, T, -1, per + 2, K)
        if per == 1:
            q, k, v = (part.transpose(1, 2) for part in grouped.unbind(3))
        else:
            q_BTGPK, k_BTGK, v_BTGK = grouped.split((per, 1, 1), dim=3)
            q = q_BTGPK.reshape(B, T, -1, K).transpose(1, 2)
            k, v = k_BTGK.squeeze(3).transpose(1, 2), v_BTGK.squeeze(3).transpose(1, 2)
        if self.query_norm is not None and self.key_norm is not None:
            q, k = normalize_heads(self.query_norm, q), normalize_heads(self.key_norm, k)
        if self.rotary is not None:
            if self.context is not None and not isinstance(past, torch.Tensor):
                cosine, sine = self.rotary.cos_sin(0, T * self.context.size, q.device, q.dtype)
                cos_sin = self.context.cut(cosine, 0), self.context.cut(sine, 0)
            q, k = self.rotary(q, k, past) if cos_sin is None else self.rotary.apply_rotary(q, k, cos_sin)
        return q, k, v

    def attend(
        self, q_BHTK: torch.Tensor, k_BGSK: torch.Tensor, v_BGSK: torch.Tensor, mask: torch.Tensor | None, causal: bool
    ) -> torch.Tensor:
        """The sublayer's output ``[B, T, D]`` before residual and dropout.

        Args:
            q_BHTK: queries, ``[B, H, T, K]``.
            k_BGSK: keys, ``[B, G, S, K]``.
            v_BGSK: values, ``[B, G, S, K]``.
            mask: bool or additive float, broadcastable to ``[B, H, T, S]``; true where a key is attended to.
            causal: whether to apply the causal mask; ``mask`` must then be None.
        """
        y_BHTK = self.weighted_values(q_BHTK, k_BGSK, v_BGSK, mask, causal)
        return self.output(y_BHTK.transpose(1, 2).flatten(2))

    def output(self, heads_BTR: torch.Tensor) -> torch.Tensor:
        """The sublayer's output ``[B, T, D]`` of the heads' outputs ``heads_BTR`` ``[B, T, H*K]``."""
        y_BTD: torch.Tensor = self.dense(heads_BTR)
        return y_BTD if self.post_norm is None else self.post_norm(y_BTD)

    def weighted_values(
        self, q_BHTK: torch.Tensor, k_BGSK: torch.Tensor, v_BGSK: torch.Tensor, mask: torch.Tensor | None, causal: bool
    ) -> torch.Tensor:
        """What :meth:`attend` gives to ``dense``, of ``q_BHTK``, ``k_BGSK``, ``v_BGSK``, ``mask``: ``[B, H, T, K]``."""
        if self.is_eager:
            return self._eager(q_BHTK, k_BGSK, v_BGSK, mask, causal)
        dropout = self.attention_dropout if self.training else 0.0
        grouped = self.queries_per_group > 1 and _reads_grouped_keys(q_BHTK.device, mask, dropout)
        if not grouped:
            k_BGSK, v_BGSK = self._for_each_head(k_BGSK), self._for_each_head(v_BGSK)
        # torch's product, and no kernel of our own: it selects flash attention where the device has it.
        return F.scaled_dot_product_attention(
            q_BHTK,
            k_BGSK,
            v_BGSK,
            attn_mask=mask,
            dropout_p=dropout,
            is_causal=causal,
            scale=self.scale,
            enable_gqa=grouped,
        )

    @property
    def is_eager(self) -> bool:
        """Whether torch has no fused kernel for this attention."""
        return self.softcap is not None or self.sinks is not None or self.off_by_one

    def head_sinks(self, q_BHTK: torch.Tensor) -> torch.Tensor | None:
        """The sinks ``[H]`` of the heads that are computed, those of ``q_BHTK``: pruning may remove some; or None."""
        if self.off_by_one:
            return q_BHTK.new_zeros(q_BHTK.shape[1])
        columns = self.dense.columns
        if self.sinks is None or columns is None:
            return self.sinks
        return self.sinks[columns[:: self.head_width] // self.head_width]

    def has_kernel(self, q_BHTK: torch.Tensor) -> bool:
        """Whether sequences of variable length have a kernel for the queries ``q_BHTK`` ``[B, H, T, K]``."""
        return not self.is_eager and has_kernel(q_BHTK, self.attention_dropout if self.training else 0.0)

    def _eager(
        self,
        q_BHTK: torch.Tensor,
        k_BGSK: torch.Tensor,
        v_BGSK: torch.Tensor,
        mask: torch.Tensor | None,
        causal: bool,
        window: int | None = None,
    ) -> torch.Tensor:
        return eager_attention(
            q_BHTK,
            k_BGSK,
            v_BGSK,
            scale=self.scale,
            cap=self.softcap,
            sinks_H=self.head_sinks(q_BHTK),
            mask=mask,
            causal=causal,
            window=window,
            dropout=self.attention_dropout if self.training else 0.0,
        )

    def _for_each_head(self, x_BGSK: torch.Tensor) -> torch.Tensor:
        return x_BGSK if self.queries_per_group == 1 else x_BGSK.repeat_interleave(self.queries_per_group, dim=1)

    def forward(
        self, x_BTD: torch.Tensor, key_mask_BS: torch.Tensor | None = None, *, positions: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Apply the sublayer with its residual.

        Args:
            x_BTD: the residual stream, ``[B, T, D]``.
            key_mask_BS: bool ``[B, S]``, true for tokens that may be attended to; None means all. Without ``positions``
                these are the first tokens of a sample, and the others padding.
            positions: int64 ``[B, T]``, where the tokens are a selection from longer sequences; None means 0, 1, 2, ...

        Returns:
            The residual stream after the sublayer, ``[B, T, D]``.
        """
        q, k, v = self.project(x_BTD, 0 if positions is None else positions)
        if self.context is not None:
            y_BTR = self.output(attend_context(q, k, v, self.context, self))
            return x_BTD + item_dropout(y_BTR, self.dropout, self.training)
        dropout = self.attention_dropout if self.training else 0.0
        if self.sparse is not None:
            return self.finish(x_BTD, self._attend_buckets(self.sparse, q, k, v, key_mask_BS, positions))
        # Selected tokens have keys in any place; a bias, or a causal mask as well, needs the scores.
        is_padded = positions is None and self.relative is None and not self.causal
        if key_mask_BS is not None and is_padded and has_kernel(q, dropout):
            offsets, tokens = padded_offsets(key_mask_BS), q.shape[2]
            y_BTR = attend_sequences(q, k, v, (offsets, offsets), (tokens, tokens), scale=self.scale)
            return self.finish(x_BTD, y_BTR)
        if self.window is not None:
            return self.finish(x_BTD, self._window_heads(q, k, v, self.window, positions))
        mask = None if key_mask_BS is None else key_mask_BS[:, None, None, :]
        causal = self.causal
        # scaled_dot_product_attention accepts a mask or ``is_causal``, so the bias contains the causal mask as well.
        if self.relative is not None:
            mask, causal = self.relative.scores(q.shape[2], k.shape[2], mask, causal=causal), False
        return x_BTD + item_dropout(self.attend(q, k, v, mask, causal), self.dropout, self.training)

    def of_selected(
        self,
        x_BTD: torch.Tensor,
        index_BC: torch.Tensor,
        key_mask_BT: torch.Tensor | None = None,
        past: Past | None = None,
        positions: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, Past]:
        """Apply the sublayer to selected tokens, which attend to keys and values of all tokens.

        Args:
            x_BTD: the residual stream of all new tokens, ``[B, T, D]``.
            index_BC: int64 places of the selected tokens among them, ``[B, C]``.
            key_mask_BT: bool ``[B, T]``, true for tokens that may be attended to; None means all. Not with ``past``.
            past: of the tokens before; None where there are none.
            positions: int64 ``[B, T]`` of the new tokens, which are consecutive; None means 0, 1, 2, ...

        Returns:
            The output of the selected tokens, ``[B, C, D]``, and keys and values of all tokens.
        """
        q, k, v = self.project(x_BTD, 0 if positions is None else positions)
        cache, band = append_keys(past, k, v, positions, self.window)
        # Of all queries: the causal kernel without a mask is faster than one with a mask for fewer of them.
        if self.sparse is not None and past is None:
            heads_BTR = self._attend_buckets(self.sparse, q, k, v, key_mask_BT, None)
        elif self.window is not None and past is None and key_mask_BT is None:
            heads_BTR = self._window_heads(q, k, v, self.window)
        else:
            mask = None if key_mask_BT is None else key_mask_BT.bool()[:, None, None, :]
            causal = self.causal and past is None and mask is None
            if self.causal and not causal:
                mask = band if mask is None else mask & band
            y_BHTK = self.weighted_values(q, cache[0], cache[1], mask, causal)
            heads_BTR = y_BHTK.transpose(1, 2).flatten(2)
        chosen_BC1 = index_BC[..., None]
        y_BCD = self.output(heads_BTR.gather(1, chosen_BC1.expand(-1, -1, heads_BTR.shape[2])))
        x_BCD = x_BTD.gather(1, chosen_BC1.expand(-1, -1, x_BTD.shape[2]))
        return x_BCD + item_dropout(y_BCD, self.dropout, self.training), cache

    def _attend_buckets(
        self,
        sparse: HashedAttention,
        q_BHTK: torch.Tensor,
        k_BGTK: torch.Tensor,
        v_BGTK: torch.Tensor,
        key_mask_BT: torch.Tensor | None,
        positions: torch.Tensor | None,
    ) -> torch.Tensor:
        """The heads' outputs ``[B, T, H*K]``: a token attends to those of its bucket and of its window."""
        y_BHTK = sparse.attend(
            q_BHTK,
            self._for_each_head(k_BGTK),
            self._for_each_head(v_BGTK),
            key_mask_BT,
            causal=self.causal,
            dropout=self.attention_dropout if self.training else 0.0,
            training=self.training,
            rules=ScoreRules(self.scale, self.softcap, self.head_sinks(q_BHTK), self.window, positions),
        )
        return y_BHTK.transpose(1, 2).flatten(2)

    def _window_heads(
        self,
        q_BHTK: torch.Tensor,
        k_BGTK: torch.Tensor,
        v_BGTK: torch.Tensor,
        window: int,
        positions: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """The heads' outputs ``[B, T, H*K]``: a token attends to the last ``window`` positions up to its own."""
        B, _, T, _ = q_BHTK.shape
        if window < T and positions is None and self.has_kernel(q_BHTK):
            offsets, span = sample_offsets(B, T, q_BHTK.device), (window - 1, 0)
            return attend_sequences(q_BHTK, k_BGTK, v_BGTK, (offsets, offsets), (T, T), window=span, scale=self.scale)
        if positions is not None:
            # Selected tokens: keys that are near in this list may be far in the sample.
            mask = selected_window_mask(positions, window)
            y_BHTK = self.weighted_values(q_BHTK, k_BGTK, v_BGTK, mask, False)
        elif window >= T:
            y_BHTK = self.weighted_values(q_BHTK, k_BGTK, v_BGTK, None, True)
        elif self.is_eager:
            y_BHTK = self._eager(q_BHTK, k_BGTK, v_BGTK, None, True, window)
        else:
            mask = window_mask(T, T, window, q_BHTK.device)
            y_BHTK = self.weighted_values(q_BHTK, k_BGTK, v_BGTK, mask, False)
        return y_BHTK.transpose(1, 2).flatten(2)

    def finish(self, x_BTD: torch.Tensor, heads_BTR: torch.Tensor) -> torch.Tensor:
        """The stream ``x_BTD`` ``[B, T, D]`` with the update by the heads' outputs ``heads_BTR`` ``[B, T, H*K]``."""
        return x_BTD + item_dropout(self.output(heads_BTR), self.dropout, self.training)

    def extend(
        self, x_BTD: torch.Tensor, past: Past | None, positions: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, Past]:
        """Process new tokens after those whose keys and values are ``past``.

        Args:
            x_BTD: the residual stream of the new tokens, ``[B, T, D]``.
            past: of the tokens before; None where there are none.
            positions: int64 ``[B, T]`` of the new tokens, where this item skips some tokens of a sequence.

        Returns:
            The output ``[B, T, D]``, and keys and values of all tokens.
        """
        before = 0 if past is None else past[0].shape[2]
        q, k, v = self.project(x_BTD, before if positions is None else positions)
        # Not ``is_causal``: torch aligns its causal mask to the first key, and here the last query is the last key.
        cache, mask = append_keys(past, k, v, positions, self.window)
        return x_BTD + self.attend(q, cache[0], cache[1], mask, False), cache

    def extend_into(
        self, x_BTD: torch.Tensor, kv_cache: KVCache, mask: torch.Tensor | None, cos_sin: CosSin | None
    ) -> torch.Tensor:
        """Process new tokens after those in ``kv_cache``, and append their keys and values in place.

        Args:
            x_BTD: the residual stream of the new tokens, ``[B, T, D]``.
            kv_cache: keys and values of the tokens before.
            mask: bool ``[..., T, S]`` over all tokens including the new ones, true where a key is attended to; None is
                causal for several new tokens in an empty cache, else all.
            cos_sin: rotation of the new tokens; None without rotary positions.

        Returns:
            The residual stream of the new tokens after the sublayer, ``[B, T, D]``.
        """
        q, k, v = self.project(x_BTD, cos_sin=cos_sin)
        B, H, T, K = q.shape
        causal = mask is None and T > 1
        k_BGSK, v_BGSK = kv_cache.extend(k, v)
        keys = k_BGSK.shape[2]
        if self.window is not None and keys > self.window:
            if T == 1:
                # One query attends to the last keys: no mask.
                k_BGSK, v_BGSK = k_BGSK[:, :, -self.window :], v_BGSK[:, :, -self.window :]
                mask = None if mask is None else mask[..., -self.window :]
            else:
                band_TS = window_mask(T, keys, self.window, q.device)
                mask, causal = band_TS if mask is None else mask & band_TS, False
        groups = k.shape[1]
        if groups < H and T == 1 and not self.is_eager:
            # The queries of a group take the token dimension, so that no key is repeated for each of them.
            y_BGPK = F.scaled_dot_product_attention(
                q.reshape(B, groups, -1, K), k_BGSK, v_BGSK, attn_mask=mask, scale=self.scale
            )
            return x_BTD + self.output(y_BGPK.reshape(B, 1, H * K))
        return x_BTD + self.attend(q, k_BGSK, v_BGSK, mask, causal)
