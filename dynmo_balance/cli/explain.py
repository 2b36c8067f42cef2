"""``dynmo-plan explain``: what limits a plan and what would help."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from .._common.console import Format, emit, emit_json
from .._common.option_groups import grouped
from .options import CostOptions, FormatOption, Objective, ObjectiveOption, SourceArgument, StagesOption


@grouped
def explain(
    *,
    source: SourceArgument,
    plan: Annotated[
        Path | None, typer.Option(help="Plan to explain. Default: the active plan of a run, else the exact one.")
    ] = None,
    stages: StagesOption = None,
    objective: ObjectiveOption = Objective.AUTO,
    costs: CostOptions,
    output_format: FormatOption = Format.TEXT,
) -> None:
    """Explain what limits a plan and what would help next; each remedy is simulated first."""
    from dataclasses import replace

    from ..analysis.explain import explain_plan
    from ..formats.plan import read_plan_of_profile
    from ..inputs.problem_from_options import ProblemOptions, make_problem, options_of_plan, with_plan_order
    from ..partition.balance import certify
    from ..planning.plan_builder import propose
    from ..simulation.simulator import predict

    loaded = costs.load(source)
    if plan is not None:
        read, header = read_plan_of_profile(plan, loaded.header)
        loaded = replace(loaded, plan=read, header=header)
    options = ProblemOptions(stages=stages)
    problem = make_problem(loaded, options)
    if loaded.plan is not None and stages is None:
        problem = with_plan_order(make_problem(loaded, options_of_plan(options, loaded.plan)), loaded.plan)
    best = propose(problem, "exact", objective=objective)
    if loaded.plan is not None and stages is None:
        solution = certify(problem, loaded.plan.boundaries, best.solution)
        timeline = predict(problem, solution.boundaries)
        sentences = explain_plan(loaded.header, problem, solution, timeline, best.timeline)
    else:
        sentences = explain_plan(loaded.header, problem, best.solution, best.timeline)
    if output_format is Format.JSON:
        emit_json({"sentences": sentences})
        return
    for sentence in sentences:
        emit(sentence)
