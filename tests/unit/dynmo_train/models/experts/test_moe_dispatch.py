"""Plans of rows against plain lists, and rows that no slot fills."""

from __future__ import annotations

import pytest
import torch

from dynmo_train.models.experts.moe_dispatch import plan_rows, return_rows, take_rows, within_capacity

EXPERTS, CHOICES, CAPACITY = 3, 2, 2
# Slots of four tokens: expert 0 is chosen 3 times, expert 1 once, expert 2 four times.
EXPERT_M = torch.tensor([2, 0, 2, 0, 1, 2, 0, 2])
WEIGHTS_M = torch.tensor([0.1, 0.9, 0.4, 0.2, 0.5, 0.4, 0.2, 0.3])


@pytest.mark.parametrize(("policy", "dropped"), [("probs", {0, 6, 7}), ("position", {5, 6, 7})])
def test_within_capacity_drops_by_policy(policy, dropped):
    computed = within_capacity(EXPERT_M, WEIGHTS_M, EXPERTS, CAPACITY, policy)
    assert {slot for slot, inside in enumerate(computed.tolist()) if not inside} == dropped


def plan(*, pad=False, drop=True):
    computed = within_capacity(EXPERT_M, WEIGHTS_M, EXPERTS, CAPACITY, "probs") if drop else None
    return plan_rows(EXPERT_M, EXPERTS, computed, CAPACITY if drop else None, pad=pad)


def test_plan_without_capacity_has_a_row_for_each_slot():
    rows = plan(drop=False)
    assert rows.groups.host_counts() == (3, 1, 4)
    assert rows.slot_R.tolist() == [1, 3, 6, 4, 0, 2, 5, 7]
    assert rows.slot_R[rows.row_M].tolist() == list(range(8))


def test_plan_with_capacity_has_computed_rows_first():
    rows = plan()
    assert rows.groups.counts is None, "the counts are on the device alone"
    assert rows.groups.host_counts() == (2, 1, 2)
    assert rows.filled_R.tolist() == [True] * 5 + [False], "no more rows than the capacity of all experts"
    assert rows.slot_R[:5].tolist() == [1, 3, 4, 2, 5]
    assert [int(rows.row_M[slot]) for slot in (1, 3, 4, 2, 5)] == [0, 1, 2, 3, 4]


def test_padded_plan_has_the_capacity_of_each_expert():
    rows = plan(pad=True)
    assert rows.groups.counts == (CAPACITY,) * EXPERTS
    assert rows.groups.ends_E.tolist() == [2, 4, 6]
    assert rows.filled_R.tolist() == [True, True, True, False, True, True]
    assert rows.slot_R[rows.filled_R].tolist() == [1, 3, 4, 2, 5]
    assert [int(rows.row_M[slot]) for slot in (1, 3, 4, 2, 5)] == [0, 1, 2, 4, 5]


@pytest.mark.parametrize("pad", [False, True])
def test_rows_return_to_their_slots(pad):
    rows, x = plan(pad=pad), torch.arange(8.0).view(4, 2)
    y = return_rows(take_rows(x, rows, CHOICES), rows, CHOICES)
    assert torch.equal(y, x[:, None] * rows.computed_M.view(4, CHOICES, 1))


@pytest.mark.parametrize("pad", [False, True])
def test_undefined_rows_reach_no_result_and_no_gradient(pad):
    """After a grouped product the rows that no slot fills are undefined, in both directions."""
    rows, x = plan(pad=pad), torch.ones(4, 2, requires_grad=True)
    taken = take_rows(x, rows, CHOICES)
    undefined = (~rows.filled_R)[:, None] * torch.full_like(taken, torch.nan)
    undefined = torch.where(rows.filled_R[:, None], torch.zeros_like(taken), undefined)
    result = return_rows((taken.detach() + undefined).requires_grad_(), rows, CHOICES)
    assert result.isfinite().all()
    taken.backward(torch.ones_like(taken) + undefined)
    assert torch.equal(x.grad, rows.computed_M.view(4, CHOICES).sum(1, keepdim=True).expand(4, 2).float())


@pytest.mark.parametrize("pad", [False, True])
def test_unfilled_rows_get_a_gradient_of_zero(pad):
    rows = plan(pad=pad)
    made = torch.ones(len(rows.slot_R), 2, requires_grad=True)
    return_rows(made, rows, CHOICES).sum().backward()
    assert torch.equal(made.grad[:, 0], rows.filled_R.float())
