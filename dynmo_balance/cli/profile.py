"""``dynmo-plan profile``: build, check, show and compare profiles."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from .._common.console import Format, command_list, emit, emit_json, emit_table, progress, say
from .._common.document import MAX_INTEGER, MAX_MICROBATCHES, MAX_RANKS, MAX_SIZE, MAX_STEPS, MAX_WIDTH
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

app = typer.Typer(
    cls=command_list(),
    no_args_is_help=True,
    add_completion=False,
    help="Build, check, show and compare profiles.",
)


@app.command()
def build(
    model: Annotated[Path, typer.Argument(help="A config.json (ours or Hugging Face's) or the directory of one.")],
    output: Annotated[Path, typer.Option("--output", "-o", help="The profile.jsonl to write; must not exist.")],
    device: Annotated[str, typer.Option(help="h200, h100, a100, cpu, or a TOML file with a device's fields.")] = "h100",
    workers: Annotated[int, typer.Option(min=1, max=MAX_RANKS, help="Pipeline workers.")] = 8,
    microbatches: Annotated[int, typer.Option(min=1, max=MAX_MICROBATCHES, help="Microbatches a step.")] = 32,
    micro_batch_size: Annotated[int, typer.Option(min=1, max=MAX_RANKS, help="Samples a microbatch.")] = 1,
    sequence_length: Annotated[
        int | None, typer.Option(min=1, max=MAX_SIZE, help="Tokens. Default: the model's own.")
    ] = None,
    schedule: Annotated[Schedule, typer.Option(help="The schedule of the run.")] = Schedule.ONE_F_ONE_B,
    virtual_stages: Annotated[int, typer.Option(min=1, max=MAX_RANKS, help="Stages on each worker.")] = 1,
    granularity: Annotated[Granularity, typer.Option(help="Where plans may cut.")] = Granularity.LAYER,
    dtype: DtypeOption = Dtype.BFLOAT16,
    tensor_parallel: Annotated[int, typer.Option(min=1, max=MAX_RANKS, help="Ranks that share each layer.")] = 1,
    sequence_parallel: Annotated[
        bool, typer.Option("--sequence-parallel", help="Norms and dropouts are shared by the tensor-parallel ranks.")
    ] = False,
    data_parallel: Annotated[int, typer.Option(min=1, max=MAX_RANKS, help="Replicas.")] = 1,
    recompute: Annotated[Recompute, typer.Option(help="Activation recomputation.")] = Recompute.NONE,
    fused_attention: FusedOption = True,
    technique: Annotated[Technique, typer.Option(help="The scripted trajectory.")] = Technique.STATIC,
    strength: Annotated[
        float | None,
        typer.Option(min=0, max=0.99, help="Final sparsity, frozen share or skew. Default: the technique's own."),
    ] = None,
    steps: Annotated[int, typer.Option(min=1, max=MAX_STEPS, help="Steps of the trajectory.")] = 1,
    noise: Annotated[float, typer.Option(min=0, help="Relative standard deviation of each time.")] = 0.0,
    seed: Annotated[int, typer.Option(min=0, max=MAX_INTEGER, help="Of the noise and the trajectory.")] = 0,
) -> None:
    """Write an analytic profile: what each item would cost on a device, static or over a scripted run."""
    import json

    from .._common.errors import UsageError
    from ..costs.devices import load_device
    from ..formats.profile import write_profile
    from ..inputs.analytic_profile import BuildOptions, build_costs, build_header, build_lines, header_of
    from ..inputs.model_config import load_spec
    from ..inputs.scenarios import DEFAULT_STRENGTH, Script, scenario_steps

    if output.exists():
        raise UsageError(f"{output} exists; profiles are only appended to, so choose another name")
    spec, hardware = load_spec(model), load_device(device)
    options = BuildOptions(
        workers=workers,
        microbatches=microbatches,
        micro_batch_size=micro_batch_size,
        sequence=sequence_length,
        schedule=schedule.value,
        virtual_stages=virtual_stages,
        sequence_parallel=sequence_parallel,
        fused_attention=fused_attention,
        dtype=dtype.value,
        tensor_parallel=tensor_parallel,
        data_parallel=data_parallel,
        recompute=recompute.value,
        granularity=granularity.value,
    )
    document = build_header(spec, hardware, options, output.stem)
    header = header_of(document)
    dense = build_costs(spec, header, hardware, options)
    script = Script(
        steps=steps,
        strength=DEFAULT_STRENGTH[technique.value] if strength is None else strength,
        noise=noise,
        seed=seed,
    )
    lines = []
    with progress("building", steps, "steps") as tick:
        for line in build_lines(document, header, scenario_steps(technique.value, header, dense, script)):
            lines.append(json.dumps(line, allow_nan=False) + "\n")
            if line["record"] == "step":
                tick(1)
    write_profile(output, [line.encode() for line in lines])
    say(f"wrote {output}: {len(header.items)} items, {spec.params:,} parameters, {steps} steps")
    for part in spec.left_out:
        say(f"without {part}, as transformers trains the model")


@app.command()
def check(
    profile: SourceArgument,
    strict: Annotated[bool, typer.Option("--strict", help="Exit 2 for warnings as well.")] = False,
    output_format: FormatOption = Format.TEXT,
) -> None:
    """Check a profile: every broken rule, and warnings for numbers that look like another unit."""
    from ..formats.profile import read_profile
    from ..inputs.profile_source import profile_path
    from ..inputs.profile_summary import warnings_of
    from ._documents import refuse

    path = profile_path(profile)
    segments = read_profile(path)
    warnings = warnings_of(segments)
    if strict:
        refuse(str(path), warnings)
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
    width: Annotated[int, typer.Option(min=10, max=MAX_WIDTH, help="Columns of the map.")] = 60,
    output_format: FormatOption = Format.TEXT,
) -> None:
    """A heat map: one line an item, one column a stretch of steps, darker is dearer."""
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
    after: Annotated[Path, typer.Argument(help="Another with the same items.")],
    window: WindowOption = 20,
    output_format: FormatOption = Format.TEXT,
) -> None:
    """The costs of two profiles side by side, from the last window of each."""
    from .._common.errors import UsageError
    from ..inputs.profile_source import load
    from ..output.tables import milliseconds

    one, two = load(before, window=window), load(after, window=window)
    names = [item.name for item in one.header.items]
    if names != [item.name for item in two.header.items]:
        raise UsageError(f"{before} and {after} do not have the same items")
    rows = list(zip(names, one.costs.total_ns, two.costs.total_ns, strict=True))
    if output_format is Format.JSON:
        emit_json([{"item": name, "before_ns": a, "after_ns": b} for name, a, b in rows])
        return
    cells = [[name, milliseconds(a), milliseconds(b), f"{b / a - 1:+.1%}" if a else "-"] for name, a, b in rows]
    total = [sum(costs) for costs in (one.costs.total_ns, two.costs.total_ns)]
    cells.append(["all", milliseconds(total[0]), milliseconds(total[1]), f"{total[1] / total[0] - 1:+.1%}"])
    emit_table("ms a microbatch", ["item", "before", "after", "change"], cells)


@app.command("import")
def import_(
    measured: Annotated[Path, typer.Argument(help="What another program measured.")],
    header: Annotated[Path, typer.Option(help="A profile whose header describes the model and the run.")],
    output: Annotated[Path, typer.Option("--output", "-o", help="The profile.jsonl to write; must not exist.")],
    kind: Annotated[Importable, typer.Option(help="What kind of file it is.")] = Importable.CHROME_TRACE,
    device: Annotated[str, typer.Option(help="Shares a worker's time among its items, for logs of workers.")] = "h100",
    plan: Annotated[
        Path | None,
        typer.Option(
            help="The partition that was measured. Default: a run's initial plan, else Megatron's even split."
        ),
    ] = None,
) -> None:
    """Put measured times onto a profile's items: a Chrome trace with an event per item, or a log of worker times.

    Logs hold the times of whole workers; these are shared among a worker's items as the analytic model has them.
    """
    from .._common.document import read_lines
    from .._common.errors import UsageError
    from ..costs.analytic import costs_of_header
    from ..costs.devices import load_device
    from ..formats.plan import header_problems, read_plan
    from ..formats.profile import read_profile, write_profile
    from ..inputs.import_profile import import_lines
    from ..inputs.profile_source import initial_plan, profile_path
    from ._documents import refuse

    if output.exists():
        raise UsageError(f"{output} exists; profiles are only appended to, so choose another name")
    path = profile_path(header)
    described = read_profile(path)[0].header
    line = next(read_lines(path)).rstrip()
    model = costs_of_header(described, load_device(device), "float32")
    had = initial_plan(header, described) if plan is None else read_plan(plan)
    if plan is not None and had is not None:
        refuse(str(plan), header_problems(had, described))
    write_profile(output, import_lines(kind.value, measured, line, described, model, had).splitlines())
    say(f"wrote {output}: {len(read_profile(output)[0].steps)} steps")
