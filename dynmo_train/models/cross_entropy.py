"""The loss of a vocabulary projection, piece by piece: the logits of all tokens never stand in memory at once.

Each piece's logits become its share of the loss and at once its gradients: with a weighted sum over tokens the gradient
of the logits is known as soon as they are (softmax minus one-hot, times the token's weight), so that nothing is
computed twice.

Shapes in names: B samples, T tokens, N = B*T, P tokens of a piece, D model width, V vocabulary, R rows of the
weight, of which V are real.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.autograd.function import once_differentiable

# On CPU any number above 100 is about as fast (vocabulary 50,304, width 384: 0.9 of the time of the whole at once).
PIECE_TOKENS = {"cpu": 128, "cuda": 4096}


class _Gradients:
    """The gradients of a sum of pieces, added up as the pieces come; None where none is wanted."""

    def __init__(
        self, x_ND: torch.Tensor, weight_RD: torch.Tensor, bias_R: torch.Tensor | None, vocabulary: int, wanted: Any
    ) -> None:
        self.vocabulary = vocabulary
        self.x_ND = torch.empty_like(x_ND) if wanted[0] else None
        self.weight_RD = torch.zeros_like(weight_RD, dtype=torch.float32) if wanted[1] else None
        self.bias_R = None
        if bias_R is not None and wanted[2]:
            self.bias_R = torch.zeros_like(bias_R, dtype=torch.float32)

    def add(self, rows: slice, x_PD: torch.Tensor, weight_VD: torch.Tensor, logits_PV: torch.Tensor) -> None:
        """Take the gradient of a piece's logits, float32."""
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
        piece: int,
    ) -> torch.Tensor:
        gradients = _Gradients(x_ND, weight_RD, bias_R, vocabulary, ctx.needs_input_grad)
        weight_VD, bias_V = weight_RD[:vocabulary], None if bias_R is None else bias_R[:vocabulary]
        loss = torch.zeros((), dtype=torch.float32, device=x_ND.device)
        room_PV = x_ND.new_empty(min(piece, x_ND.shape[0]), vocabulary)
        for begin in range(0, x_ND.shape[0], piece):
            rows = slice(begin, begin + piece)
            x_PD, labels_P1, weights_P = x_ND[rows], labels_N[rows, None], weights_N[rows]
            # Written to a place of its own: what a selective checkpoint keeps must not be changed in place, as here.
            logits_PV = room_PV[: x_PD.shape[0]]
            if bias_V is None:
                torch.mm(x_PD, weight_VD.t(), out=logits_PV)
            else:
                torch.addmm(bias_V, x_PD, weight_VD.t(), out=logits_PV)
            logits_PV = logits_PV.float()
            top_P1 = logits_PV.amax(-1, keepdim=True)
            chosen_P1 = logits_PV.gather(1, labels_P1)
            logits_PV.sub_(top_P1).exp_()
            sums_P1 = logits_PV.sum(-1, keepdim=True)
            loss += ((sums_P1.log() + top_P1 - chosen_P1)[:, 0] * weights_P).sum()
            if any(ctx.needs_input_grad[:3]):
                logits_PV.mul_(weights_P[:, None] / sums_P1)
                logits_PV.scatter_add_(1, labels_P1, -weights_P[:, None])
                gradients.add(rows, x_PD, weight_VD, logits_PV)
        # Saved tensors are freed as soon as the backward has used them; attributes live as long as the loss does. The
        # factor is saved beside what it was applied to: activation checkpointing makes both anew for each backward.
        # Whether there is one yet is asked on the CPU, so that no backward waits for a device.
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
            # Scaled once, in place and unseen by autograd; a split backward comes twice with the same factor.
            is_applied.data.fill_(True)
            applied.data.copy_(scale)
            for gradient in gradients:
                if gradient is not None:
                    gradient.data.mul_(scale)
        elif scale.device.type != "cpu" or not torch.equal(scale, applied):
            ratio = torch.where(scale == applied, 1.0, scale / applied)  # a factor of 0 comes twice as well
            gradients = [None if gradient is None else gradient * ratio for gradient in gradients]
        told = [None if g is None else g.to(dtype) for g, dtype in zip(gradients, ctx.dtypes, strict=True)]
        return *told, None, None, None, None


def linear_cross_entropy(
    x_ND: torch.Tensor,
    weight_RD: torch.Tensor,
    bias_R: torch.Tensor | None,
    labels_N: torch.Tensor,
    weights_N: torch.Tensor,
    *,
    vocabulary: int,
    piece: int,
) -> torch.Tensor:
    """``sum_n weights_n * -log softmax(W x_n + b)[label_n]``, in float32, in pieces of ``piece`` tokens.

    Rows of weight and bias beyond ``vocabulary`` are padding and take no part.

    The same bits for the same ``piece``, wherever it runs. The gradients are computed with the loss and kept until the
    backward: ``[N, D]`` and ``[V, D]`` numbers in place of ``[N, V]``.
    """
    loss: torch.Tensor = _LinearCrossEntropy.apply(  # type: ignore[no-untyped-call]
        x_ND, weight_RD, bias_R, labels_N, weights_N, vocabulary, piece
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
    """The mean over the tokens that count (None: all), 0 where none does."""
    x_ND, labels_N = x_BTD.flatten(0, -2), labels_BT.reshape(-1)
    if counts_BT is None:
        weights_N = torch.full((len(labels_N),), 1.0 / len(labels_N), device=x_ND.device)
    else:
        counts_N = counts_BT.reshape(-1).float()
        weights_N = counts_N / counts_N.sum().clamp(min=1.0)
    piece = PIECE_TOKENS.get(x_ND.device.type, PIECE_TOKENS["cpu"])
    return linear_cross_entropy(x_ND, weight_RD, bias_R, labels_N, weights_N, vocabulary=vocabulary, piece=piece)
