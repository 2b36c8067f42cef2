"""Writes a planned checkpoint: checks the target, writes a staging directory, reads it back, renames it, reports.

::

    check_target      OUT exists? would it replace IN? enough space?             nothing is written
    new_directory     .OUT.tmp-XXXXXXXX, next to OUT
        execute       preallocate, copy, checksum, read back, fsync each file    tensors
        finish        the manifest, with the checksums of the copy, fsync        small files
        findings      the index that a reader sees, all bytes around tensors
        LogitsCheck   logits of IN and of the staging directory
        fsync         of the directories
    rename to OUT     the only step that a reader can observe; fsync of the parent

An error or a signal before the rename removes the staging directory; after it, OUT is complete and on disk. The rename
fails where OUT exists; with ``--overwrite`` it exchanges the two, where OUT is a checkpoint (see ``overwrite``).
"""

from __future__ import annotations

import os
import tempfile
import time
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import chain
from pathlib import Path
from typing import Any

from .. import __version__
from .._common.checks import ENVELOPE, anything, mapping, obj, string
from .._common.console import Format, emit, emit_json, emit_table, human_bytes, print_message, progress
from .._common.document import Problem, WriterError, encode_json, envelope, parse_json
from .._common.portable import peak_memory_bytes
from ..io.directory import check_target, new_directory, write_synced
from ..io.errors import StorageError
from ..io.remote import HUB, RemotePath
from ..tensors.copy_plan import ExportPlan, Writable
from ..tensors.execute import execute
from ..tensors.tiled_copy import buffer_bytes
from .logits import LogitsCheck, compare_logits
from .overwrite import replaced_check
from .verify import MANIFEST, header_findings, refuse_findings, small_findings, written_findings
from .write_hub import write_hub
from .write_remote import stream_memory_bytes, write_remote

BASE_MEMORY_BYTES = 50_000_000  # the process without buffers, as measured
PROBE_BYTES = 64 << 20


@dataclass(frozen=True, kw_only=True)
class WriteSettings:
    """How to write.

    Attributes:
        jobs: number of threads that copy.
        verify: read everything back before the output appears.
        overwrite: replace an existing output.
        plan_only: show files, bytes, memory and time, and write nothing.
        format: how to report.
        logits: the comparison of input and output; None: none.
        inputs: what is read besides the checkpoint, such as adapters and a tokenizer; it must not be replaced.
    """

    jobs: int
    verify: bool
    overwrite: bool
    plan_only: bool
    format: Format
    logits: LogitsCheck | None = None
    inputs: tuple[Path, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Result:
    """The report of a command; ``peak_rss_bytes`` is the largest resident memory of the process."""

    source: str
    target: str
    tensors: int
    bytes: int
    seconds: float
    peak_rss_bytes: int
    verified: bool
    decisions: Mapping[str, Any]
    logits: Mapping[str, Any] | None


def write_export(source: Path, target: Path, plan: ExportPlan, settings: WriteSettings) -> None:
    """Write a planned checkpoint directory and report.

    Args:
        source: the input; it is recorded, and must not be replaced.
        target: the new directory; it appears by one rename when everything is written and verified.
        plan: what to write.
        settings: how to write.

    Raises:
        UsageError: ``target`` exists, or is or contains the input.
        CorruptError: the bytes of the input do not have their recorded checksums.
        StorageError: no space or permission, or the written bytes read back differently.
        UnsupportedError: the logits of input and output differ.
        WriterError: a format recorded a decision that is not JSON.
    """
    record = conversion_record(source, plan.decisions)
    write_plan(source, target, plan, {**plan.small_files, "conversion.json": record}, settings)


def write_plan(
    source: Path, target: Path, plan: ExportPlan, small: Mapping[str, bytes], settings: WriteSettings
) -> None:
    """As ``write_export``, with the files without tensors in ``small`` and no others."""
    total = sum(file.num_bytes for file in plan.files) + sum(map(len, small.values()))
    if settings.plan_only:
        _show_plan(source, target, plan.files, small, total, settings)
        return
    started = time.monotonic()
    if isinstance(target, RemotePath):
        write = write_hub if target.scheme == HUB else write_remote
        logits = write(source, target, plan, small, settings)
        _report(source, target, plan, started, settings, logits)
        return
    inputs = (source, *settings.inputs)
    check = replaced_check(inputs) if settings.overwrite else None
    check_target(target, inputs, check=check, need_bytes=total)
    with new_directory(target, check) as staging:
        with progress("write", sum(file.num_bytes for file in plan.files) / 1e6, "MB") as tick:
            written = execute(staging, plan.files, jobs=settings.jobs, tick=tick, verify=settings.verify)
        # The manifest comes last: it has the checksums of all other files.
        final = {} if plan.finish is None else plan.finish(written, small)
        for name, payload in {**small, **final}.items():
            write_synced(staging / name, payload)
        # Within the block: any error here removes the staging directory, and the output never appears.
        if settings.verify:
            refuse_findings(chain(written_findings(staging, plan.files, written), small_findings(staging, small)))
            if MANIFEST in final:
                refuse_findings(header_findings(staging))
        logits = compare_logits(settings.logits, staging)
    _report(source, target, plan, started, settings, logits)


_CONVERSION = obj({**ENVELOPE, "source": string(), "decisions": mapping(anything())})


def conversion_record(source: Path, decisions: Mapping[str, Any]) -> bytes:
    """Contents of ``conversion.json``.

    Raises:
        WriterError: a decision that a reader would refuse.
    """
    document = envelope("dynmo.conversion", 1, f"dynmo-ckpt {__version__}")
    payload = encode_json({**document, "source": str(source), "decisions": dict(decisions)})
    problems: list[Problem] = []
    # A format of another package may record decisions that are not JSON.
    _CONVERSION(parse_json(payload), "", problems)
    if problems:
        raise WriterError("conversion.json", problems)
    return payload


def _show_plan(
    source: Path,
    target: Path,
    files: Sequence[Writable],
    small: Mapping[str, bytes],
    total: int,
    settings: WriteSettings,
) -> None:
    """Print what ``--plan`` shows: files, and estimates of memory and time."""
    sizes = {file.name: file.num_bytes for file in files} | {name: len(payload) for name, payload in small.items()}
    buffers = max((buffer_bytes(tensor) for file in files for tensor in file.tensors), default=0)
    client, streams = stream_memory_bytes(source, target, files)
    memory = BASE_MEMORY_BYTES + client + settings.jobs * (buffers + streams)
    # The rate of a store is that of its network, which a probe of a few seconds would not show.
    is_local = not isinstance(target, RemotePath) and not isinstance(source, RemotePath)
    rate = copy_rate(target, min(PROBE_BYTES, max(1, total))) if is_local else None
    seconds = None if rate is None else total / rate
    if settings.format is Format.JSON:
        emit_json(
            {
                "source": str(source),
                "target": str(target),
                "files": sizes,
                "bytes": total,
                "memory_bytes_at_most": memory,
                "bytes_per_s": None if rate is None else round(rate),
                "seconds": None if seconds is None else round(seconds, 3),
            }
        )
        return
    emit_table(f"would write {target}", ("file", "bytes"), [(name, f"{size:,}") for name, size in sizes.items()])
    shown = "not estimated for an object store"
    if rate is not None:
        shown = f"about {total / rate:.1f} s at {rate / 1e9:.2f} GB/s, as just measured on this disk"
    emit(
        f"{len(sizes)} files, {human_bytes(total)} | memory: at most {human_bytes(memory)} | "
        f"time: {shown} | nothing was written"
    )


def copy_rate(target: Path, num_bytes: int) -> float:
    """Measured write rate of the disk of a new directory, in bytes per second, with checksums and a flush.

    Args:
        target: the new directory, which need not exist.
        num_bytes: number of bytes of the probe, at least 1.

    Raises:
        StorageError: the system refused to write.
    """
    parent = next(parent for parent in target.resolve().parents if parent.is_dir())
    panel = bytes(min(num_bytes, 1 << 20))
    try:
        with tempfile.TemporaryFile(dir=parent) as probe:
            # With checksums and a flush, as in the copy: without the flush, this would measure the page cache.
            started = time.perf_counter()
            for _ in range(-(-num_bytes // len(panel))):
                zlib.crc32(panel)
                probe.write(panel)
            probe.flush()
            os.fsync(probe.fileno())
            return num_bytes / max(1e-9, time.perf_counter() - started)
    except OSError as error:
        raise StorageError(f"{parent}: {error.strerror or error}") from error


def _report(
    source: Path,
    target: Path,
    plan: ExportPlan,
    started: float,
    settings: WriteSettings,
    logits: Mapping[str, Any] | None,
) -> None:
    seconds = time.monotonic() - started
    result = Result(
        source=str(source),
        target=str(target),
        tensors=sum(len(file.tensors) for file in plan.files),
        bytes=sum(file.num_bytes for file in plan.files),
        seconds=round(seconds, 3),
        peak_rss_bytes=peak_rss_bytes(),
        verified=settings.verify,
        decisions=plan.decisions,
        logits=logits,
    )
    if settings.format is Format.JSON:
        emit_json(asdict(result))
        return
    verified = "read back and compared" if settings.verify else "not read back"
    if isinstance(target, RemotePath) and target.scheme == HUB and settings.verify:
        verified = "compared with the hashes of the hub"
    emit(
        f"{target}: {result.tensors} tensors, {human_bytes(result.bytes)} in {seconds:.2f} s "
        f"({result.bytes / 1e9 / max(seconds, 1e-9):.2f} GB/s, {human_bytes(result.peak_rss_bytes)} of memory), "
        f"{verified}"
    )
    for name, value in plan.decisions.items():
        print_message(f"  {name}: {value}")


def peak_rss_bytes() -> int:
    """Largest resident memory of this process so far, in bytes.

    ``/proc`` counts this program alone; ``getrusage`` also counts the memory of the parent before ``exec``.
    """
    status = Path("/proc/self/status")
    lines = status.read_text(encoding="ascii").splitlines() if status.exists() else []
    found = [int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM:")]
    return found[0] if found else peak_memory_bytes()
