"""Fused gathers and products over symmetric memory, on two devices, near the plain ones."""

from __future__ import annotations

import pytest
import torch

from dynmo_train.parallel.process_groups import destroy_world, init_world
from tests.distributed.test_async_tensor_parallel import multiply
from tests.distributed.workers import run_workers

pytestmark = [
    pytest.mark.distributed,
    pytest.mark.timeout(900),
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="there are not two CUDA devices"),
]


def multiply_on_devices():
    world = init_world("cuda")
    try:
        return multiply(world)
    finally:
        destroy_world()


def test_fused_products_are_near_the_plain_ones():
    for results, obstacle in run_workers(multiply_on_devices, 2, joins=False):
        if obstacle is not None:
            pytest.skip(f"no symmetric memory: {obstacle}")
        for one, other in zip(*results, strict=True):
            assert (other - one).norm() < 0.02 * one.norm()
