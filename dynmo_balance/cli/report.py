"""``dynmo-plan report``: a run as one HTML file."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from .._common.console import print_message
from .._common.document import MAX_STEPS


def report(
    run: Annotated[Path, typer.Argument(help="Run directory.")],
    output: Annotated[Path, typer.Option("--output", "-o", help="HTML file to write.")] = Path("report.html"),
    window: Annotated[int, typer.Option(min=1, max=MAX_STEPS, help="Steps before and after a move to compare.")] = 8,
    trace: Annotated[
        Path | None, typer.Option(help="File to write a Chrome trace of the simulated steps to, for Perfetto.")
    ] = None,
) -> None:
    """Write one self-contained HTML file: loss, steps, layers and stages, memory, plans, and timelines of a step.

    The page needs no network, and zooms on drag. Its size is bounded, at about 2 MB: long runs are reduced to 300
    columns and 600 points per line.
    """
    from dataclasses import replace

    from .._common.document import encode_json, write_whole
    from .._common.errors import UsageError
    from .._common.report.page import encoded
    from .._common.report.units import plural
    from ..inputs.problem_from_options import ProblemOptions, make_problem
    from ..inputs.run_history import read_history
    from ..output.html_report import page
    from ..output.html_report import trace as trace_of

    history = read_history(run, window)
    problem = None
    try:
        problem = None if history.source is None else make_problem(history.source, ProblemOptions())
    except UsageError as error:
        history = replace(history, without_costs=str(error))
    if problem is None:
        print_message(f"no timelines: {history.without_costs}")
    write_whole(output, encoded(page(history, problem, window)))
    if trace is not None:
        write_whole(trace, encode_json(trace_of(history, problem)))
    counts = (len(history.data.step_ns), "step"), (len(history.plan_histories), "plan"), (len(history.moves), "move")
    print_message(f"wrote {output}: {', '.join(plural(count, noun) for count, noun in counts)}")
