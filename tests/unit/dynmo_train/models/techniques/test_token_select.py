"""Tokens taken out of the stream and put back."""

from __future__ import annotations

import pytest
import torch

from dynmo_train.models.techniques.token_select import select_tokens, select_top, whole_tiles

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


def test_select_top_puts_padding_behind_the_selected_tokens():
    chosen = select_top(torch.tensor([[1.0, 3.0, 5.0, 2.0, 4.0]]), 2, 4)
    assert chosen.index_BC.tolist() == [[2, 4, 1, 3]]
    assert chosen.real_BC.tolist() == [[True, True, False, False]]


@pytest.mark.parametrize(
    ("samples", "count", "tokens", "entries"),
    [
        (1, 100, 512, 128),
        (1, 128, 512, 128),
        (4, 100, 512, 128),
        (16, 100, 512, 104),
        (128, 7, 16, 7),
        (1, 100, 120, 120),
    ],
)
def test_whole_tiles_is_the_least_number_of_entries(samples, count, tokens, entries):
    assert whole_tiles(samples, count, tokens) == entries


def test_select_top_equal_scores_take_the_earlier_token():
    chosen = select_top(torch.tensor([[1.0, 3.0, 3.0, 2.0], [5.0, 5.0, 5.0, 5.0]]), 2)
    assert chosen.index_BC.tolist() == [[1, 2], [0, 1]]
    assert bool(chosen.real_BC.all())


@pytest.mark.parametrize("samples", [1, 2])
def test_positions_of_selected_tokens_have_strides_of_a_copy(samples):
    """Of one sample a view is contiguous with any stride, on which a compiled graph would depend."""
    scores = torch.rand(samples, 8)
    assert select_top(scores, 3).index_BC.stride() == (3, 1)
    assert select_tokens(scores >= scores.sort(dim=1).values[:, 4:5]).index_BC.stride() == (4, 1)


def test_positions_of_selected_tokens_are_contiguous():
    """A compiled graph would depend on the strides of a view, and with them on how many tokens are selected."""
    selected = select_tokens(torch.tensor([[True, False, True, False], [False, True, False, False]]))
    assert selected.index_BC.tolist() == [[0, 2], [1, 0]]
    assert selected.index_BC.is_contiguous()
