"""Tokens of sequence parallelism: exchanged without transpositions, with the same bits."""

from __future__ import annotations

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from dynmo_train.parallel import tensor_parallel
from dynmo_train.parallel.dims import ParallelDims
from dynmo_train.parallel.process_groups import set_parallel_dims
from dynmo_train.parallel.tensor_parallel import tensor_region
from tests.distributed.workers import run_workers

pytestmark = [pytest.mark.complete, pytest.mark.distributed]
BATCH, TOKENS, WIDTH = 3, 8, 5


class Copies(TorchDispatchMode):
    """Bytes that operations copy."""

    def __init__(self):
        super().__init__()
        self.bytes = 0

    def __torch_dispatch__(self, function, kinds, arguments=(), keywords=None):
        result = function(*arguments, **(keywords or {}))
        # Not ``copy_``, by which gloo itself returns its results.
        if function._schema.name in ("aten::clone", "aten::cat"):
            self.bytes += result.nbytes
        return result


def exchange(world, sample_bytes):
    """What each rank gets, and how many bytes were copied for it."""
    world = set_parallel_dims(world, ParallelDims(tensor=world.size), 60)
    tensor_parallel.SAMPLE_BYTES = sample_bytes
    region = tensor_region(world, sequence=True)
    generator = torch.Generator().manual_seed(world.rank)
    own = torch.randn(BATCH, TOKENS // world.size, WIDTH, generator=generator, requires_grad=True)
    with Copies() as copies:
        entered = region.enter(own)
        left = region.leave(entered * (world.rank + 1.5))
        [gradient] = torch.autograd.grad(left, own, torch.randn(left.shape, generator=generator))
    return [each.detach().tolist() for each in (own, entered, left, gradient)], copies.bytes


@pytest.mark.parametrize("ranks", [2, 4])
def test_tokens_by_sample_have_the_bits_of_transposed_ones(ranks):
    by_sample, transposed = (run_workers(exchange, ranks, each) for each in (0, 1 << 40))
    for (values, copied), (expected, copied_before) in zip(by_sample, transposed, strict=True):
        assert values == expected
        # Two gathers and two scatters, each of which transposed the whole stream.
        assert copied_before > 4 * BATCH * TOKENS * WIDTH * 4
        assert copied == 0
    tokens = torch.cat([torch.tensor(values[0]) for values, _ in by_sample], dim=1)
    for values, _ in by_sample:
        assert torch.equal(torch.tensor(values[1]), tokens)
