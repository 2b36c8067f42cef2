"""``dynmo-plan export``: a plan for another framework."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from .._common.console import emit, say
from .._common.document import MAX_MICROBATCHES
from .options import Target


def export(
    plan: Annotated[Path, typer.Argument(help="The plan to export.")],
    profile: Annotated[Path, typer.Option(help="The profile.jsonl or run directory that it is for.")],
    to: Annotated[Target, typer.Option(help="The framework.")],
    microbatches: Annotated[
        int | None, typer.Option(min=1, max=MAX_MICROBATCHES, help="Microbatches a step. Default: as planned.")
    ] = None,
    target_version: Annotated[
        str | None, typer.Option(help="Release of torchtitan, such as 0.2.2. Default: main.")
    ] = None,
) -> None:
    """Write a plan in the format of Megatron, torchtitan, DeepSpeed, torch or vLLM.

    A plan that the framework would run in another way is refused: other placements, schedules, cuts inside layers.
    """
    from .._common.errors import UsageError
    from ..formats.plan import header_problems, read_plan
    from ..formats.profile import read_profile
    from ..inputs.profile_source import profile_path
    from ..output.export import TARGETS
    from ._documents import refuse

    read = read_plan(plan)
    header = read_profile(profile_path(profile))[-1].header
    refuse(str(plan), header_problems(read, header))
    if target_version is not None and to is not Target.TORCHTITAN:
        raise UsageError(f"--target-version: {to.value} has one format; the option is for torchtitan")
    planned = header.microbatches if read.constraints is None else read.constraints.microbatches
    text = TARGETS[to.value](read, header, microbatches or planned, target_version)
    if read.workers != tuple(range(len(read.workers))):
        say(f"rank r is the r-th of the plan's workers {', '.join(map(str, read.workers))}")
    emit(text)
