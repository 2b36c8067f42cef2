"""The search over schedules and granularities, bounds, and several stages on a worker."""

from __future__ import annotations

from dataclasses import replace
from itertools import combinations, pairwise

import pytest

from dynmo_balance.analysis.search import search, split_in_half
from dynmo_balance.formats.plan import V_SCHEDULES
from dynmo_balance.formats.profile import read_profile
from dynmo_balance.inputs.problem_from_options import ProblemOptions, make_problem
from dynmo_balance.inputs.profile_source import load
from dynmo_balance.partition.balance import balance, bottleneck_ns
from dynmo_balance.partition.exact import solve
from dynmo_balance.partition.problem import InfeasibleError
from dynmo_balance.schedules.registry import SCHEDULES
from dynmo_balance.simulation.bounds import bounds_of
from dynmo_balance.simulation.simulator import predict
from tests.paths import CONTRACTS

STEPS = CONTRACTS / "profile/valid/steps.jsonl"


def random_split_problem(rng, chain_factory, problem_factory, least=1, **options):
    n, stages = rng.randint(4, 10), rng.randint(1, 4 // options.get("virtual_stages", 1))
    columns = [[rng.randint(1, 50) for _ in range(n)] for _ in range(3)]
    chain = chain_factory(columns[0], backward=columns[1], weight=columns[2])
    return problem_factory(chain, min(stages, n), microbatches=rng.randint(least, 12), **options)


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_bounds_are_below_every_partition(schedule, rng, chain_factory, problem_factory):
    for _ in range(40):
        options = {"virtual_stages": 2, "least": 4} if schedule in V_SCHEDULES else {}
        problem = random_split_problem(rng, chain_factory, problem_factory, schedule=schedule, **options)
        n = len(problem.chain.items)
        bound = bounds_of(problem).step_ns
        for inner in combinations(range(1, n), problem.num_stages - 1):
            assert predict(problem, (0, *inner, n)).step_ns >= bound


def test_bounds_are_reached_without_bubble(chain_factory, problem_factory):
    problem = problem_factory(chain_factory([5], backward=[7]), 1, microbatches=9)
    assert bounds_of(problem).step_ns == predict(problem, (0, 1)).step_ns


def test_solve_interleaved_balances_the_workers(rng, chain_factory, problem_factory):
    better = 0
    for _ in range(20):
        chain = chain_factory([rng.randint(1, 60) for _ in range(9)])
        problem = problem_factory(chain, 2, "interleaved-1f1b", 4, virtual_stages=2)
        solution = balance(problem, "exact")
        plain = bottleneck_ns(problem, solve(problem).boundaries)
        brute = min(bottleneck_ns(problem, (0, *inner, 9)) for inner in combinations(range(1, 9), 3))
        assert brute <= solution.bottleneck_ns <= plain
        assert solution.lower_bound_ns <= brute
        assert solution.bottleneck_ns <= 1.25 * brute
        assert all(b > a for a, b in pairwise(solution.boundaries))
        better += solution.bottleneck_ns < plain
    assert better > 6


def test_search_is_as_good_as_each_single_choice():
    header = read_profile(STEPS)[0].header
    loaded = load(STEPS)
    problem = make_problem(loaded, ProblemOptions())
    found = search(header, problem, tuple(SCHEDULES), ("layer", "sublayer"))
    assert found.assumed_split
    split = replace(problem.chain, costs=split_in_half(problem.chain.costs))
    for schedule in ("gpipe", "1f1b", "zero-bubble"):
        trial = replace(problem, chain=split, schedule=schedule)
        assert found.best.timeline.step_ns <= predict(trial, solve(trial).boundaries).step_ns
    assert found.best.timeline.step_ns >= found.bounds.step_ns
    steps = [found.best.timeline.step_ns, *(other.timeline.step_ns for other in found.others)]
    assert steps == sorted(steps)


def test_split_in_half_keeps_the_sum():
    costs = load(STEPS).costs
    assert split_in_half(costs).total_ns == costs.total_ns


def test_search_infeasible_names_the_reason():
    loaded = load(STEPS)
    problem = make_problem(loaded, ProblemOptions(memory="1MB"))
    with pytest.raises(InfeasibleError, match="no schedule has a feasible partition"):
        search(loaded.header, problem, ("1f1b", "gpipe"), ("layer",))
