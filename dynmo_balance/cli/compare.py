"""``dynmo-plan compare``: all balancers side by side."""

from __future__ import annotations

from .._common.console import Format, emit_json, emit_table, human_bytes
from .._common.option_groups import grouped
from .options import (
    CostOptions,
    FormatOption,
    GranularityOption,
    LimitOptions,
    Objective,
    ObjectiveOption,
    PipelineOptions,
    ScheduleOption,
    SourceArgument,
)


@grouped
def compare(
    *,
    source: SourceArgument,
    pipeline: PipelineOptions,
    schedule: ScheduleOption = None,
    granularity: GranularityOption = None,
    limits: LimitOptions,
    objective: ObjectiveOption = Objective.AUTO,
    costs: CostOptions,
    output_format: FormatOption = Format.TEXT,
) -> None:
    """Compare all balancers: bottleneck, step time, gap to the best, bubble, peak memory and bytes to move."""
    from ..analysis.compare import compare as compare_all
    from ..inputs.problem_from_options import ProblemOptions, make_problem
    from ..output.tables import OBJECTIVES, milliseconds

    loaded = costs.load(source)
    options = ProblemOptions(**vars(pipeline), **vars(limits), schedule=schedule, granularity=granularity)
    minimized, rows = compare_all(make_problem(loaded, options, loaded.plan), loaded.plan, objective)
    if output_format is Format.JSON:
        emit_json([row.document() for row in rows])
        return
    emit_table(
        f"{len(rows)} balancers | objective: minimum {OBJECTIVES[minimized]}",
        ["balancer", "bottleneck ms", "step ms", "gap", "bubble", "peak memory", "over the limit", "to move"],
        [
            [
                row.balancer,
                milliseconds(row.bottleneck_ns),
                milliseconds(row.step_ns, 2),
                f"{row.gap:.1%}",
                f"{row.bubble_fraction:.1%}",
                human_bytes(row.peak_memory_bytes),
                "yes" if row.over_memory else "no",
                human_bytes(row.bytes_to_move),
            ]
            for row in rows
        ],
    )
