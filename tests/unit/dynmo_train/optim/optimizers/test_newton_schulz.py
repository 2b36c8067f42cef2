"""Orthogonalization of several matrices at once: the bits of each alone, and of torch's."""

from __future__ import annotations

import pytest
import torch
from torch.optim._muon import _zeropower_via_newtonschulz

from dynmo_train.optim.optimizers.newton_schulz import COEFFICIENTS, iteration_coefficients, orthogonalize
from tests.tables import table

SHAPES = [(32, 96), (96, 32), (64, 64), (17, 33), (33, 17), (1, 8), (8, 1), (128, 512), (768, 256)]


def matrices(shape, count, scale=1e-2):
    generator = torch.Generator().manual_seed(sum(shape))
    return [(torch.randn(shape, generator=generator) * scale).bfloat16() for _ in range(count)]


@table("threads", [1, 4])
@table("shape", SHAPES, ids=str)
def test_orthogonalize_batch_has_the_bits_of_torch_for_each_matrix(shape, threads):
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        all_of = matrices(shape, 7)
        coefficients = iteration_coefficients("simple", 5)
        expected = [_zeropower_via_newtonschulz(each.clone(), coefficients[0], 5, 1e-7) for each in all_of]
        for count in (1, 2, 3, 7):
            got = orthogonalize(all_of[:count], coefficients)
            assert got.shape == (count, *shape)
            assert all(map(torch.equal, got, expected))
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize(("kind", "steps", "bounds"), [("quintic", 5, (0.7, 1.3)), ("polar_express", 8, (0.7, 1.3))])
def test_orthogonalize_brings_singular_values_near_one(kind, steps, bounds):
    [result] = orthogonalize(matrices((64, 128), 1), iteration_coefficients(kind, steps))
    values = torch.linalg.svdvals(result.float())
    assert bounds[0] < values.min()
    assert values.max() < bounds[1]


def test_orthogonalize_zero_matrix_stays_zero():
    result = orthogonalize([torch.zeros(4, 6, dtype=torch.bfloat16)], iteration_coefficients("simple", 5))
    assert torch.equal(result, torch.zeros(1, 4, 6, dtype=torch.bfloat16))


def test_iteration_coefficients_repeat_and_keep_the_last():
    assert iteration_coefficients("simple", 3) == [COEFFICIENTS["simple"][0]] * 3
    assert iteration_coefficients("quintic", 10) == [*COEFFICIENTS["quintic"]] * 2
    assert iteration_coefficients("polar_express", 10) == [*COEFFICIENTS["polar_express"]] + [(1.875, -1.25, 0.375)] * 2
