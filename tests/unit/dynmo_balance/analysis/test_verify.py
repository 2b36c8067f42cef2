"""The second way to the numbers of a plan, against the first and against all partitions, on random problems."""

from __future__ import annotations

from itertools import combinations_with_replacement, pairwise

import pytest

from dynmo_balance._common.errors import UsageError
from dynmo_balance.analysis.verify.bottleneck import BoundProblem, bound_of
from dynmo_balance.analysis.verify.step import Pipeline, PlanWorker, measure
from dynmo_balance.costs.cost_window import SPLIT_SCHEDULES
from dynmo_balance.formats.plan import V_SCHEDULES
from dynmo_balance.partition.balance import solve_best
from dynmo_balance.partition.problem import InfeasibleError
from dynmo_balance.simulation.simulator import predict


def pipeline_of(problem, boundaries):
    return Pipeline(
        items=problem.chain.items,
        costs=problem.chain.costs,
        spans=tuple(pairwise(boundaries)),
        plan_workers=tuple(
            PlanWorker(worker=p.worker, speed_ppm=p.speed_ppm, memory_bytes=p.memory_bytes) for p in problem.slots
        ),
        worker_of_stage=problem.positions,
        order=problem.operations,
        bandwidth=problem.link_bandwidth,
        latency_ns=problem.link_latency_ns,
    )


def random_problem(rng, chain_factory, problem_factory, schedule, virtual):
    workers = rng.randint(1, 3)
    n = rng.randint(workers * virtual, workers * virtual + 4)
    frozen = rng.choice([0, 0, 1, 2])
    backward = [0 if at < frozen else rng.randint(1, 30) for at in range(n)]
    chain = chain_factory(
        [rng.randint(0, 30) for _ in range(n)],
        backward=backward,
        weight=[rng.randint(0, 30) if time else 0 for time in backward] if schedule in SPLIT_SCHEDULES else None,
        activation=[rng.randint(0, 9) for _ in range(n)],
        sizes=[rng.randint(0, 12) for _ in range(n)],
        boundary=rng.randint(0, 50),
    )
    options = {
        "microbatches": workers * rng.randint(2 if schedule == "dualpipe-v" else 1, 4),
        "virtual_stages": virtual,
        "min_units": rng.randint(0, 1),
    }
    options["speeds"] = [rng.choice([700_000, 1_000_000, 1_300_000]) for _ in range(workers)]
    if rng.random() < 0.6:
        options["memory"] = [rng.choice([None, rng.randint(40, 160)]) for _ in range(workers)]
    if rng.random() < 0.3:
        options["pins"] = ((rng.randrange(n), rng.randrange(workers * virtual)),)
    options |= {"link_bandwidth": rng.choice([None, 10**9]), "link_latency_ns": rng.randint(0, 5)}
    return problem_factory(chain, workers, schedule, **options)


def question_of(problem, boundaries):
    return BoundProblem(
        pipeline=pipeline_of(problem, boundaries),
        cuts=problem.chain.cuts,
        min_units=problem.min_units,
        pins=problem.pins,
        is_v=problem.schedule in V_SCHEDULES,
        own_order=False,
    )


@pytest.mark.parametrize(
    ("schedule", "virtual"),
    [
        ("1f1b", 1),
        ("gpipe", 1),
        ("zero-bubble", 1),
        ("interleaved-1f1b", 2),
        ("zb-v", 2),
        ("dualpipe-v", 2),
        ("gpipe", 3),
    ],
)
def test_verify_measures_and_bounds_equal_the_planner(rng, chain_factory, problem_factory, schedule, virtual):
    solved = 0
    for _ in range(25 if virtual > 1 and schedule not in V_SCHEDULES else 60):
        problem = random_problem(rng, chain_factory, problem_factory, schedule, virtual)
        try:
            solution = solve_best(problem)
        except (InfeasibleError, UsageError):
            continue
        solved += 1
        measures, timeline = measure(pipeline_of(problem, solution.boundaries)), predict(problem, solution.boundaries)
        assert measures.step_ns == timeline.step_ns
        assert measures.busy_ns == timeline.busy_ns
        assert measures.peak_memory_bytes == timeline.peak_memory_bytes
        assert measures.bottleneck_ns == solution.bottleneck_ns
        for claim in (solution.lower_bound_ns, 0, solution.lower_bound_ns + 7):
            bound = bound_of(question_of(problem, solution.boundaries), claim)
            assert bound.least_ns == solution.lower_bound_ns
            assert bound.blocking == solution.blocking
    assert solved > 8


def test_verify_bound_with_memory_equals_brute_force(rng, chain_factory, problem_factory):
    checked = 0
    for _ in range(120):
        problem = random_problem(rng, chain_factory, problem_factory, "1f1b", 1)
        n, stages = len(problem.chain.items), len(problem.slots)
        best = None
        for inner in combinations_with_replacement(range(n + 1), stages - 1):
            boundaries = (0, *inner, n)
            spans = list(pairwise(boundaries))
            measures = measure(pipeline_of(problem, boundaries))
            fits = all(
                slot.memory_bytes is None or peak <= slot.memory_bytes
                for slot, peak in zip(problem.slots, measures.peak_memory_bytes, strict=True)
            )
            pinned = all(spans[stage][0] <= item < spans[stage][1] for item, stage in problem.pins)
            if fits and pinned and all(b - a >= problem.min_units for a, b in spans):
                best = measures.bottleneck_ns if best is None else min(best, measures.bottleneck_ns)
        if best is not None:
            checked += 1
            assert bound_of(question_of(problem, (0,) * stages + (n,)), best).least_ns == best
    assert checked > 40
