"""The command line of ``dynmo-ckpt``: reads options, opens the input, and hands over to plans and actions."""

from __future__ import annotations

import gc
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from .._common.console import Format, add_version, command_list, emit, emit_json, emit_table, progress, run_app, say
from .._common.errors import UsageError
from ..formats.choices import Agreement, Dtype, Level, SourceKind, TargetKind
from . import options
from .megatron_tools import register

if TYPE_CHECKING:
    from collections.abc import Mapping

    from ..native.checkpoint import NativeCheckpoint
    from ..operations.convert import ExportPlan
    from ..operations.logits import LogitsCheck

ORDER_OF_WORK = ("info", "verify", "diff", "merge", "split", "reshard", "convert")

app = typer.Typer(
    cls=command_list(*ORDER_OF_WORK),
    no_args_is_help=True,
    rich_markup_mode=None,  # plain help never cuts the name of an option, and needs no rich
    help="Inspect, verify, compare, merge, split and convert checkpoints. No pickle is ever executed.",
)
add_version(app)


@app.command()
def info(
    path: options.Input,
    step: options.Step = None,
    tensors: Annotated[
        str | None, typer.Option(help="List the tensors whose name fits this shell pattern, such as 'layers.0.*'.")
    ] = None,
    ignore_config: options.IgnoreConfig = None,
    report: options.Report = Format.TEXT,
) -> None:
    """Show what a checkpoint holds: run, model, partition, pruning, tensors and files. Reads no tensor's bytes.

    A Hugging Face or legacy Megatron directory is shown under the names that it would be converted to.
    """
    from ..native.checkpoint import find_checkpoint, load_manifest
    from ..operations.info import stored_files, summarize, summary_rows, tensor_rows
    from ..readers.detect import detect

    if detect(path) is SourceKind.NATIVE:
        directory, remarks = find_checkpoint(path, step)
        manifest = load_manifest(directory)
        for remark in remarks:
            say(remark)
    else:
        from ..megatron.read import LegacyOptions

        look = LegacyOptions(look_only=True, ignore_config=tuple(ignore_config or ()))
        checkpoint = _open(path, SourceKind.AUTO, step, legacy=look)
        directory, manifest = path, {**checkpoint.manifest, "files": stored_files(checkpoint)}
    summary = summarize(str(directory), manifest)
    if report is Format.JSON:
        chosen = {name: manifest["tensors"][name] for name, *_ in tensor_rows(manifest, tensors)} if tensors else None
        emit_json(summary if chosen is None else {**summary, "tensors": chosen})
        return
    emit_table(str(directory), ("fact", "value"), summary_rows(summary))
    if tensors is not None:
        emit_table("tensors", ("name", "role", "type", "shape", "files"), tensor_rows(manifest, tensors))


@app.command()
def verify(
    path: options.Input,
    step: options.Step = None,
    level: Annotated[
        Level,
        typer.Option(
            help="header: manifest, files, sizes and headers; replicas: copies that must be equal as well, such as "
            "those of legacy Megatron's tensor ranks; full: every byte's checksum as well."
        ),
    ] = Level.FULL,
    against: Annotated[
        Path | None, typer.Option(help="Also compare every tensor with this checkpoint, of any format or topology.")
    ] = None,
    atol: options.Atol = 0.0,
    hf_logits: Annotated[
        Path | None,
        typer.Option(help="Also compare the logits with those of transformers on this Hugging Face directory."),
    ] = None,
    logits_atol: Annotated[float, typer.Option(min=0, help="Largest difference of a logit that passes.")] = 1e-4,
    ignore_config: options.IgnoreConfig = None,
    report: options.Report = Format.TEXT,
) -> None:
    """Check a checkpoint of any format. Exit code 0: nothing is wrong; 1: something is, and every finding is told.

    What has no checksums, such as a Hugging Face directory, is only opened and read to its end, which is said.
    """
    from ..errors import EXIT_DIFFERENCE
    from ..operations.verify import verify_checkpoint

    directory, findings, remarks = verify_checkpoint(path, step, level, tuple(ignore_config or ()))
    for remark in remarks:
        say(remark)
    if against is not None and not findings:
        differing = _differences(directory, against, ("parameter", "buffer", "mask"), atol, step, ignore_config)
        findings += [f"{each['name']}: {each['message']}" for each in differing]
    logits = None
    if hf_logits is not None and not findings:
        logits = _logits(directory, hf_logits, step, ignore_config)
        if not logits["max_abs"] <= logits_atol:
            findings.append(f"logits differ by {logits['max_abs']:.3g}, at most {logits_atol:.3g} passes")
    if report is Format.JSON:
        result = {"path": str(directory), "level": level.value, "ok": not findings, "findings": findings}
        emit_json(result if logits is None else {**result, "logits": logits})
    else:
        for finding in findings:
            emit(finding)
        emit(f"{directory}: {'ok' if not findings else f'{len(findings)} findings'} ({level.value})")
    if findings:
        raise typer.Exit(EXIT_DIFFERENCE)


def _logits(
    directory: Path, hf_directory: Path, step: int | None, ignore_config: options.IgnoreConfig
) -> dict[str, Any]:
    from ..operations.logits import hf_difference

    found = hf_difference(_open_lenient(directory, step, ignore_config), hf_directory)
    say(f"logits of {found['tokens']} tokens differ by {found['max_abs']:.3g} at most")
    return found


@app.command()
def diff(
    left: options.Input,
    right: Annotated[Path, typer.Argument(metavar="OTHER", help="The checkpoint to compare with, of any format.")],
    atol: options.Atol = 0.0,
    with_optimizer: options.WithOptimizer = False,
    ignore_config: options.IgnoreConfig = None,
    report: options.Report = Format.TEXT,
) -> None:
    """Compare two checkpoints tensor by tensor, on any topologies and in any formats. Exit code 1: they differ.

    Rows that pad the vocabulary are left out. Where only one side has pruning masks, they are applied before comparing.
    """
    from ..errors import EXIT_DIFFERENCE

    roles = ("parameter", "buffer", "mask", *(("optimizer",) if with_optimizer else ()))
    found = _differences(left, right, roles, atol, ignore_config=ignore_config)
    if report is Format.JSON:
        emit_json({"left": str(left), "right": str(right), "atol": atol, "equal": not found, "differences": found})
    else:
        for each in found:
            emit(f"{each['name']}: {each['message']}")
        emit(f"{len(found)} tensors differ" if found else "no tensor differs")
    if found:
        raise typer.Exit(EXIT_DIFFERENCE)


def _differences(
    left: Path,
    right: Path,
    roles: tuple[str, ...],
    atol: float,
    step: int | None = None,
    ignore_config: options.IgnoreConfig = None,
) -> list[dict[str, Any]]:
    from ..operations.compare import differences

    sides = [_open_lenient(path, number, ignore_config) for path, number in ((left, step), (right, None))]
    total = sum(content.num_bytes for content in sides[0].tensors.values())
    with progress("compare", total / 1e6, "MB") as tick:
        return [asdict(each) for each in differences(sides[0], sides[1], roles, atol, tick)]


@app.command()
def merge(
    source: options.Input,
    target: options.Output,
    step: options.Step = None,
    with_optimizer: options.WithOptimizer = True,
    jobs: options.Jobs = options.DEFAULT_JOBS,
    verify: options.Verify = True,
    overwrite: options.Overwrite = False,
    plan: options.PlanOnly = False,
    ignore_config: options.IgnoreConfig = None,
    report: options.Report = Format.TEXT,
) -> None:
    """Put the files of all workers together into those of one; tensors, masks and optimizer state stay as they are."""
    from ..native.reshard import whole_partition
    from ..operations.write import Settings

    checkpoint = _open_lenient(source, step, ignore_config)
    how = Settings(jobs=jobs, verify=verify, overwrite=overwrite, plan_only=plan, format=report)
    _write_native(
        checkpoint, target, how, partition=whole_partition(checkpoint.manifest), with_optimizer=with_optimizer
    )


@app.command()
def split(
    source: options.Input,
    target: options.Output,
    tp: options.TensorSize = 1,
    pp: options.PipelineSize = 1,
    vpp: options.VirtualSize = 1,
    partition: options.Counts = None,
    step: options.Step = None,
    with_optimizer: options.WithOptimizer = True,
    jobs: options.Jobs = options.DEFAULT_JOBS,
    verify: options.Verify = True,
    overwrite: options.Overwrite = False,
    plan: options.PlanOnly = False,
    ignore_config: options.IgnoreConfig = None,
    report: options.Report = Format.TEXT,
) -> None:
    """Divide a checkpoint among tensor ranks and pipeline workers; the same as reshard with one replica."""
    state = (with_optimizer, jobs, verify, overwrite, plan, ignore_config, report)
    reshard(source, target, tp, pp, 1, vpp, partition, step, *state)


@app.command()
def reshard(
    source: options.Input,
    target: options.Output,
    tp: options.TensorSize = 1,
    pp: options.PipelineSize = 1,
    dp: options.DataSize = 1,
    vpp: options.VirtualSize = 1,
    partition: options.Counts = None,
    step: options.Step = None,
    with_optimizer: options.WithOptimizer = True,
    jobs: options.Jobs = options.DEFAULT_JOBS,
    verify: options.Verify = True,
    overwrite: options.Overwrite = False,
    plan: options.PlanOnly = False,
    ignore_config: options.IgnoreConfig = None,
    report: options.Report = Format.TEXT,
) -> None:
    """Write a checkpoint of any topology for another one, in one pass, with masks and optimizer state."""
    from ..native.reshard import counted_partition
    from ..operations.write import Settings

    checkpoint = _open_lenient(source, step, ignore_config)
    model = checkpoint.manifest["model"]
    counts = options.layer_counts(options.num_blocks(model), pp * vpp, partition)
    how = Settings(jobs=jobs, verify=verify, overwrite=overwrite, plan_only=plan, format=report)
    _write_native(
        checkpoint,
        target,
        how,
        partition=counted_partition(counts, model),
        tensor_parallel_size=tp,
        data_parallel_size=dp,
        virtual_stages_per_worker=vpp,
        with_optimizer=with_optimizer,
    )


@app.command()
def convert(
    source: options.Input,
    target: options.Output,
    to: Annotated[
        TargetKind,
        typer.Option(
            "--to",
            help="hf: a Hugging Face directory (GPT-2, MegatronBert, Blenderbot, Llama, Mixtral); native: ours; "
            "legacy: Megatron's; both on the topology of --tp, --pp, --vpp and --partition; deepspeed: "
            "Megatron-DeepSpeed's (GPT, Llama) on --tp ranks; dcp: Megatron-core's distributed format (GPT, Llama).",
        ),
    ],
    kind: options.Source = SourceKind.AUTO,
    step: options.Step = None,
    tokenizer: Annotated[
        Path | None, typer.Option(help="Directory with the tokenizer's files; default: those of the input.")
    ] = None,
    max_shard_size: Annotated[str, typer.Option(help="Largest weight file, such as 500MB or 5GB.")] = "5GB",
    make_vocab_size_divisible_by: options.VocabDivisor = 128,
    vocab_size: options.VocabSize = None,
    num_attention_heads: options.NumHeads = None,
    config: options.ModelConfig = None,
    sparse: options.Sparse = False,
    with_optimizer: options.MaybeOptimizer = None,
    with_optimizer_if_present: options.OptimizerIfPresent = False,
    dtype: options.WeightType = Dtype.KEEP,
    tie: options.Tie = True,
    replicas: options.Replicas = Agreement.EQUAL,
    drop: options.Drop = None,
    ignore_config: options.IgnoreConfig = None,
    tp: options.TensorSize = 1,
    pp: options.PipelineSize = 1,
    vpp: options.VirtualSize = 1,
    partition: options.Counts = None,
    checkpoint_version: options.Version = 3.0,
    jobs: options.Jobs = options.DEFAULT_JOBS,
    verify: options.Verify = True,
    check_logits: options.CheckLogits = None,
    overwrite: options.Overwrite = False,
    plan: options.PlanOnly = False,
    report: options.Report = Format.TEXT,
) -> None:
    """Convert a checkpoint to another format.

    To Hugging Face, pruned weights become zeros in place, the vocabulary's padding is cut off and the optimizer's state
    stays behind.
    """
    from ..megatron.read import LegacyOptions
    from ..native.reshard import counted_partition
    from ..operations.convert import plan_hf_export
    from ..operations.write import Settings, write_export

    legacy = LegacyOptions(
        vocab_size=vocab_size,
        num_attention_heads=num_attention_heads,
        sparse=sparse,
        first_replica=replicas is Agreement.FIRST,
        untie=not tie,
        drop=tuple(drop or ()),
        ignore_config=tuple(ignore_config or ()),
        with_optimizer=bool(with_optimizer),
        optimizer_if_present=with_optimizer_if_present and to is not TargetKind.HF,
        config=config,
    )
    if with_optimizer_if_present and with_optimizer is not None:
        raise UsageError("--with-optimizer-if-present: leave out --with-optimizer and --no-optimizer")
    _check_target(to, (tp, pp, vpp, partition), asks_for_state=bool(with_optimizer))
    checkpoint = _open(source, kind, step, make_vocab_size_divisible_by=make_vocab_size_divisible_by, legacy=legacy)
    if with_optimizer_if_present:
        with_optimizer = checkpoint.manifest["optimizer"] is not None
    if tokenizer is not None and not tokenizer.is_dir():
        raise UsageError(f"--tokenizer {tokenizer}: is not a directory")
    how = Settings(jobs=jobs, verify=verify, overwrite=overwrite, plan_only=plan, format=report)
    how = replace(how, logits=_logits_check(source, kind, to, checkpoint, dtype, check_logits))
    if to is TargetKind.NATIVE:
        model = checkpoint.manifest["model"]
        counts = options.layer_counts(options.num_blocks(model), pp * vpp, partition)
        stages = counted_partition(counts, model) if pp * vpp > 1 else checkpoint.manifest["topology"]["partition"]
        topology = {
            "tensor_parallel_size": tp,
            "virtual_stages_per_worker": vpp,
            "dtype": dtype.stored,
            "with_optimizer": with_optimizer is not False,
        }
        _write_native(checkpoint, target, how, partition=stages, tokenizer=tokenizer, **topology)
        return
    if to is TargetKind.HF:
        shard_bytes = options.parse_bytes(max_shard_size)
        export = plan_hf_export(checkpoint, tokenizer=tokenizer, shard_bytes=shard_bytes, dtype=dtype.stored)
    else:
        state = {"dtype": dtype.stored, "with_optimizer": bool(with_optimizer)}
        export = _megatron_export(checkpoint, to, (tp, pp, vpp, partition), checkpoint_version, state)
    write_export(checkpoint.directory, target, export, how)


@app.command("source-digest", hidden=True)
def show_source_digest() -> None:
    """Print a digest of the version, the code and the tables: a cache of conversions is named by it."""
    from .source_digest import source_digest

    emit(source_digest())


def _logits_check(
    source: Path,
    kind: SourceKind,
    to: TargetKind,
    checkpoint: NativeCheckpoint,
    dtype: Dtype,
    asked: bool | None,
) -> LogitsCheck | None:
    """The comparison of logits of a conversion; None with ``--no-check-logits`` and between native checkpoints."""
    from ..operations.logits import LogitsCheck
    from ..readers.detect import detect

    kind = detect(source) if kind is SourceKind.AUTO else kind
    target = SourceKind(to.value)
    if asked is False or (asked is None and kind is target is SourceKind.NATIVE):
        return None
    return LogitsCheck(
        source=checkpoint, source_kind=kind, target_kind=target, dtype=dtype.stored, required=asked is True
    )


def _megatron_export(
    checkpoint: NativeCheckpoint,
    to: TargetKind,
    topology: tuple[int, int, int, str | None],
    version: float,
    state: Mapping[str, Any],
) -> ExportPlan:
    """Plan a checkpoint of one of the Megatrons; ``topology`` is --tp, --pp, --vpp and --partition."""
    from ..operations.convert import plan_core_export, plan_deepspeed_export, plan_legacy_export

    tp, pp, vpp, partition = topology
    if to is TargetKind.DEEPSPEED:
        return plan_deepspeed_export(checkpoint, tensor_parallel_size=tp, **state)
    if to is TargetKind.DCP:
        return plan_core_export(checkpoint, **state)
    return plan_legacy_export(
        checkpoint,
        counts=options.legacy_counts(checkpoint.manifest["model"], pp * vpp, partition),
        tensor_parallel_size=tp,
        virtual_stages_per_worker=vpp,
        version=options.legacy_version(version),
        **state,
    )


def _check_target(to: TargetKind, topology: tuple[int, int, int, str | None], *, asks_for_state: bool) -> None:
    """Raise ``UsageError`` for a topology, or for optimizer state, that the format does not have."""
    if to is TargetKind.DEEPSPEED and topology[1:] != (1, 1, None):
        raise UsageError("--pp, --vpp and --partition go with --to native and --to legacy; deepspeed has one stage")
    if to in (TargetKind.HF, TargetKind.DCP) and topology != (1, 1, 1, None):
        raise UsageError(f"--tp, --pp, --vpp and --partition go with --to native and legacy; {to} has one topology")
    if to is TargetKind.HF and asks_for_state:
        raise UsageError("--with-optimizer: a Hugging Face directory holds no optimizer state")


def _open(source: Path, kind: SourceKind, step: int | None, **imported: Any) -> NativeCheckpoint:
    from ..readers.detect import open_any

    checkpoint, remarks = open_any(source, kind, step, **imported)
    for remark in remarks:
        say(remark)
    return checkpoint


def _open_lenient(source: Path, step: int | None, ignore_config: options.IgnoreConfig) -> NativeCheckpoint:
    """Open an input of any format, without a check of the settings that fit a pattern of ``ignore_config``."""
    from ..megatron.read import LegacyOptions

    given = LegacyOptions(ignore_config=tuple(ignore_config or ()))
    return _open(source, SourceKind.AUTO, step, legacy=given)


def _write_native(
    checkpoint: NativeCheckpoint, target: Path, how: Any, *, tokenizer: Path | None = None, **topology: Any
) -> None:
    """Plan and write a native checkpoint; ``topology`` goes to ``plan_native``."""
    from ..native.reshard import plan_native
    from ..operations.write import write_native
    from ..readers.detect import small_files

    native = plan_native(checkpoint.manifest, checkpoint.tensors, **topology)
    before, after = checkpoint.manifest["topology"], native.manifest["topology"]
    decisions = {
        "workers_before": before["pipeline_parallel_size"] * before["tensor_parallel_size"],
        "workers_after": after["pipeline_parallel_size"] * after["tensor_parallel_size"],
        "with_optimizer": native.manifest["optimizer"] is not None,
        "masks": len(checkpoint.names("mask")),
    }
    write_native(checkpoint.directory, target, native, small_files(checkpoint, tokenizer), decisions, how)


register(app)


def main() -> None:
    """The console script ``dynmo-ckpt``."""
    # The logits check imports torch and transformers, whose objects stay: scanning them takes 0.5 of 3.5 s.
    gc.set_threshold(50_000, 20, 100)
    run_app(app, "dynmo-ckpt")
