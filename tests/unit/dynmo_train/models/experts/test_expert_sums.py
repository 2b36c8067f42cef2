"""Sums of weight gradients that do not depend on the order, and products whose gradients go to them."""

from __future__ import annotations

import itertools

import torch
import torch.nn.functional as F

from dynmo_train.models.experts.expert_sums import ExpertSums, chunk_bias, chunk_linear

LIKE = torch.empty(3)


def total(parts, scale=1.0):
    sums = ExpertSums()
    sums.scale = scale
    for part in parts:
        sums.add(0, "w", part)
    return sums.take(0, "w", LIKE)


def test_every_order_gives_the_same_bits():
    # Halves of the unit, whose rounding to even would depend on the sum so far; and sums that float64 would round.
    parts = [torch.tensor([1.5 * 2.0**-44, 1.0 + 2.0**-23, 2.0**-53]) * (-1) ** k * 3**k for k in range(5)]
    parts.append(torch.tensor([2.0**-44, 0.0, 1.0]))
    found = {tuple(total(order).tolist()) for order in itertools.permutations(parts)}
    assert len(found) == 1


def test_partial_sums_of_ranks_give_the_bits_of_one_rank():
    parts = list(torch.randn(40, 3, generator=torch.Generator().manual_seed(0)) * 1e-4)
    one, split = ExpertSums(), ExpertSums()
    for part in parts:
        one.add(0, "w", part)
    split.add_rounded(0, "w", total(parts[1::3]))
    split.add_rounded(0, "w", total([*parts[::3], *parts[2::3]]))
    assert torch.equal(one.take(0, "w", LIKE), split.take(0, "w", LIKE))


def test_sum_is_that_of_float64_to_the_unit():
    parts = list(torch.randn(40, 3, generator=torch.Generator().manual_seed(0)))
    exact = torch.stack(parts).double().sum(0)
    assert (total(parts) - exact).abs().max() <= 20 * 2.0**-44
    scaled = total([part * 1024 for part in parts], scale=1024.0)
    assert torch.equal(scaled / 1024, total(parts))


def test_expert_without_rows_has_zeros():
    assert torch.equal(ExpertSums().take(3, "w", LIKE), torch.zeros(3, dtype=torch.float64))


def test_products_have_the_gradients_of_a_linear_layer():
    generator = torch.Generator().manual_seed(1)
    x, weight, bias = (torch.randn(size, generator=generator) for size in ((5, 4), (3, 4), (3,)))
    for separate in (False, True):
        sums, given = ExpertSums(), x.clone().requires_grad_()
        y = chunk_linear(given, weight, None if separate else bias, sums, 2, "fc1")
        y = chunk_bias(y, bias, sums, 2, "fc1") if separate else y
        y.square().sum().backward()
        leaves = [each.clone().requires_grad_() for each in (x, weight, bias)]
        expected = F.linear(*leaves)
        expected.square().sum().backward()
        torch.testing.assert_close(y, expected)
        torch.testing.assert_close(given.grad, leaves[0].grad)
        torch.testing.assert_close(sums.take(2, "fc1.weight", weight).float(), leaves[1].grad)
        torch.testing.assert_close(sums.take(2, "fc1.bias", bias).float(), leaves[2].grad)
