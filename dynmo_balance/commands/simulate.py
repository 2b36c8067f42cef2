"""``dynmo-plan simulate``: one step of a partition on the clock."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from ..console import Format, emit, emit_json
from ..options import (
    AtStepOption,
    Balancer,
    BalancerOption,
    DeviceOption,
    DtypeOption,
    FormatOption,
    GranularityOption,
    MicrobatchesOption,
    ProblemOptions,
    ScheduleOption,
    SourceArgument,
    StagesOption,
    VirtualOption,
    WindowOption,
)


def simulate(
    source: SourceArgument,
    plan: Annotated[
        Path | None, typer.Option(help="The plan to simulate. Default: the plan in force of a run, else a balancer's.")
    ] = None,
    stages: StagesOption = None,
    microbatches: MicrobatchesOption = None,
    schedule: ScheduleOption = None,
    virtual_stages: VirtualOption = None,
    granularity: GranularityOption = None,
    balancer: BalancerOption = Balancer.EXACT,
    overhead_us: Annotated[float, typer.Option(min=0, help="Microseconds added to every operation.")] = 0.0,
    width: Annotated[int, typer.Option(min=20, help="Characters of the timeline.")] = 100,
    device: DeviceOption = None,
    dtype: DtypeOption = "float32",
    window: WindowOption = 20,
    at_step: AtStepOption = None,
    output_format: FormatOption = Format.TEXT,
) -> None:
    """Simulate one step: time, bubble, memory, and the timeline as text (F forward, B backward, . idle)."""
    from dataclasses import replace

    from ..devices import load_device
    from ..formats.plan import header_problems, read_plan
    from ..partition import balance
    from ..question import make_problem
    from ..render import milliseconds, show_stages, timeline_document
    from ..simulate import predict
    from ..source import load
    from ..timeline import as_text
    from ._documents import refuse

    loaded = load(
        source,
        window=window,
        at_step=at_step,
        device=None if device is None else load_device(device),
        dtype=dtype,
    )
    if plan is not None:
        loaded = replace(loaded, plan=read_plan(plan))
        if loaded.plan is not None:
            refuse(str(plan), header_problems(loaded.plan, loaded.header))
    options = ProblemOptions(
        stages=stages,
        microbatches=microbatches,
        schedule=schedule,
        virtual_stages=virtual_stages,
        granularity=granularity,
    )
    problem = make_problem(loaded, options)
    if loaded.plan is not None and len(loaded.plan.stages) == problem.num_stages:
        boundaries = loaded.plan.boundaries
    else:
        boundaries = balance(problem, balancer).boundaries
    timeline = predict(problem, boundaries, round(overhead_us * 1000))
    if output_format is Format.JSON:
        emit_json(timeline_document(timeline))
        return
    show_stages(problem, boundaries, timeline)
    emit(f"step {milliseconds(timeline.step_ns, 2)} ms, bubble {timeline.bubble_fraction:.1%}")
    for at, line in enumerate(as_text(timeline, width)):
        emit(f"{problem.places[at].worker:>4} |{line}|")
