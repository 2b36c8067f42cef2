"""Fused linear cross-entropy in chunks of tokens: the logits of all tokens are never in memory together.

Each chunk's logits are turned into its part of the loss and, in place, into gradients. The loss is a weighted sum over
tokens, so the gradient of a logit is known with the logit: (softmax - one-hot) times the token's weight. Nothing is
recomputed in the backward.

    x_PD ─▶ logits_PV ─▶ loss += ...
                └──────▶ softmax - one-hot ─▶ grad x_PD = logits_PV @ W;  grad W += logits_PV^T @ x_PD

Shapes in names: B samples, T tokens, N = B*T, P tokens of a chunk, D model width, V vocabulary, R rows of the
weight, of which V are real.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.autograd.function import once_differentiable

# Measured on CPU (V 50,304, D 384): any chunk above 100 tokens takes about 0.9 of the time of one product of all.
CHUNK_TOKENS = {"cpu": 128, "cuda": 4096}


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
    ) -> torch.Tensor:
        """The weighted sum of the losses, over ``vocabulary`` rows of the weight, ``chunk_tokens`` tokens at a time."""
        # The gradients are computed here: a backward would need the logits of all tokens, or every product again.
        gradients = _Gradients(x_ND, weight_RD, bias_R, vocabulary, ctx.needs_input_grad)
        weight_VD, bias_V = weight_RD[:vocabulary], None if bias_R is None else bias_R[:vocabulary]
        loss = torch.zeros((), dtype=torch.float32, device=x_ND.device)
        buffer_PV = x_ND.new_empty(min(chunk_tokens, x_ND.shape[0]), vocabulary)
        for begin in range(0, x_ND.shape[0], chunk_tokens):
            rows = slice(begin, begin + chunk_tokens)
            x_PD, labels_P1, weights_P = x_ND[rows], labels_N[rows, None], weights_N[rows]
            # ``out=`` a buffer of our own: selective checkpointing may save a product's output, which must not be
            # modified in place as below.
            logits_PV = buffer_PV[: x_PD.shape[0]]
            if bias_V is None:
                torch.mm(x_PD, weight_VD.t(), out=logits_PV)
            else:
                torch.addmm(bias_V, x_PD, weight_VD.t(), out=logits_PV)
            logits_PV = logits_PV.float()
            top_P1 = logits_PV.amax(-1, keepdim=True)
            # The label's logit is read before the logits are overwritten by their exponentials.
            chosen_P1 = logits_PV.gather(1, labels_P1)
            logits_PV.sub_(top_P1).exp_()
            sums_P1 = logits_PV.sum(-1, keepdim=True)
            loss += ((sums_P1.log() + top_P1 - chosen_P1)[:, 0] * weights_P).sum()
            if any(ctx.needs_input_grad[:3]):
                logits_PV.mul_(weights_P[:, None] / sums_P1)
                logits_PV.scatter_add_(1, labels_P1, -weights_P[:, None])
                gradients.add(rows, x_PD, weight_VD, logits_PV)
        # Saved tensors are freed once the backward has used them; attributes of ctx live as long as the loss. The
        # applied factor is saved with the gradients, because activation checkpointing recomputes both for a backward.
        # The flag is on the CPU, so that no backward synchronizes with the device.
        applied = torch.ones((), dtype=torch.float32, device=x_ND.device)
        is_applied = torch.zeros((), dtype=torch.bool, device="cpu")
        ctx.save_for_backward(is_applied, applied, *gradients.all())
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
                    gradient.data.mul_(scale)
        elif scale.device.type != "cpu" or not torch.equal(scale, applied):
            ratio = torch.where(scale == applied, 1.0, scale / applied)  # both may be 0
            gradients = [None if gradient is None else gradient * ratio for gradient in gradients]
        typed = [None if g is None else g.to(dtype) for g, dtype in zip(gradients, ctx.dtypes, strict=True)]
        return *typed, None, None, None, None


def linear_cross_entropy(
    x_ND: torch.Tensor,
    weight_RD: torch.Tensor,
    bias_R: torch.Tensor | None,
    labels_N: torch.Tensor,
    weights_N: torch.Tensor,
    *,
    vocabulary: int,
    chunk_tokens: int,
) -> torch.Tensor:
    """``sum_n weights_n * -log softmax(W x_n + b)[label_n]`` in float32.

    The same ``chunk_tokens`` gives the same bits on every rank. The gradients are computed with the loss and saved for
    the backward: ``[N, D]`` and ``[V, D]`` values instead of ``[N, V]``.

    Args:
        x_ND: input of the projection, ``[N, D]``.
        weight_RD: weight ``[R, D]``; rows from ``vocabulary`` on are padding.
        bias_R: bias ``[R]``, or None.
        labels_N: int64 token ids below ``vocabulary``, ``[N]``.
        weights_N: float32 weight of each token's loss, ``[N]``.
        vocabulary: number of true token ids V.
        chunk_tokens: tokens of a chunk.

    Returns:
        A float32 scalar.
    """
    loss: torch.Tensor = _LinearCrossEntropy.apply(  # type: ignore[no-untyped-call]
        x_ND, weight_RD, bias_R, labels_N, weights_N, vocabulary, chunk_tokens
    )
    return loss


def mean_linear_cross_entropy(
    x_BTD: torch.Tensor,
    weight_RD: torch.Tensor,
    bias_R: torch.Tensor | None,
    labels_BT: torch.Tensor,
    counts_BT: torch.Tensor | None,
    vocabulary: int,
) -> torch.Tensor:
    """The mean over the tokens whose count is 1; 0 where there is none.

    Args:
        x_BTD: input of the projection, ``[B, T, D]``.
        weight_RD: weight ``[R, D]``; rows from ``vocabulary`` on are padding.
        bias_R: bias ``[R]``, or None.
        labels_BT: int64 token ids below ``vocabulary``, ``[B, T]``.
        counts_BT: ``[B, T]``, 1 where a token counts, else 0; None means that all count.
        vocabulary: number of true token ids V.

    Returns:
        A float32 scalar.
    """
    x_ND, labels_N = x_BTD.flatten(0, -2), labels_BT.reshape(-1)
    if counts_BT is None:
        weights_N = torch.full((len(labels_N),), 1.0 / len(labels_N), device=x_ND.device)
    else:
        counts_N = counts_BT.reshape(-1).float()
        weights_N = counts_N / counts_N.sum().clamp(min=1.0)
    chunk_tokens = CHUNK_TOKENS.get(x_ND.device.type, CHUNK_TOKENS["cpu"])
    return linear_cross_entropy(
        x_ND, weight_RD, bias_R, labels_N, weights_N, vocabulary=vocabulary, chunk_tokens=chunk_tokens
    )
