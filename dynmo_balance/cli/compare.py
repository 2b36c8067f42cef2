"""``dynmo-plan compare``: all balancers side by side."""

from __future__ import annotations

from .._common.console import Format, emit_json, emit_table, human_bytes
from .options import (
    AtStepOption,
    FormatOption,
    GranularityOption,
    MemoryOption,
    MicrobatchesOption,
    MinLayersOption,
    Objective,
    ObjectiveOption,
    ScheduleOption,
    SourceArgument,
    StagesOption,
    VirtualOption,
    WindowOption,
)


def compare(
    source: SourceArgument,
    stages: StagesOption = None,
    microbatches: MicrobatchesOption = None,
    schedule: ScheduleOption = None,
    virtual_stages: VirtualOption = None,
    granularity: GranularityOption = None,
    memory: MemoryOption = None,
    min_layers: MinLayersOption = 1,
    objective: ObjectiveOption = Objective.AUTO,
    window: WindowOption = 20,
    at_step: AtStepOption = None,
    output_format: FormatOption = Format.TEXT,
) -> None:
    """All balancers side by side: bottleneck, step time, gap by the objective, bubble, memory and bytes to move."""
    from ..analysis.compare import compare as compare_all
    from ..inputs.problem_from_options import ProblemOptions, make_problem
    from ..inputs.profile_source import load
    from ..output.tables import OBJECTIVES, milliseconds

    loaded = load(source, window=window, at_step=at_step)
    options = ProblemOptions(
        stages=stages,
        microbatches=microbatches,
        schedule=schedule,
        virtual_stages=virtual_stages,
        granularity=granularity,
        memory=memory,
        min_layers=min_layers,
    )
    minimized, rows = compare_all(make_problem(loaded, options, loaded.plan), loaded.plan, objective)
    if output_format is Format.JSON:
        emit_json([row.document() for row in rows])
        return
    emit_table(
        f"{len(rows)} balancers | objective: least {OBJECTIVES[minimized]}",
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
