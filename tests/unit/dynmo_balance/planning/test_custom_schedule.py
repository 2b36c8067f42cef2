"""Orders of operations made for given costs, and partitions made for them."""

from __future__ import annotations

from dataclasses import replace

import pytest

from dynmo_balance.formats.plan import CUSTOM
from dynmo_balance.planning.custom_schedule import operation_times, search_custom_schedules
from dynmo_balance.schedules.list_scheduler import RULES, list_order
from dynmo_balance.schedules.registry import count_in_flight, from_order
from dynmo_balance.simulation.bounds import bounds_of
from dynmo_balance.simulation.simulator import predict
from tests.tables import table


def random_problem(rng, chain_factory, problem_factory, workers, n, schedule="zb-v", virtual=2, **options):
    times = [[rng.randint(10, 90) for _ in range(n)] for _ in range(3)]
    frozen = options.pop("frozen", 0)
    for column in times[1:]:
        column[:frozen] = [0] * frozen
    chain = chain_factory(times[0], backward=times[1], weight=times[2], boundary=5, activation=[3] * n)
    options.setdefault("microbatches", 6)
    return problem_factory(chain, workers, schedule, virtual_stages=virtual, link_latency_ns=4, **options)


@table("rule", RULES)
@table("frozen", [0, 4])
def test_list_order_step_equals_the_simulation(rule, frozen, rng, chain_factory, problem_factory):
    for schedule, virtual in (("zb-v", 2), ("1f1b", 1), ("interleaved-1f1b", 3)):
        problem = random_problem(rng, chain_factory, problem_factory, 3, 12, schedule, virtual, frozen=frozen)
        stages = problem.num_stages
        boundaries = (0, *sorted(rng.sample(range(1, 12), stages - 1)), 12)
        order, step = list_order(operation_times(problem, boundaries), 6, 4, rule)
        custom = replace(problem, schedule=CUSTOM, order=order, layout=problem.positions)
        assert predict(custom, boundaries).step_ns == step
        words = [str(operation) for row in order for operation in row]
        assert sorted(words) == sorted(f"{s}{kind}{m}" for s in range(stages) for kind in "FIW" for m in range(6))
        first_trained = next(s for s in range(stages) if boundaries[s + 1] > frozen)
        assert max(count_in_flight(from_order(order))[first_trained:]) <= 4


@pytest.mark.complete
def test_custom_schedule_step_is_close_to_the_bound(rng, chain_factory, problem_factory):
    problem = random_problem(rng, chain_factory, problem_factory, 4, 40, microbatches=32)
    found = search_custom_schedules(problem, rounds=3)
    best = found[0]
    assert predict(best.problem, best.solution.boundaries).step_ns == best.step_ns
    assert [one.step_ns for one in found] == sorted(one.step_ns for one in found)
    assert bounds_of(problem).step_ns <= best.step_ns <= 1.03 * bounds_of(problem).step_ns
    assert search_custom_schedules(problem, rounds=3)[0] == best


def test_custom_schedule_satisfies_memory_limits(rng, chain_factory, problem_factory):
    problem = random_problem(rng, chain_factory, problem_factory, 2, 10, microbatches=12)
    free = search_custom_schedules(problem, rounds=2)[0]
    peak = max(predict(free.problem, free.solution.boundaries).peak_memory_bytes)
    tight = replace(problem, slots=tuple(replace(slot, memory_bytes=peak // 2) for slot in problem.slots))
    found = search_custom_schedules(tight, rounds=2)
    assert found
    for one in found:
        assert max(predict(one.problem, one.solution.boundaries).peak_memory_bytes) <= peak // 2
        assert one.step_ns >= free.step_ns


def test_custom_schedule_search_ends_at_the_bound(chain_factory, problem_factory):
    chain = chain_factory([1] * 8 + [90], backward=[1] * 8 + [90], weight=[1] * 8 + [90])
    problem = problem_factory(chain, 3, "zero-bubble", 12)
    # A search that does not end early would take days.
    best = search_custom_schedules(problem, rounds=10**8)[0]
    assert best.step_ns == bounds_of(problem).step_ns == 8 + 12 * 270
