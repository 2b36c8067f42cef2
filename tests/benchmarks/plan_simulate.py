"""How many schedules a second the batched simulator does: 64 stages, 512 microbatches, 65,536 operations each.

python tests/benchmarks/plan_simulate.py [--stages 64] [--microbatches 512] [--candidates 64]
"""

from __future__ import annotations

import argparse
import random
import sys
import time
from pathlib import Path

from dynmo_balance._common.console import emit
from dynmo_balance.simulation.batched import step_times

sys.path.insert(0, str(Path(__file__).parents[2]))

from tests.unit.dynmo_balance.problems import make_chain, make_problem


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--stages", type=int, default=64)
    parser.add_argument("--microbatches", type=int, default=512)
    parser.add_argument("--candidates", type=int, default=64)
    options = parser.parse_args()
    rng = random.Random(1)
    items = 4 * options.stages
    chain = make_chain([rng.randint(10**6, 10**7) for _ in range(items)], backward=[10**7] * items)
    problem = make_problem(chain, options.stages, microbatches=options.microbatches)
    inner = [sorted(rng.sample(range(1, items), options.stages - 1)) for _ in range(options.candidates)]
    candidates = [[0, *cuts, items] for cuts in inner]
    step_times(problem, candidates[:1])  # compiles the schedule
    for repetition in range(3):
        started = time.perf_counter()
        step_times(problem, candidates)
        spent = time.perf_counter() - started
        emit(f"repetition {repetition}: {options.candidates / spent:,.0f} schedules/s")


if __name__ == "__main__":
    main()
