"""The exact balancer against brute force over all partitions, under every kind of constraint."""

from __future__ import annotations

import math
from dataclasses import replace
from fractions import Fraction
from itertools import combinations_with_replacement, pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dynmo_balance._common.errors import UsageError
from dynmo_balance.partition.balance import bottleneck_ns, solve_best
from dynmo_balance.partition.constraints import make_limits
from dynmo_balance.partition.exact import greedy, solve
from dynmo_balance.partition.problem import InfeasibleError, with_ties_together
from tests.tables import table


def partitions(problem):
    """All partitions that obey the constraints other than time, from the chain itself: no code of the solver."""
    chain, stages = problem.chain, problem.num_stages
    units = len(chain.cuts) - 1
    for inner in combinations_with_replacement(range(units + 1), stages - 1):
        cuts = (0, *inner, units)
        if all(obeys(problem, stage, a, b) for stage, (a, b) in enumerate(pairwise(cuts))):
            yield cuts


def obeys(problem, stage, first, last):
    """Whether a stage may hold the units from ``first`` to before ``last``."""
    chain, slot = problem.chain, problem.slot(stage)
    begin, end = chain.cuts[first], chain.cuts[last]
    static = sum(item.param_bytes + item.gradient_bytes + item.optimizer_bytes for item in chain.items[begin:end])
    trained = max(begin, chain.frozen_items)  # a frozen front has no backward and keeps no activations
    memory = static + problem.in_flight[stage] * sum(chain.costs.activation_bytes[trained:end])
    fits = slot.memory_bytes is None or memory <= slot.memory_bytes
    pinned = all(stage == pin if begin <= item < end else stage != pin for item, pin in problem.pins)
    return fits and pinned and last - first >= problem.min_units


def slowest_ns(problem, cuts):
    """The time of the slowest stage of a partition, rounded up to whole nanoseconds."""
    chain = problem.chain
    stages = enumerate(pairwise(chain.cuts[cut] for cut in cuts))
    times = [Fraction(sum(chain.work_ns[a:b]) * 1_000_000, problem.slot(stage).speed_ppm) for stage, (a, b) in stages]
    return max(math.ceil(time) for time in times)


def brute_force(problem):
    return min((slowest_ns(problem, cuts) for cuts in partitions(problem)), default=None)


def random_problem(rng, chain_factory, problem_factory):
    n = rng.randint(1, 8)
    stages = rng.randint(1, 5)
    heavy = rng.choice([3, 10, 1000])
    zero = rng.random() < 0.3
    forward = [0 if zero and rng.random() < 0.4 else rng.randint(1, heavy) for _ in range(n)]
    options = {"min_units": rng.choice([0, 0, 1, 1, 2]), "schedule": rng.choice(["1f1b", "gpipe", "zero-bubble"])}
    options["microbatches"] = rng.randint(1, 6)
    if rng.random() < 0.5:
        options["speeds"] = [rng.choice([250_000, 500_000, 1_000_000, 1_500_000]) for _ in range(stages)]
    if rng.random() < 0.5:
        options["memory"] = [rng.choice([None, rng.randint(1, 60)]) for _ in range(stages)]
    if rng.random() < 0.3:
        options["pins"] = ((rng.randrange(n), rng.randrange(stages)),)
    chain = chain_factory(
        forward,
        backward=[rng.randint(0, heavy) for _ in range(n)],
        activation=[rng.randint(0, 5) for _ in range(n)],
        sizes=[rng.randint(0, 12) for _ in range(n)],
    )
    return problem_factory(chain, stages, **options)


def is_too_small(problem):
    return problem.num_stages * problem.min_units > len(problem.chain.cuts) - 1


def check_against_brute_force(problem):
    """Whether the problem had a solution; asserts that the solver found the best one and can prove it."""
    expected = brute_force(problem)
    if is_too_small(problem):
        with pytest.raises(UsageError):
            solve(problem)
        return False
    if expected is None:
        with pytest.raises(InfeasibleError):
            solve(problem)
        return False
    solution = solve(problem)
    assert solution.bottleneck_ns == expected
    assert solution.optimal
    assert solution.lower_bound_ns == expected
    assert bottleneck_ns(problem, solution.boundaries) == expected
    assert solution.boundaries in set(partitions(problem))
    return True


def test_solve_equals_brute_force(rng, chain_factory, problem_factory):
    solved = sum(check_against_brute_force(random_problem(rng, chain_factory, problem_factory)) for _ in range(1000))
    assert 300 < solved < 950  # both feasible and infeasible problems came up


@settings(max_examples=200, deadline=None)
@given(
    work=st.lists(st.integers(0, 50), min_size=1, max_size=9),
    stages=st.integers(1, 5),
    min_units=st.integers(0, 2),
    caps=st.lists(st.one_of(st.none(), st.integers(0, 30)), min_size=5, max_size=5),
)
def test_solve_adversarial_cases_equal_brute_force(work, stages, min_units, caps, chain_factory, problem_factory):
    chain = chain_factory(work, sizes=work)
    check_against_brute_force(problem_factory(chain, stages, min_units=min_units, memory=caps[:stages]))


def stored_bytes(problem, boundaries):
    sizes = [size + 1 for size in problem.chain.move_bytes]
    return sum(
        sum(sizes[max(a, x) : max(max(a, x), min(b, y))])
        for (a, b), (x, y) in zip(pairwise(boundaries), problem.current, strict=True)
    )


def test_solve_ties_move_the_fewest_bytes(rng, chain_factory, problem_factory):
    for _ in range(500):
        problem = random_problem(rng, chain_factory, problem_factory)
        if brute_force(problem) is None or is_too_small(problem):
            continue
        units = len(problem.chain.cuts) - 1
        inner = sorted(rng.randint(0, units) for _ in range(problem.num_stages - 1))
        current = tuple(pairwise((0, *inner, units)))
        problem = replace(problem, current=current)
        solution = solve(problem)
        best = max(
            stored_bytes(problem, cuts)
            for cuts in partitions(problem)
            if slowest_ns(problem, cuts) == solution.bottleneck_ns
        )
        assert stored_bytes(problem, solution.boundaries) == best


def test_solve_min_units_where_greedy_fails(chain_factory, problem_factory):
    # Stage 1 cannot hold layer 2; greedy would give it that one alone.
    chain = chain_factory([1, 1, 1, 1], sizes=[1, 1, 9, 1])
    problem = problem_factory(chain, 3, memory=[None, 5, None])
    assert greedy(make_limits(problem), 2).cuts == (0, 2, 2, 4)  # it leaves stage 1 empty
    assert solve(problem).bottleneck_ns == brute_force(problem) == 2


def test_blocking_run_does_not_fit_below_the_bottleneck(rng, chain_factory, problem_factory):
    for _ in range(500):
        n, stages = rng.randint(2, 12), rng.randint(1, 5)
        problem = problem_factory(chain_factory([rng.randint(1, 30) for _ in range(n)]), stages, min_units=0)
        solution = solve(problem)
        begin, end = solution.blocking
        assert sum(problem.chain.work_ns[begin:end]) >= solution.bottleneck_ns


def test_solve_heavy_first_item_is_optimal(chain_factory, problem_factory):
    # A probe that wraps around on a heavy first item answers 13 here.
    assert solve(problem_factory(chain_factory([10, 1, 1, 1]), 3)).bottleneck_ns == 10


def test_solve_beats_max_min_partition(chain_factory, problem_factory):
    problem = problem_factory(chain_factory([15, 5, 4, 7, 2, 13, 20, 2, 7]), 4)
    assert solve(problem).bottleneck_ns == 24


def test_solve_cuts_only_at_permitted_positions(chain_factory, problem_factory):
    problem = problem_factory(chain_factory([1, 1, 1, 1, 1, 1], cuts=[0, 2, 4, 6]), 2)
    assert solve(problem).boundaries in {(0, 2, 6), (0, 4, 6)}


def test_solve_infeasible_memory_names_the_unit(chain_factory, problem_factory):
    problem = problem_factory(chain_factory([1, 1], sizes=[5, 50]), 2, memory=[10, 10])
    with pytest.raises(InfeasibleError, match="unit 1 needs 50 bytes") as caught:
        solve(problem)
    assert caught.value.exit_code == 3


def test_solve_more_stages_than_units_is_refused(chain_factory, problem_factory):
    with pytest.raises(UsageError, match="use fewer stages"):
        solve(problem_factory(chain_factory([1, 2]), 3))
    assert solve(problem_factory(chain_factory([1, 2]), 3, min_units=0)).bottleneck_ns == 2


def test_with_ties_together_keeps_one_worker(rng, chain_factory, problem_factory):
    solved = 0
    for _ in range(600):
        problem = random_problem(rng, chain_factory, problem_factory)
        items, n = problem.chain.items, len(problem.chain.items)
        if n < 2:
            continue
        first, second = sorted(rng.sample(range(n), 2))
        tied = replace(items[second], tied_to=items[first].name)
        items = (*items[:second], tied, *items[second + 1 :])
        problem = replace(problem, chain=replace(problem.chain, items=items))
        together = [
            slowest_ns(problem, cuts)
            for cuts in partitions(problem)
            if not any(first < cut <= second for cut in cuts[1:-1])
        ]
        if is_too_small(problem):
            continue
        if not together:
            with pytest.raises(InfeasibleError):
                solve(with_ties_together(problem))
            continue
        if problem.min_units > 1:  # a unit is then the tied run as a whole
            continue
        assert solve(with_ties_together(problem)).bottleneck_ns == min(together)
        solved += 1
    assert solved > 100


def test_with_ties_together_in_a_v_pins_the_ends(chain_factory, problem_factory):
    chain = chain_factory([1, 5, 5, 5, 5, 1])
    items = (*chain.items[:5], replace(chain.items[5], tied_to=chain.items[0].name))
    problem = problem_factory(replace(chain, items=items), 2, "zb-v", virtual_stages=2, min_units=0)
    boundaries = solve_best(with_ties_together(problem)).boundaries
    assert boundaries[1] >= 1
    assert boundaries[3] <= 5
    with pytest.raises(InfeasibleError, match="use --schedule zb-v"):
        with_ties_together(replace(problem, schedule="1f1b", virtual_stages=1, min_units=1))


@table("memory", [None, [10**9] * 3])
@table("pins", [((3, 0), (0, 1)), ((2, 1), (2, 2)), ((3, 0),), ((0, 2),), ((1, 0), (2, 2))])
def test_solve_contradictory_pins_are_named(pins, memory, chain_factory, problem_factory):
    problem = problem_factory(chain_factory([1, 1, 1, 1]), 3, pins=pins, memory=memory)
    assert brute_force(problem) is None
    with pytest.raises(InfeasibleError) as error:
        solve(problem)
    for item, stage in pins:
        assert f"--pin layers.{item}:{stage}" in str(error.value)


def test_solve_first_item_pinned_to_later_stage_names_stage_0(chain_factory, problem_factory):
    with pytest.raises(InfeasibleError, match="stage 0 must have at least 1 unit, but at most 0 so that"):
        solve(problem_factory(chain_factory([1, 1, 1, 1]), 3, pins=((0, 1),), min_units=1))


def test_solve_random_pins_are_satisfied_or_named(rng, chain_factory, problem_factory):
    refused = 0
    for _ in range(400):
        n, stages = rng.randint(2, 7), rng.randint(2, 4)
        chain = chain_factory([rng.randint(1, 9) for _ in range(n)], sizes=[1] * n)
        pins = tuple((rng.randrange(n), rng.randrange(stages)) for _ in range(rng.randint(1, 4)))
        memory = rng.choice([None, [10**6] * stages])
        problem = problem_factory(chain, stages, pins=pins, memory=memory, min_units=rng.choice([0, 1]))
        if not check_against_brute_force(problem) and not is_too_small(problem):
            refused += 1
            with pytest.raises(InfeasibleError, match="--pin"):
                solve(problem)
    assert 50 < refused < 350
