"""``dynmo-plan verify``: an independent check of every number of a plan."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from .._common.console import Format, emit, emit_json, human_bytes
from .._common.document import MAX_LAYERS, MAX_MICROBATCHES, MAX_STEPS, Problem, read_json
from .._common.errors import DynmoError
from .._common.option_groups import grouped
from .options import DeviceOptions, FormatOption, GranularityOption, MemoryOption

if TYPE_CHECKING:
    from ..analysis.verify.inputs import VerifyInputs
    from ..formats.plan import Plan


class PlanMismatchError(DynmoError):
    """Numbers of a plan that differ from the recomputed ones; exit code 1."""

    def __init__(self, source: str, faults: list[Problem]) -> None:
        noun = "number is" if len(faults) == 1 else "numbers are"
        super().__init__("\n  ".join([f"{source}: {len(faults)} {noun} wrong", *map(str, faults)]))


@grouped
def verify(
    *,
    plan: Annotated[Path, typer.Argument(help="Plan to check.")],
    profile: Annotated[Path, typer.Option(help="The profile.jsonl or run directory that the plan was made from.")],
    base: Annotated[
        Path | None, typer.Option(help="Base plan, to check the migration. Default: found in a run directory.")
    ] = None,
    granularity: GranularityOption = None,
    microbatches: Annotated[
        int | None, typer.Option(min=1, max=MAX_MICROBATCHES, help="Default: as in the plan.")
    ] = None,
    min_layers: Annotated[int | None, typer.Option(min=0, max=MAX_LAYERS, help="Default: as in the plan.")] = None,
    memory: MemoryOption = None,
    window: Annotated[
        int | None,
        typer.Option(min=1, max=MAX_STEPS, help="Number of step records. Default: as in the plan, else 20."),
    ] = None,
    device: DeviceOptions,
    output_format: FormatOption = Format.TEXT,
) -> None:
    """Recompute every number of a plan from the profile, without the solvers. Exits with code 1 if one is wrong.

    The plan may be one of dynmo-plan experts.
    """
    from ..analysis.verify.inputs import Overrides, load_inputs
    from ..analysis.verify.plan import verify as find_faults
    from ..formats.expert_plan import FORMAT as EXPERT_PLAN
    from ..formats.plan import parse_plan, plan_path, read_plan
    from ..inputs.problem_from_options import parse_bytes

    document = read_json(plan)
    if isinstance(document, dict) and document.get("format") == EXPERT_PLAN:
        _report(plan, _expert_faults(plan, document, profile, base, window), "tokens and placements", output_format)
        return
    read = parse_plan(document, str(plan))
    overrides = Overrides(
        granularity=granularity,
        microbatches=microbatches,
        min_layers=min_layers,
        memory_bytes=None if memory is None else parse_bytes(memory),
        window=window,
    )
    inputs = load_inputs(read, profile, overrides, device=device.load(), dtype=device.dtype.value)
    # A missing base is not an error here: ``verify`` reports what it could not check as a fault of its own.
    if base is None and profile.is_dir() and read.base_plan_id is not None:
        candidate = plan_path(profile / "plans", read.base_plan_id)
        base = candidate if candidate.is_file() else None
    faults = find_faults(read, inputs, None if base is None else read_plan(base), plan.name)
    _report(plan, faults, _describe(inputs, read), output_format)


def _expert_faults(path: Path, document: object, profile: Path, base: Path | None, window: int | None) -> list[Problem]:
    """The wrong numbers of an expert plan."""
    from ..analysis.verify.expert_plan import verify_experts
    from ..analysis.verify.inputs import DEFAULT_WINDOW
    from ..formats.expert_plan import parse_expert_plan, read_expert_plan
    from ..formats.profile import read_profile
    from ..inputs.profile_source import profile_path

    source = profile_path(profile)
    return verify_experts(
        parse_expert_plan(document, str(path)),
        read_profile(source),
        str(source),
        None if base is None else read_expert_plan(base),
        window=window or DEFAULT_WINDOW,
    )


def _report(plan: Path, faults: list[Problem], described: str, output_format: Format) -> None:
    """Print the result.

    Raises:
        PlanMismatchError: a number is wrong.
    """
    if output_format is Format.JSON:
        emit_json({"faults": [{"path": f.path, "kind": f.kind, "message": f.message} for f in faults]})
    if faults:
        raise PlanMismatchError(str(plan), faults)
    if output_format is Format.TEXT:
        emit(f"{plan}: every number is correct | {described}")


def _describe(inputs: VerifyInputs, plan: Plan) -> str:
    """The constraints of the partition."""
    constraints = inputs.constraints
    count, least = constraints.microbatches, constraints.min_layers
    parts = [f"{inputs.granularity} granularity", f"{count} microbatch{'' if count == 1 else 'es'}"]
    parts.append(f"at least {least} unit{'' if least == 1 else 's'} per stage")
    limits = [limit for limit in constraints.memory_bytes if limit is not None]
    if limits:
        span = sorted({human_bytes(min(limits)), human_bytes(max(limits))})
        parts.append(f"{' to '.join(span)} of memory on {len(limits)} of {len(plan.workers)} workers")
    parts += [f"{pin.item} in stage {pin.stage}" for pin in constraints.pins]
    if constraints.tied_together:
        parts.append("tied items on one worker")
    return ", ".join(parts)
