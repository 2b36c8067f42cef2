"""The exact balancer: against brute force on many random cases, and its time on large ones.

python tests/benchmarks/plan_exact.py [--cases 100000]
"""

from __future__ import annotations

import argparse
import random
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

from dynmo_balance._common.console import emit
from dynmo_balance.partition.exact import solve
from dynmo_balance.partition.problem import PartitionProblem

sys.path.insert(0, str(Path(__file__).parents[2]))

from tests.unit.dynmo_balance.partition import test_exact
from tests.unit.dynmo_balance.problems import make_chain, make_problem


def best_ms(call: Callable[[], object], repetitions: int) -> float:
    times = []
    for _ in range(repetitions):
        started = time.perf_counter()
        call()
        times.append(time.perf_counter() - started)
    return 1e3 * min(times)


def large(layers: int, stages: int) -> None:
    rng = random.Random(layers)
    work = [rng.randint(10**6, 5 * 10**6) for _ in range(layers)]
    sizes = [rng.randint(10**6, 2 * 10**6) for _ in range(layers)]
    chain = make_chain(work, sizes=sizes, activation=[1000] * layers)
    plain = make_problem(chain, stages)
    speeds = [rng.choice([900_000, 1_000_000, 1_100_000]) for _ in range(stages)]
    memory = [2 * 10**6 * layers // stages + 10**6] * stages
    limited = make_problem(chain, stages, speeds=speeds, memory=memory)
    solution = solve(plain)
    drifted = make_chain([round(w * rng.uniform(0.95, 1.05)) for w in work], sizes=sizes)
    moving: PartitionProblem = replace(make_problem(drifted, stages), current=tuple(pairwise(solution.boundaries)))
    rows = [("plain", plain), ("memory and speeds", limited), ("least migration", moving)]
    for label, problem in rows:
        emit(f"| {layers} | {stages} | {label} | {best_ms(lambda p=problem: solve(p), 5):.2f} |")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", type=int, default=100_000)
    options = parser.parse_args()
    emit("| layers | stages | constraints | ms, best of 5, whole solve with certificate |")
    emit("|---|---|---|---|")
    for layers, stages in ((1000, 128), (100_000, 4096)):
        large(layers, stages)
    rng = random.Random(1)
    solved = 0
    for _ in range(options.cases):
        problem = test_exact.random_problem(rng, make_chain, make_problem)
        solved += test_exact.check_against_brute_force(problem)
    emit(f"{options.cases} random cases equal brute force, {solved} of them feasible")


if __name__ == "__main__":
    main()
