"""``dynmo-plan repack``: the fewest workers that keep a share of the throughput."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from .._common.console import Format, emit, emit_table, human_bytes
from .._common.option_groups import grouped
from ..formats.plan import encode_plan
from .options import (
    CostOptions,
    FormatOption,
    GranularityOption,
    LimitOptions,
    PipelineOptions,
    ScheduleOption,
    SourceArgument,
    write_plan,
)

if TYPE_CHECKING:
    from ..planning.repack import RepackTable


@grouped
def repack(
    *,
    source: SourceArgument,
    keep: Annotated[float, typer.Option(min=0.01, max=1.0, help="Share of the throughput to keep.")] = 0.95,
    reference: Annotated[
        str, typer.Option(help="Throughput to compare with. balanced: the exact plan; static: the uniform split.")
    ] = "balanced",
    pipeline: PipelineOptions,
    schedule: ScheduleOption = None,
    granularity: GranularityOption = None,
    limits: LimitOptions,
    output: Annotated[Path | None, typer.Option("--output", "-o", help="File to write the plan to.")] = None,
    costs: CostOptions,
    output_format: FormatOption = Format.TEXT,
) -> None:
    """Find the fewest workers that keep a share of the throughput, and plan for those that remain.

    Every number of workers is tried with the exact balancer. Exits with code 4 when no worker can be released.
    """
    from .._common.errors import UsageError
    from ..inputs.problem_from_options import ProblemOptions, make_problem
    from ..output.tables import print_stages
    from ..planning.repack import NoChangeError, make_release_plan, repack_table

    if reference not in ("balanced", "static"):
        raise UsageError(f"--reference {reference!r}: must be balanced or static")
    loaded = costs.load(source)
    options = ProblemOptions(**vars(pipeline), **vars(limits), schedule=schedule, granularity=granularity)
    problem = make_problem(loaded, options, loaded.plan)
    found = repack_table(problem, keep)
    chosen = found.balanced if reference == "balanced" else found.static
    is_text = output_format is not Format.JSON
    if is_text:
        _show_sizes(found, keep, len(problem.slots))
    if chosen.workers == len(problem.slots):
        raise NoChangeError(
            f"all {chosen.workers} workers are needed to keep {keep:.0%} of the throughput of the {reference} pipeline"
            # In text the table above has already shown why each number was refused.
            + ("" if is_text else _refusals(found))
        )
    small, plan = make_release_plan(loaded.header, problem, loaded.plan, chosen, loaded.last_step, reference)
    write_plan(lambda name: encode_plan(plan, name), output, output_format)
    if not is_text:
        return
    emit(f"release workers {', '.join(map(str, plan.released_workers))}")
    if loaded.plan is not None:
        emit(f"{len(plan.migration.moves)} items move, {human_bytes(plan.migration.bytes)}")
    print_stages(small.problem, small.solution.boundaries, small.timeline)


def _refusals(found: RepackTable) -> str:
    return "".join(f"; {row.workers} workers: {row.refusal}" for row in found.rows if row.refusal is not None)


def _show_sizes(found: RepackTable, keep: float, workers: int) -> None:
    """Print the step on each number of workers, and the fewest that are enough."""
    from ..output.tables import milliseconds

    emit_table(
        f"step on fewer workers (keep {keep:.0%})",
        ["workers", "step ms", "of balanced", "of static"],
        [
            [
                str(row.workers),
                milliseconds(row.step_ns, 2),
                "-" if row.step_ns is None else f"{found.balanced_step_ns / row.step_ns:.1%}",
                "-" if row.step_ns is None else f"{found.static_step_ns / row.step_ns:.1%}",
            ]
            for row in found.rows
        ],
    )
    for row in found.rows:
        if row.refusal is not None:
            emit(f"{row.workers} workers: {row.refusal}")
    for name, packing in (("balanced", found.balanced), ("static uniform", found.static)):
        emit(f"{packing.workers} of {workers} workers keep {packing.throughput_fraction:.1%} of the {name} throughput")
