"""``dynmo-plan profile``: build, check, show and compare profiles."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, ClassVar

import typer

from .._common.console import Format, emit, emit_json, emit_table, print_message, progress
from .._common.document import MAX_INTEGER, MAX_MICROBATCHES, MAX_RANKS, MAX_SIZE, MAX_STEPS, MAX_WIDTH
from .._common.help import CommandLine
from .._common.option_groups import grouped
from .options import (
    Dtype,
    DtypeOption,
    FormatOption,
    FusedOption,
    Granularity,
    Importable,
    Recompute,
    Schedule,
    SourceArgument,
    Technique,
    WindowOption,
)

app = CommandLine(help="Build, check, show, compare and import profiles.")


@dataclass(frozen=True, kw_only=True)
class RunOptions:
    """How the model is trained; the fields are those of ``BuildOptions``."""

    PANEL: ClassVar[str] = "Run"

    workers: Annotated[int, typer.Option(min=1, max=MAX_RANKS, help="Pipeline workers.")] = 8
    microbatches: Annotated[int, typer.Option(min=1, max=MAX_MICROBATCHES, help="Microbatches per step.")] = 32
    micro_batch_size: Annotated[int, typer.Option(min=1, max=MAX_RANKS, help="Samples per microbatch.")] = 1
    sequence_length: Annotated[
        int | None, typer.Option(min=1, max=MAX_SIZE, help="Tokens per sample. Default: the model's own.")
    ] = None
    schedule: Annotated[Schedule, typer.Option(help="Pipeline schedule of the run.")] = Schedule.ONE_F_ONE_B
    virtual_stages: Annotated[int, typer.Option(min=1, max=MAX_RANKS, help="Stages per worker.")] = 1
    granularity: Annotated[Granularity, typer.Option(help="Where plans may cut.")] = Granularity.LAYER
    dtype: DtypeOption = Dtype.BFLOAT16
    tensor_parallel: Annotated[int, typer.Option(min=1, max=MAX_RANKS, help="Tensor-parallel ranks.")] = 1
    sequence_parallel: Annotated[
        bool, typer.Option("--sequence-parallel", help="Shard norms and dropouts over the tensor-parallel ranks.")
    ] = False
    data_parallel: Annotated[int, typer.Option(min=1, max=MAX_RANKS, help="Data-parallel replicas.")] = 1
    context_parallel: Annotated[
        int, typer.Option(min=1, max=MAX_RANKS, help="Context-parallel ranks, which share the tokens of each sample.")
    ] = 1
    recompute: Annotated[Recompute, typer.Option(help="Activation recomputation.")] = Recompute.NONE
    vocabulary_parallel: Annotated[
        int | None,
        typer.Option(
            min=1, max=4096, help="Shards of word table and output layer, on all workers. Default: whole layers."
        ),
    ] = None
    fused_attention: FusedOption = True


@dataclass(frozen=True, kw_only=True)
class ScriptOptions:
    """The scripted trajectory of a dynamic technique."""

    PANEL: ClassVar[str] = "Dynamic technique"

    technique: Annotated[Technique, typer.Option(help="Scripted trajectory.")] = Technique.STATIC
    strength: Annotated[
        float | None,
        typer.Option(min=0, max=0.99, help="Final sparsity, frozen share or skew. Default: the technique's own."),
    ] = None
    steps: Annotated[int, typer.Option(min=1, max=MAX_STEPS, help="Steps of the trajectory.")] = 1
    noise: Annotated[float, typer.Option(min=0, help="Relative standard deviation of each time.")] = 0.0
    seed: Annotated[int, typer.Option(min=0, max=MAX_INTEGER, help="Seed of the noise and the trajectory.")] = 0


@app.command()
@grouped
def build(
    *,
    model: Annotated[Path, typer.Argument(help="A config.json (DynMo or Hugging Face), or a directory with one.")],
    output: Annotated[Path, typer.Option("--output", "-o", help="The profile.jsonl to write; must not exist.")],
    device: Annotated[str, typer.Option(help="h200, h100, a100, cpu, or a TOML file with a device's fields.")] = "h100",
    run: RunOptions,
    trajectory: ScriptOptions,
) -> None:
    """Write an analytic profile: the costs of each item on a device, static or over a scripted trajectory."""
    import json

    from ..costs.devices import load_device
    from ..formats.profile import write_profile
    from ..inputs.analytic_profile import BuildOptions, build_costs, build_header, build_lines, header_of
    from ..inputs.model_config import load_spec
    from ..inputs.scenarios import DEFAULT_STRENGTH, TrajectorySettings, scenario_steps

    _refuse_existing(output)
    spec, hardware = load_spec(model), load_device(device)
    values = {name: getattr(value, "value", value) for name, value in vars(run).items()}
    options = BuildOptions(sequence=values.pop("sequence_length"), **values)
    document = build_header(spec, hardware, options, output.stem)
    header = header_of(document)
    dense = build_costs(spec, header, hardware, options)
    technique = trajectory.technique.value
    scenario = TrajectorySettings(
        steps=trajectory.steps,
        strength=DEFAULT_STRENGTH[technique] if trajectory.strength is None else trajectory.strength,
        noise=trajectory.noise,
        seed=trajectory.seed,
    )
    lines = []
    with progress("building", trajectory.steps, "steps") as tick:
        for line in build_lines(document, header, scenario_steps(technique, header, dense, scenario)):
            lines.append(json.dumps(line, allow_nan=False) + "\n")
            if line["record"] == "step":
                tick(1)
    write_profile(output, [line.encode() for line in lines])
    print_message(f"wrote {output}: {len(header.items)} items, {spec.params:,} parameters, {trajectory.steps} steps")
    for part in spec.left_out:
        print_message(f"without {part}, which transformers does not train either")


def _refuse_existing(output: Path) -> None:
    """Refuse to overwrite a profile."""
    from .._common.errors import UsageError

    # A profile may be the only record of a run, and a trainer may still append to it.
    if output.exists():
        raise UsageError(f"{output} exists, and profiles are never overwritten; choose another name")


@app.command()
def check(
    profile: SourceArgument,
    strict: Annotated[bool, typer.Option("--strict", help="Exit with code 2 on warnings as well.")] = False,
    output_format: FormatOption = Format.TEXT,
) -> None:
    """Check a profile: every violated rule, and warnings for numbers that look like another unit."""
    from .._common.document import DocumentError
    from ..formats.profile import read_profile
    from ..inputs.profile_source import profile_path
    from ..inputs.profile_summary import warnings_of

    path = profile_path(profile)
    segments = read_profile(path)
    warnings = warnings_of(segments)
    if strict and warnings:
        raise DocumentError(str(path), warnings)
    if output_format is Format.JSON:
        emit_json(
            {
                "segments": len(segments),
                "steps": sum(len(segment.steps) for segment in segments),
                "warnings": [str(warning) for warning in warnings],
            }
        )
        return
    for warning in warnings:
        emit(f"warning: {warning}")
    steps = sum(len(segment.steps) for segment in segments)
    emit(f"{path}: {len(segments)} segments, {steps} steps, {len(warnings)} warnings")


@app.command()
def show(
    profile: SourceArgument,
    width: Annotated[int, typer.Option(min=10, max=MAX_WIDTH, help="Columns of the heat map.")] = 60,
    output_format: FormatOption = Format.TEXT,
) -> None:
    """Print a heat map: one row per item, one column per range of steps; darker is more expensive."""
    from ..formats.profile import read_profile
    from ..inputs.profile_source import profile_path
    from ..inputs.profile_summary import heat_map, heat_values

    segment = next((s for s in reversed(read_profile(profile_path(profile))) if s.steps), None)
    names, values = heat_values(segment, width)
    if output_format is Format.JSON:
        emit_json({"items": names, "ns": values})
        return
    for line in heat_map(names, values):
        emit(line)


@app.command()
def diff(
    before: Annotated[Path, typer.Argument(help="A profile or run directory.")],
    after: Annotated[Path, typer.Argument(help="Another profile or run directory with the same items.")],
    window: WindowOption = 20,
    output_format: FormatOption = Format.TEXT,
) -> None:
    """Compare the costs of two profiles, from the last window of each."""
    from .._common.errors import UsageError
    from ..inputs.profile_source import load
    from ..output.tables import milliseconds

    one, two = load(before, window=window), load(after, window=window)
    names = [item.name for item in one.header.items]
    if names != [item.name for item in two.header.items]:
        raise UsageError(f"{before} and {after}: the items differ; compare profiles of the same model")
    rows = list(zip(names, one.costs.total_ns, two.costs.total_ns, strict=True))
    if output_format is Format.JSON:
        emit_json([{"item": name, "before_ns": a, "after_ns": b} for name, a, b in rows])
        return
    cells = [[name, milliseconds(a), milliseconds(b), f"{b / a - 1:+.1%}" if a else "-"] for name, a, b in rows]
    total = [sum(costs) for costs in (one.costs.total_ns, two.costs.total_ns)]
    cells.append(["all", milliseconds(total[0]), milliseconds(total[1]), f"{total[1] / total[0] - 1:+.1%}"])
    emit_table("ms per microbatch", ["item", "before", "after", "change"], cells)


@app.command("import")
def import_(
    measured: Annotated[Path, typer.Argument(help="File with the measured times.")],
    header: Annotated[Path, typer.Option(help="Profile whose header describes the model and the run.")],
    output: Annotated[Path, typer.Option("--output", "-o", help="The profile.jsonl to write; must not exist.")],
    kind: Annotated[Importable, typer.Option(help="Format of the file.")] = Importable.CHROME_TRACE,
    device: Annotated[
        str, typer.Option(help="Device whose analytic costs divide a worker's time among its items.")
    ] = "h100",
    plan: Annotated[
        Path | None,
        typer.Option(help="Partition that was measured. Default: a run's initial plan, else Megatron's even split."),
    ] = None,
) -> None:
    """Import measured times: a Chrome trace with one event per item, or a log with one time per worker.

    A worker's time is divided among its items in proportion to the analytic cost model.
    """
    from .._common.document import read_lines
    from .._common.errors import UsageError
    from ..costs.analytic import costs_of_header
    from ..costs.devices import load_device
    from ..formats.plan import read_plan_of_profile
    from ..formats.profile import read_profile, write_profile
    from ..inputs.import_profile import import_lines
    from ..inputs.profile_source import initial_plan, profile_path

    _refuse_existing(output)
    path = profile_path(header)
    described = read_profile(path)[0].header
    # The header's own bytes, so that its ``x_`` keys survive, also those without a meaning here.
    line = next(read_lines(path)).rstrip()
    model = costs_of_header(described, load_device(device), "float32")
    if plan is None:
        measured_plan = initial_plan(header, described)
    else:
        measured_plan, planned = read_plan_of_profile(plan, described)
        if planned != described:
            raise UsageError(f"{plan}: has {len(measured_plan.workers)} workers, {path} {len(described.workers)}")
    write_profile(output, import_lines(kind.value, measured, line, described, model, measured_plan).splitlines())
    print_message(f"wrote {output}: {len(read_profile(output)[0].steps)} steps")
