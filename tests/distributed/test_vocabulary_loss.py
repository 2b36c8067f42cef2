"""The cross-entropy over a vocabulary that tensor-parallel ranks share, against torch's on the whole of it."""

from __future__ import annotations

import pytest
import torch

from dynmo_train.models.vocabulary.cross_entropy import linear_cross_entropy
from dynmo_train.parallel.dims import ParallelDims
from dynmo_train.parallel.process_groups import set_parallel_dims
from dynmo_train.parallel.tensor_parallel import tensor_region
from tests.distributed.workers import run_workers

pytestmark = pytest.mark.distributed
WIDTH, TOKENS, ROWS, REAL = 8, 24, 40, 37


def inputs(scale: float) -> tuple[torch.Tensor, ...]:
    """Features ``[T, D]``, weight ``[V, D]``, bias ``[V]``, labels, weights ``[T]``; logits are about ``scale``."""
    generator = torch.Generator().manual_seed(3)
    features = torch.randn(TOKENS, WIDTH, generator=generator)
    weight = torch.randn(ROWS, WIDTH, generator=generator) * scale / WIDTH**0.5
    bias = torch.randn(ROWS, generator=generator)
    labels = torch.randint(REAL, (TOKENS,), generator=generator)
    # Some tokens do not count.
    counts = (torch.rand(TOKENS, generator=generator) > 0.3).float()
    return features, weight, bias, labels, counts / counts.sum()


def sharded_loss(world, scale, chunk_tokens, sequence):
    world = set_parallel_dims(world, ParallelDims(tensor=world.size), 60)
    region = tensor_region(world, sequence=sequence)
    features, weight, bias, labels, weights = inputs(scale)
    part = features.chunk(world.size)[world.rank] if sequence else features
    part = part.clone().requires_grad_()
    own, own_bias = (each.chunk(world.size)[world.rank].clone().requires_grad_() for each in (weight, bias))
    entered = region.enter(part[None])[0]
    loss = linear_cross_entropy(
        entered, own, own_bias, labels, weights, vocabulary=REAL, chunk_tokens=chunk_tokens, region=region
    )
    (loss * 3).backward()
    return loss.tolist(), part.grad.tolist(), own.grad.tolist(), own_bias.grad.tolist()


@pytest.mark.parametrize(
    ("ranks", "scale", "chunk_tokens", "sequence"),
    [(2, 1.0, 24, False), (2, 300.0, 5, False), (2, 1.0, 5, True), (4, 1.0, 7, False), (4, 300.0, 24, True)],
)
def test_sharded_vocabulary_loss_equals_torch(ranks, scale, chunk_tokens, sequence):
    features, weight, bias, labels, weights = (tensor.clone() for tensor in inputs(scale))
    given = [each.requires_grad_() for each in (features, weight, bias)]
    losses = torch.nn.functional.cross_entropy(features @ weight[:REAL].T + bias[:REAL], labels, reduction="none")
    expected = (losses * weights).sum()
    grads = torch.autograd.grad(expected * 3, given)
    parts = run_workers(sharded_loss, ranks, scale, chunk_tokens, sequence)
    assert len({loss for loss, *_ in parts}) == 1
    torch.testing.assert_close(parts[0][0], expected.item(), rtol=1e-5, atol=1e-5 * scale)
    _, inner, *sliced = ([torch.tensor(each) for each in column] for column in zip(*parts, strict=True))
    inner = [torch.cat(inner)] if sequence else inner
    for gradient in inner:
        torch.testing.assert_close(gradient, grads[0], rtol=1e-4, atol=1e-5 * scale)
    for gradient, reference in zip(sliced, grads[1:], strict=True):
        torch.testing.assert_close(torch.cat(gradient), reference, rtol=1e-4, atol=1e-5)
