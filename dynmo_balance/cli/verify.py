"""``dynmo-plan verify``: an independent check of every number of a plan."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from .._common.console import Format, emit, emit_json, human_bytes
from .._common.document import MAX_LAYERS, MAX_MICROBATCHES, MAX_STEPS
from .options import DeviceOption, Dtype, DtypeOption, FormatOption, GranularityOption, MemoryOption

if TYPE_CHECKING:
    from ..analysis.verify.setting import Setting
    from ..formats.plan import Plan


def verify(
    plan: Annotated[Path, typer.Argument(help="The plan to check.")],
    profile: Annotated[Path, typer.Option(help="The profile.jsonl or run directory that it was made from.")],
    base: Annotated[
        Path | None, typer.Option(help="The plan that it moves from, to check the migration. Default: found in a run.")
    ] = None,
    granularity: GranularityOption = None,
    microbatches: Annotated[
        int | None, typer.Option(min=1, max=MAX_MICROBATCHES, help="Default: as in the plan.")
    ] = None,
    min_layers: Annotated[int | None, typer.Option(min=0, max=MAX_LAYERS, help="Default: as in the plan.")] = None,
    memory: MemoryOption = None,
    window: Annotated[
        int | None,
        typer.Option(min=1, max=MAX_STEPS, help="Step records of the costs. Default: as the plan says, else 20."),
    ] = None,
    device: DeviceOption = None,
    dtype: DtypeOption = Dtype.FLOAT32,
    output_format: FormatOption = Format.TEXT,
) -> None:
    """Recompute every number of a plan from the profile, without the solvers. Exits 1 when one does not hold."""
    from ..analysis.verify.plan import verify as find_faults
    from ..analysis.verify.setting import Overrides, load_setting
    from ..costs.devices import load_device
    from ..formats.plan import plan_path, read_plan
    from ..inputs.problem_from_options import parse_bytes
    from ._faults import FaultsError

    read = read_plan(plan)
    named = Overrides(
        granularity=granularity,
        microbatches=microbatches,
        min_layers=min_layers,
        memory_bytes=None if memory is None else parse_bytes(memory),
        window=window,
    )
    setting = load_setting(
        read, profile, named, device=None if device is None else load_device(device), dtype=dtype.value
    )
    if base is None and profile.is_dir() and read.base_plan_id is not None:
        candidate = plan_path(profile / "plans", read.base_plan_id)
        base = candidate if candidate.is_file() else None
    faults = find_faults(read, setting, None if base is None else read_plan(base), plan.name)
    if output_format is Format.JSON:
        emit_json({"faults": [{"path": f.path, "kind": f.kind, "message": f.message} for f in faults]})
    if faults:
        raise FaultsError(str(plan), faults)
    if output_format is Format.TEXT:
        emit(f"{plan}: every number holds, with {_describe(setting, read)}")


def _describe(setting: Setting, plan: Plan) -> str:
    """What the partition had to obey."""
    constraints = setting.constraints
    count, least = constraints.microbatches, constraints.min_layers
    words = [f"{setting.granularity} granularity", f"{count} microbatch{'' if count == 1 else 'es'}"]
    words.append(f"at least {least} unit{'' if least == 1 else 's'} a stage")
    limits = [limit for limit in constraints.memory_bytes if limit is not None]
    if limits:
        span = sorted({human_bytes(min(limits)), human_bytes(max(limits))})
        words.append(f"{' to '.join(span)} of memory on {len(limits)} of {len(plan.workers)} workers")
    words += [f"{pin.item} in stage {pin.stage}" for pin in constraints.pins]
    if constraints.tied_together:
        words.append("tied items on one worker")
    return ", ".join(words)
