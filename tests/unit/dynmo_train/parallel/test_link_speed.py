"""Which pairs of ranks are measured, and the link that stands for all of them."""

from __future__ import annotations

import pytest

from dynmo_train.parallel.link_speed import LinkTime, ReduceTime, bandwidth_without_latency, link_of, pairs_of


def times(here, there, latency_ns, payload_ns, num_bytes=1 << 20):
    return [
        LinkTime(here=here, there=there, num_bytes=1, ns=latency_ns),
        LinkTime(here=here, there=there, num_bytes=1 << 16, ns=(latency_ns + payload_ns) // 2),
        LinkTime(here=here, there=there, num_bytes=num_bytes, ns=payload_ns),
    ]


def test_pairs_of_few_ranks_are_all_pairs():
    assert pairs_of(2) == [(0, 1)]
    assert len(pairs_of(8)) == 28


def test_pairs_of_many_ranks_are_neighbors_in_a_ring():
    assert pairs_of(9) == [(0, 1), (1, 2), (2, 3), (3, 4), (4, 5), (5, 6), (6, 7), (7, 8), (8, 0)]


def test_link_of_pairs_is_the_slowest():
    fast, slow = times(0, 1, 1000, 101_000, 1_000_000), times(0, 2, 3000, 203_000, 1_000_000)
    assert link_of([*fast, *slow]) == (5_000_000_000, 3000)
    assert link_of(fast) == (10_000_000_000, 1000)


def test_link_of_no_pairs_is_none():
    assert link_of([]) is None


@pytest.mark.parametrize(
    ("latency", "payload", "rate"), [(0, 1000, 10**9), (500, 1000, 2 * 10**9), (999, 1000, 2 * 10**9)]
)
def test_bandwidth_is_at_most_twice_the_measured_one(latency, payload, rate):
    assert bandwidth_without_latency(1000, latency, payload) == rate


def test_bus_bandwidth_counts_the_bytes_of_a_ring():
    assert ReduceTime(num_ranks=2, num_bytes=1000, ns=1000).bus_bytes_per_s == 1e9
    assert ReduceTime(num_ranks=4, num_bytes=1000, ns=1000).bus_bytes_per_s == 1.5e9
