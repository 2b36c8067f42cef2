"""The low-rank kernel: orthonormal rows, exact at full rank, the best rank in a few iterations, seeds by name."""

from __future__ import annotations

import pytest
import torch

from dynmo_train.optim.compression.lowrank import (
    FactorShape,
    factorize,
    initial_factor,
    orthonormalize,
    reconstruct,
    subtract_product,
)


def random(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def with_spectrum(rows, columns, values, seed=1):
    """A matrix with these singular values."""
    left = torch.linalg.qr(random(rows, len(values), seed=seed)).Q
    right = torch.linalg.qr(random(columns, len(values), seed=seed + 1)).Q
    return left @ torch.diag(torch.tensor(values)) @ right.T


def approximation(matrix, rank, iterations):
    shape = FactorShape.of(matrix.shape, rank)
    left, right = shape.split(torch.empty(shape.numel))
    factor = initial_factor(shape, torch.device("cpu"), "test")
    for _ in range(iterations):
        factorize(matrix, factor, left, right)
        factor.copy_(right)
    out = torch.empty_like(matrix)
    reconstruct(left, right, out)
    return out, left, right


def test_factor_shape_of_a_tensor():
    shape = FactorShape.of((8, 1024, 1920), 12)
    assert (shape.rows, shape.columns, shape.numel, shape.num_bytes) == (8192, 1920, 121_344, 485_376)
    assert FactorShape.of((2, 3, 5), 12).rank == 5
    assert FactorShape.of((2, 3), 12).rank == 2
    assert shape.is_smaller(4)
    assert not FactorShape.of((32, 32), 16).is_smaller(4)
    assert FactorShape.of((32, 32), 15).is_smaller(4)
    assert not FactorShape.of((32, 32), 8).is_smaller(2)


@pytest.mark.parametrize("condition", [1.0, 1e3, 1e5, 1e9])
def test_orthonormalize_keeps_the_span(condition):
    spread = [condition ** (-at / 7) for at in range(8)]
    rows = with_spectrum(300, 8, spread).T.contiguous()
    before = rows.clone()
    orthonormalize(rows)
    # In float32, small rows have larger relative errors
    assert torch.allclose(rows @ rows.T, torch.eye(8), atol=1e-4 if condition < 1e5 else 2e-2)
    assert torch.allclose(before @ rows.T @ rows, before, atol=1e-5)


def test_orthonormalize_dependent_and_zero_rows():
    for rows in (torch.zeros(3, 40), random(1, 40).repeat(3, 1)):
        orthonormalize(rows)
        assert torch.allclose(rows @ rows.T, torch.eye(3), atol=1e-5)


def test_orthonormalize_leaves_nonfinite_rows():
    rows = random(3, 40)
    rows[1, 2] = float("inf")
    before = rows.clone()
    orthonormalize(rows)
    assert torch.equal(rows, before)


def test_factorize_at_full_rank_is_exact():
    matrix = random(48, 20)
    assert torch.allclose(approximation(matrix, 20, 1)[0], matrix, atol=1e-5)
    low = with_spectrum(64, 32, [5.0, 2.0, 1.0])
    assert torch.allclose(approximation(low, 3, 1)[0], low, atol=1e-5)


def test_factorize_repeated_converges_to_the_best_rank():
    """The smallest error at rank 4 is the norm of the other singular values (Eckart and Young)."""
    values = [2.0**-at for at in range(12)]
    matrix = with_spectrum(100, 60, values)
    best = sum(value**2 for value in values[4:]) ** 0.5
    first, warm = (torch.linalg.vector_norm(approximation(matrix, 4, n)[0] - matrix) for n in (1, 8))
    assert first > 1.05 * best
    assert warm == pytest.approx(best, rel=1e-3)


def test_subtract_product_leaves_the_error():
    matrix = random(30, 20)
    out, left, right = approximation(matrix, 4, 2)
    rest, half = matrix.clone(), matrix.clone()
    subtract_product(rest, left, right)
    subtract_product(half, left, right, 0.5)
    assert torch.allclose(rest, matrix - out, atol=1e-5)
    assert torch.allclose(half, matrix - out / 2, atol=1e-5)
    # What is left is orthogonal to the columns that were sent
    assert torch.allclose(left @ rest, torch.zeros(4, 20), atol=1e-5)


def test_reconstruct_to_a_lower_precision():
    _, left, right = approximation(random(30, 20), 4, 1)
    out = torch.empty(30, 20, dtype=torch.bfloat16)
    reconstruct(left, right, out)
    assert torch.equal(out, (left.T @ right).to(torch.bfloat16))


def test_initial_factor_depends_on_names_only():
    shape = FactorShape.of((30, 20), 4)
    one, two, other = (initial_factor(shape, torch.device("cpu"), 7, name) for name in ("a", "a", "b"))
    assert torch.equal(one, two)
    assert not torch.equal(one, other)
