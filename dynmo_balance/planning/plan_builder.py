"""From costs and a balancer's answer to a whole plan with its predictions, certificate and migration."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

from ..costs.cost_window import ItemCosts
from ..formats.plan import RECORDS_KEY, Constraints, Migration, Optimality, Pin, Plan, Predicted, Stage, position_of
from ..formats.profile import Header
from ..partition.balance import balance
from ..partition.exact import Solution
from ..partition.problem import Chain, PartitionProblem, WorkerSlot, permitted_cuts
from ..simulation.simulator import Timeline, predict
from .local_search import minimize_step
from .migration import BASE_PAUSE_NS, migration


@dataclass(frozen=True, kw_only=True)
class Proposal:
    """A balancer's answer, simulated, and how to get there from the partition in force."""

    problem: PartitionProblem
    solution: Solution
    timeline: Timeline
    stages: tuple[Stage, ...]
    migration: Migration


def chain_of(header: Header, costs: ItemCosts, granularity: str | None = None) -> Chain:
    """The chain of a profile's items with these costs."""
    granularity = granularity or header.granularity
    cuts = permitted_cuts(header.items, granularity)
    return Chain(items=header.items, costs=costs, cuts=cuts, granularity=granularity)


def current_spans(
    plan: Plan, slots: Sequence[WorkerSlot], virtual_stages: int, schedule: str
) -> tuple[tuple[int, int], ...] | None:
    """The item range that each stage's worker holds in a plan; None where the numbers of stages a worker differ."""
    if plan.virtual_stages_per_worker != virtual_stages:
        return None
    held: dict[tuple[int, int], tuple[int, int]] = {}
    workers = len(plan.workers)
    for stage, span in zip(plan.stages, pairwise(plan.boundaries), strict=True):
        held[stage.worker, stage.stage // workers] = span
    return tuple(
        held.get((slots[position_of(schedule, stage, len(slots))].worker, stage // len(slots)), (0, 0))
        for stage in range(len(slots) * virtual_stages)
    )


def minimizes_step(problem: PartitionProblem, objective: str) -> bool:
    """Whether to go on from the least bottleneck to the least simulated step time.

    From eight microbatches a worker on, the two differ by less than 0.1 % on average (see the README); the first is
    proven, the second is not.
    """
    if objective == "auto":
        return problem.microbatches < 8 * len(problem.slots) or problem.schedule == "gpipe"
    return objective == "simulated"


def propose(
    problem: PartitionProblem,
    balancer: str,
    *,
    objective: str = "auto",
    owner: Mapping[str, int] | None = None,
    base_pause_ns: int | None = None,
) -> Proposal:
    """The balancer's partition of the problem, simulated.

    Args:
        problem: what to partition.
        balancer: a name of ``partition.BALANCERS``.
        objective: ``bottleneck``, ``simulated`` or ``auto``; the exact balancer minimizes it, the answers of the others
            are only measured by it.
        owner: the worker of each item now, for the migration.
        base_pause_ns: what a move costs beyond its bytes, where it has been measured.
    """
    solution = balance(problem, balancer)
    is_simulated = minimizes_step(problem, objective)
    if balancer != "exact":
        solution = replace(solution, objective="simulated" if is_simulated else "bottleneck")
    elif is_simulated:
        solution = minimize_step(problem, solution)
    return make_proposal(problem, solution, owner=owner, base_pause_ns=base_pause_ns)


def make_proposal(
    problem: PartitionProblem,
    solution: Solution,
    *,
    owner: Mapping[str, int] | None = None,
    base_pause_ns: int | None = None,
) -> Proposal:
    """A solution with its simulation, stages and migration."""
    names = problem.chain.names
    stages = tuple(
        Stage(stage=stage, worker=problem.slot(stage).worker, items=names[begin:end])
        for stage, (begin, end) in enumerate(pairwise(solution.boundaries))
    )
    pause = BASE_PAUSE_NS if base_pause_ns is None else base_pause_ns
    return Proposal(
        problem=problem,
        solution=solution,
        timeline=predict(problem, solution.boundaries),
        stages=stages,
        migration=migration(problem.chain, owner or {}, stages, problem.link_bandwidth, pause),
    )


def to_plan(
    proposal: Proposal,
    *,
    run_id: str,
    balancer: str,
    base: Plan | None,
    read_to_step: int,
    base_step_ns: int | None,
    reason: str,
    action: str = "move",
    released: Sequence[int] = (),
) -> Plan:
    """The plan document of a proposal; its number is given when it is published."""
    problem, solution, timeline = proposal.problem, proposal.solution, proposal.timeline
    begin, end = solution.blocking
    gain = 1 - timeline.step_ns / base_step_ns if base_step_ns else None
    return Plan(
        plan_id=0 if base is None else base.plan_id + 1,
        run_id=run_id,
        base_plan_id=None if base is None else base.plan_id,
        read_to_step=read_to_step,
        action=action,
        apply_at_step=None,
        balancer=balancer,
        schedule=problem.schedule,
        virtual_stages_per_worker=problem.virtual_stages,
        stages=proposal.stages,
        released_workers=tuple(released),
        predicted=Predicted(
            bottleneck_ns=solution.bottleneck_ns,
            step_ns=timeline.step_ns,
            bubble_fraction=round(max(0.0, timeline.bubble_fraction), 6),
            gain_fraction=None if gain is None else round(gain, 6),
            busy_ns=timeline.busy_ns,
            peak_memory_bytes=timeline.peak_memory_bytes,
        ),
        optimality=Optimality(
            objective=solution.objective,
            lower_bound_ns=solution.lower_bound_ns,
            optimal=solution.optimal,
            blocking_items=problem.chain.names[begin:end],
        ),
        migration=proposal.migration,
        reason=reason,
        granularity=problem.chain.granularity,
        constraints=constraints_of(problem),
        operations=None if problem.order is None else tuple(" ".join(map(str, row)) for row in problem.order),
        extra={RECORDS_KEY: problem.chain.costs.records},
    )


def constraints_of(problem: PartitionProblem) -> Constraints:
    """What the partition had to obey, as the plan records it."""
    return Constraints(
        microbatches=problem.microbatches,
        min_layers=problem.min_units,
        memory_bytes=tuple(slot.memory_bytes for slot in problem.slots),
        pins=tuple(Pin(item=problem.chain.names[item], stage=stage) for item, stage in problem.pins),
        tied_together=problem.tied_together,
    )


def keep_plan(base: Plan, *, run_id: str, read_to_step: int, balancer: str, reason: str) -> Plan:
    """A plan that keeps the partition of its base."""
    return replace(
        base,
        plan_id=base.plan_id + 1,
        run_id=run_id,
        base_plan_id=base.plan_id,
        read_to_step=read_to_step,
        action="keep",
        apply_at_step=None,
        balancer=balancer,
        released_workers=(),
        predicted=None,
        optimality=None,
        migration=Migration(),
        reason=reason,
        constraints=None,
        extra=None,
    )
