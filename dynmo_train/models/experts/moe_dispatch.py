"""From the choices of tokens to rows sorted by expert, and back, without reading the device.

Each choice of a token is a slot; a row is what an expert computes. Dropped slots have no row, so that they cost no
arithmetic::

    x_ND ─▶ take_rows ─▶ rows_RD by expert ─▶ experts ─▶ rows_RD ─▶ return_rows ─▶ y_NCD, zero where dropped

The number of rows R follows from shapes alone: all slots, or at most the capacity of all experts. Rows that no slot
fills are at the end, or with padding at the end of each expert's rows.

Shapes in names: N tokens, C experts per token, M = N*C slots, R rows, E experts, D model width.
"""

from __future__ import annotations

from typing import Any, Literal, NamedTuple

import torch
from torch.autograd.function import once_differentiable

from ...parallel.expert_parallel import RowGroups, equal_groups

DropPolicy = Literal["probs", "position"]
PROBS: DropPolicy = "probs"


class RowPlan(NamedTuple):
    """Which slot fills which row.

    Attributes:
        groups: rows of each expert.
        slot_R: int64 slot of each row; any slot for a row that none fills.
        row_M: int64 row of each slot; any row for a dropped slot.
        filled_R: bool, whether a slot fills the row; None where all are filled.
        computed_M: bool, whether the slot has a row; None where none is dropped.
    """

    groups: RowGroups
    slot_R: torch.Tensor
    row_M: torch.Tensor
    filled_R: torch.Tensor | None
    computed_M: torch.Tensor | None


def ends_by_expert(sorted_M: torch.Tensor, experts: int) -> torch.Tensor:
    """The end of each expert's slots, int32 ``[E]``; ``sorted_M`` are the experts of the slots, ascending.

    ``bincount`` would read the largest index on the host.
    """
    numbers_E = torch.arange(experts, device=sorted_M.device)
    return torch.searchsorted(sorted_M, numbers_E, right=True, out_int32=True)


def within_capacity(
    expert_M: torch.Tensor, weights_M: torch.Tensor, experts: int, capacity: int, policy: DropPolicy
) -> torch.Tensor:
    """Whether each slot is within the capacity of its expert, bool ``[M]``.

    Args:
        expert_M: int64 expert of each slot, ``[M]``.
        weights_M: weight of each slot.
        experts: number of experts.
        capacity: largest number of slots of an expert.
        policy: an expert keeps its slots of largest weight (``probs``) or its first ones (``position``).
    """
    if policy == PROBS:
        # Two stable sorts: by weight, then by expert. So each expert's slots are consecutive, the largest weight first.
        by_weight_M = weights_M.argsort(descending=True, stable=True)
        order_M = by_weight_M[expert_M[by_weight_M].argsort(stable=True)]
    else:
        order_M = expert_M.argsort(stable=True)
    sorted_M = expert_M[order_M]
    ends_E = ends_by_expert(sorted_M, experts)
    rank_M = _positions(sorted_M) - _begins(ends_E)[sorted_M]
    return torch.empty_like(expert_M, dtype=torch.bool).scatter_(0, order_M, rank_M < capacity)


def plan_rows(
    expert_M: torch.Tensor,
    experts: int,
    computed_M: torch.Tensor | None = None,
    capacity: int | None = None,
    *,
    pad: bool = False,
    is_fixed: bool = False,
) -> RowPlan:
    """Plan the rows of each expert, in the order of the slots.

    Args:
        expert_M: int64 expert of each slot, ``[M]``.
        experts: number of experts.
        computed_M: bool ``[M]``, which slots are computed; None means all.
        capacity: largest number of computed slots of an expert; required with ``computed_M``.
        pad: whether each expert gets exactly ``capacity`` rows.
        is_fixed: with ``pad``: whether all ranks that share the experts have the same capacity.
    """
    if computed_M is None or capacity is None:
        order_M = expert_M.argsort(stable=True)
        row_M = _inverse(order_M)
        return RowPlan(RowGroups(ends_E=ends_by_expert(expert_M[order_M], experts)), order_M, row_M, None, None)
    # The number E sorts dropped slots behind all experts.
    order_M = expert_M.masked_fill(~computed_M, experts).argsort(stable=True)
    sorted_M = expert_M[order_M]
    ends_E = ends_by_expert(sorted_M.masked_fill(~computed_M[order_M], experts), experts)
    begins_E = _begins(ends_E)
    if not pad:
        rows = min(len(expert_M), experts * capacity)
        slot_R = order_M[:rows]
        filled_R = _positions(slot_R) < ends_E[-1]
        # Dropped slots are last; they read the last row, and their result is masked.
        row_M = _inverse(order_M).clamp(max=rows - 1)
        return RowPlan(RowGroups(ends_E=ends_E), slot_R, row_M, filled_R, computed_M)
    rank_M = (_positions(sorted_M) - begins_E[sorted_M]).clamp(max=capacity - 1)
    row_M = torch.empty_like(order_M).scatter_(0, order_M, sorted_M * capacity + rank_M)
    rank_EC = torch.arange(capacity, device=expert_M.device).expand(experts, -1)
    filled_R = (rank_EC < (ends_E - begins_E)[:, None]).reshape(-1)
    slot_R = order_M[(begins_E[:, None] + rank_EC).clamp(max=len(expert_M) - 1).reshape(-1)]
    return RowPlan(
        equal_groups(experts, capacity, expert_M.device, is_fixed=is_fixed), slot_R, row_M, filled_R, computed_M
    )


def take_rows(x_ND: torch.Tensor, plan: RowPlan, choices: int) -> torch.Tensor:
    """The token of each row, ``[R, D]``.

    Args:
        x_ND: tokens, ``[N, D]``.
        plan: rows of the slots.
        choices: slots of a token, C.
    """
    rows_RD: torch.Tensor = _TakeRows.apply(x_ND, plan, choices)  # type: ignore[no-untyped-call]
    return rows_RD


def return_rows(rows_RD: torch.Tensor, plan: RowPlan, choices: int) -> torch.Tensor:
    """The result of each slot, ``[N, C, D]``; zero where it was dropped.

    Args:
        rows_RD: results of the rows, ``[R, D]``.
        plan: rows of the slots.
        choices: slots of a token, C.
    """
    y_NCD: torch.Tensor = _ReturnRows.apply(rows_RD, plan, choices)  # type: ignore[no-untyped-call]
    return y_NCD


def _positions(x_M: torch.Tensor) -> torch.Tensor:
    return torch.arange(len(x_M), device=x_M.device)


def _begins(ends_E: torch.Tensor) -> torch.Tensor:
    return torch.cat([ends_E.new_zeros(1), ends_E[:-1]])


def _inverse(order_M: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(order_M).scatter_(0, order_M, _positions(order_M))


def _select(rows: torch.Tensor, index: torch.Tensor, valid: torch.Tensor | None) -> torch.Tensor:
    """The rows at ``index``, zero where not ``valid``."""
    selected = rows.index_select(0, index)
    # Not a product: rows that belong to no expert are undefined after a grouped product, and may be NaN.
    return selected if valid is None else selected.masked_fill_(~valid[:, None], 0.0)


class _TakeRows(torch.autograd.Function):
    """A gather in both directions: the backward of an indexing would add rows in an order that CUDA does not fix."""

    @staticmethod
    def forward(ctx: Any, x_ND: torch.Tensor, plan: RowPlan, choices: int) -> torch.Tensor:
        ctx.plan, ctx.choices = plan, choices
        return x_ND.index_select(0, plan.slot_R.div(choices, rounding_mode="floor"))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Any) -> Any:
        grad_MD = _select(grads[0], ctx.plan.row_M, ctx.plan.computed_M)
        return grad_MD.view(-1, ctx.choices, grad_MD.shape[1]).sum(1), None, None


class _ReturnRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows_RD: torch.Tensor, plan: RowPlan, choices: int) -> torch.Tensor:
        ctx.plan = plan
        return _select(rows_RD, plan.row_M, plan.computed_M).view(-1, choices, rows_RD.shape[1])

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Any) -> Any:
        return _select(grads[0].reshape(-1, grads[0].shape[-1]), ctx.plan.slot_R, ctx.plan.filled_R), None, None
