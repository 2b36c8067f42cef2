"""How loose the bound of any schedule is: the best of all placements of a small recipe, bounded from both sides.

    python tests/benchmarks/plan_bound.py [--recipes moe,pruning] [--layers 8] [--workers 4] [--microbatches 8]

Every assignment of units (layers) to workers is tried, so every partition, placement and number of stages per worker.
For each, ``stages_bound_ns`` is below every order of operations, so its minimum is a proven bound for any schedule. The
best order of ``justified_order`` for the assignments with the smallest bounds is a step that exists. The best
step of all is between these two; in brackets: over ``bounds_of``. Memory is not limited.
"""

from __future__ import annotations

import argparse
import heapq
from collections.abc import Iterator
from dataclasses import dataclass, replace

from dynmo_balance._common.console import emit
from dynmo_balance.partition.problem import PartitionProblem
from dynmo_balance.planning.plan_builder import problem_of_run
from dynmo_balance.recipes.recipe import final_costs, load_recipe, with_size
from dynmo_balance.schedules.justified_order import START_RULES, Rule, justified_order
from dynmo_balance.schedules.list_scheduler import OperationTimes
from dynmo_balance.simulation.bounds import bounds_of
from dynmo_balance.simulation.order_bound import stages_bound_ns
from dynmo_balance.simulation.simulator import StageCosts

SCHEDULED = 40
"""Assignments with the smallest bounds that get orders of operations."""


@dataclass(frozen=True, kw_only=True)
class Bracket:
    """Times in ns: the bound of any schedule, the least bound of all assignments, and the best step found."""

    bound_ns: int
    exact_bound_ns: int
    found_ns: int
    assignments: int


def assignments(units: int, workers: int) -> Iterator[tuple[int, ...]]:
    """All assignments of units to workers; workers are numbered in the order of their first units."""

    def extend(row: tuple[int, ...], used: int) -> Iterator[tuple[int, ...]]:
        if len(row) == units:
            if used == workers:
                yield row
            return
        for worker in range(min(used + 1, workers)):
            yield from extend((*row, worker), max(used, worker + 1))

    yield from extend((0,), 1)


def stages_of(problem: PartitionProblem, row: tuple[int, ...]) -> tuple[list[StageCosts], list[int]]:
    """One stage for each run of units on the same worker, and its worker."""
    chain, cuts = problem.chain, problem.chain.cuts
    begins = [at for at, worker in enumerate(row) if not at or row[at - 1] != worker]
    stages = []
    for begin, end in zip(begins, [*begins[1:], len(row)], strict=True):
        first, last = cuts[begin], cuts[end]
        sent = problem.transfer_ns(chain.items[last - 1].boundary_bytes) if end < len(row) else 0
        stages.append(
            StageCosts(
                forward_ns=sum(chain.costs.forward_ns[first:last]),
                backward_input_ns=sum(chain.costs.backward_input_ns[first:last]),
                backward_weight_ns=sum(chain.costs.backward_weight_ns[first:last]),
                has_backward=last > chain.frozen_items,
                send_ns=sent,
            )
        )
    return stages, [row[begin] for begin in begins]


def bracket(problem: PartitionProblem) -> Bracket:
    """Bound the best step of a small problem from both sides; all workers have the same speed."""
    microbatches, workers = problem.microbatches, len(problem.slots)
    loads = problem.chain.prefix_at_cuts(problem.chain.work_ns)
    best, least, count = None, None, 0
    smallest: list[tuple[int, tuple[int, ...]]] = []
    for row in assignments(len(problem.chain.cuts) - 1, workers):
        count += 1
        load = [0] * workers
        for at, worker in enumerate(row):
            load[worker] += loads[at + 1] - loads[at]
        # An assignment whose heaviest worker alone needs longer than a step that exists is not the best.
        if best is not None and max(load) * microbatches >= best:
            continue
        stages, positions = stages_of(problem, row)
        bound = stages_bound_ns(stages, positions, microbatches)
        least = bound if least is None else min(least, bound)
        if len(smallest) < SCHEDULED or bound < -smallest[0][0]:
            (heapq.heappush if len(smallest) < SCHEDULED else heapq.heapreplace)(smallest, (-bound, row))
            step = best_step(problem, stages, positions, START_RULES[:1])
            best = step if best is None else min(best, step)
    assert best is not None
    assert least is not None
    for _, row in smallest:
        best = min(best, best_step(problem, *stages_of(problem, row), START_RULES))
    return Bracket(
        bound_ns=bounds_of(problem).step_ns, exact_bound_ns=min(least, best), found_ns=best, assignments=count
    )


def best_step(
    problem: PartitionProblem, stages: list[StageCosts], positions: list[int], rules: tuple[Rule, ...]
) -> int:
    """The shortest step of orders that start from ``rules``, in ns."""
    times = OperationTimes(
        forward=[stage.forward_ns for stage in stages],
        backward_input=[stage.backward_input_ns for stage in stages],
        backward_weight=[stage.backward_weight_ns for stage in stages],
        send=[
            stage.send_ns if at + 1 < len(stages) and positions[at] != positions[at + 1] else 0
            for at, stage in enumerate(stages)
        ],
        trained=[stage.has_backward for stage in stages],
        positions=positions,
    )
    made = justified_order(times, problem.microbatches, rules, rounds=6 if len(rules) > 1 else 0)
    assert made is not None  # without memory limits an order always exists
    return made.step_ns


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--recipes", default="early-exit,freezing,mod,moe,pruning,sparse-attention")
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--workers", type=int, default=4)
    parser.add_argument("--microbatches", default="8,16")
    options = parser.parse_args()
    emit("| recipe | microbatches | assignments | bound ms | proven bound of all assignments ms | found ms |")
    emit("|---|---|---|---|---|---|")
    for name in options.recipes.split(","):
        for microbatches in map(int, options.microbatches.split(",")):
            recipe = with_size(load_recipe(name), options.layers, options.workers)
            recipe = replace(recipe, run=replace(recipe.run, microbatches=microbatches))
            header, _, last = final_costs(recipe)
            problem = problem_of_run(header, last, "layer")
            slots = tuple(replace(slot, memory_bytes=None) for slot in problem.slots)
            found = bracket(replace(problem, slots=slots))
            cells = (found.bound_ns, found.exact_bound_ns, found.found_ns)
            figures = [f"{cell / 1e6:.2f} ({cell / found.bound_ns:.3f})" for cell in cells]
            emit(f"| {name} | {microbatches} | {found.assignments:,} | {' | '.join(figures)} |")


if __name__ == "__main__":
    main()
