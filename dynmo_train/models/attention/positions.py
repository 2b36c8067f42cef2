"""Positions: rotary embeddings of queries and keys, a learned bias by relative distance, or a table of embeddings.

Shapes in names: B samples, T queries, S keys, H heads, K head width, R rotated width.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from torch._guards import detect_fake_mode
from torch.autograd.function import once_differentiable

from ...parallel.context_parallel import ContextRegion
from .rotary_scaling import rotary_frequencies, rotary_magnitude

RotaryKey = tuple[int, float, tuple[tuple[str, Any], ...] | None]
CACHED_TABLES = 16
"""Tables that are kept: one for each sequence length and dtype of a run; 2 MiB for 4,096 tokens and heads of 128."""


def _is_traced() -> bool:
    """Whether tensors of this moment must not be kept: a compiler fuses them into its graph, a dry run has none."""
    return torch.compiler.is_compiling() or detect_fake_mode() is not None


def _angles(
    positions: torch.Tensor, width: int, base: float, scaling: Mapping[str, Any] | None, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor]:
    """Cosine and sine ``[..., R]`` of float32 positions ``[...]``."""
    frequencies = rotary_frequencies(width, base, scaling, positions)
    # In float32 up to here: bfloat16 has 8 significant bits, and cannot represent positions above 256.
    angles = positions[..., None] * frequencies
    # Halves, as in Hugging Face, and not the paper's interleaved pairs: the rows of ``qkv`` are in this order.
    angles = torch.cat([angles, angles], dim=-1)
    magnitude = rotary_magnitude(scaling)
    if magnitude == 1.0:
        return angles.cos().to(dtype), angles.sin().to(dtype)
    return (angles.cos() * magnitude).to(dtype), (angles.sin() * magnitude).to(dtype)


def _rotary_table(
    first: int,
    tokens: int,
    width: int,
    base: float,
    scaling: tuple[tuple[str, Any], ...] | None,
    device: torch.device,
    dtype: torch.dtype,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Cosine and sine ``[T, R]`` of consecutive positions."""
    positions = torch.arange(first, first + tokens, device=device, dtype=torch.float32)
    return _angles(positions, width, base, None if scaling is None else dict(scaling), dtype)


@functools.lru_cache(maxsize=CACHED_TABLES)
def _cached_rotary_table(*arguments: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """:func:`_rotary_table`, shared by all layers and microbatches."""
    # A table that an evaluation computes is read by the backward of later steps.
    with torch.inference_mode(mode=False):
        return _rotary_table(*arguments)


class Rotary(nn.Module):
    """Rotary position embedding; the two halves of what is rotated are the coordinates of the planes. No parameters.

    Args:
        width: number R of the first elements of a head that are rotated, even; all of them in most models.
        base: base of the geometric series of wavelengths.
        scaling: see :func:`rotary_scaling.rotary_frequencies`.
    """

    def __init__(self, width: int, base: float, scaling: Mapping[str, Any] | None = None) -> None:
        super().__init__()
        self.width, self.base, self.scaling = width, base, scaling

    @property
    def key(self) -> RotaryKey:
        """Equal for rotations that are equal."""
        scaling = None
        if self.scaling is not None:
            listed = self.scaling.items()
            scaling = tuple((name, tuple(each) if isinstance(each, list) else each) for name, each in listed)
        return self.width, self.base, scaling

    def forward(
        self, q_BHTK: torch.Tensor, k_BGTK: torch.Tensor, past: int | torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Rotate queries and keys; the results have their shapes.

        Args:
            q_BHTK: queries, ``[B, H, T, K]``.
            k_BGTK: keys, ``[B, G, T, K]``.
            past: position of the first token, or the positions of all, int64 ``[B, T]``.
        """
        return self.apply_rotary(q_BHTK, k_BGTK, self.cos_sin(past, q_BHTK.shape[2], q_BHTK.device, q_BHTK.dtype))

    def cos_sin(
        self, past: int | torch.Tensor, tokens: int, device: torch.device, dtype: torch.dtype
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Cosine and sine of the tokens' angles, the same for every layer.

        Args:
            past: position of the first token, or the positions of all, int64 ``[B, T]``.
            tokens: number of tokens T; unused where ``past`` is a tensor.
            device: device of the result.
            dtype: dtype of the result.

        Returns:
            ``[T, R]`` each, or ``[B, 1, T, R]`` where ``past`` is a tensor.
        """
        if isinstance(past, torch.Tensor):
            return _angles(past[:, None].to(torch.float32), self.width, self.base, self.scaling, dtype)
        table = _rotary_table if _is_traced() else _cached_rotary_table
        return table(past, tokens, *self.key, device, dtype)

    @staticmethod
    def apply_rotary(
        q_BHTK: torch.Tensor, k_BGTK: torch.Tensor, cos_sin: tuple[torch.Tensor, torch.Tensor]
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Queries and keys rotated by the angles of :meth:`cos_sin`.

        Args:
            q_BHTK: queries, ``[B, H, T, K]``.
            k_BGTK: keys, ``[B, G, T, K]``.
            cos_sin: cosine and sine, broadcastable to ``[B, H, T, R]``.
        """
        width = cos_sin[0].shape[-1]
        if width < q_BHTK.shape[-1]:
            (q, q_rest), (k, k_rest) = (x.split([width, x.shape[-1] - width], dim=-1) for x in (q_BHTK, k_BGTK))
            q, k = Rotary.apply_rotary(q, k, cos_sin)
            return torch.cat([q, q_rest], dim=-1), torch.cat([k, k_rest], dim=-1)
        if torch.compiler.is_compiling():
            # A compiler fuses these operations.
            return _rotated_out_of_place(q_BHTK, cos_sin), _rotated_out_of_place(k_BGTK, cos_sin)
        rotated: tuple[torch.Tensor, torch.Tensor] = _Rotate.apply(q_BHTK, k_BGTK, *cos_sin)  # type: ignore[no-untyped-call]
        return rotated


def _rotated_out_of_place(x: torch.Tensor, cos_sin: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    first, second = x.chunk(2, dim=-1)
    return x * cos_sin[0] + torch.cat([-second, first], dim=-1) * cos_sin[1]


def _rotated(x: torch.Tensor, cosine: torch.Tensor, half_sine: torch.Tensor, sign: int) -> torch.Tensor:
    y = x * cosine
    (first, second), (first_y, second_y) = x.chunk(2, dim=-1), y.chunk(2, dim=-1)
    first_y.addcmul_(second, half_sine, value=-sign)
    second_y.addcmul_(first, half_sine, value=sign)
    return y


class _Rotate(torch.autograd.Function):
    """Queries and keys in three operations each, either way: the backward rotates by the negative angle."""

    @staticmethod
    def forward(ctx: Any, q: torch.Tensor, k: torch.Tensor, cosine: torch.Tensor, sine: torch.Tensor) -> Any:
        # The halves of a table are equal.
        half_sine = sine.narrow(-1, 0, sine.shape[-1] // 2)
        ctx.save_for_backward(cosine, half_sine)
        return _rotated(q, cosine, half_sine, 1), _rotated(k, cosine, half_sine, 1)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Any) -> Any:
        cosine, half_sine = ctx.saved_tensors
        return *(_rotated(grad, cosine, half_sine, -1) for grad in grads), None, None


def relative_buckets(tokens: int, keys: int, buckets: int, max_distance: int, *, causal: bool) -> torch.Tensor:
    """The bucket of each relative distance, int64 ``[T, S]`` (Raffel et al. 2020, arXiv:1910.10683, section 2.1).

    Half of a direction's buckets are single distances; the others grow logarithmically up to ``max_distance``. Without
    ``causal`` half of the buckets are for later keys.

    Args:
        tokens: number of queries T.
        keys: number of keys S.
        buckets: number of buckets, of both directions together.
        max_distance: distance in tokens from which all keys share the last bucket of their direction.
        causal: whether no query attends to later keys.
    """
    distance = torch.arange(keys)[None, :] - torch.arange(tokens)[:, None]
    offset = torch.zeros_like(distance)
    if causal:
        distance = (-distance).clamp(min=0)
    else:
        buckets //= 2
        offset = (distance > 0).long() * buckets
        distance = distance.abs()
    exact = buckets // 2
    # Clamped before the logarithm: ``where`` selects the exact bucket for small distances, but evaluates both.
    ratio = torch.log(distance.clamp(min=1).float() / exact) / math.log(max_distance / exact)
    far = (exact + (ratio * (buckets - exact)).long()).clamp(max=buckets - 1)
    return offset + torch.where(distance < exact, distance, far)


def _bucket_table(
    tokens: int, keys: int, buckets: int, max_distance: int, causal: bool, device: torch.device
) -> torch.Tensor:
    """:func:`relative_buckets` on ``device``; computed on the CPU, so that no logarithm is rounded in another way."""
    return relative_buckets(tokens, keys, buckets, max_distance, causal=causal).to(device)


@functools.lru_cache(maxsize=CACHED_TABLES)
def _cached_bucket_table(*arguments: Any) -> torch.Tensor:
    """:func:`_bucket_table`, shared by all layers and microbatches."""
    with torch.inference_mode(mode=False):
        return _bucket_table(*arguments)


class RelativeBias(nn.Module):
    """A learned bias of the attention scores by bucket of distance and head, ``weight [buckets, H]``.

    Args:
        buckets: number of buckets.
        heads: heads H.
        max_distance: distance in tokens from which all keys share a bucket.
        device: where the parameter is created.
    """

    def __init__(self, buckets: int, heads: int, max_distance: int, device: torch.device) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(buckets, heads, device=device))
        self.max_distance = max_distance

    def scores(self, tokens: int, keys: int, key_mask: torch.Tensor | None, *, causal: bool) -> torch.Tensor:
        """The bias, ``[1 or B, H, T, S]``: minus infinity where a key must not be attended to.

        Args:
            tokens: number of queries T.
            keys: number of keys S.
            key_mask: bool, broadcastable to ``[B, H, T, S]``, true for keys that may be attended to; None means all.
            causal: whether later keys are masked as well.
        """
        table = _bucket_table if _is_traced() else _cached_bucket_table
        buckets_TS = table(tokens, keys, self.weight.shape[0], self.max_distance, causal, self.weight.device)
        bias = self.weight[buckets_TS].permute(2, 0, 1)[None]
        if causal:
            ahead = torch.ones(tokens, keys, dtype=torch.bool, device=bias.device).triu(1)
            bias = bias.masked_fill(ahead, float("-inf"))
        if key_mask is not None:
            bias = bias.masked_fill(~key_mask, float("-inf"))
        return bias


def add_positions(
    x_BTD: torch.Tensor,
    ids_BT: torch.Tensor,
    position: nn.Embedding | None,
    past: int | torch.Tensor,
    context: ContextRegion | None,
) -> torch.Tensor:
    """Word embeddings plus position embeddings, where a model has them, ``[B, T, D]``.

    Args:
        x_BTD: word embeddings, ``[B, T, D]``; with sequence parallelism this rank's tokens.
        ids_BT: int64 token ids, ``[B, T]``.
        position: the position table, or None.
        past: position of the first token, or the positions of all, int64 ``[B, T]``.
        context: ranks that share the tokens of a sample, which then determine positions that are not given; None with
            one.
    """
    if position is None:
        return x_BTD
    tokens, device = ids_BT.shape[1], ids_BT.device
    if not isinstance(past, torch.Tensor):
        if context is None:
            past = torch.arange(past, past + tokens, device=device)
        else:
            past = context.positions(tokens, device)
    positions: torch.Tensor = position(past)
    return x_BTD + positions
