"""The command line of ``dynmo-ckpt``: reads options, opens the input, and hands over to plans and actions."""

from __future__ import annotations

import os
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from .console import Format, emit, emit_json, emit_table, progress, run_app, say
from .errors import UsageError

if TYPE_CHECKING:
    from .native import NativeCheckpoint

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    help="Inspect, verify, merge and convert checkpoints. No pickle is ever executed.",
)


class Level(StrEnum):
    """How closely ``verify`` looks."""

    HEADER = "header"
    FULL = "full"


class Kind(StrEnum):
    """What ``convert`` can write."""

    HF = "hf"


Input = Annotated[
    Path, typer.Argument(metavar="IN", help="A run directory, its checkpoints directory, or one step's directory.")
]
Output = Annotated[Path, typer.Argument(metavar="OUT", help="The directory to write; appears whole or not at all.")]
Step = Annotated[
    int | None, typer.Option("--step", "--iteration", help="Step of a run directory; default: what LATEST names.")
]
Report = Annotated[Format, typer.Option("--format", help="text for people, json for programs.")]
Jobs = Annotated[int, typer.Option(min=1, help="Threads that copy; each needs up to 64 MiB of memory.")]
Overwrite = Annotated[bool, typer.Option("--overwrite", help="Replace OUT if it exists.")]
PlanOnly = Annotated[bool, typer.Option("--plan", help="Only show files, bytes, memory and time; write nothing.")]
Verify = Annotated[bool, typer.Option("--verify/--no-verify", help="Read everything back before it is put in place.")]
DEFAULT_JOBS = min(2, os.cpu_count() or 1)


@app.command()
def info(
    path: Input,
    step: Step = None,
    tensors: Annotated[
        str | None, typer.Option(help="List the tensors whose name fits this shell pattern, such as 'layers.0.*'.")
    ] = None,
    report: Report = Format.TEXT,
) -> None:
    """Show what a checkpoint holds: run, model, partition, pruning, tensors and files. Reads the manifest only."""
    from .info import summarize, summary_rows, tensor_rows
    from .native import find_checkpoint, load_manifest

    directory, remarks = find_checkpoint(path, step)
    for remark in remarks:
        say(remark)
    manifest = load_manifest(directory)
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
    path: Input,
    step: Step = None,
    level: Annotated[
        Level, typer.Option(help="header: manifest, files, sizes and headers; full: every byte's checksum as well.")
    ] = Level.FULL,
    report: Report = Format.TEXT,
) -> None:
    """Check a checkpoint. Exit code 0: nothing is wrong; 1: something is, and every finding is told."""
    from .faults import EXIT_DIFFERENCE
    from .native import checkpoints_dir, latest_faults
    from .verify import full_findings, header_findings

    directory = _step_to_verify(path, step)
    findings = [] if directory == path or step is not None else latest_faults(checkpoints_dir(path))
    if level is Level.HEADER:
        findings += header_findings(directory)
    else:
        with progress("verify", _directory_bytes(directory) / 1e6, "MB") as tick:
            findings += full_findings(directory, tick)
    if report is Format.JSON:
        emit_json({"path": str(directory), "level": level.value, "ok": not findings, "findings": findings})
    else:
        for finding in findings:
            emit(finding)
        emit(f"{directory}: {'ok' if not findings else f'{len(findings)} findings'} ({level.value})")
    if findings:
        raise typer.Exit(EXIT_DIFFERENCE)


def _step_to_verify(path: Path, step: int | None) -> Path:
    """The directory to look at, even if it is not complete: that is what ``verify`` is to find."""
    from .native import STEP_NAME, checkpoints_dir, find_checkpoint, read_latest

    if STEP_NAME.fullmatch(path.name) and path.is_dir():
        return path
    if step is None and not (path / "manifest.json").exists() and path.is_dir():
        folder = checkpoints_dir(path)
        named = read_latest(folder)
        if STEP_NAME.fullmatch(named) and (folder / named).is_dir():
            return folder / named
    return find_checkpoint(path, step)[0]


def _directory_bytes(directory: Path) -> int:
    return sum(path.stat().st_size for path in directory.rglob("*") if path.is_file())


@app.command()
def merge(
    source: Input,
    target: Output,
    step: Step = None,
    with_optimizer: Annotated[
        bool, typer.Option("--with-optimizer/--no-optimizer", help="Take the optimizer's state along.")
    ] = True,
    jobs: Jobs = DEFAULT_JOBS,
    verify: Verify = True,
    overwrite: Overwrite = False,
    plan: PlanOnly = False,
    report: Report = Format.TEXT,
) -> None:
    """Put the files of all workers together into those of one; tensors, masks and optimizer state stay as they are."""
    from .actions import Settings, write_native
    from .reshard import plan_native, whole_partition

    checkpoint = _open(source, step)
    native = plan_native(
        checkpoint.manifest,
        checkpoint.tensors,
        partition=whole_partition(checkpoint.manifest),
        with_optimizer=with_optimizer,
    )
    topology = checkpoint.manifest["topology"]
    decisions = {
        "merged_workers": topology["pipeline_parallel_size"] * topology["tensor_parallel_size"],
        "with_optimizer": with_optimizer and checkpoint.manifest["optimizer"] is not None,
        "masks": len(checkpoint.names("mask")),
    }
    how = Settings(jobs=jobs, verify=verify, overwrite=overwrite, plan_only=plan, format=report)
    write_native(checkpoint.directory, target, native, _other_files(checkpoint), decisions, how)


@app.command()
def convert(
    source: Input,
    target: Output,
    to: Annotated[Kind, typer.Option("--to", help="hf: a Hugging Face directory, opened as GPT2LMHeadModel.")],
    step: Step = None,
    tokenizer: Annotated[
        Path | None, typer.Option(help="Directory with the tokenizer's files; default: those of the checkpoint.")
    ] = None,
    max_shard_size: Annotated[str, typer.Option(help="Largest weight file, such as 500MB or 5GB.")] = "5GB",
    jobs: Jobs = DEFAULT_JOBS,
    verify: Verify = True,
    overwrite: Overwrite = False,
    plan: PlanOnly = False,
    report: Report = Format.TEXT,
) -> None:
    """Convert a checkpoint to another format; pruned weights become zeros in place, optimizer state stays behind."""
    from .actions import Settings, write_export
    from .convert import plan_hf_export

    checkpoint = _open(source, step)
    if tokenizer is not None and not tokenizer.is_dir():
        raise UsageError(f"--tokenizer {tokenizer}: is not a directory")
    export = plan_hf_export(checkpoint, tokenizer=tokenizer, shard_bytes=_parse_bytes(max_shard_size))
    how = Settings(jobs=jobs, verify=verify, overwrite=overwrite, plan_only=plan, format=report)
    write_export(checkpoint.directory, target, export, how)


def _open(source: Path, step: int | None) -> NativeCheckpoint:
    from .native import find_checkpoint, open_native

    directory, remarks = find_checkpoint(source, step)
    for remark in remarks:
        say(remark)
    return open_native(directory)


def _other_files(checkpoint: NativeCheckpoint) -> dict[str, bytes]:
    """The small files beside the shards, such as the tokenizer's; an older record of a conversion is left out."""
    shards = {shard["file"] for entry in checkpoint.manifest["tensors"].values() for shard in entry["shards"]}
    names = set(checkpoint.manifest["files"]) - shards - {"conversion.json"}
    return {name: (checkpoint.directory / name).read_bytes() for name in sorted(names)}


def _parse_bytes(text: str) -> int:
    units = {"KB": 1e3, "MB": 1e6, "GB": 1e9, "TB": 1e12, "B": 1}
    upper = text.strip().upper()
    unit = next((unit for unit in units if upper.endswith(unit)), "")
    number = upper.removesuffix(unit).strip()
    if not number.replace(".", "", 1).isdecimal():
        raise UsageError(f"{text!r} is not a size; write a number and B, KB, MB or GB, such as 5GB")
    return max(1, int(float(number) * units.get(unit, 1)))


def main() -> None:
    """The console script ``dynmo-ckpt``."""
    run_app(app, "dynmo-ckpt")
