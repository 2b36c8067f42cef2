"""``dynmo-plan calibrate``: the simulator's constants from measured steps."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from .._common.console import Format, emit, emit_json, print_message
from .options import FormatOption


def calibrate(
    run: Annotated[Path, typer.Argument(help="Run directory with its profile and plans.")],
    link: Annotated[
        bool, typer.Option("--link", help="Also fit latency and bandwidth; needs steps under two partitions.")
    ] = False,
    output_format: FormatOption = Format.TEXT,
) -> None:
    """Fit the overhead per operation, and the link's latency and bandwidth, to measured steps.

    Pass the overhead to simulate as --overhead-us.
    """
    from .._common.errors import UsageError
    from ..analysis.calibrate import calibrate as fit
    from ..analysis.calibrate import relative_error, samples_of
    from ..formats.profile import read_profile
    from ..inputs.profile_source import profile_path, warn_of_units
    from ..inputs.run_history import read_plans

    segment = next((s for s in reversed(read_profile(profile_path(run))) if s.steps), None)
    if segment is None:
        raise UsageError(f"{run}: has no step records to calibrate with; record at least one step")
    warn_of_units(run, segment.steps)
    samples = samples_of(segment, read_plans(run / "plans", segment.header))
    found = fit(samples, link)
    # With the link of the profile and no overhead, which is what ``simulate`` uses by default.
    before = relative_error(samples, 0, samples[0].problem.link_latency_ns, samples[0].problem.link_bandwidth)
    for doubt in found.doubts:
        print_message(f"warning: --link: {doubt}")
    if output_format is Format.JSON:
        emit_json(
            {
                "overhead_ns": found.overhead_ns,
                "latency_ns": found.latency_ns,
                "bandwidth_bytes_per_s": found.bandwidth_bytes_per_s,
                "samples": len(samples),
                "error_before": before,
                "error_after": found.error,
            }
        )
        return
    emit(f"overhead: {found.overhead_ns / 1000:.1f} us per operation")
    bandwidth = "unlimited" if found.bandwidth_bytes_per_s is None else f"{found.bandwidth_bytes_per_s / 1e9:.3f} GB/s"
    emit(f"link latency: {found.latency_ns / 1000:.1f} us | bandwidth: {bandwidth}")
    emit(f"error: {before:.1%} before, {found.error:.1%} after, over {len(samples)} ranges of steps")
