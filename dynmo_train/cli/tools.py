"""``dynmo-train compare`` and ``monitor``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from .._common.console import Format, emit, emit_json, emit_table, print_message
from .._common.document import write_whole


def compare(
    first: Annotated[Path, typer.Argument(help="Run directory: numerator of the step-time ratio.")],
    second: Annotated[Path, typer.Argument(help="Run directory with the same computation, placed differently.")],
    rtol: Annotated[
        float, typer.Option("--rtol", min=0, help="Relative difference of losses and norms that is accepted.")
    ] = 0.0,
    html: Annotated[Path | None, typer.Option("--html", help="HTML file to write charts of both runs to.")] = None,
    form: Annotated[Format, typer.Option("--format", help="Output format.")] = Format.TEXT,
) -> None:
    """Compare two runs step by step: bit-identity of losses, and step times.

    Exits with code 1 if a loss or gradient norm of a common step differs by more than --rtol.
    """
    from ..trainer.monitoring.compare_runs import compare_runs, comparison_rows

    result = compare_runs(first, second)
    if html is not None:
        from .._common.report.page import encoded
        from ..trainer.monitoring.compare_report import compare_page

        write_whole(html, encoded(compare_page(first, second, result)))
        print_message(f"wrote {html}: {result.steps} common step{'' if result.steps == 1 else 's'}")
    if form is Format.JSON:
        emit_json(result.document())
    else:
        emit_table(
            f"{result.steps} common step{'' if result.steps == 1 else 's'}",
            ("", first.name, second.name),
            comparison_rows(result),
        )
        emit(f"step time ratio {result.ratio:.2f}; after the last move {result.ratio_steady:.2f}")
        emit(result.verdict)
    raise typer.Exit(0 if result.identical or result.largest_difference <= rtol else 1)


def monitor(
    run: Annotated[Path, typer.Argument(help="Run directory.")],
    once: Annotated[bool, typer.Option("--once", help="Print the current state and exit.")] = False,
    every_s: Annotated[float, typer.Option("--every-s", min=0.1, help="Seconds between updates.")] = 2.0,
    peak_tflops: Annotated[
        float | None,
        typer.Option("--peak-tflops", min=1e-6, help="Peak TFLOP/s per device, for MFU; known for A100, H100, H200."),
    ] = None,
    form: Annotated[Format, typer.Option("--format", help="Output format; json implies --once.")] = Format.TEXT,
) -> None:
    """Monitor a run until it ends: loss, tokens/s, stage load, bubble, plans.

    On a terminal the view is updated in place, and `q` quits. Elsewhere the current state is printed once.
    """
    from ..trainer.monitoring.monitor import format_status, is_ascii_output, is_live_terminal, watch
    from ..trainer.monitoring.run_status import read_run_status, status_document

    peak_flops_per_s = peak_tflops * 1e12 if peak_tflops is not None else None
    if form is Format.JSON:
        emit_json(status_document(read_run_status(run, peak_flops_per_s)))
    elif once or not is_live_terminal():
        emit(format_status(read_run_status(run, peak_flops_per_s), ascii_only=is_ascii_output()))
    else:
        watch(run, every_s, peak_flops_per_s)
