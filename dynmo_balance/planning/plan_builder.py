"""Plans: from costs and a balancer's partition to a document with predictions, certificate and migration.

::

    Header, ItemCosts --chain_of--> Chain --+
    WorkerSlots, schedule, constraints -----+--> PartitionProblem
                                                      |
                                       propose        |  partition.balance   boundaries and certificate
                                                      |  local_search        shorter simulated step
                                                      v
    Solution --make_proposal--> Proposal = solution + simulation (Timeline) + stages + migration
                                                      |
                                       to_plan        v
                                                    Plan --formats.plan.publish--> plans/plan-000001.json

A proposal compares partitions; only ``to_plan`` adds what a document needs: ids, the base plan, the gain over it, and
a reason. ``keep_plan`` answers a plan request without a move. These functions are pure: no clock, no files. The number
of a plan is assigned when it is published.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

from ..costs.cost_window import ItemCosts
from ..costs.vocabulary import shard_costs
from ..formats.plan import (
    RECORDS_KEY,
    Constraints,
    ExpertMoves,
    ExpertsOfItem,
    Migration,
    Optimality,
    Pin,
    Plan,
    Predicted,
    Stage,
    expert_keys,
    position_of,
)
from ..formats.profile import Header
from ..partition.balance import balance
from ..partition.exact import Solution
from ..partition.problem import Chain, PartitionProblem, WorkerSlot, permitted_cuts, worker_slots
from ..simulation.simulator import Timeline, predict
from .local_search import minimize_step
from .migration import BASE_PAUSE_NS, migration


@dataclass(frozen=True, kw_only=True)
class Proposal:
    """A balancer's partition with its simulation, and the migration from the active partition."""

    problem: PartitionProblem
    solution: Solution
    timeline: Timeline
    stages: tuple[Stage, ...]
    migration: Migration


def chain_of(header: Header, costs: ItemCosts, granularity: str | None = None) -> Chain:
    """The chain of a profile's items with these costs; the granularity is the profile's by default."""
    granularity = granularity or header.granularity
    cuts = permitted_cuts(header.items, granularity)
    return Chain(
        items=header.items,
        costs=costs,
        cuts=cuts,
        granularity=granularity,
        vocabulary=shard_costs(header, costs.vocabulary),
    )


def problem_of_run(header: Header, costs: ItemCosts, granularity: str | None = None) -> PartitionProblem:
    """The partitioning problem of a profile's run with these costs, without memory limits and pins."""
    return PartitionProblem(
        chain=chain_of(header, costs, granularity),
        slots=worker_slots(header),
        schedule=header.schedule,
        microbatches=header.microbatches,
        virtual_stages=header.virtual_stages_per_worker,
        link_bandwidth=header.link.bandwidth_bytes_per_s if header.link else None,
        link_latency_ns=header.link.latency_ns if header.link else 0,
    )


def current_spans(
    plan: Plan, slots: Sequence[WorkerSlot], virtual_stages: int, schedule: str
) -> tuple[tuple[int, int], ...] | None:
    """For each stage the item range ``(begin, end)`` that its worker has in a plan.

    Args:
        plan: the plan.
        slots: the workers of the stages.
        virtual_stages: stages per worker.
        schedule: name of the schedule, which places the stages on the workers.

    Returns:
        one range per stage; None if the plan has another number of stages per worker.
    """
    if plan.virtual_stages_per_worker != virtual_stages:
        return None
    # By worker and lap, not by stage: after a release the remaining workers have other stage numbers. A worker without
    # that stage has nothing resident, the empty range.
    spans: dict[tuple[int, int], tuple[int, int]] = {}
    workers = len(plan.workers)
    for stage, span in zip(plan.stages, pairwise(plan.boundaries), strict=True):
        spans[stage.worker, stage.stage // workers] = span
    return tuple(
        spans.get((slots[position_of(schedule, stage, len(slots))].worker, stage // len(slots)), (0, 0))
        for stage in range(len(slots) * virtual_stages)
    )


def minimizes_step(problem: PartitionProblem, objective: str) -> bool:
    """Whether to minimize the simulated step after the bottleneck.

    From eight microbatches per worker on, the two objectives differ by less than 0.1 % on average (see the README).
    The minimum bottleneck is proven, the minimum step is not.
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
    """The partition of a balancer, simulated.

    Args:
        problem: the partitioning problem.
        balancer: name of a balancer, see ``partition.registry``.
        objective: ``bottleneck``, ``simulated`` or ``auto``. The exact balancer minimizes it; partitions of other
            balancers are only measured by it.
        owner: the worker of each item now, for the migration.
        base_pause_ns: pause in ns of a migration apart from transfers, if measured.

    Raises:
        UsageError: the balancer is unknown, or there are more stages than units.
        InfeasibleError: no partition satisfies the constraints.
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
    """A solution with its simulation, stages and migration.

    Args:
        problem: the partitioning problem.
        solution: the partition.
        owner: the worker of each item now, for the migration; None is without migration.
        base_pause_ns: pause in ns of a migration apart from transfers; None is ``BASE_PAUSE_NS``.
    """
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
    experts: Mapping[str, Any] | None = None,
) -> Plan:
    """The plan document of a proposal; its number is assigned when it is published.

    Args:
        proposal: the partition.
        run_id: of the profile.
        balancer: name of the balancer.
        base: the active plan; None if there is none.
        read_to_step: the last step of the profile that was read.
        base_step_ns: the simulated step in ns of the base plan with the same costs; None if unknown.
        reason: one sentence.
        action: ``move`` or ``keep``.
        released: ids of the released workers.
        experts: key of the placements of experts; None keeps those of the base.
    """
    if experts is None:
        former = () if base is None else base.experts
        experts = expert_keys([ExpertsOfItem(item=each.item, ranks=each.ranks) for each in former], ExpertMoves())
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
            # Six digits, so that a plan is readable; ``verify`` allows for the rounding.
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
        extra={RECORDS_KEY: problem.chain.costs.records, **_shards(problem), **experts},
    )


def _shards(problem: PartitionProblem) -> dict[str, Any]:
    """The ``x_vocabulary`` of a plan: the number of shards of the output layer on each worker; empty without."""
    shards, workers = problem.chain.vocabulary, len(problem.slots)
    if shards is None:
        return {}
    return {"x_vocabulary": {"shards_per_worker": [shards.count_on(at, workers) for at in range(workers)]}}


def constraints_of(problem: PartitionProblem) -> Constraints:
    """The constraints of a problem as the plan records them."""
    return Constraints(
        microbatches=problem.microbatches,
        min_layers=problem.min_units,
        memory_bytes=tuple(slot.memory_bytes for slot in problem.slots),
        pins=tuple(Pin(item=problem.chain.names[item], stage=stage) for item, stage in problem.pins),
        tied_together=problem.tied_together,
    )


def keep_plan(base: Plan, *, run_id: str, read_to_step: int, balancer: str, reason: str) -> Plan:
    """A plan that keeps the partition of its base.

    Args:
        base: the active plan.
        run_id: of the profile.
        read_to_step: the last step of the profile that was read.
        balancer: name of the balancer.
        reason: one sentence.
    """
    # Predictions, certificate and constraints of the base belong to older costs, so the plan has none.
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
