"""``dynmo-plan simulate``: one step of a partition on the clock."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from .._common.console import Format, emit, emit_json, human_bytes
from .._common.document import MAX_WIDTH
from .options import (
    AtStepOption,
    Balancer,
    BalancerOption,
    BoundaryRankOption,
    DeviceOption,
    Dtype,
    DtypeOption,
    EpilogueOption,
    FactorDeviceOption,
    FeedbackOption,
    FormatOption,
    FusedOption,
    FusedTiesOption,
    GranularityOption,
    MemoryOption,
    MicrobatchesOption,
    Recompute,
    RecomputeOption,
    ReplicaRankOption,
    ScheduleOption,
    SourceArgument,
    StagesOption,
    Transfers,
    VirtualOption,
    WayOption,
    WindowOption,
)

if TYPE_CHECKING:
    from ..analysis.compression import CompressionResult
    from ..partition.problem import PartitionProblem
    from ..simulation.simulator import Timeline
    from ..simulation.throughput import StepForecast


def simulate(
    source: SourceArgument,
    plan: Annotated[
        Path | None, typer.Option(help="The plan to simulate. Default: the active plan of a run, else a balancer's.")
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
    link_gbps: Annotated[
        float | None, typer.Option(min=1e-6, help="GB/s between workers. Default: as in the profile.")
    ] = None,
    data_parallel_gbps: Annotated[
        float | None,
        typer.Option(
            min=0.001,
            help="GB/s of the gradient all-reduce between replicas. Default: the --device's, else as measured.",
        ),
    ] = None,
    optimizer_gbps: Annotated[
        float | None,
        typer.Option(min=0.001, help="GB/s at which the optimizer touches memory. Default: half the --device's."),
    ] = None,
    inter_grad_comp_rank: BoundaryRankOption = None,
    inter_grad_comp_epilogue_only: EpilogueOption = False,
    use_error_feedback: FeedbackOption = False,
    grad_comp_rank: ReplicaRankOption = None,
    selective_grad_comp_way: WayOption = None,
    emb_comm_opt: FusedTiesOption = False,
    compression_device: FactorDeviceOption = None,
    svg: Annotated[Path | None, typer.Option(help="Write the timeline as a picture to this file.")] = None,
    trace: Annotated[
        Path | None, typer.Option(help="Write a Chrome trace, which Perfetto opens, to this file.")
    ] = None,
    width: Annotated[int, typer.Option(min=20, max=MAX_WIDTH, help="Characters of the timeline.")] = 100,
    memory: MemoryOption = None,
    device: DeviceOption = None,
    dtype: DtypeOption = Dtype.FLOAT32,
    recompute: RecomputeOption = Recompute.NONE,
    fused_attention: FusedOption = True,
    window: WindowOption = 20,
    at_step: AtStepOption = None,
    output_format: FormatOption = Format.TEXT,
) -> None:
    """Simulate one step: time, bubble, memory, and the timeline as text (F forward, B backward, . idle).

    With --device the costs are computed for that device, so a profile with only a header is enough. Memory beyond the
    limit is reported, not refused. With gradient compression (dynmo-train's flags) the step without it is shown too.
    """
    from dataclasses import replace

    from ..analysis.compression import CompressionOptions, simulate_compressed
    from ..costs.devices import load_device
    from ..formats.plan import header_problems, read_plan
    from ..inputs.problem_from_options import ProblemOptions, make_problem, options_of_plan, with_plan_order
    from ..inputs.profile_source import load
    from ..partition.registry import balance
    from ..simulation.simulator import Communication
    from ..simulation.throughput import forecast_step, rates_of
    from ._documents import refuse

    hardware = None if device is None else load_device(device)
    loaded = load(
        source,
        window=window,
        at_step=at_step,
        device=hardware,
        dtype=dtype,
        recompute=recompute.value,
        fused_attention=fused_attention,
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
        memory=memory,
    )
    if loaded.plan is not None and stages is None:
        problem = with_plan_order(make_problem(loaded, options_of_plan(options, loaded.plan)), loaded.plan)
    else:
        problem = make_problem(loaded, options)
    if link_gbps is not None:
        problem = replace(problem, link_bandwidth=round(link_gbps * 1e9))
    if loaded.plan is not None and len(loaded.plan.stages) == problem.num_stages:
        boundaries = loaded.plan.boundaries
    else:
        # The limit is reported, not enforced: what does not fit must be seen here rather than refused
        free = tuple(replace(slot, memory_bytes=None) for slot in problem.slots)
        boundaries = balance(replace(problem, slots=free), balancer).boundaries
    rates = rates_of(loaded.header, hardware, data_parallel_gbps, optimizer_gbps)
    question = CompressionOptions(
        boundary_rank=inter_grad_comp_rank,
        epilogue_only=inter_grad_comp_epilogue_only,
        feedback=use_error_feedback,
        replica_rank=grad_comp_rank,
        way=selective_grad_comp_way,
        fuse_ties=emb_comm_opt,
        device=load_device(compression_device) if compression_device else hardware or load_device("cpu"),
    )
    clock = (round(overhead_us * 1000), Communication(transfers))
    answer = simulate_compressed(loaded.header, problem, boundaries, rates, question, *clock)
    timeline = answer.timeline
    _write_pictures(problem, timeline, svg, trace)
    found = forecast_step(loaded.header, problem, boundaries, timeline, answer.rates, hardware, dtype)
    _report(problem, boundaries, timeline, found, width, output_format, answer)


def _report(
    problem: PartitionProblem,
    boundaries: tuple[int, ...],
    timeline: Timeline,
    found: StepForecast,
    width: int,
    output_format: Format,
    answer: CompressionResult,
) -> None:
    from ..output.tables import milliseconds, print_stages, timeline_document
    from ..output.timeline import as_text
    from ..simulation.throughput import document_of

    if output_format is Format.JSON:
        emit_json({**timeline_document(timeline), **document_of(problem, boundaries, found), **answer.document})
        return
    print_stages(problem, boundaries, timeline)
    emit(
        f"step {milliseconds(timeline.step_ns, 2)} ms, bubble {timeline.bubble_fraction:.1%}; with reductions and the"
        f" optimizer {milliseconds(found.step_ns, 2)} ms"
    )
    of_peak = "" if found.flops_fraction is None else f", {found.flops_fraction:.1%} of the device's peak"
    emit(f"{found.samples_per_s:,.1f} samples/s, {found.tokens_per_s:,.0f} tokens/s{of_peak}")
    for line in answer.lines:
        emit(line)
    for worker, peak, limit in found.over_memory:
        emit(f"worker {worker} needs {human_bytes(peak)}, has {human_bytes(limit)}")
    for at, line in enumerate(as_text(timeline, width)):
        emit(f"{problem.slots[at].worker:>4} |{line}|")


def _write_pictures(problem: PartitionProblem, timeline: Timeline, svg: Path | None, trace: Path | None) -> None:
    """Write the files that were asked for."""
    from .._common.document import encode_json, write_whole
    from ..output.timeline import as_svg, as_trace

    workers = [slot.worker for slot in problem.slots]
    if svg is not None:
        title = f"{problem.schedule}, {problem.microbatches} microbatches"
        write_whole(svg, as_svg(timeline, workers, title).encode())
    if trace is not None:
        write_whole(trace, encode_json(as_trace(timeline, workers)))
