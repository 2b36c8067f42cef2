"""Fused linear cross-entropy in chunks of tokens: the logits of all tokens are never in memory together.

Each chunk's logits are turned into its part of the loss and, in place, into gradients. The loss is a weighted sum over
tokens, so the gradient of a logit is known with the logit: (softmax - one-hot) times the token's weight. Nothing is
recomputed in the backward. In float16 the gradients are formed at the scale that the backward applies (``factor``):
unscaled, those of unlikely tokens would be rounded to 0 before a loss scale can lift them.

    x_PD ─▶ logits_PV ─▶ loss += ...
                └──────▶ softmax - one-hot ─▶ grad x_PD = logits_PV @ W;  grad W += logits_PV^T @ x_PD

Under tensor parallelism each rank has some rows of the weight. The ranks exchange three numbers per token, in one
collective per chunk: with the largest logit m and the sum of exponentials s of each rank, the sum over all is
``S = sum s exp(m - M)``, ``M = max m``.

Shapes in names: B samples, T tokens, N = B*T, P tokens of a chunk, D model width, R rows of this rank's weight, of
which V are real; in ``statistics_R3P`` R are the ranks.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch.autograd.function import once_differentiable

from ...parallel.tensor_parallel import PendingGather, TensorRegion
from ..layers.softcap import soft_cap_, soft_cap_slope

# Measured on CPU (V 50,304, D 384): any chunk above 100 tokens takes about 0.9 of the time of one product of all.
CHUNK_TOKENS = {"cpu": 128, "cuda": 4096}
# With V 8,192 chunks of 512 tokens take 0.88 of the time of chunks of 128, and longer ones no less. So a small
# vocabulary has longer chunks, while the logits of a chunk have at most 2^23 elements (34 MB).
MOST_LOGITS, MOST_CPU_TOKENS = 1 << 23, 512


class _Gradients:
    """Gradients of input, weight and bias, accumulated chunk by chunk; None for those that are not needed."""

    def __init__(
        self, x_ND: torch.Tensor, weight_RD: torch.Tensor, bias_R: torch.Tensor | None, vocabulary: int, needs_grad: Any
    ) -> None:
        self.vocabulary = vocabulary
        self.x_ND = torch.empty_like(x_ND) if needs_grad[0] else None
        self.weight_RD = torch.zeros_like(weight_RD, dtype=torch.float32) if needs_grad[1] else None
        self.bias_R = None
        if bias_R is not None and needs_grad[2]:
            self.bias_R = torch.zeros_like(bias_R, dtype=torch.float32)

    def add(self, rows: slice, x_PD: torch.Tensor, weight_VD: torch.Tensor, logits_PV: torch.Tensor) -> None:
        """Accumulate from the gradient of a chunk's logits, float32 ``[P, V]``."""
        # The products run in the compute dtype; the sums over chunks are float32.
        low_PV = logits_PV.to(x_PD.dtype)
        if self.x_ND is not None:
            torch.mm(low_PV, weight_VD, out=self.x_ND[rows])
        if self.weight_RD is not None:
            real_VD = self.weight_RD[: self.vocabulary]
            if x_PD.dtype == torch.float32:
                real_VD.addmm_(low_PV.t(), x_PD)
            else:
                real_VD += low_PV.t() @ x_PD
        if self.bias_R is not None:
            self.bias_R[: self.vocabulary] += logits_PV.sum(0)

    def all(self) -> tuple[torch.Tensor | None, ...]:
        """Of input, weight and bias."""
        return self.x_ND, self.weight_RD, self.bias_R


class _Chunk(NamedTuple):
    """Some tokens between their logits and their part of the loss.

    Attributes:
        rows: of these tokens.
        exponentials_PV: ``exp(logit - largest)``, float32; the largest is this rank's.
        labels_P1: column of each label on this rank; 0 where another rank has it.
        own_P: whether this rank has the label's column; None where it has all.
        statistics_3P: largest logit, sum of the exponentials, and logit of the label, 0 where another rank has it.
    """

    rows: slice
    exponentials_PV: torch.Tensor
    labels_P1: torch.Tensor
    own_P: torch.Tensor | None
    statistics_3P: torch.Tensor


def _chunk_of(logits_PV: torch.Tensor, rows: slice, labels_P: torch.Tensor, first: int, *, sharded: bool) -> _Chunk:
    """Overwrite float32 logits, columns ``first`` and following of the vocabulary, by their exponentials."""
    columns = logits_PV.shape[1]
    statistics_3P = logits_PV.new_zeros(3, len(logits_PV))
    labels_P1, own_P = labels_P[:, None], None
    if sharded:
        local_P = labels_P - first
        own_P = (local_P >= 0) & (local_P < columns)
        labels_P1 = local_P.masked_fill(~own_P, 0)[:, None]
    if not columns:
        # A rank that has padding rows alone changes no sum.
        statistics_3P[0] = torch.finfo(logits_PV.dtype).min
        return _Chunk(rows, logits_PV, labels_P1, own_P, statistics_3P)
    torch.amax(logits_PV, -1, out=statistics_3P[0])
    # The label's logit is read before the logits are overwritten.
    chosen_P = logits_PV.gather(1, labels_P1)[:, 0]
    statistics_3P[2] = chosen_P if own_P is None else chosen_P.masked_fill(~own_P, 0.0)
    logits_PV.sub_(statistics_3P[0][:, None]).exp_()
    torch.sum(logits_PV, -1, out=statistics_3P[1])
    return _Chunk(rows, logits_PV, labels_P1, own_P, statistics_3P)


def _slope_of(chunk: _Chunk, cap: float) -> torch.Tensor:
    """The derivative of a chunk's capped logits by its logits, float32 ``[P, V]``."""
    top_P, _, chosen_P = chunk.statistics_3P
    slope_PV = soft_cap_slope(chunk.exponentials_PV, top_P[:, None], cap)
    if slope_PV.shape[1]:
        # The exponential of an unlikely label may have underflowed; its gradient does not depend on it.
        of_label_P = 1.0 - (chosen_P / cap).square()
        if chunk.own_P is not None:
            of_label_P = torch.where(chunk.own_P, of_label_P, slope_PV.gather(1, chunk.labels_P1)[:, 0])
        slope_PV.scatter_(1, chunk.labels_P1, of_label_P[:, None])
    return slope_PV


def _joined(statistics_R3P: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Largest logit, sum of exponentials relative to it, and label's logit ``[P]`` over the ranks' vocabulary."""
    largest_RP, sums_RP, chosen_RP = statistics_R3P.unbind(1)
    largest_P = largest_RP.amax(0)
    parts_RP = sums_RP * (largest_RP - largest_P).exp_()
    sums_P, chosen_P = parts_RP[0], chosen_RP[0]
    # One rank after another: the bits do not depend on how a backend reduces.
    for rank in range(1, len(parts_RP)):
        sums_P, chosen_P = sums_P + parts_RP[rank], chosen_P + chosen_RP[rank]
    return largest_P, sums_P, chosen_P


class _LinearCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x_ND: torch.Tensor,
        weight_RD: torch.Tensor,
        bias_R: torch.Tensor | None,
        labels_N: torch.Tensor,
        weights_N: torch.Tensor,
        vocabulary: int,
        chunk_tokens: int,
        region: TensorRegion | None,
        factor: float,
        cap: float | None,
    ) -> torch.Tensor:
        """The weighted sum of the losses, over ``vocabulary`` tokens, ``chunk_tokens`` tokens at a time.

        The gradients are those of the sum times ``factor``.
        """
        # The gradients are computed here: a backward would need the logits of all tokens, or every product again.
        first = 0 if region is None else region.rank * len(weight_RD)
        real = min(max(vocabulary - first, 0), len(weight_RD))
        gradients = _Gradients(x_ND, weight_RD, bias_R, real, ctx.needs_input_grad)
        weight_VD, bias_V = weight_RD[:real], None if bias_R is None else bias_R[:real]
        loss = torch.zeros((), dtype=torch.float32, device=x_ND.device)

        def finish(chunk: _Chunk, pending: PendingGather | None) -> None:
            x_PD, weights_P = x_ND[chunk.rows], weights_N[chunk.rows]
            own_top_P = chunk.statistics_3P[0]
            top_P, sums_P, chosen_P = chunk.statistics_3P if pending is None else _joined(pending.wait())
            loss.add_(((sums_P.log() + top_P - chosen_P) * weights_P).sum())
            if not any(ctx.needs_input_grad[:3]):
                return
            if factor != 1.0:
                weights_P = weights_P * factor
            factors_P = weights_P / sums_P
            if pending is not None:
                factors_P = factors_P * (own_top_P - top_P).exp()
            # Before the exponentials are overwritten: they have the capped logits, whose slope the gradient needs.
            slope_PV = None if cap is None else _slope_of(chunk, cap)
            logits_PV = chunk.exponentials_PV.mul_(factors_P[:, None])
            if real:
                once_P = weights_P if chunk.own_P is None else weights_P.masked_fill(~chunk.own_P, 0.0)
                logits_PV.scatter_add_(1, chunk.labels_P1, -once_P[:, None])
            if slope_PV is not None:
                logits_PV.mul_(slope_PV)
            gradients.add(chunk.rows, x_PD, weight_VD, logits_PV)

        # Under tensor parallelism the sums of a chunk travel while the logits of the next one are computed: the
        # products of a chunk need no second pass, and two chunks are in memory.
        in_flight = 1 if region is None else 2
        buffers_PV = [x_ND.new_empty(min(chunk_tokens, x_ND.shape[0]), real) for _ in range(in_flight)]
        waiting: tuple[_Chunk, PendingGather] | None = None
        for number, begin in enumerate(range(0, x_ND.shape[0], chunk_tokens)):
            rows = slice(begin, begin + chunk_tokens)
            x_PD = x_ND[rows]
            # ``out=`` a buffer of our own: selective checkpointing may save a product's output, which must not be
            # modified in place.
            logits_PV = buffers_PV[number % in_flight][: x_PD.shape[0]]
            if bias_V is None:
                torch.mm(x_PD, weight_VD.t(), out=logits_PV)
            else:
                torch.addmm(bias_V, x_PD, weight_VD.t(), out=logits_PV)
            chunk = _chunk_of(
                soft_cap_(logits_PV.float(), cap), rows, labels_N[rows], first, sharded=region is not None
            )
            if region is None:
                finish(chunk, None)
                continue
            gather = region.start_gather(chunk.statistics_3P)
            if waiting is not None:
                finish(*waiting)
            waiting = chunk, gather
        if waiting is not None:
            finish(*waiting)
        # Saved tensors are freed once the backward has used them; attributes of ctx live as long as the loss. The
        # applied factor is saved with the gradients, because activation checkpointing recomputes both for a backward.
        # The flag is on the CPU, so that no backward synchronizes with the device.
        applied = torch.ones((), dtype=torch.float32, device=x_ND.device)
        is_applied = torch.zeros((), dtype=torch.bool, device="cpu")
        ctx.save_for_backward(is_applied, applied, *gradients.all())
        ctx.factor = factor
        ctx.dtypes = x_ND.dtype, weight_RD.dtype, None if bias_R is None else bias_R.dtype
        return loss

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        [scale] = grads
        is_applied, applied, *gradients = ctx.saved_tensors
        if not is_applied:
            # Scaled in place once, bypassing version counters: a split backward runs this twice with the same factor.
            is_applied.data.fill_(True)
            applied.data.copy_(scale)
            for gradient in gradients:
                if gradient is not None:
                    gradient.data.mul_(scale / ctx.factor)
        elif scale.device.type != "cpu" or not torch.equal(scale, applied):
            ratio = torch.where(scale == applied, 1.0, scale / applied)  # both may be 0
            gradients = [None if gradient is None else gradient * ratio for gradient in gradients]
        typed = [None if g is None else g.to(dtype) for g, dtype in zip(gradients, ctx.dtypes, strict=True)]
        return *typed, None, None, None, None, None, None, None


def linear_cross_entropy(
    x_ND: torch.Tensor,
    weight_RD: torch.Tensor,
    bias_R: torch.Tensor | None,
    labels_N: torch.Tensor,
    weights_N: torch.Tensor,
    *,
    vocabulary: int,
    chunk_tokens: int,
    region: TensorRegion | None = None,
    factor: float = 1.0,
    cap: float | None = None,
) -> torch.Tensor:
    """``sum_n weights_n * -log softmax(W x_n + b)[label_n]`` in float32.

    The same ``chunk_tokens`` gives the same bits on every rank. The gradients are computed with the loss and saved for
    the backward: ``[N, D]`` and ``[V, D]`` values instead of ``[N, V]``.

    Args:
        x_ND: input of the projection, ``[N, D]``.
        weight_RD: weight ``[R, D]``, of this tensor-parallel rank; rows from token ``vocabulary`` on are padding.
        bias_R: bias ``[R]``, or None.
        labels_N: int64 token ids below ``vocabulary``, ``[N]``.
        weights_N: float32 weight of each token's loss, ``[N]``.
        vocabulary: number of true token ids V.
        chunk_tokens: tokens of a chunk.
        region: tensor-parallel ranks that share the rows of the weight in order; None for one rank. The gradient of
            ``x_ND`` is then this rank's part of the sum.
        factor: what the backward will multiply the loss by, or near it; float16 gradients are formed at this scale.
        cap: soft cap of the logits; None means none.

    Returns:
        A float32 scalar, equal on all ranks.
    """
    loss: torch.Tensor = _LinearCrossEntropy.apply(  # type: ignore[no-untyped-call]
        x_ND,
        weight_RD,
        bias_R,
        labels_N,
        weights_N,
        vocabulary,
        chunk_tokens,
        region,
        factor if x_ND.dtype == torch.float16 else 1.0,
        cap,
    )
    return loss


def chunk_tokens_for(device_type: str, vocabulary: int) -> int:
    """Return the number of tokens of a chunk, a power of two; layouts of processes do not change it.

    Args:
        device_type: ``cpu``, ``cuda`` or another one, which has the chunks of the CPU.
        vocabulary: Number of true token ids.
    """
    if device_type == "cuda":
        return CHUNK_TOKENS["cuda"]
    fitting = 1 << (MOST_LOGITS // vocabulary).bit_length() >> 1
    return max(CHUNK_TOKENS["cpu"], min(MOST_CPU_TOKENS, fitting))


def token_weights(labels_BT: torch.Tensor, counts_BT: torch.Tensor | None) -> torch.Tensor:
    """The weight of each token in the mean loss of a microbatch, float32 ``[N]``; all 0 where no token counts.

    Args:
        labels_BT: int64 token ids, ``[B, T]``.
        counts_BT: ``[B, T]``, 1 where a token counts, else 0; None means that all count. In floating point they are
            the weights, which a context-parallel rank cannot compute from its own tokens.
    """
    if counts_BT is None:
        return torch.full((labels_BT.numel(),), 1.0 / labels_BT.numel(), device=labels_BT.device)
    if counts_BT.is_floating_point():
        return counts_BT.reshape(-1).float()
    counts_N = counts_BT.reshape(-1).float()
    return counts_N / counts_N.sum().clamp(min=1.0)


def mean_linear_cross_entropy(
    x_BTD: torch.Tensor,
    weight_RD: torch.Tensor,
    bias_R: torch.Tensor | None,
    labels_BT: torch.Tensor,
    counts_BT: torch.Tensor | None,
    vocabulary: int,
    region: TensorRegion | None = None,
    factor: float = 1.0,
    cap: float | None = None,
) -> torch.Tensor:
    """The mean over the tokens whose count is 1; 0 where there is none.

    Args:
        x_BTD: input of the projection, ``[B, T, D]``; with sequence parallelism this rank's tokens.
        weight_RD: weight ``[R, D]``, of this tensor-parallel rank; rows from token ``vocabulary`` on are padding.
        bias_R: bias ``[R]``, or None.
        labels_BT: int64 token ids below ``vocabulary``, ``[B, T]``.
        counts_BT: ``[B, T]``, 1 where a token counts, else 0; None means that all count.
        vocabulary: number of true token ids V.
        region: tensor-parallel ranks that share the rows of the weight in order; None for one rank.
        factor: of the loss in the backward, as of :func:`linear_cross_entropy`.
        cap: soft cap of the logits; None means none.

    Returns:
        A float32 scalar.
    """
    if region is not None:
        x_BTD = region.enter(x_BTD)
    x_ND, labels_N = x_BTD.flatten(0, -2), labels_BT.reshape(-1)
    weights_N = token_weights(labels_BT, counts_BT)
    chunk_tokens = chunk_tokens_for(x_ND.device.type, vocabulary)
    if region is not None:
        # Two chunks of 1 / size of the columns are in memory; fewer chunks are fewer collectives.
        chunk_tokens = chunk_tokens * region.size // 2
    return linear_cross_entropy(
        x_ND,
        weight_RD,
        bias_R,
        labels_N,
        weights_N,
        vocabulary=vocabulary,
        chunk_tokens=chunk_tokens,
        region=region,
        factor=factor,
        cap=cap,
    )
