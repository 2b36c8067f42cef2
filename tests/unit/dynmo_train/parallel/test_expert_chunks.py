"""Who computes which chunk of replicated experts: whole chunks, each once, on hosts, in the order of the tokens."""

from __future__ import annotations

from itertools import pairwise

import numpy as np

from dynmo_train.parallel.expert_chunks import exchange_of, host_ranges, hosts_of_ranks
from tests.tables import table

HOSTS = ((0,), (1, 2), (3, 0, 1), (2,), (0, 1, 2, 3))


def random_counts(seed):
    return np.random.default_rng(seed).integers(0, 40, (4, len(HOSTS))) * (np.arange(len(HOSTS)) != seed % 7)


def loads_of(ranges):
    loads = [0] * 4
    for hosts in ranges:
        for (rank, end), begin in zip(hosts, [0, *(end for _, end in hosts)], strict=False):
            loads[rank] += end - begin
    return loads


@table("seed", range(8))
@table("rows", [1, 3, 16, 1000])
def test_ranges_are_whole_chunks_on_hosts(seed, rows):
    totals = random_counts(seed).sum(0).tolist()
    for expert, hosts in enumerate(host_ranges(totals, HOSTS, rows, 4)):
        ends = [end for _, end in hosts]
        assert [rank for rank, _ in hosts] == sorted(HOSTS[expert])
        assert ends[-1] == totals[expert]
        assert all(before <= after for before, after in pairwise([0, *ends]))
        assert all(end % rows == 0 or end == totals[expert] for end in ends)


def test_replicas_take_rows_from_the_heaviest_rank():
    assert loads_of(host_ranges([100, 60, 0, 20, 0], HOSTS, 1, 4)) == [100, 40, 40, 0]
    assert loads_of(host_ranges([100, 60, 0, 20, 140], HOSTS, 1, 4)) == [100, 73, 73, 74]
    assert loads_of(host_ranges([0, 64, 0, 0, 0], HOSTS, 32, 4)) == [0, 32, 32, 0]


@table("seed", range(4))
@table("rows", [1, 5, 64])
def test_exchanges_bring_each_row_to_its_chunk_and_back_once(seed, rows):
    """Rows are (expert, place among all rows of the expert); chunks have their rows in order."""
    counts = random_counts(seed)
    ranges = host_ranges(counts.sum(0).tolist(), HOSTS, rows, 4)
    plans = [exchange_of(counts, ranges, rows, rank) for rank in range(4)]
    begins = np.cumsum(counts, axis=0) - counts
    outgoing = []
    for rank, plan in enumerate(plans):
        own = [(e, begins[rank, e] + at) for e in range(len(HOSTS)) for at in range(counts[rank, e])]
        ordered = [own[at] for at in plan.to_ranks_R]
        assert sorted(plan.to_ranks_R) == list(range(len(own)))
        ends = np.cumsum(plan.sent)
        outgoing.append([ordered[end - sent : end] for end, sent in zip(ends, plan.sent, strict=True)])
    computed = []
    for rank, plan in enumerate(plans):
        arrived = [row for source in range(4) for row in outgoing[source][rank]]
        assert [len(outgoing[source][rank]) for source in range(4)] == list(plan.received)
        by_chunk = [arrived[at] for at in plan.to_chunks_R]
        for expert, size in zip(plan.experts, plan.rows, strict=True):
            chunk, by_chunk = by_chunk[:size], by_chunk[size:]
            first = chunk[0][1]
            assert chunk == [(expert, first + at) for at in range(size)]
            assert first % rows == 0
            assert rank in HOSTS[expert]
            computed += chunk
        assert by_chunk == []
    assert sorted(computed) == [(e, at) for e, total in enumerate(counts.sum(0)) for at in range(total)]


def test_owner_keeps_an_expert_that_stays_on_its_rank():
    assert hosts_of_ranks([0, 1, 2], [(1, 0), (2, 0), (2,)]) == ((0, 1), (2, 0), (2,))
