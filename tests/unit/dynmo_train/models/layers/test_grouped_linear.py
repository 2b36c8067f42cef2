"""Grouped linear layers against one layer after the other, and when they are used."""

from __future__ import annotations

import pytest
import torch

from dynmo_train.models.layers import grouped_linear as grouped
from dynmo_train.models.layers.linear import PrunableLinear

CPU = torch.device("cpu")


def drawn(*shape, seed=1):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def layers(count=3, inputs=8, outputs=12, bias=True):
    made = [PrunableLinear(inputs, outputs, CPU, bias=bias) for _ in range(count)]
    with torch.no_grad():
        for seed, parameter in enumerate(parameter for each in made for parameter in each.parameters()):
            parameter.copy_(drawn(*parameter.shape, seed=seed))
    return made


def test_grouped_linear_enters_and_leaves_the_region_once():
    """The bias is added after the sum over ranks, once."""
    made, x, calls = layers(), drawn(12, 8), []
    for layer in made:
        layer.enter = lambda rows: calls.append("enter") or 2.0 * rows
        layer.leave = lambda rows: calls.append("leave") or 3.0 * rows
    expected = torch.cat([layer(part) for layer, part in zip(made, x.split(4), strict=True)])
    calls.clear()
    got = grouped.grouped_linear(made, x, torch.tensor([4, 8, 12], dtype=torch.int32))
    torch.testing.assert_close(got, expected)
    assert calls == ["enter", "leave"]


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("counts", [(4, 3, 5), (0, 12, 0), (7, 0, 5)])
def test_grouped_linear_equals_one_layer_after_the_other(counts, bias):
    made = layers(bias=bias)
    x, grad = drawn(12, 8).requires_grad_(), drawn(12, 12, seed=2)
    torch.cat([layer(part) for layer, part in zip(made, x.split(counts), strict=True)]).backward(grad)
    parameters = [x, *(parameter for layer in made for parameter in layer.parameters())]
    reference = [parameter.grad for parameter in parameters]
    for parameter in parameters:
        parameter.grad = None
    ends = torch.tensor(counts).cumsum(0).to(torch.int32)
    grouped.grouped_linear(made, x, ends).backward(grad)
    for parameter, expected in zip(parameters, reference, strict=True):
        torch.testing.assert_close(parameter.grad, expected, rtol=1e-5, atol=1e-5)


def test_rows_after_the_last_group_change_no_gradient():
    made, x, grad = layers(), drawn(12, 8), drawn(12, 12, seed=2)
    ends = torch.tensor([2, 5, 9], dtype=torch.int32)

    def gradients(rows, grads):
        for layer in made:
            layer.zero_grad()
        grouped.grouped_linear(made, rows, ends).backward(grads)
        return [parameter.grad.clone() for layer in made for parameter in layer.parameters()]

    reference = gradients(x, grad)
    x[9:], grad[9:] = torch.nan, torch.nan
    assert all(torch.equal(a, b) for a, b in zip(gradients(x, grad), reference, strict=True))


def test_layers_without_rows_get_a_gradient_of_zero(monkeypatch):
    """Some devices leave it undefined."""
    made, usual = layers(), grouped.GROUPED_MM

    def undefined(left, right, offs):
        result = usual(left, right, offs=offs)
        if result.dim() == 3:
            result[1] = torch.nan
        return result

    monkeypatch.setattr(grouped, "GROUPED_MM", undefined)
    grouped.grouped_linear(made, drawn(12, 8), torch.tensor([5, 5, 12], dtype=torch.int32)).sum().backward()
    assert not made[1].weight.grad.any()
    assert not made[1].bias.grad.any()
    assert made[0].weight.grad.isfinite().all()


def test_frozen_layers_get_no_gradient():
    made, x = layers(), drawn(12, 8).requires_grad_()
    for layer in made:
        layer.requires_grad_(False)
    grouped.grouped_linear(made, x, torch.tensor([4, 8, 12], dtype=torch.int32)).sum().backward()
    assert x.grad.abs().sum() > 0
    assert all(parameter.grad is None for layer in made for parameter in layer.parameters())


def test_stacked_views_consecutive_tensors_and_copies_others():
    whole = drawn(3, 4, 8)
    view = grouped.stacked(list(whole))
    assert view.data_ptr() == whole.data_ptr()
    assert torch.equal(view, whole)
    for others in ([whole[1], whole[0]], [whole[0], whole[2]], [whole[0].t(), whole[1].t()]):
        copy = grouped.stacked(others)
        assert copy.data_ptr() != whole.data_ptr()
        assert torch.equal(copy, torch.stack(others))


def changed(field, value):
    made = layers()
    setattr(made[1], field, value)
    return made


@pytest.mark.parametrize(
    ("made", "rows", "expected"),
    [
        (layers(), drawn(4, 8), True),
        (layers(), drawn(0, 8), False),
        (layers(inputs=6), drawn(4, 6), False),
        (layers(outputs=10), drawn(4, 8), False),
        (layers(), drawn(4, 8).bfloat16(), False),
        (changed("rows", torch.arange(3)), drawn(4, 8), False),
        (changed("form", "csr"), drawn(4, 8), False),
    ],
    ids=["usual", "no rows", "inputs not aligned", "outputs not aligned", "other dtype", "narrow", "sparse"],
)
def test_can_group_needs_dense_aligned_layers(monkeypatch, made, rows, expected):
    monkeypatch.setattr(grouped, "is_fast_device", lambda rows: True)
    assert grouped.can_group(made, rows) is expected


def test_can_group_is_false_on_cpu_and_without_the_product(monkeypatch):
    assert not grouped.can_group(layers(), drawn(4, 8))
    monkeypatch.setattr(grouped, "is_fast_device", lambda rows: True)
    monkeypatch.setattr(grouped, "GROUPED_MM", None)
    assert not grouped.can_group(layers(), drawn(4, 8))
