"""``dynmo-plan simulate``: one step of a partition on the clock."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

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
    Transfers,
    VirtualOption,
    WindowOption,
)

if TYPE_CHECKING:
    from ..problem import Problem
    from ..simulate import Timeline


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
    transfers: Annotated[
        Transfers,
        typer.Option(help="overlapped: workers go on; serial: so they do, one tensor a link; blocking: both wait."),
    ] = Transfers.OVERLAPPED,
    data_parallel_gbps: Annotated[
        float | None,
        typer.Option(min=0.001, help="GB/s of the gradient all-reduce between replicas. Default: not counted."),
    ] = None,
    optimizer_gbps: Annotated[
        float | None, typer.Option(min=0.001, help="GB/s at which the optimizer touches memory. Default: not counted.")
    ] = None,
    svg: Annotated[Path | None, typer.Option(help="Write the timeline as a picture to this file.")] = None,
    trace: Annotated[
        Path | None, typer.Option(help="Write a Chrome trace, which Perfetto opens, to this file.")
    ] = None,
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
    from ..question import make_problem, of_plan, with_order
    from ..render import milliseconds, show_stages, timeline_document
    from ..simulate import Communication, predict
    from ..source import load
    from ..tail import TailOptions, tail_of
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
    if loaded.plan is not None and stages is None:
        problem = with_order(make_problem(loaded, of_plan(options, loaded.plan)), loaded.plan)
    else:
        problem = make_problem(loaded, options)
    if loaded.plan is not None and len(loaded.plan.stages) == problem.num_stages:
        boundaries = loaded.plan.boundaries
    else:
        boundaries = balance(problem, balancer).boundaries
    timeline = predict(problem, boundaries, round(overhead_us * 1000), Communication(transfers))
    _pictures(problem, timeline, svg, trace)
    tail = tail_of(
        problem,
        boundaries,
        timeline,
        TailOptions(
            data_parallel=loaded.header.data_parallel_size,
            data_parallel_bandwidth=None if data_parallel_gbps is None else round(data_parallel_gbps * 1e9),
            memory_bandwidth=None if optimizer_gbps is None else round(optimizer_gbps * 1e9),
        ),
    )
    if output_format is Format.JSON:
        emit_json({**timeline_document(timeline), "step_with_tail_ns": tail.step_ns})
        return
    show_stages(problem, boundaries, timeline)
    emit(
        f"step {milliseconds(timeline.step_ns, 2)} ms, bubble {timeline.bubble_fraction:.1%}; with reductions and the"
        f" optimizer {milliseconds(tail.step_ns, 2)} ms"
    )
    for at, line in enumerate(as_text(timeline, width)):
        emit(f"{problem.places[at].worker:>4} |{line}|")


def _pictures(problem: Problem, timeline: Timeline, svg: Path | None, trace: Path | None) -> None:
    """Write the files that were asked for."""
    from ..drawing import as_svg, as_trace
    from ..formats._document import encode_json, write_whole

    workers = [place.worker for place in problem.places]
    if svg is not None:
        title = f"{problem.schedule}, {problem.microbatches} microbatches"
        write_whole(svg, as_svg(timeline, workers, title).encode())
    if trace is not None:
        write_whole(trace, encode_json(as_trace(timeline, workers)))
