"""Attention with soft-capped scores or sinks, which no fused kernel of torch computes, in chunks of queries.

With the scores ``s = scale q k^T`` of a query, the cap ``c`` and the sink ``b`` of its head (either may be absent)::

    z = c tanh(s / c)                          Gemma 2 (arXiv:2408.00118), section 2
    L = log(exp b + sum over keys of exp z)    a sink takes part of the sum, and has no value (GPT-OSS)
    y = sum over keys of exp(z - L) v

The forward saves queries, keys, values, ``y`` and ``L``. The backward computes the scores again, chunk by chunk. With
``e = grad y * v^T - sum over K of grad y * y`` and ``p = exp(z - L)``::

    grad v = p^T grad y        grad s = p e (1 - (z / c)^2)
    grad b = - sum over queries of exp(b - L) sum over K of grad y * y

With dropout, ``y`` sums ``d p v``, where ``d`` is 0 with the probability of the dropout, else its scale: the weight of
the sink counts in ``L``, and is not given to other keys. ``d`` is a function of sample, head, query and key. So neither
chunks nor a recomputation change it, and the backward computes it again::

    grad v = (d p)^T grad y    e = d (grad y * v^T) - sum over K of grad y * y

Memory: a chunk has at most ``CHUNK_SCORES`` scores, or one query of all samples and heads, whatever the length of the
sequence. In units of a float32 tensor of that size, 32 MiB, the forward has two at a time, the backward four. A cap
adds one to the backward, bfloat16 one to each, dropout one to the forward and up to two to the backward: at most three
and seven. Keys before the window, and those after the last query of a chunk, are not read.

Shapes in names: B samples, T queries, S keys, G key-value groups, P query heads of a group, H = G*P, K head width,
c queries of a chunk, s keys of a chunk.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import torch
from torch.autograd.function import once_differentiable

from ...parallel.random_stream import LEVELS, BlockDraw, block_mask, draw_blocks
from ..layers.softcap import soft_cap

CHUNK_SCORES = 1 << 23
SHORTEST_CHUNK = 128
# Of mask, key and the numbers of an attention.
_NO_GRADS = (None,) * 8


def eager_attention(
    q_BHTK: torch.Tensor,
    k_BGSK: torch.Tensor,
    v_BGSK: torch.Tensor,
    *,
    scale: float | None = None,
    cap: float | None = None,
    sinks_H: torch.Tensor | None = None,
    mask: torch.Tensor | None = None,
    causal: bool = False,
    window: int | None = None,
    dropout: float = 0.0,
) -> torch.Tensor:
    """The weighted values of each query, ``[B, H, T, K]``.

    Args:
        q_BHTK: queries, ``[B, H, T, K]``.
        k_BGSK: keys, ``[B, G, S, K]``; query head ``h`` reads those of group ``h // P``.
        v_BGSK: values, ``[B, G, S, K]``.
        scale: factor on the scores; None means ``K^-0.5``.
        cap: the scores are between ``-cap`` and ``cap``; None means no cap.
        sinks_H: logit of each head's sink, ``[H]``; None means none.
        mask: bool, broadcastable to ``[B, H, T, S]``, true where a key is attended to. Every query needs a key.
        causal: whether a query attends to no later key; the last query is the last key.
        window: with ``causal``, keys that a query attends to, itself included; None means all.
        dropout: dropout probability of the weights of keys.
    """
    scale = q_BHTK.shape[-1] ** -0.5 if scale is None else scale
    key, begin, dropped = draw_blocks(dropout, q_BHTK.device) if dropout else (None, 0, 0)
    shape = (scale, 0.0 if cap is None else cap, causal, window or 0, begin, dropped)
    if torch.compiler.is_compiling():
        # One operation to the compiler, which would otherwise have the scores of all chunks in memory.
        compiled_BHTK: torch.Tensor = _eager_attention(q_BHTK, k_BGSK, v_BGSK, sinks_H, mask, key, *shape)[0]
        return compiled_BHTK
    y_BHTK: torch.Tensor = _EagerAttention.apply(q_BHTK, k_BGSK, v_BGSK, sinks_H, mask, key, *shape)  # type: ignore[no-untyped-call]
    return y_BHTK


def tile_attention(
    q_GLK: torch.Tensor,
    k_GMK: torch.Tensor,
    v_GMK: torch.Tensor,
    allowed_GLM: torch.Tensor,
    *,
    scale: float | None,
    cap: float | None,
    sinks_G: torch.Tensor | None,
) -> torch.Tensor:
    """The same for tiles of queries, with all scores of a tile in memory: ``[G, L, K]``.

    Args:
        q_GLK: queries of each tile.
        k_GMK: keys of each tile.
        v_GMK: values of each tile.
        allowed_GLM: bool, whether a query attends to a key. Every query needs a key.
        scale: factor on the scores; None means ``K^-0.5``.
        cap: the scores are between ``-cap`` and ``cap``; None means no cap.
        sinks_G: float32 logit of the sink of each tile's head; None means none.
    """
    scale = q_GLK.shape[-1] ** -0.5 if scale is None else scale
    z_GLM = soft_cap(torch.bmm(q_GLK, k_GMK.transpose(1, 2)).float() * scale, cap)
    z_GLM = z_GLM.masked_fill(~allowed_GLM, -math.inf)
    sums_GL1 = z_GLM.logsumexp(-1, keepdim=True)
    if sinks_G is not None:
        sums_GL1 = torch.logaddexp(sums_GL1, sinks_G[:, None, None].expand_as(sums_GL1))
    return torch.bmm((z_GLM - sums_GL1).exp().to(v_GMK.dtype), v_GMK)


def _chunks(q: torch.Tensor, keys: int, causal: bool, window: int) -> Iterator[tuple[slice, slice]]:
    """The queries of each chunk, and the keys that they may attend to."""
    B, H, T, _ = q.shape
    before, rows = keys - T, CHUNK_SCORES / max(1, B * H)
    most = int(rows / max(1, keys))
    if causal and window:
        # A chunk of c queries reads c + window keys; longer chunks compute more scores that are masked.
        fitting = (math.sqrt(window * window + 4 * rows) - window) / 2
        most = max(most, min(int(fitting), max(window, SHORTEST_CHUNK)))
    most = max(1, most)
    for begin in range(0, T, most):
        end = min(T, begin + most)
        first = max(0, before + begin - window + 1) if causal and window else 0
        yield slice(begin, end), slice(first, before + end if causal else keys)


def _capped_scores(
    q_BGRK: torch.Tensor,
    k_BGsK: torch.Tensor,
    mask: torch.Tensor | None,
    queries: slice,
    keys: slice,
    before: int,
    scale: float,
    cap: float,
    causal: bool,
    window: int,
) -> torch.Tensor:
    """``z`` of a chunk, float32 ``[B, G, P, c, s]``, minus infinity for keys that a query does not attend to."""
    count = queries.stop - queries.start
    z: torch.Tensor = torch.matmul(q_BGRK, k_BGsK.transpose(-1, -2)).float().mul_(scale)
    if cap:
        z.div_(cap).tanh_().mul_(cap)
    z = z.unflatten(2, (-1, count))
    if causal:
        places = torch.arange(before + queries.start, before + queries.stop, device=z.device)[:, None]
        found = torch.arange(keys.start, keys.stop, device=z.device)
        hidden_cs = found > places
        if window:
            hidden_cs |= found <= places - window
        z.masked_fill_(hidden_cs, float("-inf"))
    if mask is not None:
        while mask.dim() < 4:
            mask = mask[None]
        rows = mask[:, :, queries if mask.shape[2] > 1 else slice(None), keys if mask.shape[3] > 1 else slice(None)]
        # Heads as groups and their queries; a mask of all heads has one.
        heads = rows[:, :, None] if rows.shape[1] == 1 else rows.unflatten(1, (z.shape[1], -1))
        z.masked_fill_(~heads, float("-inf"))
    return z


def _stays(draw: BlockDraw, p: torch.Tensor, queries: slice, keys: slice, T: int, S: int) -> torch.Tensor:
    """Which weights of a chunk stay, bool ``[B, G, P, c, s]``; a row has the keys of a sample, head and query."""
    heads = torch.arange(p.shape[:3].numel(), device=p.device).view(*p.shape[:3], 1)
    return block_mask(draw, heads * T + torch.arange(queries.start, queries.stop, device=p.device), keys, S)


def _drop(x: torch.Tensor, stays: torch.Tensor, dropped: int) -> torch.Tensor:
    """Apply a mask in place, and scale what stays."""
    return x.mul_(stays).mul_(LEVELS / (LEVELS - dropped))


def _rows(x_BHTK: torch.Tensor, groups: int, queries: slice) -> torch.Tensor:
    """Queries of a chunk by group, ``[B, G, P * c, K]``."""
    grouped: torch.Tensor = x_BHTK.unflatten(1, (groups, -1))
    return grouped[:, :, :, queries].flatten(2, 3)


def _forward(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    sinks_H: torch.Tensor | None,
    mask: torch.Tensor | None,
    key: torch.Tensor | None,
    scale: float,
    cap: float,
    causal: bool,
    window: int,
    begin: int,
    dropped: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    """``y`` and ``L``, float32 ``[B, H, T]``."""
    (B, H, T, _), (_, groups, S, _) = q.shape, k.shape
    y = torch.empty(B, H, T, v.shape[-1], dtype=q.dtype, device=q.device)
    L_BHT = torch.empty(B, H, T, dtype=torch.float32, device=q.device)
    for queries, keys in _chunks(q, S, causal, window):
        count, v_BGsK = queries.stop - queries.start, v[:, :, keys]
        z = _capped_scores(
            _rows(q, groups, queries), k[:, :, keys], mask, queries, keys, S - T, scale, cap, causal, window
        )
        if sinks_H is None:
            L = z.logsumexp(-1, keepdim=True)
        else:
            sinks = sinks_H.float().view(groups, -1, 1, 1).expand(*z.shape[:-1], 1)
            L = torch.logaddexp(z.logsumexp(-1, keepdim=True), sinks)
        p = z.sub_(L).exp_()
        if key is not None:
            _drop(p, _stays(BlockDraw(key, begin, dropped), p, queries, keys, T, S), dropped)
        p_BGRs = p.flatten(2, 3).to(v.dtype)
        y[:, :, queries] = torch.matmul(p_BGRs, v_BGsK).unflatten(2, (-1, count)).flatten(1, 2)
        L_BHT[:, :, queries] = L.squeeze(-1).flatten(1, 2)
    return y, L_BHT


def _backward(
    grad: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    sinks_H: torch.Tensor | None,
    mask: torch.Tensor | None,
    key: torch.Tensor | None,
    y: torch.Tensor,
    L_BHT: torch.Tensor,
    scale: float,
    cap: float,
    causal: bool,
    window: int,
    begin: int,
    dropped: int,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Gradients of queries, keys, values and sinks; the last is empty without sinks."""
    (_, _, T, _), (_, groups, S, _) = q.shape, k.shape
    grad_q = torch.empty_like(q)
    grad_k, grad_v = (torch.zeros_like(x, dtype=torch.float32) for x in (k, v))
    of_y_BHT = (grad.float() * y.float()).sum(-1)
    for queries, keys in _chunks(q, S, causal, window):
        rows, k_BGsK, v_BGsK = _rows(q, groups, queries), k[:, :, keys], v[:, :, keys]
        count, grad_rows = queries.stop - queries.start, _rows(grad, groups, queries)
        z = _capped_scores(rows, k_BGsK, mask, queries, keys, S - T, scale, cap, causal, window)
        L, of_y = (x[:, :, queries].unflatten(1, (groups, -1))[..., None] for x in (L_BHT, of_y_BHT))
        slope = (z / cap).square_().neg_().add_(1.0) if cap else None
        p = z.sub_(L).exp_()
        grad_s = torch.matmul(grad_rows, v_BGsK.transpose(-1, -2)).float().unflatten(2, (-1, count))
        of_values = p
        if key is not None:
            stays = _stays(BlockDraw(key, begin, dropped), p, queries, keys, T, S)
            of_values = _drop(p.clone(), stays, dropped)
            _drop(grad_s, stays, dropped)
        grad_v[:, :, keys] += torch.matmul(of_values.flatten(2, 3).to(v.dtype).transpose(-1, -2), grad_rows)
        grad_s = grad_s.sub_(of_y).mul_(p)
        if slope is not None:
            # Keys that are not attended to have the score minus infinity, and no probability.
            grad_s.mul_(slope.masked_fill_(p == 0, 0.0))
        low_BGRs = grad_s.mul_(scale).flatten(2, 3).to(q.dtype)
        grad_q[:, :, queries] = torch.matmul(low_BGRs, k_BGsK).unflatten(2, (-1, count)).flatten(1, 2)
        grad_k[:, :, keys] += torch.matmul(low_BGRs.transpose(-1, -2), rows)
    if sinks_H is None:
        grad_sinks = q.new_empty(0)
    else:
        of_sink_BHT = (sinks_H.float()[:, None] - L_BHT).exp()
        grad_sinks = -(of_sink_BHT * of_y_BHT).sum((0, 2)).to(sinks_H.dtype)
    return grad_q, grad_k.to(k.dtype), grad_v.to(v.dtype), grad_sinks


class _EagerAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Any, k: Any, v: Any, sinks_H: Any, mask: Any, key: Any, *shape: Any) -> Any:
        y, L_BHT = _forward(q, k, v, sinks_H, mask, key, *shape)
        ctx.save_for_backward(q, k, v, sinks_H, mask, key, y, L_BHT)
        ctx.shape = shape
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Any) -> Any:
        *gradients, of_sinks = _backward(grads[0], *ctx.saved_tensors, *ctx.shape)
        return *gradients, of_sinks if ctx.needs_input_grad[3] else None, *_NO_GRADS


@torch.library.custom_op("dynmo_train::eager_attention", mutates_args=())
def _eager_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    sinks_H: torch.Tensor | None,
    mask: torch.Tensor | None,
    key: torch.Tensor | None,
    scale: float,
    cap: float,
    causal: bool,
    window: int,
    begin: int,
    dropped: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    return _forward(q, k, v, sinks_H, mask, key, scale, cap, causal, window, begin, dropped)


@_eager_attention.register_fake
def _(q: Any, _k: Any, v: Any, *_rest: Any) -> Any:
    return q.new_empty(*q.shape[:3], v.shape[3]), q.new_empty(q.shape[:3], dtype=torch.float32)


@torch.library.custom_op("dynmo_train::eager_attention_gradients", mutates_args=())
def _eager_attention_gradients(
    grad: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    sinks_H: torch.Tensor | None,
    mask: torch.Tensor | None,
    key: torch.Tensor | None,
    y: torch.Tensor,
    L_BHT: torch.Tensor,
    scale: float,
    cap: float,
    causal: bool,
    window: int,
    begin: int,
    dropped: int,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    return _backward(grad, q, k, v, sinks_H, mask, key, y, L_BHT, scale, cap, causal, window, begin, dropped)


@_eager_attention_gradients.register_fake
def _(_grad: Any, q: Any, k: Any, v: Any, sinks_H: Any, *_rest: Any) -> Any:
    contiguous = (torch.empty_like(k, dtype=torch.float32).to(k.dtype), torch.empty_like(v))
    return torch.empty_like(q), *contiguous, q.new_empty(0) if sinks_H is None else torch.empty_like(sinks_H)


def _save_operands(ctx: Any, inputs: Any, output: Any) -> None:
    ctx.save_for_backward(*inputs[:6], *output)
    ctx.shape = inputs[6:]


def _operand_gradients(ctx: Any, grad: torch.Tensor, _of_sums: Any) -> Any:
    *gradients, of_sinks = _eager_attention_gradients(grad, *ctx.saved_tensors, *ctx.shape)
    return *gradients, of_sinks if ctx.needs_input_grad[3] else None, *_NO_GRADS


_eager_attention.register_autograd(_operand_gradients, setup_context=_save_operands)
