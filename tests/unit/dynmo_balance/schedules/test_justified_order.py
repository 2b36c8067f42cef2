"""Orders of operations within the workers' memory: complete, executable, within the limits, and short."""

from __future__ import annotations

from dataclasses import replace

import pytest

from dynmo_balance.formats.plan import CUSTOM
from dynmo_balance.partition.balance import balance
from dynmo_balance.planning.custom_schedule import operation_times
from dynmo_balance.schedules.justified_order import justified_order
from dynmo_balance.schedules.list_scheduler import RULES, list_order
from dynmo_balance.simulation.order_bound import order_bound_ns
from dynmo_balance.simulation.simulator import predict
from tests.unit.dynmo_balance.problems import best_of_all_orders, fits, make_chain, make_problem

PLACEMENTS = (("zb-v", 2), ("1f1b", 1), ("interleaved-1f1b", 3))


def random_problem(rng, schedule, virtual, frozen=0, shortest=0):
    times = [[rng.randint(shortest, 40) for _ in range(12)] for _ in range(3)]
    for column in times[1:]:
        column[:frozen] = [0] * frozen
    sizes, static = ([rng.randint(0, 9) for _ in range(12)] for _ in range(2))
    chain = make_chain(times[0], backward=times[1], weight=times[2], boundary=5, activation=sizes, sizes=static)
    problem = make_problem(chain, 3, schedule, 6, virtual_stages=virtual, link_latency_ns=rng.choice([0, 4]))
    return problem, (0, *sorted(rng.sample(range(1, 12), problem.num_stages - 1)), 12)


@pytest.mark.parametrize("frozen", [0, 4])
@pytest.mark.parametrize(("schedule", "virtual"), PLACEMENTS)
def test_order_is_complete_and_its_step_is_the_simulated_one(schedule, virtual, frozen, rng):
    for _ in range(5):
        problem, boundaries = random_problem(rng, schedule, virtual, frozen)
        found = justified_order(operation_times(problem, boundaries), 6)
        words = [str(operation) for row in found.order for operation in row]
        stages = range(problem.num_stages)
        assert sorted(words) == sorted(f"{s}{kind}{m}" for s in stages for kind in "FIW" for m in range(6))
        custom = replace(problem, schedule=CUSTOM, order=found.order, layout=problem.positions)
        assert predict(custom, boundaries).step_ns == found.step_ns >= order_bound_ns(problem, boundaries)


@pytest.mark.parametrize(("schedule", "virtual"), PLACEMENTS)
def test_order_exists_wherever_one_microbatch_fits(schedule, virtual, rng):
    for _ in range(20):
        problem, boundaries = random_problem(rng, schedule, virtual)
        free = replace(problem, schedule=CUSTOM, layout=problem.positions)
        once = justified_order(operation_times(replace(problem, microbatches=1), boundaries), 1)
        needed = predict(replace(free, microbatches=1, order=once.order), boundaries).peak_memory_bytes
        for missing in (0, 1):
            slots = tuple(
                replace(slot, memory_bytes=size - missing) for slot, size in zip(problem.slots, needed, strict=True)
            )
            tight = replace(free, slots=slots)
            found = justified_order(operation_times(tight, boundaries), 6)
            if missing:
                assert found is None
            else:
                made = predict(replace(tight, order=found.order), boundaries)
                assert fits(tight, made.peak_memory_bytes)


def test_order_is_not_longer_than_those_by_rules(rng):
    for _ in range(10):
        for schedule, virtual in PLACEMENTS:
            problem, boundaries = random_problem(rng, schedule, virtual, shortest=5)
            lengths = operation_times(problem, boundaries)
            by_rules = min(list_order(lengths, 6, 6, rule)[1] for rule in RULES)
            step = justified_order(lengths, 6).step_ns
            assert step <= 1.03 * by_rules


def test_order_reaches_the_best_of_all_orders_of_small_problems(rng):
    reached = 0
    for _ in range(8):
        columns = [[rng.randint(1, 20) for _ in range(2)] for _ in range(3)]
        chain = make_chain(columns[0], backward=columns[1], weight=columns[2], activation=[1, 1])
        cap = rng.choice([1, 2])
        problem = make_problem(chain, 2, "zero-bubble", 2, memory=[cap, cap])
        found = justified_order(operation_times(problem, (0, 1, 2)), 2)
        best = best_of_all_orders(problem)
        assert best <= found.step_ns
        reached += found.step_ns == best
    assert reached >= 6


def test_backward_and_forward_schedules_shorten_the_step(rng):
    improved = 0
    for _ in range(5):
        times = [[rng.randint(10, 90) for _ in range(40)] for _ in range(3)]
        chain = make_chain([*times[0], 1200], backward=[*times[1], 1], weight=[*times[2], 1])
        problem = make_problem(chain, 4, "zb-v", 16, virtual_stages=2)
        lengths = operation_times(problem, balance(problem, "exact").boundaries)
        first = justified_order(lengths, 16, rounds=0).step_ns
        better = justified_order(lengths, 16).step_ns
        assert better <= first
        improved += better < first
    assert improved >= 1


def test_short_weight_gradients_free_the_memory_at_once():
    # The last stage needs 40 ns forward and almost nothing back; two microbatches fit.
    chain = make_chain([10, 40], backward=[10, 0], weight=[10, 0], activation=[0, 1])
    problem = make_problem(chain, 2, "zero-bubble", 8, memory=[10, 2])
    found = justified_order(operation_times(problem, (0, 1, 2)), 8)
    # Nothing waits for memory: the first forward pass, all of the last stage, and one microbatch back.
    assert found.step_ns <= 10 + 8 * 40 + 20
