"""Weights of tokens over a step: the mean loss and gradients of plain torch, whatever the microbatches are."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from dynmo_train.data.batch import LOSS_MASK, Batch
from dynmo_train.models.vocabulary.cross_entropy import mean_linear_cross_entropy
from dynmo_train.parallel.dims import ParallelDims
from dynmo_train.parallel.process_groups import World
from tests.tables import table

SAMPLES, TOKENS, WIDTH, VOCABULARY = 8, 6, 5, 11


def one_process():
    return World(rank=0, size=1, device=torch.device("cpu"), host="here", dims=ParallelDims())


@table("microbatches", [1, 2, 8])
@table("share", [0.0, 0.3, 1.0])
def test_loss_over_a_step_is_the_mean_over_counted_tokens(microbatches, share):
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(SAMPLES, TOKENS, WIDTH, generator=generator)
    labels = torch.randint(VOCABULARY, (SAMPLES, TOKENS), generator=generator)
    mask = (torch.rand(SAMPLES, TOKENS, generator=generator) < share).long()
    weight, ours = (torch.ones(VOCABULARY, WIDTH).cumsum(0).requires_grad_() for _ in range(2))
    each = F.cross_entropy((x @ weight.t()).flatten(0, 1), labels.flatten(), reduction="none")
    expected = (each * mask.flatten()).sum() / max(1, int(mask.sum()))
    expected.backward()
    batch = Batch(inputs={"ids": labels, LOSS_MASK: mask}, first_microbatch=0, step=1)
    weights = batch.weighed_over_step(one_process(), microbatches).inputs[LOSS_MASK]
    loss = sum(
        mean_linear_cross_entropy(*parts[:1], ours, None, *parts[1:], VOCABULARY) / microbatches
        for parts in zip(x.chunk(microbatches), labels.chunk(microbatches), weights.chunk(microbatches), strict=True)
    )
    loss.backward()
    torch.testing.assert_close(loss, expected, rtol=1e-6, atol=1e-7)
    torch.testing.assert_close(ours.grad, weight.grad, rtol=1e-5, atol=1e-6)


def test_batch_without_a_mask_is_unchanged():
    batch = Batch(inputs={"ids": torch.zeros(2, 3)}, first_microbatch=0, step=1)
    assert batch.weighed_over_step(one_process(), 2) is batch
