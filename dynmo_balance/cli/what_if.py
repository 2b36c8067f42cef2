"""``dynmo-plan what-if``: predicted steps over a grid."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, ClassVar

import typer

from .._common.console import Format, emit, emit_json, print_message
from .._common.option_groups import grouped
from .._common.panel import Panel
from .options import (
    ClockOptions,
    CompressionFlags,
    CostOptions,
    FormatOption,
    GranularityOption,
    LimitOptions,
    ScheduleOption,
    SourceArgument,
)

if TYPE_CHECKING:
    from ..analysis.compression import CompressionOptions
    from ..analysis.what_if import Grid
    from ..inputs.profile_source import ProfileSource
    from ..simulation.simulator import Communication


@dataclass(frozen=True, kw_only=True)
class SparsityOptions:
    """The cost model of pruned layers."""

    PANEL: ClassVar[Panel] = Panel("Sparsity model", rare=True)

    sparse_threshold: Annotated[
        float, typer.Option(min=0.0, max=1.0, help="Sparsity from which the sparse format is used; dense below it.")
    ] = 0.85
    sparse_overhead: Annotated[
        float, typer.Option(min=0.0, max=1.0, help="Share of the dense cost that remains at sparsity 1.")
    ] = 0.15


@grouped
def what_if(
    *,
    source: SourceArgument,
    vary: Annotated[
        list[str] | None,
        typer.Option(
            help="NAME=VALUES, repeatable. NAME: stages, microbatches, schedule, sparsity (share of the blocks' weights"
            " that are zero), freeze (share of the layers frozen from the front), skew (extra time of the busiest"
            " experts), exit (active tokens decrease as exp(-exit depth)), speed (of the last worker, relative to the"
            " profile); with gradient compression: link-gbps (GB/s between workers and replicas),"
            " inter-grad-comp-rank and grad-comp-rank (0: uncompressed). VALUES: first:last, first:last:step, or a,b,c."
        ),
    ] = None,
    keep: Annotated[
        float, typer.Option(min=0.01, max=1.0, help="Share of the throughput to keep when workers are released.")
    ] = 0.95,
    sparsity: SparsityOptions,
    front: Annotated[
        bool, typer.Option("--front", help="Show only cells on the Pareto front of throughput, workers and memory.")
    ] = False,
    svg: Annotated[Path | None, typer.Option(help="File to write the grid to as SVG.")] = None,
    compression: CompressionFlags,
    data_parallel_gbps: Annotated[
        float | None,
        typer.Option(
            min=0.001,
            help="GB/s between replicas. Default: that between workers.",
            rich_help_panel=Panel("Gradient compression", rare=True),
        ),
    ] = None,
    clock: ClockOptions,
    schedule: ScheduleOption = None,
    granularity: GranularityOption = None,
    limits: LimitOptions,
    costs: CostOptions,
    output_format: FormatOption = Format.TEXT,
) -> None:
    """Predict the step over a grid: time, bubble, throughput, and how many workers could be released.

    If the dynamics (sparsity, freeze, skew, exit) are varied, the costs are those before the first pruning or freezing
    of the run, unless --at-step is given. The sparsity model: an item costs its dense time below the threshold; from
    there on overhead + (1 - overhead) x (1 - sparsity) / (1 - threshold) of it. Worker speeds, links and memory are
    those of the profile; additional workers are like its first.

    With gradient compression (its axes, or the flags of simulate) the table has each step with its all-reduces next to
    the same step without compression: bytes, compression time, and when compression is worth using. --overhead-us and
    --transfers apply only then.
    """
    from .._common.document import write_whole
    from .._common.errors import UsageError
    from ..analysis.sweep_axes import parse_vary
    from ..analysis.what_if import AXES, DYNAMIC, Grid, headline, rows
    from ..analysis.what_if_compression import COMPRESSION_AXES
    from ..costs.sparsity import SparsityModel
    from ..inputs.problem_from_options import parse_bytes
    from ..output.svg import grid_chart
    from ..output.tables import print_rows, row_document
    from ..simulation.simulator import Communication

    options = compression.resolve()
    varied = [parse_vary(entry, {**AXES, **COMPRESSION_AXES}) for entry in vary or ()]
    is_compressed = options.is_enabled or bool({name for name, _ in varied} & COMPRESSION_AXES.keys())
    if is_compressed and (front or svg is not None):
        raise UsageError("--front and --svg have no grid with compression to show; leave them out")
    # Without --vary: how many workers does this run need?
    axes = dict(varied or ([] if is_compressed else [parse_vary("stages=1:8", AXES)]))
    # A sweep over sparsity multiplies costs, so they must not be those of a model that is pruned already.
    is_dense = costs.at_step is None and bool(set(DYNAMIC) & axes.keys())
    loaded = costs.load(source, before_changes=is_dense)
    print_message(
        f"costs: median of {loaded.costs.records} records, steps {loaded.costs.from_step} to {loaded.costs.to_step}"
    )
    grid = Grid(
        loaded.header,
        loaded.costs,
        model=SparsityModel(threshold=sparsity.sparse_threshold, overhead=sparsity.sparse_overhead),
        schedule=schedule,
        granularity=granularity,
        memory_bytes=None if limits.memory is None else parse_bytes(limits.memory),
        min_units=limits.min_layers,
    )
    if is_compressed:
        operation_clock = (round(clock.overhead_us * 1000), Communication(clock.transfers))
        _report_compressed(grid, loaded, axes, options, data_parallel_gbps, operation_clock, output_format)
        return
    found = rows(grid, loaded.header, axes, keep)
    answer = headline(found, len(loaded.header.workers))
    if front:
        found = [row for row in found if row.pareto]
    if svg is not None:
        write_whole(svg, grid_chart(found, list(axes), answer).encode())
    if output_format is Format.JSON:
        emit_json({"answer": answer, "keep": keep, "rows": [row_document(row) for row in found]})
        return
    print_rows(found, keep)
    emit(answer)


def _report_compressed(
    grid: Grid,
    loaded: ProfileSource,
    axes: Mapping[str, Sequence[float | str]],
    options: CompressionOptions,
    replica_gbps: float | None,
    clock: tuple[int, Communication],
    output_format: Format,
) -> None:
    """Print the grid with compression."""
    from ..analysis.what_if_compression import CompressedGrid, headline
    from ..output.tables import compressed_document, print_compressed
    from ..simulation.throughput import rates_of

    compressed_grid = CompressedGrid(
        grid=grid,
        header=loaded.header,
        question=options,
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
