"""Lookups in the shards of a word table on one rank: those of the whole table, bit for bit."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from dynmo_train.models.vocabulary.vocabulary_shards import VocabularyShard
from dynmo_train.parallel.device_clock import clock_for
from dynmo_train.parallel.dims import ParallelDims
from dynmo_train.parallel.process_groups import World
from dynmo_train.pipeline.profiler import LayerProfiler
from dynmo_train.pipeline.word_lookups import TokenOwners, WordLookups

V, D, B, T, MICROBATCHES = 40, 8, 2, 30, 3
CPU = torch.device("cpu")
SPANS = [(0, 10), (10, 20), (20, 30), (30, 40)]


def test_tokens_are_sorted_by_shard_and_then_by_place():
    owners = TokenOwners(torch.tensor([[35, 3, 12, 0, 39, 3]]), SPANS)
    assert owners.order_MN.tolist() == [[1, 3, 5, 2, 0, 4]]
    assert owners.ids_MN.tolist() == [[3, 0, 3, 12, 35, 39]]
    places = [owners.place(0, shard, shard + 1) for shard in range(4)]
    assert places == [slice(0, 3), slice(3, 4), slice(4, 4), slice(4, 6)]
    assert owners.place(0, 1, 4) == slice(3, 6)


def test_tokens_of_other_slices_are_last():
    """The second of two tensor-parallel ranks."""
    owners = TokenOwners(torch.tensor([[35, 3, 12, 0, 39, 16, 7]]), [(5, 10), (15, 20), (25, 30), (35, 40)])
    assert owners.ids_MN.tolist() == [[7, 16, 35, 39, 3, 12, 0]]
    assert owners.place(0, 0, 4) == slice(0, 4)


def lookups_of(table_VD, *, tied, trains=True):
    shards = {
        f"vocabulary.{at}": VocabularyShard(a, table_VD[a:b].clone(), None if tied else torch.zeros(b - a, D))
        for at, (a, b) in enumerate(SPANS)
    }
    for shard in shards.values():
        shard.collect_gradients()
    lookups = WordLookups(
        stream=(B, T, D),
        dtype=torch.float32,
        microbatches=MICROBATCHES,
        spans=SPANS,
        shards=shards,
        copies={},
        placed=[0] * 4,
        first=0,
        world=World(rank=0, size=1, device=CPU, host="here", dims=ParallelDims()),
        groups=(None, None),
        profiler=LayerProfiler(clock_for(CPU)),
        trains=trains,
    )
    return lookups, shards


def run(lookups, ids, scales):
    """A step; returns the embeddings of each microbatch, whose gradient is ``scales``."""
    lookups.begin_step(ids, training=True)
    found = []
    for m in range(MICROBATCHES):
        lookups.look_up(m)
        words = lookups.words(m)
        found.append(words.detach().clone())
        (words * scales[m]).sum().backward()
        lookups.add_gradients(m)
    lookups.end_step()
    return found


@pytest.mark.parametrize("tied", [False, True])
def test_lookups_have_the_bits_of_a_whole_table(tied):
    generator = torch.Generator().manual_seed(0)
    table = torch.randn(V, D, generator=generator)
    table[7] = -0.0
    ids = torch.randint(0, 30, (MICROBATCHES * B, T), generator=generator)
    scales = torch.randn(MICROBATCHES, B, T, D, generator=generator)
    lookups, shards = lookups_of(table, tied=tied)
    found = run(lookups, ids, scales)
    whole = table.clone().requires_grad_()
    for m, words in enumerate(found):
        expected = F.embedding(ids[m * B : (m + 1) * B], whole)
        assert torch.equal(words.view(torch.int32), expected.detach().view(torch.int32))
        (expected * scales[m]).sum().backward()
    for shard in shards.values():
        shard.pending.materialize_grads()
    gradient = torch.cat([shard.words.grad for shard in shards.values()])
    torch.testing.assert_close(gradient, whole.grad, rtol=1e-6 if tied else 0, atol=1e-6 if tied else 0)
    # A shard without tokens has a gradient, too: its rows decay as those of a whole table.
    assert not shards["vocabulary.3"].words.grad.any()


def test_rows_of_a_frozen_embedding_have_no_gradient():
    lookups, shards = lookups_of(torch.ones(V, D), tied=False, trains=False)
    lookups.begin_step(torch.zeros(MICROBATCHES * B, T, dtype=torch.int64), training=True)
    for m in range(MICROBATCHES):
        lookups.look_up(m)
        assert not lookups.words(m).requires_grad
        lookups.add_gradients(m)
    lookups.end_step()
    for shard in shards.values():
        shard.pending.materialize_grads()
        assert shard.words.grad is None


def test_tied_gradients_do_not_depend_on_the_order_of_passes():
    """T of the output layer adds to ``grad`` before, between or after the lookups' gradients."""
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(0, V, (MICROBATCHES * B, T), generator=generator)
    scales = torch.randn(MICROBATCHES, B, T, D, generator=generator)
    results = []
    for early in (True, False):
        lookups, shards = lookups_of(torch.ones(V, D), tied=True)
        outputs = {
            name: torch.randn(len(s.words), D, generator=torch.Generator().manual_seed(2)) for name, s in shards.items()
        }
        if not early:
            run(lookups, ids, scales)
        for name, shard in shards.items():
            shard.words.grad = outputs[name].clone()
        if early:
            run(lookups, ids, scales)
        for shard in shards.values():
            shard.pending.materialize_grads()
        results.append(torch.cat([shard.words.grad for shard in shards.values()]))
    assert torch.equal(*results)
