"""Shards of the output layer on CUDA: near the same shards on the CPU, without a read of the device."""

from __future__ import annotations

import pytest
import torch

from dynmo_train.models.vocabulary.cross_entropy import token_weights
from dynmo_train.models.vocabulary.vocabulary_shards import VocabularyShard, merge_tree
from dynmo_train.parallel.device_clock import clock_for
from dynmo_train.parallel.dims import ParallelDims
from dynmo_train.parallel.process_groups import World
from dynmo_train.pipeline.profiler import LayerProfiler
from dynmo_train.pipeline.word_lookups import WordLookups

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device is here")
V, D, B, T, SHARDS = 1000, 64, 2, 300, 4


def results(device, dtype):
    """Loss, gradients of input and weight, in float32 on the CPU."""
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(V, D, generator=generator).to(device, dtype)
    x_ND = torch.randn(B * T, D, generator=generator).to(device, dtype)
    labels = torch.randint(0, V, (B, T), generator=generator).to(device)
    bounds = [(k * V // SHARDS, (k + 1) * V // SHARDS) for k in range(SHARDS)]
    shards = [VocabularyShard(begin, torch.zeros(end - begin, D), weight[begin:end].clone()) for begin, end in bounds]
    if device == "cuda":
        torch.cuda.synchronize()
        torch.cuda.set_sync_debug_mode("error")
    try:
        outputs = [shard(x_ND, labels.reshape(-1)) for shard in shards]
        whole = merge_tree(0, SHARDS, {(k, k + 1): part for k, (part, _) in enumerate(outputs)})
        weights = token_weights(labels, None)
        for _, add_gradient in outputs:
            add_gradient(whole.log_sum(), weights)
        found = [whole.losses(weights)[0], whole.input_gradient(weights)]
    finally:
        if device == "cuda":
            torch.cuda.set_sync_debug_mode("default")
    gradient = torch.cat([shard.output.grad for shard in shards])
    return [each.float().cpu() for each in (*found, gradient)]


def test_shards_on_cuda_are_near_those_on_the_cpu():
    for one, other in zip(results("cuda", torch.bfloat16), results("cpu", torch.float32), strict=True):
        torch.testing.assert_close(one, other, rtol=0.05, atol=0.05 * float(other.abs().max()))


def looked_up(device):
    """Embeddings of three microbatches, and the gradient of the tied table, on the CPU."""
    generator = torch.Generator().manual_seed(1)
    table = torch.randn(V, D, generator=generator)
    ids = torch.randint(0, V, (3 * B, T), generator=generator)
    spans = [(k * V // SHARDS, (k + 1) * V // SHARDS) for k in range(SHARDS)]
    shards = {f"vocabulary.{k}": VocabularyShard(a, table[a:b].to(device)) for k, (a, b) in enumerate(spans)}
    for shard in shards.values():
        shard.collect_gradients()
    lookups = WordLookups(
        stream=(B, T, D),
        dtype=torch.float32,
        microbatches=3,
        spans=spans,
        shards=shards,
        copies={},
        placed=[0] * SHARDS,
        first=0,
        world=World(rank=0, size=1, device=torch.device(device), host="here", dims=ParallelDims()),
        groups=(None, None),
        profiler=LayerProfiler(clock_for(torch.device(device))),
        trains=True,
    )
    found = []
    if device == "cuda":
        torch.cuda.synchronize()
        torch.cuda.set_sync_debug_mode("error")
    try:
        lookups.begin_step(ids, training=True)
        for m in range(3):
            lookups.look_up(m)
            words = lookups.words(m)
            found.append(words.detach())
            words.square().sum().backward()
            lookups.add_gradients(m)
        lookups.end_step()
        for shard in shards.values():
            shard.pending.materialize_grads()
    finally:
        if device == "cuda":
            torch.cuda.set_sync_debug_mode("default")
    return [each.cpu() for each in found], torch.cat([shard.words.grad for shard in shards.values()]).cpu()


def test_lookups_on_cuda_have_the_bits_of_those_on_the_cpu():
    words, gradient = looked_up("cuda")
    expected, expected_gradient = looked_up("cpu")
    for one, other in zip(words, expected, strict=True):
        assert torch.equal(one, other)
    torch.testing.assert_close(gradient, expected_gradient, rtol=1e-5, atol=1e-5)
