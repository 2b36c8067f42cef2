"""Tokens taken out of the stream and put back."""

from __future__ import annotations

import torch

from dynmo_train.models.token_select import select_tokens, select_top

X = torch.arange(24.0).view(2, 4, 3)


def test_select_tokens_put_restores_their_positions():
    keep = torch.tensor([[False, True, False, True], [True, False, False, False]])
    chosen = select_tokens(keep)
    assert chosen.index_BC[0].tolist() == [1, 3]
    assert chosen.index_BC[1, 0] == 0
    assert chosen.real_BC.tolist() == [[True, True], [True, False]]
    back = chosen.put(X, -chosen.take(X))
    assert torch.equal(back, torch.where(keep[..., None], -X, X))


def test_select_tokens_without_any_token_keeps_one_padding_entry():
    chosen = select_tokens(torch.zeros(2, 4, dtype=torch.bool))
    assert chosen.index_BC.shape == (2, 1)
    weight = torch.ones(3, requires_grad=True)
    back = chosen.put(X, chosen.take(X) * weight * 7)
    assert torch.equal(back, X)
    back.sum().backward()
    assert torch.equal(weight.grad, torch.zeros(3))


def test_select_top_equal_scores_take_the_earlier_token():
    chosen = select_top(torch.tensor([[1.0, 3.0, 3.0, 2.0], [5.0, 5.0, 5.0, 5.0]]), 2)
    assert chosen.index_BC.tolist() == [[1, 2], [0, 1]]
    assert bool(chosen.real_BC.all())
