"""``dynmo-plan partition``: one plan."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from .._common.console import Format, emit_json, say
from ..formats.plan import encode_plan
from .options import (
    AtStepOption,
    Balancer,
    BalancerOption,
    DeviceOption,
    Dtype,
    DtypeOption,
    FormatOption,
    GranularityOrAuto,
    MemoryOption,
    MicrobatchesOption,
    MinLayersOption,
    Objective,
    ObjectiveOption,
    PinOption,
    ScheduleOrAuto,
    SourceArgument,
    StagesOption,
    TiedOption,
    VirtualOption,
    WindowOption,
)

SEARCHED = (ScheduleOrAuto.AUTO, ScheduleOrAuto.CUSTOM)

if TYPE_CHECKING:
    from ..formats.plan import Plan
    from ..inputs.profile_source import Source
    from ..partition.problem import PartitionProblem
    from ..planning.plan_builder import Proposal


def partition(
    source: SourceArgument,
    stages: StagesOption = None,
    microbatches: MicrobatchesOption = None,
    schedule: Annotated[
        ScheduleOrAuto | None,
        typer.Option(
            help="auto: search schedules and virtual stages too, and orders of operations made for these costs (custom"
            " searches these alone). Default: as in the profile."
        ),
    ] = None,
    virtual_stages: VirtualOption = None,
    balancer: BalancerOption = Balancer.EXACT,
    objective: ObjectiveOption = Objective.AUTO,
    granularity: Annotated[
        GranularityOrAuto | None,
        typer.Option(help="Where to cut; auto: search both. Default: as in the profile."),
    ] = None,
    memory: MemoryOption = None,
    min_layers: MinLayersOption = 1,
    pin: PinOption = None,
    tied_together: TiedOption = False,
    current: Annotated[
        Path | None,
        typer.Option(help="A plan to move least from. Default: the active plan of a run directory."),
    ] = None,
    output: Annotated[Path | None, typer.Option("--output", "-o", help="Write the plan to this file.")] = None,
    device: DeviceOption = None,
    dtype: DtypeOption = Dtype.FLOAT32,
    window: WindowOption = 20,
    at_step: AtStepOption = None,
    output_format: FormatOption = Format.TEXT,
) -> None:
    """Make one plan, with its certificate, its predictions and what would have to move.

    Exits 3 when no partition obeys the constraints, and says which limit cannot be met.
    """
    from .._common.document import write_whole
    from ..costs.devices import load_device
    from ..formats.plan import header_problems, read_plan, to_document
    from ..inputs.problem_from_options import ProblemOptions, make_problem
    from ..inputs.profile_source import load
    from ..output.tables import print_proposal
    from ..partition import uniform
    from ..simulation.simulator import predict
    from ._documents import refuse

    loaded = load(
        source,
        window=window,
        at_step=at_step,
        device=None if device is None else load_device(device),
        dtype=dtype,
    )
    base = read_plan(current) if current is not None else loaded.plan
    if base is not None:
        refuse(str(current), header_problems(base, loaded.header))
    options = ProblemOptions(
        stages=stages,
        microbatches=microbatches,
        schedule=None if schedule in SEARCHED else schedule,
        virtual_stages=virtual_stages,
        granularity=None if granularity is GranularityOrAuto.AUTO else granularity,
        memory=memory,
        min_layers=min_layers,
        pins=tuple(pin or ()),
        tied_together=tied_together,
    )
    problem = make_problem(loaded, options, base)
    proposal = _proposal(loaded, problem, base, schedule, granularity, balancer, objective)
    plan = _plan(loaded, proposal, base, balancer)
    if output is not None:
        write_whole(output, encode_plan(plan, str(output)))
        say(f"wrote {output}")
    if output_format is Format.JSON:
        emit_json(to_document(plan))
    else:
        static_step_ns = predict(proposal.problem, uniform.boundaries(proposal.problem)).step_ns
        searched = schedule in SEARCHED or granularity is GranularityOrAuto.AUTO
        print_proposal(proposal, static_step_ns, is_minimized=searched or balancer is Balancer.EXACT)


def _proposal(
    loaded: Source,
    problem: PartitionProblem,
    base: Plan | None,
    schedule: ScheduleOrAuto | None,
    granularity: GranularityOrAuto | None,
    balancer: Balancer,
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
    if schedule not in SEARCHED and granularity is not GranularityOrAuto.AUTO:
        return propose(problem, balancer, objective=objective, owner=owner)
    schedules: tuple[str, ...] = (CUSTOM,) if schedule is ScheduleOrAuto.CUSTOM else (problem.schedule,)
    if schedule is ScheduleOrAuto.AUTO:
        schedules = (*SCHEDULES, CUSTOM)
    searched = granularity is GranularityOrAuto.AUTO
    granularities = ("layer", "sublayer") if searched else (granularity or loaded.header.granularity,)
    found = search(loaded.header, problem, schedules, granularities)
    log_search(found)
    solution = dataclasses.replace(found.best.solution, objective="simulated")
    return make_proposal(found.best.problem, solution, owner=owner)


def _plan(loaded: Source, proposal: Proposal, base: Plan | None, balancer: Balancer) -> Plan:
    """The plan document, with its gain where the base runs on as many workers."""
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
        balancer=balancer.value,
        base=base,
        read_to_step=loaded.last_step,
        base_step_ns=base_step_ns,
        reason=f"made by dynmo-plan partition with balancer {balancer.value} from step {loaded.last_step}",
    )
