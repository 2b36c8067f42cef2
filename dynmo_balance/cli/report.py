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
) -> None:
    """Write one self-contained HTML file: steps, stage loads, plans, migrations, timelines and gains."""
    from .._common.document import write_whole
    from .._common.errors import UsageError
    from ..inputs.problem_from_options import ProblemOptions, make_problem
    from ..inputs.profile_source import load
    from ..inputs.run_history import read_history
    from ..output.html_report import html

    history = read_history(run, window)
    try:
        loaded = load(run, window=window)
        problem = make_problem(loaded, ProblemOptions())
    except UsageError as error:
        print_message(f"without timelines: {error}")
        problem = None
    write_whole(output, html(history, problem).encode())
    print_message(
        f"wrote {output}: {len(history.steps)} steps, {len(history.plan_histories)} plans, {len(history.moves)} moves"
    )
