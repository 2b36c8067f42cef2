"""``dynmo-plan export``: a plan for another framework."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from ..console import emit
from ..options import Target


def export(
    plan: Annotated[Path, typer.Argument(help="The plan to export.")],
    profile: Annotated[Path, typer.Option(help="The profile.jsonl or run directory that it is for.")],
    to: Annotated[Target, typer.Option(help="The framework.")],
    microbatches: Annotated[int | None, typer.Option(min=1, help="For torch-csv. Default: as in the profile.")] = None,
) -> None:
    """Say a plan in the words of Megatron, torchtitan, DeepSpeed, torch or vLLM.

    Plans that cut inside a layer are refused where the framework cannot do that.
    """
    from ..export import TARGETS
    from ..formats.plan import header_problems, read_plan
    from ..formats.profile import read_profile
    from ..source import profile_path
    from ._documents import refuse

    read = read_plan(plan)
    header = read_profile(profile_path(profile))[-1].header
    refuse(str(plan), header_problems(read, header))
    emit(TARGETS[to.value](read, header, microbatches or header.microbatches))
