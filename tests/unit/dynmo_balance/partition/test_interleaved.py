"""Several stages on a worker: the sums of the workers, their memory, and the exact table of a V."""

from __future__ import annotations

from dataclasses import replace
from itertools import combinations_with_replacement, pairwise

import numpy as np
import pytest

from dynmo_balance.formats.plan import V_SCHEDULES
from dynmo_balance.partition.balance import balance, bottleneck_ns
from dynmo_balance.partition.constraints import make_limits
from dynmo_balance.partition.exact import minimize_bottleneck
from dynmo_balance.partition.interleaved import make_worker_loads, neighbors
from dynmo_balance.partition.problem import InfeasibleError
from dynmo_balance.partition.run_shifts import best_shift
from dynmo_balance.simulation.simulator import predict


def partitions(problem):
    """All partitions that obey pins, least units and, by the order of operations, memory."""
    try:
        limits = make_limits(problem)
    except InfeasibleError:  # by its pins
        return
    units = limits.units
    for inner in combinations_with_replacement(range(units + 1), problem.num_stages - 1):
        cuts = (0, *inner, units)
        if any(b - a < problem.min_units for a, b in pairwise(cuts)):
            continue
        if not all(limits.lowest[p] <= cut <= limits.highest[p] for p, cut in enumerate(cuts)):
            continue
        peaks = zip(problem.slots, predict(problem, cuts).peak_memory_bytes, strict=True)
        if all(slot.memory_bytes is None or peak <= slot.memory_bytes for slot, peak in peaks):
            yield cuts


def random_problem(rng, chain_factory, problem_factory, schedule):
    workers, n = rng.randint(1, 3), rng.randint(6, 7)
    # Between a few heavy layers the exact table for stages that are not empty is needed.
    times = rng.choice([range(1, 31), (1, 2, 3, 30, 37)])
    chain = chain_factory(
        [rng.choice(times) for _ in range(n)],
        backward=[rng.choice(times) for _ in range(n)],
        activation=[rng.randint(0, 4) for _ in range(n)],
        sizes=[rng.randint(0, 9) for _ in range(n)],
    )
    options = {"min_units": rng.choice([0, 1]), "microbatches": workers * rng.randint(1, 3), "virtual_stages": 2}
    if schedule == "dualpipe-v":
        options["microbatches"] = max(options["microbatches"], 2 * workers)
    if rng.random() < 0.5:
        options["speeds"] = [rng.choice([500_000, 1_000_000]) for _ in range(workers)]
    if rng.random() < 0.6:
        options["memory"] = [rng.choice([None, rng.randint(20, 120)]) for _ in range(workers)]
    if rng.random() < 0.3:
        options["pins"] = ((rng.randrange(n), rng.randrange(2 * workers)),)
    return problem_factory(chain, workers, schedule, **options)


@pytest.mark.parametrize("schedule", [*V_SCHEDULES, pytest.param("interleaved-1f1b", marks=pytest.mark.complete)])
def test_solve_interleaved_against_brute_force(schedule, rng, chain_factory, problem_factory):
    reached = tight = feasible = 0
    for _ in range(80):
        problem = random_problem(rng, chain_factory, problem_factory, schedule)
        best = min((bottleneck_ns(problem, cuts) for cuts in partitions(problem)), default=None)
        if best is None:
            with pytest.raises(InfeasibleError):
                balance(problem, "exact")
            continue
        feasible += 1
        try:
            solution = balance(problem, "exact")
        except InfeasibleError:
            assert schedule not in V_SCHEDULES  # the search is a heuristic for the others
            continue
        assert solution.boundaries in set(partitions(problem))
        assert solution.lower_bound_ns <= best <= solution.bottleneck_ns == bottleneck_ns(problem, solution.boundaries)
        assert solution.optimal == (solution.bottleneck_ns == solution.lower_bound_ns)
        reached += solution.optimal
        tight += solution.bottleneck_ns == best
    assert feasible > 40
    assert tight >= (1 if schedule in V_SCHEDULES else 0.7) * feasible
    assert reached >= (1 if schedule in V_SCHEDULES else 0.02) * feasible


@pytest.mark.parametrize("schedule", [*V_SCHEDULES, "interleaved-1f1b"])
def test_solve_interleaved_ties_move_fewer_bytes(schedule, rng, chain_factory, problem_factory):
    nearer = 0
    for _ in range(40):
        chain = chain_factory([rng.randint(1, 2) for _ in range(12)], sizes=[1] * 12)
        problem = problem_factory(chain, 2, schedule, 4, virtual_stages=2)
        free = balance(problem, "exact")
        drawn = sorted(rng.sample(range(1, 12), 3))
        tied = balance(replace(problem, current=tuple(pairwise((0, *drawn, 12)))), "exact")
        assert tied.bottleneck_ns <= free.bottleneck_ns

        def moved(boundaries, problem=problem, drawn=drawn):
            def owner(cuts):
                return [problem.positions[s] for s, (a, b) in enumerate(pairwise(cuts)) for _ in range(b - a)]

            return sum(a != b for a, b in zip(owner(boundaries), owner((0, *drawn, 12)), strict=True))

        assert moved(tied.boundaries) <= moved(free.boundaries)
        nearer += moved(tied.boundaries) < moved(free.boundaries)
    assert nearer > 3


def test_best_shift_is_the_first_of_the_best_neighbors(rng, chain_factory, problem_factory):
    found = []
    for _ in range(60):
        problem = random_problem(rng, chain_factory, problem_factory, rng.choice(["interleaved-1f1b", "zb-v"]))
        try:
            loads = make_worker_loads(problem)
            cuts = np.array(minimize_bottleneck(replace(loads.limits, static=(), activation=()))[1])
        except InfeasibleError:
            continue
        if loads.excess_bytes(cuts[None, :])[0]:
            continue

        def worth(candidate, loads=loads):
            times = loads.times(candidate[None, :])
            squares = (times.astype(np.float64) ** 2).sum(axis=1)
            return int(loads.excess_bytes(candidate[None, :])[0]), int(times.max()), float(squares[0])

        now = worth(cuts)
        best = min(neighbors(loads.limits, cuts.tolist()), key=worth, default=cuts)
        expected = (worth(best), best.tolist()) if worth(best) < now else None
        shifted = best_shift(loads, cuts, now)
        assert (shifted and (shifted[0], shifted[1].tolist())) == expected
        found.append(shifted is not None)
    assert 10 < sum(found) < len(found)
