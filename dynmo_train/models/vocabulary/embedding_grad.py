"""The gradient of an embedding table, collected by token until the step needs the dense gradient.

A microbatch reads few rows of the table: a dense gradient per microbatch would be mostly zeros, written and added for
nothing. Each row's sum has the bits of dense accumulation: first the tokens of a microbatch in their order, then the
microbatches in theirs.

    backward of a microbatch ─▶ PendingRows.add(ids_N, gradient_ND)   up to a quarter of the table's memory
    end of the step          ─▶ materialize_grads: unique ids, summed rows ─▶ table.grad[ids] +=

Shapes in names: B samples, T tokens, N = B*T, U unique ids, V rows of the table, D model width.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch.autograd.function import once_differentiable


def most_pending(rows: int) -> int:
    """The number of tokens whose gradients are collected, for a table of ``rows`` rows: a quarter of its memory."""
    return rows // 4


class PendingRows:
    """Gradients of a table by token, not yet added to its ``grad``.

    Args:
        table_VD: the parameter, ``[V, D]``.
        most: maximum number of collected tokens; above it all are added to a dense gradient.
        apart: whether that is a tensor of its own until :meth:`materialize_grads`. Another product adds to ``grad`` of
            a tied table: the order of the two must not depend on the schedule.
    """

    def __init__(self, table_VD: torch.Tensor, most: int, *, apart: bool = False) -> None:
        self._table_VD, self._most, self._apart = table_VD, most, apart
        self._parts: list[tuple[torch.Tensor, torch.Tensor]] = []
        self._tokens = 0
        self._sum_VD: torch.Tensor | None = None
        # An input that requires a gradient, so that autograd runs the backward of a lookup. It never gets one itself.
        self.anchor = torch.zeros((), device=table_VD.device, requires_grad=True)

    def add(self, ids_N: torch.Tensor, gradient_ND: torch.Tensor) -> None:
        """Collect the gradients of a microbatch.

        Args:
            ids_N: int64 token ids, ``[N]``.
            gradient_ND: one row per token, ``[N, D]``, in the dtype of the table.
        """
        self._parts.append((ids_N, gradient_ND))
        self._tokens += len(ids_N)
        if self._tokens <= self._most:
            return
        if not self._apart:
            self.materialize_grads()
            return
        if self._sum_VD is None:
            self._sum_VD = torch.zeros_like(self._table_VD)
        self._add_parts(self._sum_VD)

    @torch.no_grad()
    def materialize_grads(self) -> None:
        """Add the collected gradients to the table's ``grad``."""
        if self._parts or self._sum_VD is not None:
            if self._table_VD.grad is None:
                self._table_VD.grad = torch.zeros_like(self._table_VD)
            if self._sum_VD is not None:
                self._table_VD.grad += self._sum_VD
                self._sum_VD = None
            self._add_parts(self._table_VD.grad)

    def is_of(self, parameter: torch.Tensor) -> bool:
        """Whether ``parameter`` is the table."""
        return parameter is self._table_VD

    @torch.no_grad()
    def accumulated(self) -> torch.Tensor | None:
        """The table's gradient as :meth:`materialize_grads` would leave it, ``[V, D]``; None without one.

        Nothing that is collected changes, so that the step has the same bits.
        """
        summands = [each for each in (self._table_VD.grad, self._sum_VD) if each is not None]
        if not summands and not self._parts:
            return None
        total_VD = torch.zeros_like(self._table_VD)
        for each in summands:
            total_VD += each
        self._add_to(total_VD, self._parts)
        return total_VD

    @torch.no_grad()
    def _add_parts(self, dense_VD: torch.Tensor) -> None:
        """Add what is collected to a dense gradient, and drop it."""
        parts, self._parts, self._tokens = self._parts, [], 0
        self._add_to(dense_VD, parts)

    @staticmethod
    def _add_to(dense_VD: torch.Tensor, parts: list[tuple[torch.Tensor, torch.Tensor]]) -> None:
        for ids_N, gradient_ND in parts:
            if not len(ids_N):
                continue
            if ids_N.device.type != "cpu":
                # The host cannot know the number of unique ids without waiting. This adds in the order of the tokens,
                # too: on CUDA torch sorts them.
                dense_VD.index_put_((ids_N,), gradient_ND.to(dense_VD.dtype), accumulate=True)
                continue
            # torch's own backward of an embedding, on the rows that occur: it adds the tokens of a row in their order.
            found_U, places_N = torch.unique(ids_N, return_inverse=True)
            sums_UD = torch.ops.aten.embedding_dense_backward(gradient_ND, places_N, len(found_U), -1, False)
            dense_VD.index_add_(0, found_U, sums_UD.to(dense_VD.dtype))


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
    """Rows of a table, ``[B, T, D]``; their gradients go to ``pending``.

    Args:
        table_VD: the parameter, ``[V, D]``.
        ids_BT: int64 token ids, ``[B, T]``.
        pending: collects the gradients.
    """
    # The table is detached: autograd would otherwise allocate its dense gradient in each microbatch.
    rows: torch.Tensor = _LookUp.apply(pending.anchor, table_VD.detach(), ids_BT, pending)  # type: ignore[no-untyped-call]
    return rows
