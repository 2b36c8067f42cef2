"""What a chain stores: parameters of all items, gradients and optimizer state of the trained ones."""

from __future__ import annotations

from dataclasses import replace

import pytest

from dynmo_balance.analysis.explain import _freed
from dynmo_balance.partition.exact import solve
from dynmo_balance.partition.problem import InfeasibleError
from dynmo_balance.simulation.simulator import predict
from dynmo_balance.simulation.step_tail import TailOptions, reduced_bytes, tail_of
from tests.unit.dynmo_balance.problems import make_chain, make_problem

DENSE = [20, 20, 20, 20, 20, 20]
FRONT = 3


def chain_of(backward, tied=None):
    chain = make_chain([10] * 6, backward, sizes=[100] * 6)
    items = [replace(item, gradient_bytes=200, optimizer_bytes=400) for item in chain.items]
    if tied is not None:
        items[-1] = replace(items[-1], tied_to=items[tied].name)
    return replace(chain, items=tuple(items))


def frozen(tied=None):
    return chain_of([0] * FRONT + [20] * (6 - FRONT), tied)


def test_frozen_front_stores_parameters_only():
    assert chain_of(DENSE).static_bytes == (700,) * 6
    assert frozen().static_bytes == (100,) * FRONT + (700,) * 3
    assert (chain_of(DENSE).freed_bytes, frozen().freed_bytes) == (0, FRONT * 600)


def test_frozen_item_with_a_shared_weight_keeps_its_state():
    chain = frozen(tied=0)
    assert chain.static_bytes == (700, 100, 100, 700, 700, 700)
    assert chain.freed_bytes == 2 * 600


def test_freed_memory_permits_a_better_partition():
    """The balanced partition needs four layers on a worker, which fit once three of them are frozen."""
    dense, free = (make_problem(chain, 2, microbatches=4) for chain in (chain_of(DENSE), frozen()))
    with_limit = [
        replace(each, slots=tuple(replace(slot, memory_bytes=2200) for slot in each.slots)) for each in (dense, free)
    ]
    assert solve(with_limit[0]).boundaries == (0, 3, 6)
    assert solve(with_limit[1]).boundaries == solve(free).boundaries == (0, 4, 6)
    heavier = [
        replace(each, slots=tuple(replace(slot, memory_bytes=2000) for slot in each.slots)) for each in with_limit
    ]
    with pytest.raises(InfeasibleError):
        solve(heavier[0])
    assert solve(heavier[1]).boundaries == (0, 4, 6)


def test_replicas_reduce_the_trained_items_only():
    options = TailOptions(data_parallel=2, data_parallel_bandwidth=10**9)
    boundaries = (0, 2, 6)
    sizes = [reduced_bytes(make_problem(chain, 2), boundaries, options) for chain in (chain_of(DENSE), frozen())]
    assert sizes == [(400, 800), (0, 600)]


def test_optimizer_touches_the_trained_items_only():
    options = TailOptions(memory_bandwidth=10**9)
    boundaries = (0, 3, 6)
    tails = []
    for chain in (chain_of(DENSE), frozen()):
        problem = make_problem(chain, 2)
        timeline = predict(problem, boundaries)
        tail = tail_of(problem, boundaries, timeline, options)
        tails.append(tail.step_ns - max(tail.tied_ns))
    assert tails[0] == 3 * 700
    assert tails[1] == 3 * 700, "the last stage is trained"
    alone = make_problem(frozen(), 1)
    tail = tail_of(alone, (0, 6), predict(alone, (0, 6)), options)
    assert tail.step_ns - max(tail.tied_ns) == 3 * 700


def test_explain_reports_the_freed_memory():
    assert _freed(make_problem(chain_of(DENSE), 2)) == []
    [sentence] = _freed(make_problem(frozen(), 2))
    assert "layers.0 to layers.2" in sentence
