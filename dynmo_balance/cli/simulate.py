"""``dynmo-plan simulate``: one step of a partition on the clock."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, ClassVar

import typer

from .._common.console import Format, emit, emit_json, human_bytes
from .._common.document import MAX_WIDTH
from .._common.option_groups import grouped
from .._common.panel import Panel
from .options import (
    BalancerOption,
    ClockOptions,
    CompressionFlags,
    CostOptions,
    DeviceOptions,
    FormatOption,
    FusedOption,
    GranularityOption,
    LimitOptions,
    PipelineOptions,
    Recompute,
    ScheduleOption,
    SourceArgument,
)

if TYPE_CHECKING:
    from ..analysis.compression import CompressionResult
    from ..partition.problem import PartitionProblem
    from ..simulation.simulator import Timeline
    from ..simulation.throughput import StepForecast


@dataclass(frozen=True, kw_only=True)
class BandwidthOptions:
    """Bandwidths in GB/s."""

    PANEL: ClassVar[Panel] = Panel("Simulation", rare=True)

    link_gbps: Annotated[
        float | None, typer.Option(min=1e-6, help="GB/s between workers. Default: as in the profile.")
    ] = None
    data_parallel_gbps: Annotated[
        float | None,
        typer.Option(min=0.001, help="GB/s of the gradient all-reduce. Default: the --device's, else as measured."),
    ] = None
    optimizer_gbps: Annotated[
        float | None,
        typer.Option(min=0.001, help="GB/s of the optimizer's memory accesses. Default: half the --device's."),
    ] = None


@dataclass(frozen=True, kw_only=True)
class TimelineOptions:
    """Files and width of the timeline."""

    PANEL: ClassVar[str] = "Output"

    svg: Annotated[Path | None, typer.Option(help="File to write the timeline to as SVG.")] = None
    trace: Annotated[Path | None, typer.Option(help="File to write a Chrome trace to, for Perfetto.")] = None
    width: Annotated[int, typer.Option(min=20, max=MAX_WIDTH, help="Characters of the timeline.")] = 100


@grouped
def simulate(
    *,
    source: SourceArgument,
    plan: Annotated[
        Path | None, typer.Option(help="Plan to simulate. Default: the active plan of a run, else a balancer's.")
    ] = None,
    pipeline: PipelineOptions,
    schedule: ScheduleOption = None,
    granularity: GranularityOption = None,
    limits: LimitOptions,
    balancer: BalancerOption = "exact",
    clock: ClockOptions,
    rates: BandwidthOptions,
    compression: CompressionFlags,
    device: DeviceOptions,
    recompute: Annotated[
        Recompute | None,
        typer.Option(
            help="Activation recomputation of computed costs. Default: as in the profile.", rich_help_panel="Costs"
        ),
    ] = None,
    fused_attention: FusedOption = True,
    costs: CostOptions,
    pictures: TimelineOptions,
    output_format: FormatOption = Format.TEXT,
) -> None:
    """Simulate one step: time, bubble, memory, and the timeline as text (F forward, B backward, . idle).

    With --device the costs are computed for that device, so a profile with only a header is enough. Memory above the
    limit is reported, not refused. With gradient compression the step without it is shown too.
    """
    from dataclasses import replace

    from ..analysis.compression import simulate_compressed
    from ..formats.plan import read_plan_of_profile
    from ..inputs.problem_from_options import ProblemOptions, make_problem, options_of_plan, with_plan_order
    from ..partition.balance import balance
    from ..simulation.simulator import Communication
    from ..simulation.throughput import forecast_step, rates_of

    hardware = device.load()
    loaded = costs.load(
        source,
        device=hardware,
        dtype=device.dtype,
        recompute=None if recompute is None else recompute.value,
        fused_attention=fused_attention,
    )
    if plan is not None:
        read, header = read_plan_of_profile(plan, loaded.header)
        loaded = replace(loaded, plan=read, header=header)
    options = ProblemOptions(**vars(pipeline), **vars(limits), schedule=schedule, granularity=granularity)
    if loaded.plan is not None and pipeline.stages is None:
        problem = with_plan_order(make_problem(loaded, options_of_plan(options, loaded.plan)), loaded.plan)
    else:
        problem = make_problem(loaded, options)
    if rates.link_gbps is not None:
        problem = replace(problem, link_bandwidth=round(rates.link_gbps * 1e9))
    # The active plan, unless the options ask for another number of stages than it has.
    if loaded.plan is not None and len(loaded.plan.stages) == problem.num_stages:
        boundaries = loaded.plan.boundaries
    else:
        # The limit is reported, not enforced: a partition that does not fit is shown rather than refused.
        unlimited = tuple(replace(slot, memory_bytes=None) for slot in problem.slots)
        boundaries = balance(replace(problem, slots=unlimited), balancer).boundaries
    tail = rates_of(loaded.header, hardware, rates.data_parallel_gbps, rates.optimizer_gbps)
    result = simulate_compressed(
        loaded.header,
        problem,
        boundaries,
        tail,
        compression.resolve(hardware),
        round(clock.overhead_us * 1000),
        Communication(clock.transfers),
    )
    _write_pictures(problem, result.timeline, pictures)
    forecast = forecast_step(loaded.header, problem, boundaries, result.timeline, result.rates, hardware, device.dtype)
    _report(problem, boundaries, forecast, pictures.width, output_format, result)


def _report(
    problem: PartitionProblem,
    boundaries: tuple[int, ...],
    forecast: StepForecast,
    width: int,
    output_format: Format,
    result: CompressionResult,
) -> None:
    from ..output.tables import milliseconds, print_stages, timeline_document
    from ..output.timeline import as_text
    from ..simulation.throughput import document_of

    timeline = result.timeline
    if output_format is Format.JSON:
        emit_json({**timeline_document(timeline), **document_of(problem, boundaries, forecast), **result.document})
        return
    print_stages(problem, boundaries, timeline)
    emit(
        f"step {milliseconds(timeline.step_ns, 2)} ms, bubble {timeline.bubble_fraction:.1%}; with reductions and the"
        f" optimizer {milliseconds(forecast.step_ns, 2)} ms"
    )
    of_peak = "" if forecast.flops_fraction is None else f", {forecast.flops_fraction:.1%} of the device's peak"
    emit(f"{forecast.samples_per_s:,.1f} samples/s, {forecast.tokens_per_s:,.0f} tokens/s{of_peak}")
    for line in result.lines:
        emit(line)
    for worker, peak, limit in forecast.over_memory:
        emit(f"worker {worker} needs {human_bytes(peak)}, has {human_bytes(limit)}")
    for at, line in enumerate(as_text(timeline, width)):
        emit(f"{problem.slots[at].worker:>4} |{line}|")


def _write_pictures(problem: PartitionProblem, timeline: Timeline, pictures: TimelineOptions) -> None:
    """Write the SVG and the trace, where a file is named."""
    from .._common.document import encode_json, write_whole
    from ..output.timeline import as_svg, as_trace

    workers = [slot.worker for slot in problem.slots]
    if pictures.svg is not None:
        title = f"{problem.schedule}, {problem.microbatches} microbatches"
        write_whole(pictures.svg, as_svg(timeline, workers, title).encode())
    if pictures.trace is not None:
        write_whole(pictures.trace, encode_json(as_trace(timeline, workers)))
