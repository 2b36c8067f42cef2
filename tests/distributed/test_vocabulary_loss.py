"""The cross-entropy over a vocabulary that tensor-parallel ranks share, against torch's on the whole of it."""

from __future__ import annotations

import pytest
import torch

from dynmo_train.parallel.dims import ParallelDims
from dynmo_train.parallel.process_groups import set_parallel_dims
from dynmo_train.parallel.tensor_parallel import tensor_region, token_losses
from tests.distributed.workers import run_workers

pytestmark = pytest.mark.distributed
WIDTH, TOKENS, ROWS, REAL = 8, 24, 40, 37


def inputs(scale: float) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Features ``[1, T, D]``, weights ``[V, D]`` and labels ``[1, T]``; logits are about ``scale`` large."""
    generator = torch.Generator().manual_seed(3)
    features = torch.randn(1, TOKENS, WIDTH, generator=generator)
    weights = torch.randn(ROWS, WIDTH, generator=generator) * scale / WIDTH**0.5
    return features, weights, torch.randint(REAL, (1, TOKENS), generator=generator)


def shared_losses(world, scale):
    world = set_parallel_dims(world, ParallelDims(tensor=world.size), 60)
    region = tensor_region(world, sequence=False)
    features, weights, labels = inputs(scale)
    features.requires_grad_()
    own = weights.chunk(world.size)[world.rank].clone().requires_grad_()
    losses = token_losses(features, own, None, labels, REAL, region)
    losses.sum().backward()
    return losses.tolist(), features.grad.tolist(), own.grad.tolist()


@pytest.mark.parametrize("scale", [1.0, 300.0])
def test_sharded_vocabulary_loss_equals_torch_for_large_logits(scale):
    features, weights, labels = (tensor.clone() for tensor in inputs(scale))
    features.requires_grad_()
    weights.requires_grad_()
    expected = torch.nn.functional.cross_entropy((features @ weights[:REAL].T)[0], labels[0], reduction="none")
    expected.sum().backward()
    parts = run_workers(shared_losses, 2, scale)
    for losses, feature_gradient, _ in parts:
        torch.testing.assert_close(torch.tensor(losses), expected.detach(), rtol=1e-5, atol=1e-5 * scale)
        torch.testing.assert_close(torch.tensor(feature_gradient), features.grad, rtol=1e-4, atol=1e-5 * scale)
    whole = torch.cat([torch.tensor(gradient) for *_, gradient in parts])
    torch.testing.assert_close(whole, weights.grad, rtol=1e-4, atol=1e-5)
