"""Float8 products of tensor cores near those that a CPU emulates."""

from __future__ import annotations

import pytest
import torch

from dynmo_train.models.float8 import LEAST_CAPABILITY, Float8Product
from tests.unit.dynmo_train.models.test_float8 import RECIPES, gradients

pytest.importorskip("torchao", reason="the extra fp8 is not installed")
pytestmark = pytest.mark.skipif(
    not torch.cuda.is_available() or torch.cuda.get_device_capability() < LEAST_CAPABILITY,
    reason="no CUDA device with float8 products is here",
)


@pytest.mark.parametrize("settings", RECIPES, ids=lambda each: f"{each.recipe}-{each.form}")
@pytest.mark.parametrize("rows", [32, 7])
def test_float8_product_is_near_the_emulated_one(settings, rows):
    emulated, fast = Float8Product(settings, emulate=True), Float8Product(settings, emulate=False)

    def on_cuda(x, weight):
        return fast(x.cuda(), weight.cuda()).cpu()

    for ours, expected in zip(gradients(on_cuda, rows), gradients(emulated, rows), strict=True):
        assert (ours - expected).norm() < 0.02 * expected.norm()
