"""Replicas in expert plans cost transfers in every step, and memory: placements within the memory of every rank."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from types import SimpleNamespace

import pytest

from dynmo_balance._common.errors import UsageError
from dynmo_balance.costs.expert_loads import ExpertLoads
from dynmo_balance.planning.expert_copies import GRADIENT_SUM_BYTES, CopyCosts, WorkerMemory
from dynmo_balance.planning.expert_memory import ExpertMemory
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


SIZE, STATE, WEIGHT = 10, 160, 4
"""Parameters of an expert, bytes on its owner, bytes of a weight of a copy."""
COPY = SIZE * (WEIGHT + GRADIENT_SUM_BYTES)
SUMS = 2 * SIZE * (GRADIENT_SUM_BYTES - 4)
"""Of the two experts of a rank with equal parts."""
LAYERS = {"a": (900, 100, 100, 100), "b": (400, 400, 300, 300), "c": (800, 200, 300, 100)}


def copy_costs(**changes):
    """Two ranks with three slots each."""
    return CopyCosts(
        ranks=2,
        slots=3,
        weight_bytes=WEIGHT,
        param_count=dict.fromkeys(LAYERS, SIZE),
        state_bytes=dict.fromkeys(LAYERS, STATE),
        bandwidth=None,
        **changes,
    )


def limited(spare, workers=(("a", "b", "c"),), replicas=2, **changes):
    """A plan on two ranks whose workers have ``spare`` bytes beyond the experts in order."""
    copies = copy_costs()
    memory = tuple(
        WorkerMemory(worker=worker, items=items, peak_bytes=1000, memory_bytes=1000 + len(items) * SUMS + spare[worker])
        for worker, items in enumerate(workers)
    )
    options = ExpertOptions(
        ranks=2,
        replicas=replicas,
        shares="even",
        nodes=1,
        groups=1,
        horizon_steps=1000,
        bandwidth_bytes_per_s=None,
        expert_bytes=dict.fromkeys(LAYERS, STATE),
        copy_bytes={},
        step_ns={},
        memory=ExpertMemory(copies=copies, workers=memory),
    )
    loads = ExpertLoads(header=SimpleNamespace(run_id="r"), tokens=LAYERS, last_step=1)
    return make_expert_plan(loads, replace(options, **changes))


def replicas_of(plan):
    return [sum(map(len, layer.ranks)) - len(layer.tokens) for layer in plan.layers]


def needed(plan, worker_items):
    """Bytes of the fuller rank beyond its equal part, counted here from the plan alone."""
    most = 0
    for rank in (0, 1):
        total = 0
        for layer in plan.layers:
            if layer.item in worker_items:
                hosts = {e: [r for r in (0, 1) if any(e == x for x, _ in layer.ranks[r])] for e in range(4)}
                owner = {e: e // 2 if e // 2 in on else on[0] for e, on in hosts.items()}
                owned = sum(on == rank for on in owner.values())
                copied = sum(rank in hosts[e] and owner[e] != rank for e in range(4))
                total += (owned - 2) * STATE + owned * SIZE * 4 + copied * COPY
        most = max(most, total)
    return most


def test_replicas_fit_the_memory_of_each_worker():
    free = limited((10**6,))
    assert sum(replicas_of(free)) > 2
    assert "fewer replicas" not in free.reason
    most = needed(free, LAYERS) - 3 * SUMS
    for spare in range(0, most + 1, 30):
        plan = limited((spare,))
        assert needed(plan, LAYERS) <= 3 * SUMS + spare
        assert ("fewer replicas" in plan.reason) == (sum(replicas_of(plan)) < sum(replicas_of(free))) == (spare < most)
        assert all(sum(t for each in layer.ranks for e, t in each) == sum(layer.tokens) for layer in plan.layers)


def test_reason_states_the_bytes_of_the_full_rank():
    free = limited((10**6,))
    need = 1000 + needed(free, LAYERS)
    plan = limited((need - 1000 - 3 * SUMS - 1,))
    assert f"would need {need:,} bytes of {need - 1:,}" in plan.reason


def test_copies_that_balance_most_remain():
    """Of the layers of a full worker, the one of the hottest expert keeps its replica; other workers keep all."""
    free, plan = limited((10**6,)), limited((COPY, 10**6), workers=(("a", "b"), ("c",)))
    tokens = {layer.item: layer.max_tokens for layer in plan.layers}
    best = {layer.item: layer.max_tokens for layer in free.layers}
    assert tokens["c"] == best["c"]
    assert tokens["a"] == best["a"]
    assert tokens["b"] >= best["b"]
    assert replicas_of(plan)[0] > 0


def test_experts_that_fit_with_equal_parts_alone_are_never_refused():
    plan = limited((-(10**3),), replicas=0)
    assert replicas_of(plan) == [0, 0, 0]
    assert replicas_of(limited((-(10**3),))) == [0, 0, 0]


def test_experts_of_fewer_ranks_than_profiled_are_refused_with_the_bytes():
    """One expert on each of four ranks was measured; two ranks have two, in each of three layers."""
    copies = copy_costs(profiled_ranks=4)
    worker = WorkerMemory(worker=0, items=tuple(LAYERS), peak_bytes=1000, memory_bytes=1100)
    need = 1000 + 3 * (STATE + SUMS)
    with pytest.raises(UsageError, match=f"rank 0 of the experts of worker 0 would need {need:,} bytes of 1,100 "):
        limited((0,), memory=ExpertMemory(copies=copies, workers=(worker,)))
