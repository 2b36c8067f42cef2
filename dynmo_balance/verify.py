"""Recomputes every number of a plan from the profile, without the solvers: plain sums, simulation, and a bound.

The bound is checked by dynamic programming over all cuts, a second way to the answer of the exact solver.
"""

from __future__ import annotations

from collections import Counter

from .formats._document import Problem as Fault
from .formats.plan import Plan, header_problems
from .formats.profile import Header
from .problem import Problem
from .simulate import predict, stage_costs


def least_bottleneck_by_table(problem: Problem, min_units: int) -> int:
    """The least bottleneck over all contiguous partitions, by a table over stages and cuts; memory is left out."""
    positions = problem.chain.cuts
    work = problem.chain.at_cuts(problem.chain.work_ns)
    units = len(positions) - 1
    unreachable = 1 << 200
    table = [0, *([unreachable] * units)]
    for stage in range(problem.num_stages):
        place = problem.place(stage)
        following = [unreachable] * (units + 1)
        for end in range(units + 1):
            for begin in range(end - min_units, -1, -1):
                time = place.time_ns(work[end] - work[begin])
                if time >= following[end]:
                    break
                following[end] = min(following[end], max(table[begin], time))
        table = following
    return table[units]


def verify(plan: Plan, header: Header, problem: Problem, base: Plan | None) -> list[Fault]:
    """Every number of the plan that is not what the profile says; empty for a sound plan."""
    faults = header_problems(plan, header)
    if faults:
        return faults
    faults.extend(_cut_faults(plan, problem))
    faults.extend(_memory_faults(plan, problem))
    if plan.predicted is not None:
        faults.extend(_predicted_faults(plan, problem))
    if plan.optimality is not None and plan.virtual_stages_per_worker == 1:
        faults.extend(_bound_faults(plan, problem))
    if base is not None:
        faults.extend(_migration_faults(plan, problem, base))
    return faults


def _cut_faults(plan: Plan, problem: Problem) -> list[Fault]:
    allowed = set(problem.chain.cuts)
    return [
        Fault(f"stages[{stage}]", "cut", f"begins inside a layer, at {problem.chain.names[at]}")
        for stage, at in enumerate(plan.boundaries[:-1])
        if at not in allowed
    ]


def _memory_faults(plan: Plan, problem: Problem) -> list[Fault]:
    peaks = predict(problem, plan.boundaries).peak_memory_bytes
    return [
        Fault(f"stages[{at}]", "memory", f"worker {place.worker} needs {peak:,} bytes, has {place.memory_bytes:,}")
        for at, (place, peak) in enumerate(zip(problem.places, peaks, strict=True))
        if place.memory_bytes is not None and peak > place.memory_bytes
    ]


def _predicted_faults(plan: Plan, problem: Problem) -> list[Fault]:
    predicted = plan.predicted
    if predicted is None:
        return []
    timeline = predict(problem, plan.boundaries)
    costs = stage_costs(problem, plan.boundaries)
    workers = [0] * len(problem.places)
    for stage, cost in enumerate(costs):
        workers[problem.positions[stage]] += cost.forward_ns + cost.backward_input_ns + cost.backward_weight_ns
    bottleneck = max(workers)
    # Forward and backward are rounded apart on workers that are not of normal speed: two nanoseconds a stage.
    checks = [
        ("bottleneck_ns", predicted.bottleneck_ns, bottleneck, 2 * problem.virtual_stages),
        ("step_ns", predicted.step_ns, timeline.step_ns, 0),
        ("busy_ns", predicted.busy_ns, timeline.busy_ns, 0),
        ("peak_memory_bytes", predicted.peak_memory_bytes, timeline.peak_memory_bytes, 0),
    ]
    faults = []
    for name, said, found, slack in checks:
        wrong = abs(said - found) > slack if isinstance(said, int) and isinstance(found, int) else said != found
        if wrong:
            faults.append(Fault(f"predicted.{name}", "value", f"is {said}, recomputed {found}"))
    if abs(predicted.bubble_fraction - timeline.bubble_fraction) > 1e-5:
        message = f"is {predicted.bubble_fraction}, recomputed {timeline.bubble_fraction:.6f}"
        faults.append(Fault("predicted.bubble_fraction", "value", message))
    return faults


def _bound_faults(plan: Plan, problem: Problem) -> list[Fault]:
    optimality, predicted = plan.optimality, plan.predicted
    if optimality is None or predicted is None:
        return []
    faults = []
    if optimality.optimal != (optimality.lower_bound_ns == predicted.bottleneck_ns):
        faults.append(Fault("optimality.optimal", "value", "must say whether the bottleneck equals the bound"))
    if all(place.memory_bytes is None for place in problem.places):
        least = least_bottleneck_by_table(problem, problem.min_units)
        if optimality.lower_bound_ns > least:
            message = f"is {optimality.lower_bound_ns}, but a partition with {least} exists"
            faults.append(Fault("optimality.lower_bound_ns", "value", message))
    return faults


def _migration_faults(plan: Plan, problem: Problem, base: Plan) -> list[Fault]:
    size = dict(zip(problem.chain.names, problem.chain.move_bytes, strict=True))
    before, after = base.owner, plan.owner
    moved = {item: (before[item], after[item]) for item in after if before.get(item) != after[item]}
    listed = {move.item: (move.from_worker, move.to_worker) for move in plan.migration.moves}
    if moved != listed:
        return [Fault("migration.moves", "value", f"lists {len(listed)} moves, the stages make {len(moved)}")]
    links: Counter[tuple[int, int]] = Counter()
    for item, link in moved.items():
        links[link] += size[item]
    faults = []
    for name, said, found in (
        ("bytes", plan.migration.bytes, sum(links.values())),
        ("max_link_bytes", plan.migration.max_link_bytes, max(links.values(), default=0)),
    ):
        if said != found:
            faults.append(Fault(f"migration.{name}", "value", f"is {said}, recomputed {found}"))
    return faults
