"""The balancers that are not exact, and re-packing."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest

from dynmo_balance._common.errors import UsageError
from dynmo_balance.partition import deepspeed, diffusion, uniform
from dynmo_balance.partition.balance import balance, bottleneck_ns
from dynmo_balance.partition.exact import solve
from dynmo_balance.partition.problem import WorkerSlot
from dynmo_balance.partition.registry import balancer_names, run_balancer
from dynmo_balance.planning.repack import repack_table, with_workers
from dynmo_balance.simulation.simulator import predict
from tests.tables import table


def with_ends(chain):
    items = list(chain.items)
    items[0], items[-1] = replace(items[0], kind="embedding"), replace(items[-1], kind="head")
    return replace(chain, items=tuple(items))


def test_uniform_equals_megatrons_split(chain_factory, problem_factory):
    chain = with_ends(chain_factory([1] * 10))
    assert uniform.boundaries(problem_factory(chain, 4)) == (0, 3, 5, 7, 10)
    assert uniform.boundaries(problem_factory(chain, 3)) == (0, 3, 6, 10)


def test_deepspeed_misses_the_minimum_bottleneck(chain_factory, problem_factory):
    problem = problem_factory(chain_factory([15, 5, 4, 7, 2, 13, 20, 2, 7]), 4)
    assert bottleneck_ns(problem, deepspeed.boundaries(problem)) == 29
    assert solve(problem).bottleneck_ns == 24


def test_balancers_keep_order_and_never_beat_exact(rng, chain_factory, problem_factory):
    for _ in range(200):
        n, stages = rng.randint(4, 14), rng.randint(1, 4)
        chain = with_ends(chain_factory([rng.randint(1, 50) for _ in range(n)], sizes=[rng.randint(1, 9)] * n))
        problem = problem_factory(chain, stages)
        best = solve(problem).bottleneck_ns
        for name in balancer_names():
            solution = balance(problem, name)
            assert solution.boundaries[0] == 0
            assert solution.boundaries[-1] == n
            assert all(a <= b for a, b in pairwise(solution.boundaries))
            assert solution.bottleneck_ns >= best
            assert solution.optimal == (solution.bottleneck_ns == best)


def test_diffusion_ends_at_local_equilibrium(rng, chain_factory, problem_factory):
    for _ in range(100):
        problem = problem_factory(chain_factory([rng.randint(1, 50) for _ in range(20)]), 5)
        boundaries, rounds = diffusion.diffuse(problem)
        work = problem.chain.work_ns
        assert rounds < 50
        for left in range(4):
            begin, middle, end = boundaries[left : left + 3]
            best = min(max(sum(work[begin:at]), sum(work[at:end])) for at in range(begin + 1, end))
            assert max(sum(work[begin:middle]), sum(work[middle:end])) == best


def test_diffusion_may_miss_the_optimum(chain_factory, problem_factory):
    problem = problem_factory(chain_factory([4, 1, 4, 1, 4, 1, 1, 4]), 4, min_units=1)
    assert bottleneck_ns(problem, diffusion.boundaries(problem)) >= solve(problem).bottleneck_ns


def test_fewest_workers_equals_brute_force(rng, chain_factory, problem_factory):
    for _ in range(30):
        chain = with_ends(chain_factory([rng.randint(1, 9) * 100 for _ in range(12)]))
        problem = problem_factory(chain, 6, microbatches=12)
        found = repack_table(problem, 0.9)
        times = {}
        for count in range(1, 7):
            smaller = replace(problem, slots=problem.slots[:count])
            times[count] = predict(smaller, solve(smaller).boundaries).step_ns
        for packing, reference in ((found.balanced, found.balanced_step_ns), (found.static, found.static_step_ns)):
            enough = [count for count in times if times[count] * 0.9 <= reference]
            assert packing.workers == min(enough)
            assert packing.throughput_fraction >= 0.9


def test_with_workers_keeps_unreleasable_workers(chain_factory, problem_factory):
    problem = problem_factory(chain_factory([1] * 6), 3)
    slots = (WorkerSlot(worker=0), WorkerSlot(worker=1), WorkerSlot(worker=2, releasable=False))
    smaller = with_workers(replace(problem, slots=slots), 1)
    assert [slot.worker for slot in smaller.slots] == [2]
    unreleasable = tuple(replace(slot, releasable=False) for slot in slots)
    with pytest.raises(UsageError, match="3 workers cannot be released"):
        with_workers(replace(problem, slots=unreleasable), 2)


def test_parameter_balancers_ignore_times(chain_factory, problem_factory):
    # Times are even, parameters are all at the front
    chain = chain_factory([10] * 8, sizes=[100, 100, 1, 1, 1, 1, 1, 1])
    problem = problem_factory(chain, 2)
    assert run_balancer(problem, "deepspeed") == (0, 4, 8)
    assert run_balancer(problem, "deepspeed_param") == (0, 1, 8)
    assert run_balancer(problem, "diffusion_param") == (0, 1, 8)


@table("count", [7, 8, 9, 31])
@table("stages", [1, 2, 3, 7])
def test_deepspeed_static_equals_partition_uniform(chain_factory, problem_factory, count, stages):
    # partition_uniform of DeepSpeed: the first parts get one more
    sizes = [count // stages + (part < count % stages) for part in range(stages)]
    expected = tuple(sum(sizes[:part]) for part in range(stages + 1))
    assert run_balancer(problem_factory(chain_factory([1] * count), stages), "deepspeed_static") == expected
