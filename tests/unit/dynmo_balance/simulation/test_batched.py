"""The simulators over arrays, of one partition and of many, equal the event loop, to the nanosecond and the byte."""

from __future__ import annotations

import numpy as np

from dynmo_balance.formats.plan import V_SCHEDULES
from dynmo_balance.partition.exact import solve
from dynmo_balance.planning.local_search import minimize_step
from dynmo_balance.schedules.registry import SCHEDULES
from dynmo_balance.simulation import batched, simulator
from dynmo_balance.simulation.batched import find_shorter, step_times
from dynmo_balance.simulation.simulator import predict, run, stage_costs
from tests.tables import table

CASES = [(name, virtual) for name in SCHEDULES for virtual in (1, 2, 3) if name not in V_SCHEDULES or virtual == 2]


@table(("schedule", "virtual"), CASES)
def test_step_times_equal_the_simulator(schedule, virtual, rng, chain_factory, problem_factory, monkeypatch):
    for _ in range(15):
        workers = rng.randint(1, 4)
        n = workers * virtual + rng.randint(0, 6)
        frozen = rng.randint(0, n - 1) if rng.random() < 0.5 else 0
        times = [[rng.randint(1, 90) for _ in range(n)] for _ in range(3)]
        for column in times[1:]:
            column[:frozen] = [0] * frozen
        sizes, activation = ([rng.randint(0, 9) for _ in range(n)] for _ in range(2))
        chain = chain_factory(
            times[0],
            backward=times[1],
            weight=times[2],
            boundary=rng.randint(0, 50),
            sizes=sizes,
            activation=activation,
        )
        options = {"virtual_stages": virtual, "link_bandwidth": 10**9, "link_latency_ns": rng.randint(0, 20)}
        speeds = [rng.choice([500_000, 1_000_000]) for _ in range(workers)]
        microbatches = workers * rng.randint(2 if schedule == "dualpipe-v" else 1, 4)
        problem = problem_factory(chain, workers, schedule, microbatches, speeds=speeds, **options)
        candidates = [
            (0, *sorted(rng.randint(0, n) for _ in range(workers * virtual - 1)), n) for _ in range(rng.randint(1, 5))
        ]
        overhead = rng.choice([0, 7])
        expected = [run(problem.operations, stage_costs(problem, each), overhead) for each in candidates]
        with monkeypatch.context() as patched:
            patched.setattr(simulator, "run", None)  # a plan is not simulated by the event loop
            found = [predict(problem, each, overhead) for each in candidates]
        assert found == expected
        assert [each.ends_ns for each in found] == [each.ends_ns for each in expected]
        steps = [each.step_ns for each in expected]
        # As a whole, and in parts of one or a few candidates.
        monkeypatch.setattr(batched, "MAX_BATCH_NUMBERS", rng.choice([1, 2000, 10**6]))
        assert step_times(problem, candidates, overhead) == steps
        at_zero = step_times(problem, candidates)
        monkeypatch.setattr(batched, "BOUNDED_BATCH", rng.choice([1, 64]))
        best = min(at_zero)
        shorter = (best, at_zero.index(best)) if best < at_zero[0] else None
        assert find_shorter(problem, candidates[0], np.array(candidates)) == shorter


def test_minimize_step_is_never_longer(rng, chain_factory, problem_factory):
    shorter = 0
    for microbatches in (2, 4, 64):
        for _ in range(20):
            times = [[rng.randint(10, 90) for _ in range(24)] for _ in range(2)]
            problem = problem_factory(chain_factory(times[0], backward=times[1]), 6, microbatches=microbatches)
            solution = solve(problem)
            better = minimize_step(problem, solution)
            before, after = (predict(problem, s.boundaries).step_ns for s in (solution, better))
            assert after <= before
            shorter += after < before
    assert shorter > 10
