"""``dynmo-plan export``: a plan for another framework."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from .._common.console import emit, print_message
from .._common.document import MAX_MICROBATCHES
from .options import Target


def export(
    plan: Annotated[Path, typer.Argument(help="Plan to export.")],
    profile: Annotated[Path, typer.Option(help="The profile.jsonl or run directory of the plan.")],
    to: Annotated[Target, typer.Option(help="Framework to export to.")],
    microbatches: Annotated[
        int | None, typer.Option(min=1, max=MAX_MICROBATCHES, help="Microbatches per step. Default: as in the plan.")
    ] = None,
    target_version: Annotated[
        str | None, typer.Option(help="torchtitan release, such as 0.2.2. Default: main.")
    ] = None,
) -> None:
    """Write a plan in the format of Megatron, torchtitan, DeepSpeed, torch or vLLM.

    A plan that the framework cannot run exactly is refused: another placement or schedule, or cuts inside layers.
    """
    from .._common.errors import UsageError
    from ..formats.plan import read_plan_of_profile
    from ..formats.profile import read_profile
    from ..inputs.profile_source import profile_path
    from ..output.export import TARGETS

    read, header = read_plan_of_profile(plan, read_profile(profile_path(profile))[-1].header)
    if target_version is not None and to is not Target.TORCHTITAN:
        raise UsageError(f"--target-version: {to.value} has only one format; use it with --to torchtitan")
    planned = header.microbatches if read.constraints is None else read.constraints.microbatches
    text = TARGETS[to.value](read, header, microbatches or planned, target_version)
    # The other frameworks number pipeline ranks from 0. The data on stdout stay usable in a script.
    if read.workers != tuple(range(len(read.workers))):
        print_message(f"pipeline ranks, in order, are the plan's workers {', '.join(map(str, read.workers))}")
    emit(text)
