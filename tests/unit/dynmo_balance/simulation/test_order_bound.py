"""The bound of a partition over all orders of operations."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dynmo_balance.costs.vocabulary import ShardCosts
from dynmo_balance.formats.plan import CUSTOM, V_SCHEDULES
from dynmo_balance.planning.custom_schedule import operation_times
from dynmo_balance.schedules.list_scheduler import RULES, list_order
from dynmo_balance.schedules.registry import SCHEDULES
from dynmo_balance.simulation.bounds import bounds_of
from dynmo_balance.simulation.order_bound import order_bound_ns
from dynmo_balance.simulation.simulator import predict
from tests.unit.dynmo_balance.problems import (
    best_of_all_orders,
    make_chain,
    make_problem,
    split_problems,
    with_random_layout,
)


@settings(max_examples=150, deadline=None)
@given(data=st.data(), schedule=st.sampled_from([*SCHEDULES]))
def test_order_bound_is_below_schedules_by_name(data: st.DataObject, schedule: str) -> None:
    problem, boundaries = data.draw(split_problems(schedule, 2 if schedule in V_SCHEDULES else 1))
    assert order_bound_ns(problem, boundaries) <= predict(problem, boundaries).step_ns


@settings(max_examples=150, deadline=None)
@given(data=st.data(), virtual=st.integers(1, 3), rule=st.sampled_from([*RULES]))
def test_order_bound_is_below_custom_orders(data: st.DataObject, virtual: int, rule: str) -> None:
    problem, boundaries = data.draw(split_problems("interleaved-1f1b", virtual))
    problem = with_random_layout(problem, data.draw)
    order, _ = list_order(operation_times(problem, boundaries, with_passes=True), problem.microbatches, 99, rule)
    assert order_bound_ns(problem, boundaries) <= predict(replace(problem, order=order), boundaries).step_ns


def test_order_bound_is_close_to_the_best_order(rng):
    reached = 0
    for _ in range(12):
        columns = [[rng.randint(1, 20) for _ in range(2)] for _ in range(3)]
        chain = make_chain(columns[0], backward=columns[1], weight=columns[2])
        problem = make_problem(chain, 2, "zero-bubble", 2, link_latency_ns=rng.randint(0, 5))
        best, bound = best_of_all_orders(problem), order_bound_ns(problem, (0, 1, 2))
        assert bounds_of(problem).step_ns <= bound <= best <= 1.15 * bound
        reached += best == bound
    assert reached >= 8


@pytest.mark.parametrize("virtual", [1, 2, 3])
def test_order_bound_is_above_the_bound_of_any_partition(virtual, rng):
    for _ in range(20):
        columns = [[rng.randint(1, 50) for _ in range(12)] for _ in range(3)]
        chain = make_chain(columns[0], backward=columns[1], weight=columns[2])
        problem = make_problem(chain, 4, "interleaved-1f1b", 8, virtual_stages=virtual, link_latency_ns=4)
        inner = sorted(rng.sample(range(1, 12), 4 * virtual - 1))
        problem = replace(problem, schedule=CUSTOM, layout=problem.positions)
        # Its path alone leaves the second chain of all microbatches out, which the jobs of one worker contain.
        bounds = bounds_of(problem)
        assert order_bound_ns(problem, (0, *inner, 12)) >= max(bounds.work_ns, bounds.fill_ns, bounds.unit_ns)


def test_order_bound_of_one_worker_is_all_its_work():
    shards = ShardCosts(
        count=1,
        forward_ns=40,
        weight_ns=20,
        static_bytes=0,
        gradient_bytes=0,
        activation_bytes=0,
        stream_bytes=0,
        part_bytes=0,
        sums_bytes=0,
    )
    chain = make_chain([10, 5], backward=[9, 8], weight=[7, 6])
    problem = make_problem(replace(chain, vocabulary=shards), 1, "1f1b", 1)
    assert order_bound_ns(problem, (0, 2)) == predict(problem, (0, 2)).step_ns == 45 + 60
    assert order_bound_ns(replace(problem, microbatches=3), (0, 2)) == 3 * 105
