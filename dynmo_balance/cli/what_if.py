"""``dynmo-plan what-if``: predicted steps over a grid."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from .._common.console import Format, emit, emit_json, say
from .options import (
    AtStepOption,
    BoundaryRankOption,
    EpilogueOption,
    FactorDeviceOption,
    FeedbackOption,
    FormatOption,
    FusedTiesOption,
    GranularityOption,
    MemoryOption,
    MinLayersOption,
    ReplicaRankOption,
    ScheduleOption,
    SourceArgument,
    Transfers,
    WayOption,
    WindowOption,
)

if TYPE_CHECKING:
    from ..analysis.compression import CompressionOptions
    from ..analysis.what_if import Grid
    from ..inputs.profile_source import Source
    from ..simulation.simulator import Communication


def what_if(
    source: SourceArgument,
    vary: Annotated[
        list[str] | None,
        typer.Option(
            help="NAME=VALUES, may be given several times. NAME: stages, microbatches, schedule, sparsity (share of the"
            " blocks' weights that are zero), freeze (share of the layers frozen from the front), skew (how much longer"
            " the busiest experts take), exit (tokens left fall as exp(-exit depth)), speed (of the last worker,"
            " over the profile's); of compressed gradients: link-gbps (GB/s between workers and replicas),"
            " inter-grad-comp-rank and grad-comp-rank (0: whole). VALUES: first:last,"
            " first:last:step, or a,b,c."
        ),
    ] = None,
    keep: Annotated[
        float, typer.Option(min=0.01, max=1.0, help="Share of the throughput to keep when workers are released.")
    ] = 0.95,
    sparse_threshold: Annotated[
        float, typer.Option(min=0.0, max=1.0, help="Sparsity from which the sparse form runs; dense below it.")
    ] = 0.85,
    sparse_overhead: Annotated[
        float, typer.Option(min=0.0, max=1.0, help="Share of the dense cost that stays at sparsity 1.")
    ] = 0.15,
    front: Annotated[
        bool, typer.Option("--front", help="Only cells that no other beats in throughput, workers and memory.")
    ] = False,
    svg: Annotated[Path | None, typer.Option(help="Write the grid as a picture to this file.")] = None,
    inter_grad_comp_rank: BoundaryRankOption = None,
    inter_grad_comp_epilogue_only: EpilogueOption = False,
    use_error_feedback: FeedbackOption = False,
    grad_comp_rank: ReplicaRankOption = None,
    selective_grad_comp_way: WayOption = None,
    emb_comm_opt: FusedTiesOption = False,
    compression_device: FactorDeviceOption = None,
    data_parallel_gbps: Annotated[
        float | None, typer.Option(min=0.001, help="GB/s between replicas. Default: that between workers.")
    ] = None,
    overhead_us: Annotated[
        float, typer.Option(min=0, help="Microseconds added to every operation, where compression is asked for.")
    ] = 0.0,
    transfers: Annotated[
        Transfers, typer.Option(help="What a transfer keeps busy, as in simulate, where compression is asked for.")
    ] = Transfers.OVERLAPPED,
    schedule: ScheduleOption = None,
    granularity: GranularityOption = None,
    memory: MemoryOption = None,
    min_layers: MinLayersOption = 1,
    window: WindowOption = 20,
    at_step: AtStepOption = None,
    output_format: FormatOption = Format.TEXT,
) -> None:
    """Predict the step over a grid: time, bubble, throughput, and how many workers could be released.

    Where the dynamics (sparsity, freeze, skew, exit) are varied, the costs are those from before the first pruning or
    freezing of the run, unless --at-step says otherwise. The sparsity model: an item costs its dense time below the
    threshold; from there on overhead + (1 - overhead) x (1 - sparsity) / (1 - threshold) of it. Worker speeds, links
    and memory are those of the profile; workers beyond its own are like its first.

    With compression of gradients (its axes, or the flags of simulate) the table has each step with its reductions
    beside the same step without compression, bytes, the time of making and undoing factors, and when it pays.
    """
    from .._common.document import write_whole
    from .._common.errors import UsageError
    from ..analysis.compression import CompressionOptions
    from ..analysis.sweep_axes import parse_vary
    from ..analysis.what_if import AXES, DYNAMIC, Grid, headline, rows
    from ..analysis.what_if_compression import COMPRESSION_AXES
    from ..costs.devices import load_device
    from ..costs.sparsity import SparsityModel
    from ..inputs.problem_from_options import parse_bytes
    from ..inputs.profile_source import load
    from ..output.svg import grid_chart
    from ..output.tables import print_rows, row_document
    from ..simulation.simulator import Communication

    question = CompressionOptions(
        boundary_rank=inter_grad_comp_rank,
        epilogue_only=inter_grad_comp_epilogue_only,
        feedback=use_error_feedback,
        replica_rank=grad_comp_rank,
        way=selective_grad_comp_way,
        fuse_ties=emb_comm_opt,
        device=load_device(compression_device or "cpu"),
    )
    given = [parse_vary(entry, {**AXES, **COMPRESSION_AXES}) for entry in vary or ()]
    compresses = question.is_enabled or bool({name for name, _ in given} & COMPRESSION_AXES.keys())
    if compresses and (front or svg is not None):
        raise UsageError("--front and --svg are of the grid without compression; leave them out")
    axes = dict(given or ([] if compresses else [parse_vary("stages=1:8", AXES)]))
    dense = at_step is None and bool(set(DYNAMIC) & axes.keys())
    loaded = load(source, window=window, at_step=at_step, before_changes=dense)
    say(f"costs: median of {loaded.costs.records} records, steps {loaded.costs.from_step} to {loaded.costs.to_step}")
    grid = Grid(
        loaded.header,
        loaded.costs,
        model=SparsityModel(threshold=sparse_threshold, overhead=sparse_overhead),
        schedule=schedule,
        granularity=granularity,
        memory_bytes=None if memory is None else parse_bytes(memory),
        min_units=min_layers,
    )
    if compresses:
        clock = (round(overhead_us * 1000), Communication(transfers))
        _compressed(grid, loaded, axes, question, data_parallel_gbps, clock, output_format)
        return
    found = rows(grid, loaded.header, axes, keep)
    answer = headline(found)
    if front:
        found = [row for row in found if row.pareto]
    if svg is not None:
        write_whole(svg, grid_chart(found, list(axes), answer).encode())
    if output_format is Format.JSON:
        emit_json({"answer": answer, "keep": keep, "rows": [row_document(row) for row in found]})
        return
    print_rows(found, keep)
    emit(answer)


def _compressed(
    grid: Grid,
    loaded: Source,
    axes: Mapping[str, Sequence[float | str]],
    question: CompressionOptions,
    replica_gbps: float | None,
    clock: tuple[int, Communication],
    output_format: Format,
) -> None:
    """Tell the grid with compression."""
    from ..analysis.what_if_compression import CompressedGrid, headline
    from ..output.tables import compressed_document, print_compressed
    from ..simulation.throughput import rates_of

    compressed_grid = CompressedGrid(
        grid=grid,
        header=loaded.header,
        question=question,
        rates=rates_of(loaded.header, None, replica_gbps, None),
        replica_gbps=replica_gbps,
        clock=clock,
    )
    found = compressed_grid.rows(axes)
    answer = headline(found)
    if output_format is Format.JSON:
        emit_json({"answer": answer, "rows": [compressed_document(row) for row in found]})
        return
    print_compressed(found)
    emit(answer)
