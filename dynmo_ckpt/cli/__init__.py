"""The command line of ``dynmo-ckpt``: each command builds its options and calls one function of ``operations``."""

from __future__ import annotations

import gc
import math
from dataclasses import asdict
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Annotated, Any

import typer

from .. import __version__
from .._common.console import (
    Format,
    command_line,
    emit,
    emit_json,
    emit_table,
    print_message,
    progress,
    run_app,
)
from .._common.errors import UsageError
from .._common.option_groups import grouped
from ..formats.choices import AUTO, ReadOptions, VerifyLevel, WriteOptions
from ..io.remote import parse_location
from . import options
from .megatron_tools import register

YES_NO = {"True": "yes", "False": "no"}
COMMAND_ORDER = ("info", "verify", "diff", "merge", "split", "reshard", "convert", "copy", "average", "formats")

app = command_line(
    *COMMAND_ORDER,
    help="Inspect, verify, compare, merge, split and convert checkpoints. Pickles are never executed.",
)


@app.command()
@grouped
def info(
    path: options.Input,
    reading: options.RecordedOptions,
    tensors: Annotated[
        str | None, typer.Option(help="List the tensors whose name matches this shell pattern, such as 'layers.0.*'.")
    ] = None,
    report: options.Report = Format.TEXT,
) -> None:
    """Show run, model, partition, pruning, tensors and files of a checkpoint. Reads no tensor's bytes.

    A checkpoint of another format is shown under DynMo's names.
    """
    from ..converters.registry import check_options, detect, open_and_report
    from ..native.checkpoint import find_checkpoint, load_manifest
    from ..operations.info import stored_files, summarize, summary_rows, tensor_rows

    found, read = detect(path), reading.read_options(headers_only=True)
    if found.name == "native":  # the manifest is enough; opening would read the header of every shard
        check_options(path, found, read)
        directory, remarks = find_checkpoint(path, read.step)
        manifest = load_manifest(directory)
        for remark in remarks:
            print_message(remark)
    else:
        checkpoint = open_and_report(path, found.name, read)
        directory, manifest = path, {**checkpoint.manifest, "files": stored_files(checkpoint)}
    summary = summarize(str(directory), manifest, None if found.name == "native" else found.name)
    if report is Format.JSON:
        names = [name for name in manifest["tensors"] if tensors and fnmatchcase(name, tensors)]
        listed = {"tensors": {name: manifest["tensors"][name] for name in names}}
        emit_json({**summary, **(listed if tensors else {})})
        return
    emit_table(str(directory), ("fact", "value"), summary_rows(summary))
    if tensors is not None:
        emit_table("tensors", ("name", "role", "type", "shape", "files"), tensor_rows(manifest, tensors))


@app.command()
def formats(report: options.Report = Format.TEXT) -> None:
    """List checkpoint formats, those of other installed packages included."""
    from ..converters import BUILTIN
    from ..converters.registry import external_formats, get_format

    external, failures = external_formats()
    listed = [*(("dynmo-toolkit", get_format(name)) for name in BUILTIN), *external]
    rows = [
        {
            "name": found.name,
            "reads": found.read is not None,
            "writes": found.write is not None,
            "package": package,
            "description": found.description,
        }
        for package, found in listed
    ]
    if report is Format.JSON:
        emit_json({"formats": rows, "failures": failures})
    else:
        shown = [[YES_NO.get(str(value), str(value)) for value in row.values()] for row in rows]
        emit_table("checkpoint formats", ("name", "reads", "writes", "package", "description"), shown)
    for failure in failures:
        print_message(failure)


@app.command()
@grouped
def verify(
    path: options.Input,
    reading: options.RecordedOptions,
    level: Annotated[
        VerifyLevel,
        typer.Option(
            help="header: manifest, file sizes and headers; replicas: also that replicas, such as those of Megatron's "
            "tensor ranks, are equal; full: also every checksum."
        ),
    ] = VerifyLevel.FULL,
    against: Annotated[
        Path | None,
        typer.Option(
            metavar="PATH",
            parser=parse_location,
            help="Compare every tensor with this checkpoint, of any format and topology.",
        ),
    ] = None,
    atol: options.Atol = 0.0,
    hf_logits: Annotated[
        Path | None,
        typer.Option(help="Compare the logits with those of transformers on this Hugging Face directory."),
    ] = None,
    logits_atol: Annotated[
        float, typer.Option(min=0, help="Largest difference of a logit that counts as equal.")
    ] = 1e-4,
    report: options.Report = Format.TEXT,
) -> None:
    """Verify a checkpoint of any format and print every finding. Exit code 0: no findings; 1: findings.

    Files without checksums, such as safetensors, are only read to their end; a message reports that.
    """
    from ..io.errors import EXIT_DIFFERENCE
    from ..operations.verify import verify_checkpoint

    read = reading.read_options()
    directory, findings, remarks = verify_checkpoint(path, read, level)
    for remark in remarks:
        print_message(remark)
    if against is not None and not findings:
        differing = _differences(directory, against, ("parameter", "buffer", "mask"), atol, read)
        findings += [f"{each['name']}: {each['message']}" for each in differing]
    # Not after a finding: damaged bytes are the cause, and logits would only repeat it.
    logits = None
    if hf_logits is not None and not findings:
        logits = _logits(directory, hf_logits, read)
        if not logits["max_abs"] <= logits_atol:
            findings.append(f"logits differ by {logits['max_abs']:.3g}; the limit is {logits_atol:.3g}")
    if report is Format.JSON:
        result = {"path": str(directory), "level": level.value, "ok": not findings, "findings": findings}
        emit_json(result if logits is None else {**result, "logits": logits})
    else:
        for finding in findings:
            emit(finding)
        emit(f"{directory}: {'ok' if not findings else f'{len(findings)} findings'} ({level.value})")
    if findings:
        raise typer.Exit(EXIT_DIFFERENCE)


def _logits(directory: Path, hf_directory: Path, read: ReadOptions) -> dict[str, Any]:
    from ..converters.registry import open_and_report
    from ..operations.logits import hf_difference

    found = hf_difference(open_and_report(directory, AUTO, read), hf_directory)
    print_message(f"logits of {found['tokens']} tokens differ by at most {found['max_abs']:.3g}")
    return found


@app.command()
@grouped
def diff(
    left: options.Input,
    right: options.Other,
    reading: options.FactOptions,
    atol: options.Atol = 0.0,
    with_optimizer: options.WithOptimizer = False,
    html: Annotated[
        Path | None, typer.Option("--html", help="HTML file to write statistics of every tensor to.")
    ] = None,
    report: options.Report = Format.TEXT,
) -> None:
    """Compare two checkpoints of any formats and topologies, tensor by tensor. Exit code 1: they differ.

    Padding rows of the vocabulary are not compared. Where only one side has pruning masks, they are applied first.
    """
    from .._common.report.units import plural
    from ..io.errors import EXIT_DIFFERENCE
    from ..operations.compare import SETTING

    if html is not None and html.exists() and html.suffix not in (".html", ".htm"):
        raise UsageError(f"--html {html}: exists and is not a page; choose a name that ends in .html")
    roles = ("parameter", "buffer", "mask", *(("optimizer",) if with_optimizer else ()))
    read = reading.read_options()
    found = _differences(left, right, roles, atol, read)
    listed = {} if html is None else {"tensors": _write_page(html, left, right, roles, atol, found, read)}
    if report is Format.JSON:
        # JSON has no infinity, which is the difference of a number and NaN.
        rows = [{**each, "max_abs": each["max_abs"] if math.isfinite(each["max_abs"]) else None} for each in found]
        emit_json(
            {"left": str(left), "right": str(right), "atol": atol, "equal": not rows, "differences": rows, **listed}
        )
    else:
        for each in found:
            emit(f"{each['name']}: {each['message']}")
        settings = sum(each["kind"] == SETTING for each in found)
        tensors = len(found) - settings
        emit(
            f"{plural(tensors, 'tensor')} {'differs' if tensors == 1 else 'differ'}" if tensors else "no tensor differs"
        )
        if settings:
            emit(f"{plural(settings, 'setting')} of the model {'differs' if settings == 1 else 'differ'}")
    if found:
        raise typer.Exit(EXIT_DIFFERENCE)


def _write_page(
    html: Path,
    left: Path,
    right: Path,
    roles: tuple[str, ...],
    atol: float,
    found: list[dict[str, Any]],
    read: ReadOptions,
) -> list[Any]:
    """Write the page of ``diff --html``; returns the statistics of the tensors."""
    from .._common.document import write_whole
    from .._common.report.page import encoded
    from ..converters.registry import open_sides
    from ..io.errors import StorageError
    from ..operations.compare import Difference
    from ..operations.statistics import as_json, diff_page, statistics

    sides = [checkpoint for checkpoint, _ in open_sides(left, right, read)]
    total = sum(content.num_bytes for content in sides[0].tensors.values())
    with progress("statistics", total / 1e6, "MB") as tick:
        listed = list(statistics(sides[0], sides[1], roles, tick))
    page = diff_page((str(left), str(right)), listed, [Difference(**each) for each in found], atol)
    try:
        write_whole(html, encoded(page))
    except OSError as error:
        raise StorageError(f"--html {html}: {error.strerror or error}") from error
    print_message(f"wrote {html}: {len(listed)} tensors")
    return [as_json(each) for each in listed]


def _differences(
    left: Path,
    right: Path,
    roles: tuple[str, ...],
    atol: float,
    read: ReadOptions,
) -> list[dict[str, Any]]:
    from ..converters.registry import open_sides
    from ..operations.compare import differences

    sides = []
    for checkpoint, remarks in open_sides(left, right, read):
        for remark in remarks:
            print_message(remark)
        sides.append(checkpoint)
    total = sum(content.num_bytes for content in sides[0].tensors.values())
    with progress("compare", total / 1e6, "MB") as tick:
        return [asdict(each) for each in differences(sides[0], sides[1], roles, atol, tick)]


@app.command()
@grouped
def merge(
    source: options.Input,
    target: options.Output,
    reading: options.RecordedOptions,
    writing: options.WritingOptions,
    with_optimizer: options.WithOptimizer = True,
) -> None:
    """Merge the files of all ranks into those of one; masks and optimizer state are kept."""
    from ..operations import convert as operations

    operations.merge(
        source, target, read=reading.read_options(), with_optimizer=with_optimizer, settings=writing.settings()
    )


@app.command()
@grouped
def split(
    source: options.Input,
    target: options.Output,
    topology: options.TopologyOptions,
    reading: options.RecordedOptions,
    writing: options.WritingOptions,
    with_optimizer: options.WithOptimizer = True,
) -> None:
    """Split a checkpoint over tensor-parallel and pipeline ranks; the same as reshard with --dp 1."""
    _reshard(source, target, topology, reading, writing, with_optimizer, dp=1)


@app.command()
@grouped
def reshard(
    source: options.Input,
    target: options.Output,
    topology: options.TopologyOptions,
    reading: options.RecordedOptions,
    writing: options.WritingOptions,
    dp: options.DataSize = 1,
    with_optimizer: options.WithOptimizer = True,
) -> None:
    """Write a checkpoint for another topology, in one pass, with masks and optimizer state."""
    _reshard(source, target, topology, reading, writing, with_optimizer, dp=dp)


def _reshard(
    source: Path,
    target: Path,
    topology: options.TopologyOptions,
    reading: options.RecordedOptions,
    writing: options.WritingOptions,
    with_optimizer: bool,
    dp: int,
) -> None:
    from ..operations import convert as operations

    operations.reshard(
        source,
        target,
        read=reading.read_options(),
        write=WriteOptions(**vars(topology), with_optimizer=with_optimizer),
        dp=dp,
        settings=writing.settings(),
    )


@app.command()
@grouped
def convert(
    source: options.Input,
    target: options.Output,
    to: options.TargetFormat,
    reading: options.ImportOptions,
    topology: options.TopologyOptions,
    contents: options.ExportOptions,
    writing: options.WritingOptions,
    with_optimizer: options.MaybeOptimizer = None,
    check_logits: options.CheckLogits = None,
) -> None:
    """Convert a checkpoint to another format.

    In a Hugging Face directory pruned weights are zeros, or compressed with --sparse-format; the vocabulary has no
    padding, and there is no optimizer state. `dynmo-ckpt formats` lists the formats.
    """
    from ..operations import convert as operations

    operations.convert(
        source,
        target,
        source_format=reading.source_format,
        target_format=to,
        read=reading.read_options(),
        write=contents.write_options(topology),
        with_optimizer=with_optimizer,
        check_logits=check_logits,
        settings=writing.settings(),
    )


@app.command()
@grouped
def copy(
    source: options.Input, target: options.Output, writing: options.WritingOptions, step: options.Step = None
) -> None:
    """Copy a checkpoint of any format unchanged, between local directories and addresses."""
    from ..operations.copy import copy_checkpoint

    copy_checkpoint(source, target, step=step, settings=writing.settings())


@app.command()
@grouped
def average(
    sources: Annotated[
        list[Path],
        typer.Argument(metavar="IN", parser=parse_location, help="Checkpoints of one model, oldest first."),
    ],
    target: Annotated[
        Path,
        typer.Option("--output", "-o", metavar="OUT", parser=parse_location, help="New directory of the average."),
    ],
    topology: options.TopologyOptions,
    reading: options.RecordedOptions,
    contents: options.ExportOptions,
    writing: options.WritingOptions,
    to: options.TargetFormat = "native",
    weights: Annotated[
        str | None, typer.Option(help="Weight of each checkpoint, such as 1,1,2; default: equal weights.")
    ] = None,
    ema: Annotated[float | None, typer.Option(help="Decay of an exponential moving average, in (0, 1).")] = None,
) -> None:
    """Average checkpoints of one model, of any formats, in bounded memory; optimizer states are left out.

    Sums are in float64. Checkpoints with different sizes, ties, types or masks are refused.
    """
    from ..operations.average import average as write_average

    write_average(
        sources,
        target,
        target_format=to,
        weights=None if weights is None else options.parse_numbers("--weights", weights),
        decay=ema,
        read=reading.read_options(),
        write=contents.write_options(topology),
        settings=writing.settings(),
    )


@app.command("source-digest", hidden=True)
def show_source_digest() -> None:
    """Print a digest of the version, the code and the tables, which names a cache of conversions."""
    emit(source_digest(Path(__file__).parents[1]))


def source_digest(package: Path) -> str:
    """A digest that changes with the version, the code or the tables of ``package``, wherever that is installed."""
    import hashlib

    digest = hashlib.sha256(__version__.encode())
    for path in sorted(path for pattern in ("*.py", "*.json") for path in package.rglob(pattern)):
        payload = path.read_bytes()
        digest.update(f"\0{path.relative_to(package).as_posix()}\0{len(payload)}\0".encode())
        digest.update(payload)
    return digest.hexdigest()[:16]


register(app)


def main() -> None:
    """The console script ``dynmo-ckpt``."""
    # The logits check imports torch and transformers, whose objects live to the end: fewer scans save 0.5 of 3.5 s.
    gc.set_threshold(50_000, 20, 100)
    run_app(app, "dynmo-ckpt")
