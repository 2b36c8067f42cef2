"""Replicas in expert plans cost transfers in every step, where times and bandwidth are known."""

from __future__ import annotations

from collections import Counter
from types import SimpleNamespace

import pytest

from dynmo_balance.costs.expert_loads import ExpertLoads
from dynmo_balance.planning.expert_plan import ExpertOptions, make_expert_plan

TOKENS = (900, 100, 100, 100)


def num_copies(bandwidth, step_ns=1_000_000):
    options = ExpertOptions(
        ranks=2,
        replicas=2,
        shares="free",
        nodes=1,
        groups=1,
        horizon_steps=1000,
        bandwidth_bytes_per_s=bandwidth,
        expert_bytes={"a": 12_000},
        copy_bytes={"a": 12_000},
        step_ns={"a": step_ns},
    )
    loads = ExpertLoads(header=SimpleNamespace(run_id="r"), tokens={"a": TOKENS}, last_step=1)
    hosts = Counter(expert for rank in make_expert_plan(loads, options).layers[0].ranks for expert, _ in rank)
    return sum(hosts.values()) - len(TOKENS)


@pytest.mark.parametrize(("bandwidth", "copies"), [(None, 1), (10**12, 1), (10**7, 0)])
def test_copies_are_made_where_their_transfers_take_less_than_they_save(bandwidth, copies):
    """A copy saves 0.4 ms of a step, and transfers 12 kB."""
    assert num_copies(bandwidth) == copies


def test_copies_are_free_where_times_are_unknown():
    assert num_copies(10**7, step_ns=0) == 1
