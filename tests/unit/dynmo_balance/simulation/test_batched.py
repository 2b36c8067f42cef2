"""The batched simulator equals the event loop, to the nanosecond."""

from __future__ import annotations

from dynmo_balance.formats.plan import V_SCHEDULES
from dynmo_balance.partition.exact import solve
from dynmo_balance.planning.local_search import minimize_step
from dynmo_balance.schedules.registry import SCHEDULES
from dynmo_balance.simulation.batched import step_times
from dynmo_balance.simulation.simulator import predict
from tests.tables import table

CASES = [(name, virtual) for name in SCHEDULES for virtual in (1, 2, 3) if name not in V_SCHEDULES or virtual == 2]


@table(("schedule", "virtual"), CASES)
def test_step_times_equal_the_simulator(schedule, virtual, rng, chain_factory, problem_factory):
    for _ in range(15):
        workers = rng.randint(1, 4)
        n = workers * virtual + rng.randint(0, 6)
        frozen = rng.randint(0, n - 1) if rng.random() < 0.5 else 0
        times = [[rng.randint(1, 90) for _ in range(n)] for _ in range(3)]
        for column in times[1:]:
            column[:frozen] = [0] * frozen
        chain = chain_factory(times[0], backward=times[1], weight=times[2], boundary=rng.randint(0, 50))
        options = {"virtual_stages": virtual, "link_bandwidth": 10**9, "link_latency_ns": rng.randint(0, 20)}
        speeds = [rng.choice([500_000, 1_000_000]) for _ in range(workers)]
        microbatches = workers * rng.randint(2 if schedule == "dualpipe-v" else 1, 4)
        problem = problem_factory(chain, workers, schedule, microbatches, speeds=speeds, **options)
        candidates = [
            (0, *sorted(rng.randint(0, n) for _ in range(workers * virtual - 1)), n) for _ in range(rng.randint(1, 5))
        ]
        overhead = rng.choice([0, 7])
        expected = [predict(problem, candidate, overhead).step_ns for candidate in candidates]
        assert step_times(problem, candidates, overhead) == expected


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
