"""``dynmo-plan verify``: an independent check of every number of a plan."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from ..console import Format, emit, emit_json
from ..options import FormatOption, GranularityOption, MinLayersOption, ProblemOptions


def verify(
    plan: Annotated[Path, typer.Argument(help="The plan to check.")],
    profile: Annotated[Path, typer.Option(help="The profile.jsonl or run directory that it was made from.")],
    base: Annotated[
        Path | None, typer.Option(help="The plan that it moves from, to check the migration. Default: found in a run.")
    ] = None,
    granularity: GranularityOption = None,
    microbatches: Annotated[int | None, typer.Option(min=1, help="As when the plan was made.")] = None,
    min_layers: MinLayersOption = 1,
    window: Annotated[
        int | None, typer.Option(min=1, help="Step records of the costs. Default: as the plan says, else 20.")
    ] = None,
    output_format: FormatOption = Format.TEXT,
) -> None:
    """Recompute every number of a plan from the profile, without the solvers. Exits 1 when one does not hold."""
    from ..formats.plan import plan_path, read_plan
    from ..planning import RECORDS_KEY
    from ..question import make_problem, with_order
    from ..source import load
    from ..verify import verify as find_faults
    from ._faults import FaultsError

    read = read_plan(plan)
    records = (read.extra or {}).get(RECORDS_KEY)
    counted = window or (records if isinstance(records, int) and records > 0 else 20)
    loaded = load(profile, window=counted, at_step=read.read_to_step or None)
    if base is None and profile.is_dir() and read.base_plan_id is not None:
        candidate = plan_path(profile / "plans", read.base_plan_id)
        base = candidate if candidate.is_file() else None
    options = ProblemOptions(
        stages=len(read.workers),
        schedule=read.schedule,
        virtual_stages=read.virtual_stages_per_worker,
        granularity=granularity,
        microbatches=microbatches,
        min_layers=min_layers,
    )
    problem = with_order(make_problem(loaded, options), read)
    faults = find_faults(read, loaded.header, problem, None if base is None else read_plan(base))
    if output_format is Format.JSON:
        emit_json({"faults": [{"path": f.path, "kind": f.kind, "message": f.message} for f in faults]})
    if faults:
        raise FaultsError(str(plan), faults)
    if output_format is Format.TEXT:
        emit(f"{plan}: every number holds")
