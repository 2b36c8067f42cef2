"""Lower bounds of a step: never above a simulated step, and reached in closed forms."""

from __future__ import annotations

from dataclasses import replace
from itertools import combinations, combinations_with_replacement, pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dynmo_balance._common.errors import UsageError
from dynmo_balance.costs.vocabulary import ShardCosts
from dynmo_balance.formats.plan import V_SCHEDULES
from dynmo_balance.partition.problem import InfeasibleError
from dynmo_balance.planning.custom_schedule import operation_times
from dynmo_balance.schedules.justified_order import justified_order
from dynmo_balance.schedules.list_scheduler import RULES, list_order
from dynmo_balance.schedules.registry import SCHEDULES
from dynmo_balance.simulation.bounds import bounds_of, partition_bound_ns
from dynmo_balance.simulation.simulator import predict
from tests.unit.dynmo_balance.problems import (
    best_of_all_orders,
    fits,
    make_chain,
    make_problem,
    split_problems,
    with_random_layout,
)


@settings(max_examples=150, deadline=None)
@given(data=st.data(), schedule=st.sampled_from([*SCHEDULES]))
def test_bounds_are_below_schedules_by_name(data: st.DataObject, schedule: str) -> None:
    virtual = 2 if schedule in V_SCHEDULES else 1
    problem, boundaries = data.draw(split_problems(schedule, virtual))
    step = predict(problem, boundaries).step_ns
    bounds = bounds_of(problem)
    assert bounds.step_ns <= step, bounds
    if virtual == 1 and problem.chain.vocabulary is None:
        assert bounds.step_ns <= partition_bound_ns(problem) <= step


@settings(max_examples=150, deadline=None)
@given(data=st.data(), virtual=st.integers(1, 3), rule=st.sampled_from([*RULES]))
def test_bounds_are_below_custom_orders(data: st.DataObject, virtual: int, rule: str) -> None:
    problem, boundaries = data.draw(split_problems("interleaved-1f1b", virtual))
    problem = with_random_layout(problem, data.draw)
    order, _ = list_order(operation_times(problem, boundaries, with_passes=True), problem.microbatches, 9, rule)
    step = predict(replace(problem, order=order), boundaries).step_ns
    assert bounds_of(problem).step_ns <= step, bounds_of(problem)


def test_bounds_are_below_the_best_of_all_orders(rng):
    reached = 0
    for _ in range(12):
        columns = [[rng.randint(1, 20) for _ in range(3)] for _ in range(3)]
        chain = make_chain(columns[0], backward=columns[1], weight=columns[2])
        problem = make_problem(chain, 2, "zero-bubble", 2, link_latency_ns=rng.randint(0, 5))
        best = best_of_all_orders(problem)
        assert bounds_of(problem).step_ns <= partition_bound_ns(problem) <= best
        reached += best == partition_bound_ns(problem)
    assert reached >= 4


def test_bounds_are_below_the_best_of_all_orders_that_fit_the_memory(rng):
    limited = 0
    for _ in range(16):
        columns = [[rng.randint(1, 20) for _ in range(3)] for _ in range(3)]
        sizes = [rng.randint(1, 9) for _ in range(3)]
        static = [rng.randint(0, 9) for _ in range(3)]
        chain = make_chain(columns[0], backward=columns[1], weight=columns[2], activation=sizes, sizes=static)
        # One microbatch fits somewhere, two often do not.
        cap = (sum(static) + sum(sizes)) * rng.randint(50, 110) // 100
        problem = make_problem(
            chain, 2, "zero-bubble", 2, link_latency_ns=rng.choice([0, 3]), memory=[cap, cap + rng.randint(0, 3)]
        )
        best = best_of_all_orders(problem)
        if best is None:
            continue
        bounds = bounds_of(problem)
        assert bounds.step_ns <= best, (bounds, columns, sizes, static)
        limited += bounds.limit == "memory"
    assert limited >= 1


def test_unit_that_stores_nothing_has_all_microbatches_at_once():
    chain = make_chain([0, 0], backward=[2, 2], weight=[0, 1])
    chain = replace(chain, costs=replace(chain.costs, activation_bytes=(0, 0)))
    problem = make_problem(chain, 2, "zero-bubble", 2)
    slots = tuple(replace(slot, memory_bytes=1) for slot in problem.slots)
    assert bounds_of(replace(problem, slots=slots)).unit_ns == bounds_of(problem).unit_ns == 6


@settings(max_examples=200, deadline=None)
@given(data=st.data(), virtual=st.integers(1, 3))
def test_bounds_are_below_orders_made_for_the_memory(data: st.DataObject, virtual: int) -> None:
    problem, boundaries = data.draw(split_problems("interleaved-1f1b", virtual))
    problem = with_random_layout(problem, data.draw)
    units = len(problem.chain.items)
    sizes = tuple(data.draw(st.lists(st.integers(0, 9), min_size=units, max_size=units)))
    costs = replace(problem.chain.costs, activation_bytes=sizes)
    cap = data.draw(st.integers(1, 9 * units))
    slots = tuple(replace(slot, memory_bytes=cap) for slot in problem.slots)
    problem = replace(problem, chain=replace(problem.chain, costs=costs, vocabulary=None), slots=slots)
    found = justified_order(operation_times(problem, boundaries), problem.microbatches)
    if found is None:
        return
    made = predict(replace(problem, order=found.order), boundaries)
    assert made.step_ns == found.step_ns
    assert fits(problem, made.peak_memory_bytes)
    assert bounds_of(problem).step_ns <= made.step_ns, bounds_of(problem)


def test_memory_limits_the_forward_passes_before_the_first_gradient():
    # Units of 10 ns and 1 byte; 20 ns until the first gradient, and 20 ns after the last forward pass. The workers have
    # room for one microbatch: they execute 20 ns of 40 ns before, and 40 ns after.
    chain = make_chain([10, 10], backward=[10, 10], weight=[10, 10], activation=[1, 1])
    problem = make_problem(chain, 2, "zero-bubble", 8, memory=[1, 1])
    assert bounds_of(problem).memory_ns == 20 + 20 + (8 * 60 - 20 - 40) // 2
    assert bounds_of(replace(problem, slots=make_problem(chain, 2).slots)).memory_ns == 0
    # With room for two, the memory limits nothing.
    wide = make_problem(chain, 2, "zero-bubble", 8, memory=[2, 2])
    assert bounds_of(wide).memory_ns == bounds_of(wide).work_ns


def test_memory_counts_weight_gradients_behind_the_last_input_gradient():
    # In the last 20 ns two microbatches have input gradients of unit 0, and weight gradients of unit 2 whose input
    # gradients are computed before: 40 + 30 ns in 4 bytes. Before the first gradient, 3 ns fit.
    chain = make_chain([1, 1, 1], backward=[20, 0, 0], weight=[0, 1, 15], activation=[1, 10, 1])
    problem = make_problem(chain, 4, "zero-bubble", 2, memory=[1, 1, 1, 1], min_units=0)
    assert bounds_of(problem).memory_ns == 3 + 20 + -(-(2 * 39 - 3 - 70) // 4) == 25


@pytest.mark.parametrize("schedule", ["1f1b", "zero-bubble"])
def test_partition_bound_knows_the_memory_of_the_schedule(schedule, rng):
    tighter = infeasible = 0
    for _ in range(60):
        units, workers = rng.randint(4, 8), rng.randint(2, 4)
        columns = [[rng.randint(1, 50) for _ in range(units)] for _ in range(3)]
        sizes, static = ([rng.randint(1, 9) for _ in range(units)] for _ in range(2))
        chain = make_chain(columns[0], backward=columns[1], weight=columns[2], activation=sizes, sizes=static)
        cap = rng.randint(60, 130) * (sum(static) + workers * sum(sizes)) // workers // 100
        problem = make_problem(chain, workers, schedule, 6, memory=[cap] * workers)
        steps = [
            made.step_ns
            for inner in combinations(range(1, units), workers - 1)
            for made in (predict(problem, (0, *inner, units)),)
            if fits(problem, made.peak_memory_bytes)
        ]
        if not steps:
            infeasible += 1
            with pytest.raises(InfeasibleError, match="no partition with one stage per worker fits the memory"):
                partition_bound_ns(problem)
            continue
        free = replace(problem, slots=make_problem(chain, workers).slots)
        assert partition_bound_ns(free) <= partition_bound_ns(problem) <= min(steps)
        tighter += partition_bound_ns(problem) > max(partition_bound_ns(free), bounds_of(problem).step_ns)
    assert tighter >= 5
    assert infeasible >= 1


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "zero-bubble"])
def test_partition_bound_is_below_every_partition(schedule, rng):
    for _ in range(60):
        units, workers, least = rng.randint(4, 7), rng.randint(1, 4), rng.randint(0, 1)
        columns = [[rng.randint(0, 50) for _ in range(units)] for _ in range(3)]
        for column in columns[1:]:
            column[: rng.choice([0, 0, 2])] = []
            column[:0] = [0] * (units - len(column))
        chain = make_chain(columns[0], backward=columns[1], weight=columns[2], boundary=rng.choice([0, 30]))
        options = {"speeds": [rng.choice([700_000, 1_000_000, 1_300_000]) for _ in range(workers)], "min_units": least}
        options |= {"link_latency_ns": rng.choice([3, 20]), "link_bandwidth": 10**9}
        problem = make_problem(chain, workers, schedule, rng.randint(1, 12), **options)
        bound = partition_bound_ns(problem)
        inner = (combinations if least else combinations_with_replacement)(range(least, units + 1 - least), workers - 1)
        best = min(predict(problem, (0, *each, units)).step_ns for each in inner)
        assert bounds_of(problem).step_ns <= bound <= best


@pytest.mark.parametrize(("workers", "microbatches"), [(2, 3), (4, 8), (8, 32), (8, 4)])
def test_partition_bound_of_even_stages_is_the_1f1b_step(workers, microbatches):
    chain = make_chain([10] * workers, backward=[13] * workers, weight=[7] * workers)
    problem = make_problem(chain, workers, "1f1b", microbatches)
    step = predict(problem, range(workers + 1)).step_ns
    assert step == partition_bound_ns(problem) == (microbatches + workers - 1) * 30
    # A round trip takes the time of its transfers, but the bound adds them for one stage only.
    distant = replace(problem, link_latency_ns=2)
    assert (
        partition_bound_ns(distant)
        <= predict(distant, range(workers + 1)).step_ns
        <= 1.05 * partition_bound_ns(distant)
    )


def test_partition_bound_refuses_several_stages_per_worker():
    problem = make_problem(make_chain([1] * 8), 2, "interleaved-1f1b", virtual_stages=2)
    with pytest.raises(UsageError, match="one stage per worker"):
        partition_bound_ns(problem)


def test_fill_of_even_units_is_the_mean_wait():
    # Workers begin after 0, 12, 24 and 36 ns: units of 10 ns and transfers of 2 ns.
    chain = make_chain([10] * 8, backward=[10] * 8, weight=[10] * 8)
    problem = make_problem(chain, 4, "1f1b", 16, link_latency_ns=2)
    bounds = bounds_of(problem)
    assert bounds.work_ns == 16 * 60
    assert bounds.fill_ns == 16 * 60 + (12 + 24 + 36) // 4
    # Without a unit on every worker nothing is known of the transfers.
    assert bounds_of(replace(problem, min_units=0)).fill_ns == 16 * 60 + (10 + 20 + 30) // 4


def test_fill_does_not_require_all_workers():
    # Workers begin after 0, 10, 20, ... ns: four or five of the ten are best for 100 ns of work.
    chain = make_chain([10] * 10)
    assert bounds_of(make_problem(chain, 10, "1f1b", 1, min_units=0)).fill_ns == (100 + 10 + 20 + 30) // 4


def test_packing_counts_the_heaviest_units():
    # Five units of at least 7 ns on two workers: one has three of them.
    chain = make_chain([7, 9, 1, 8, 7, 9])
    bounds = bounds_of(make_problem(chain, 2, "1f1b", 10))
    assert bounds.packing_ns == 10 * (7 + 7 + 8)
    assert bounds.work_ns == 10 * 41 // 2


def test_unit_counts_the_transfers_to_the_last_unit():
    chain = make_chain([1, 1, 1, 50], backward=[1, 1, 1, 50], weight=[1, 1, 1, 1])
    problem = make_problem(chain, 3, "1f1b", 8, link_latency_ns=5)
    bounds = bounds_of(problem)
    # Three units and two transfers before it, and back; all but 8 ns of the way back are a wait.
    assert bounds.unit_ns == (3 + 10) + 8 * 101 + (3 + 10 - 8)
    assert bounds.limit == "unit"


def test_unit_knows_weight_gradients_that_fit_the_memory():
    chain = make_chain([9, 30], backward=[40, 30], weight=[9, 30], activation=[0, 10])
    free = make_problem(chain, 2, "zero-bubble", 8)
    tight = replace(free, slots=tuple(replace(slot, memory_bytes=10) for slot in free.slots))
    # At once stored: all 8 microbatches, whose weight gradients fill the 40 ns; or one, with 30 ns.
    assert bounds_of(free).unit_ns == 9 + 8 * 90
    assert bounds_of(tight).unit_ns == 9 + 8 * 90 + 10


def test_path_contains_the_longest_forward_pass_of_all_microbatches():
    chain = make_chain([1, 20, 1], backward=[1, 1, 1], weight=[0, 0, 0])
    bounds = bounds_of(make_problem(chain, 3, "1f1b", 5))
    assert bounds.path_ns == 22 + 3 + 4 * 20


def test_bounds_with_shards_count_their_passes():
    shards = ShardCosts(
        count=4,
        forward_ns=40,
        weight_ns=20,
        static_bytes=0,
        gradient_bytes=0,
        activation_bytes=0,
        stream_bytes=0,
        part_bytes=0,
        sums_bytes=0,
    )
    plain = make_chain([10] * 4, backward=[10] * 4, weight=[10] * 4)
    problem = make_problem(replace(plain, vocabulary=shards), 2, "1f1b", 6)
    assert bounds_of(problem).work_ns == 6 * (120 + 60) // 2
    assert bounds_of(problem).packing_ns == 6 * (30 * 2 + 30)
    assert all(b > a for a, b in pairwise((0, bounds_of(problem).work_ns, bounds_of(problem).fill_ns)))


def test_fill_lets_the_fastest_workers_start_first():
    chain = make_chain([10, 10], backward=[10, 10], weight=[10, 10])
    problem = make_problem(chain, 2, "1f1b", 16, speeds=[500_000, 2_000_000])
    # The slow worker starts after 5 ns, the first unit's time on the fast one.
    assert bounds_of(problem).fill_ns == (2 * 960 + 5) // 5 == 385


def test_frozen_front_receives_no_gradient_transfers():
    chain = make_chain([1, 1, 1], backward=[0, 0, 1], weight=[0, 0, 1])
    problem = make_problem(chain, 3, "zero-bubble", 1, link_latency_ns=10)
    # Forward and two transfers, one input gradient; the step has its weight gradient, too.
    assert bounds_of(problem).path_ns == 3 + 20 + 1
    assert predict(problem, (0, 1, 2, 3)).step_ns == bounds_of(problem).step_ns == 25
