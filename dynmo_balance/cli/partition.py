"""``dynmo-plan partition``: one plan."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from .._common.console import Format, emit
from .._common.option_groups import grouped
from ..formats.plan import encode_plan
from .options import (
    BalancerOption,
    CostOptions,
    DeviceOptions,
    FormatOption,
    GranularityOrSearch,
    LimitOptions,
    Objective,
    ObjectiveOption,
    PipelineOptions,
    ScheduleOrSearch,
    SourceArgument,
    write_plan,
)

if TYPE_CHECKING:
    from ..formats.plan import Plan
    from ..inputs.profile_source import ProfileSource
    from ..partition.problem import PartitionProblem
    from ..planning.plan_builder import Proposal

SEARCHED = (ScheduleOrSearch.AUTO, ScheduleOrSearch.CUSTOM)


@grouped
def partition(
    *,
    source: SourceArgument,
    pipeline: PipelineOptions,
    schedule: Annotated[
        ScheduleOrSearch | None,
        typer.Option(
            help="auto: search schedules, virtual stages and custom orders of operations; custom: search custom orders"
            " only. Default: as in the profile."
        ),
    ] = None,
    balancer: BalancerOption = "exact",
    objective: ObjectiveOption = Objective.AUTO,
    granularity: Annotated[
        GranularityOrSearch | None,
        typer.Option(help="Where to cut; auto: search both. Default: as in the profile."),
    ] = None,
    limits: LimitOptions,
    pin: Annotated[
        list[str] | None, typer.Option(help="NAME:STAGE: keep an item or a layer on a stage. Repeatable.")
    ] = None,
    tied_together: Annotated[
        bool,
        typer.Option(
            "--tied-together", help="Keep items that share a weight on one worker, such as the ends with zb-v."
        ),
    ] = False,
    current: Annotated[
        Path | None,
        typer.Option(help="Plan to migrate from with the fewest bytes. Default: the active plan of a run directory."),
    ] = None,
    output: Annotated[Path | None, typer.Option("--output", "-o", help="File to write the plan to.")] = None,
    device: DeviceOptions,
    costs: CostOptions,
    output_format: FormatOption = Format.TEXT,
) -> None:
    """Make one plan with its certificate, predictions and migration.

    Exits with code 3 when no partition satisfies the constraints, and names the constraint that cannot be met.
    """
    from dataclasses import replace

    from ..analysis.explain import shards_remedy
    from ..formats.plan import read_plan_of_profile
    from ..inputs.problem_from_options import ProblemOptions, make_problem
    from ..output.tables import print_proposal
    from ..partition import uniform
    from ..simulation.simulator import predict

    loaded = costs.load(source, device=device.load(), dtype=device.dtype)
    base, header = (loaded.plan, loaded.header) if current is None else read_plan_of_profile(current, loaded.header)
    loaded = replace(loaded, header=header)
    options = ProblemOptions(
        **vars(pipeline),
        **vars(limits),
        schedule=None if schedule in SEARCHED else schedule,
        granularity=None if granularity is GranularityOrSearch.AUTO else granularity,
        pins=tuple(pin or ()),
        tied_together=tied_together,
    )
    problem = make_problem(loaded, options, base)
    proposal = _proposal(loaded, problem, base, schedule, granularity, balancer, objective)
    plan = _plan(loaded, proposal, base, balancer)
    write_plan(lambda name: encode_plan(plan, name), output, output_format)
    if output_format is not Format.JSON:
        static_step_ns = predict(proposal.problem, uniform.boundaries(proposal.problem)).step_ns
        is_searched = schedule in SEARCHED or granularity is GranularityOrSearch.AUTO
        print_proposal(proposal, static_step_ns, is_minimized=is_searched or balancer == "exact")
        remedy = shards_remedy(loaded.header, proposal.problem, proposal.timeline.step_ns) if is_searched else None
        if remedy is not None:
            emit(remedy)


def _proposal(
    loaded: ProfileSource,
    problem: PartitionProblem,
    base: Plan | None,
    schedule: ScheduleOrSearch | None,
    granularity: GranularityOrSearch | None,
    balancer: str,
    objective: Objective,
) -> Proposal:
    """The balancer's proposal, or the best of a search."""
    import dataclasses

    from ..analysis.search import search
    from ..formats.plan import CUSTOM
    from ..output.tables import log_search
    from ..planning.plan_builder import make_proposal, propose
    from ..schedules.registry import SCHEDULES

    owner = None if base is None else base.owner
    if schedule not in SEARCHED and granularity is not GranularityOrSearch.AUTO:
        return propose(problem, balancer, objective=objective, owner=owner)
    schedules: tuple[str, ...] = (CUSTOM,) if schedule is ScheduleOrSearch.CUSTOM else (problem.schedule,)
    if schedule is ScheduleOrSearch.AUTO:
        schedules = (*SCHEDULES, CUSTOM)
    searched = granularity is GranularityOrSearch.AUTO
    granularities = ("layer", "sublayer") if searched else (granularity or loaded.header.granularity,)
    found = search(loaded.header, problem, schedules, granularities)
    log_search(found)
    # A search compares simulated steps, also where the winner was left with its minimum bottleneck.
    solution = dataclasses.replace(found.best.solution, objective="simulated")
    return make_proposal(found.best.problem, solution, owner=owner)


def _plan(loaded: ProfileSource, proposal: Proposal, base: Plan | None, balancer: str) -> Plan:
    """The plan document; it has a gain where the base has the same number of workers."""
    from ..inputs.problem_from_options import problem_under_plan
    from ..planning.plan_builder import to_plan
    from ..simulation.simulator import predict

    base_step_ns = None
    if base is not None and len(base.workers) == len(proposal.problem.slots):
        active = problem_under_plan(proposal.problem, loaded.header, base)
        base_step_ns = None if active is None else predict(active, base.boundaries).step_ns
    return to_plan(
        proposal,
        run_id=loaded.header.run_id,
        balancer=balancer,
        base=base,
        read_to_step=loaded.last_step,
        base_step_ns=base_step_ns,
        reason=f"dynmo-plan partition, balancer {balancer}, costs up to step {loaded.last_step}",
    )
