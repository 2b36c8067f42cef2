"""``dynmo-plan partition``: one plan."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from ..console import Format, emit_json, say
from ..options import (
    AtStepOption,
    Balancer,
    BalancerOption,
    DeviceOption,
    DtypeOption,
    FormatOption,
    GranularityOption,
    MemoryOption,
    MicrobatchesOption,
    MinLayersOption,
    Objective,
    ObjectiveOption,
    PinOption,
    ProblemOptions,
    ScheduleOption,
    SourceArgument,
    StagesOption,
    VirtualOption,
    WindowOption,
)


def partition(
    source: SourceArgument,
    stages: StagesOption = None,
    microbatches: MicrobatchesOption = None,
    schedule: ScheduleOption = None,
    virtual_stages: VirtualOption = None,
    balancer: BalancerOption = Balancer.EXACT,
    objective: ObjectiveOption = Objective.AUTO,
    granularity: GranularityOption = None,
    memory: MemoryOption = None,
    min_layers: MinLayersOption = 1,
    pin: PinOption = None,
    current: Annotated[
        Path | None,
        typer.Option(help="A plan to move least from. Default: the plan in force of a run directory."),
    ] = None,
    output: Annotated[Path | None, typer.Option("--output", "-o", help="Write the plan to this file.")] = None,
    device: DeviceOption = None,
    dtype: DtypeOption = "float32",
    window: WindowOption = 20,
    at_step: AtStepOption = None,
    output_format: FormatOption = Format.TEXT,
) -> None:
    """Make one plan, with its certificate, its predictions and what would have to move.

    Exits 3 when no partition obeys the constraints, and says which limit cannot be met.
    """
    from ..devices import load_device
    from ..formats._document import encode_json, write_whole
    from ..formats.plan import header_problems, read_plan, to_document
    from ..partition import uniform
    from ..planning import propose, to_plan
    from ..question import make_problem
    from ..render import show_proposal
    from ..simulate import predict
    from ..source import load
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
        schedule=schedule,
        virtual_stages=virtual_stages,
        granularity=granularity,
        memory=memory,
        min_layers=min_layers,
        pins=tuple(pin or ()),
    )
    problem = make_problem(loaded, options, base)
    owner = None if base is None else base.owner
    proposal = propose(problem, balancer, objective=objective, owner=owner)
    same_workers = base is not None and len(base.stages) == problem.num_stages
    base_step = predict(problem, base.boundaries).step_ns if base is not None and same_workers else None
    static = predict(problem, uniform.boundaries(problem)).step_ns
    plan = to_plan(
        proposal,
        run_id=loaded.header.run_id,
        balancer=balancer.value,
        base=base,
        read_to_step=loaded.last_step,
        base_step_ns=base_step,
        reason=f"made by dynmo-plan partition with balancer {balancer.value} from step {loaded.last_step}",
    )
    if output is not None:
        write_whole(output, encode_json(to_document(plan)))
        say(f"wrote {output}")
    if output_format is Format.JSON:
        emit_json(to_document(plan))
    else:
        show_proposal(proposal, static)
