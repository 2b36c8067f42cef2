"""The gradient of a table of embeddings, kept by token until a step needs it whole.

A table has a row for each id, and a microbatch meets few of them: a dense gradient a microbatch, mostly zeros, would be
written and added for nothing. Row by row the sums are those of dense gradients, bit for bit: first the tokens of a
microbatch in their order, then the microbatches in theirs.

Shapes in names: B samples, T tokens, N = B*T, U different ids, V rows of the table, D model width.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch.autograd.function import once_differentiable


def most_pending(rows: int) -> int:
    """For how many tokens gradients are kept apart, of a table of so many rows: they take a quarter of its memory."""
    return rows // 4


class PendingRows:
    """Gradients of a table that its ``grad`` does not hold yet.

    Args:
        table_VD: the parameter whose gradients these are.
        most: tokens that are kept; above it all go into ``grad``.
    """

    def __init__(self, table_VD: torch.Tensor, most: int) -> None:
        self._table_VD, self._most = table_VD, most
        self._parts: list[tuple[torch.Tensor, torch.Tensor]] = []
        self._tokens = 0
        # What makes autograd come back to a look-up; it never gets a gradient itself.
        self.anchor = torch.zeros((), device=table_VD.device, requires_grad=True)

    def add(self, ids_N: torch.Tensor, gradient_ND: torch.Tensor) -> None:
        """Take what the backward of a microbatch gives for each token."""
        self._parts.append((ids_N, gradient_ND))
        self._tokens += len(ids_N)
        if self._tokens > self._most:
            self.materialize_grads()

    @torch.no_grad()
    def materialize_grads(self) -> None:
        """Add what is kept to the table's ``grad``."""
        parts, self._parts, self._tokens = self._parts, [], 0
        for ids_N, gradient_ND in parts:
            found_U, places_N = torch.unique(ids_N, return_inverse=True)
            sums_UD = torch.ops.aten.embedding_dense_backward(gradient_ND, places_N, len(found_U), -1, False)
            if self._table_VD.grad is None:
                self._table_VD.grad = torch.zeros_like(self._table_VD)
            self._table_VD.grad.index_add_(0, found_U, sums_UD.to(self._table_VD.dtype))


class _LookUp(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, _anchor: torch.Tensor, table_VD: torch.Tensor, ids_BT: torch.Tensor, pending: PendingRows
    ) -> torch.Tensor:
        ctx.save_for_backward(ids_BT)
        ctx.pending = pending
        return F.embedding(ids_BT, table_VD)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        [ids_BT] = ctx.saved_tensors
        ctx.pending.add(ids_BT.reshape(-1), grads[0].flatten(0, -2))
        return None, None, None, None


def look_up(table_VD: torch.Tensor, ids_BT: torch.Tensor, pending: PendingRows) -> torch.Tensor:
    """Rows of ``table_VD``, ``[B, T, D]``; their gradients go to ``pending``."""
    rows: torch.Tensor = _LookUp.apply(pending.anchor, table_VD.detach(), ids_BT, pending)  # type: ignore[no-untyped-call]
    return rows
