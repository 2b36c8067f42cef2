"""``dynmo-plan what-if``: predicted steps over a grid."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from ..console import Format, emit, emit_json, say
from ..options import (
    AtStepOption,
    FormatOption,
    GranularityOption,
    MemoryOption,
    MinLayersOption,
    ScheduleOption,
    SourceArgument,
    WindowOption,
)


def what_if(
    source: SourceArgument,
    vary: Annotated[
        list[str] | None,
        typer.Option(
            help="NAME=VALUES, may be given several times. NAME: stages, microbatches, schedule, sparsity (share of the"
            " blocks' weights that are zero), freeze (share of the layers frozen from the front), skew (how much longer"
            " the busiest experts take), exit (tokens left fall as exp(-exit depth)), speed (of the last worker,"
            " over the profile's). VALUES: first:last,"
            " first:last:step, or a,b,c."
        ),
    ] = None,
    keep: Annotated[
        float, typer.Option(min=0.01, max=1.0, help="Share of the throughput to keep when workers are given back.")
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
    schedule: ScheduleOption = None,
    granularity: GranularityOption = None,
    memory: MemoryOption = None,
    min_layers: MinLayersOption = 1,
    window: WindowOption = 20,
    at_step: AtStepOption = None,
    output_format: FormatOption = Format.TEXT,
) -> None:
    """Predict the step over a grid: time, bubble, throughput, and how many workers could be given back.

    Where the dynamics (sparsity, freeze, skew, exit) are varied, the costs are those from before the first pruning or
    freezing of the run, unless --at-step says otherwise. The sparsity model: an item costs its dense time below the
    threshold; from there on overhead + (1 - overhead) x (1 - sparsity) / (1 - threshold) of it. Worker speeds, links
    and memory are those of the profile; workers beyond its own are like its first.
    """
    from ..formats._document import write_whole
    from ..grid import parse_vary
    from ..gridpicture import picture
    from ..question import parse_bytes
    from ..render import row_document, show_rows
    from ..source import load
    from ..sparsity import SparsityModel
    from ..whatif import AXES, DYNAMIC, Grid, headline, rows

    axes = dict(parse_vary(entry, AXES) for entry in vary or ["stages=1:8"])
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
    found = rows(grid, loaded.header, axes, keep)
    answer = headline(found)
    if front:
        found = [row for row in found if row.pareto]
    if svg is not None:
        write_whole(svg, picture(found, list(axes), answer).encode())
    if output_format is Format.JSON:
        emit_json({"answer": answer, "keep": keep, "rows": [row_document(row) for row in found]})
        return
    show_rows(found, keep)
    emit(answer)
