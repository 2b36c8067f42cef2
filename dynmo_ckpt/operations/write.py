"""Writes what was planned: checks first, writes into a staging directory, reads back, puts in place, reports."""

from __future__ import annotations

import os
import tempfile
import time
import zlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import chain
from pathlib import Path
from typing import Any

from .. import __version__
from .._common.checks import ENVELOPE, anything, mapping, obj, string
from .._common.console import Format, emit, emit_json, emit_table, human_bytes, progress, say
from .._common.document import Problem, WriterError, encode_json, envelope, parse_json
from .._common.portable import peak_memory_bytes
from ..errors import CorruptError, StorageError
from ..formats.checkpoint import seal
from ..io.directory import check_target, new_directory, write_synced
from ..native.reshard import NativePlan, finished_manifest
from ..tensors.copy_plan import Writable
from ..tensors.execute import Written, execute
from ..tensors.tiled_copy import buffer_bytes
from .convert import ExportPlan
from .logits import LogitsCheck
from .verify import header_findings, small_findings, written_findings

BASE_MEMORY_BYTES = 50_000_000
PROBE_BYTES = 64 << 20


@dataclass(frozen=True, kw_only=True)
class Settings:
    """How to write: threads, whether to read back, whether to replace, whether only to show the plan."""

    jobs: int
    verify: bool
    overwrite: bool
    plan_only: bool
    format: Format
    logits: LogitsCheck | None = None


@dataclass(frozen=True, kw_only=True)
class Result:
    """What was done; ``peak_rss_bytes`` is the largest resident memory of the process."""

    source: str
    target: str
    tensors: int
    bytes: int
    seconds: float
    peak_rss_bytes: int
    verified: bool
    decisions: Mapping[str, Any]
    logits: Mapping[str, Any] | None


def write_native(
    source: Path,
    target: Path,
    plan: NativePlan,
    extra: Mapping[str, bytes],
    decisions: Mapping[str, Any],
    how: Settings,
) -> None:
    """Write a native checkpoint directory and report.

    Args:
        source: the input, for the record and so that it is not replaced.
        target: the new directory.
        plan: what to write.
        extra: small files by path inside the directory, such as the tokenizer's.
        decisions: what is to be recorded in ``conversion.json``.
        how: settings.
    """
    extra = {**extra, "conversion.json": _record(source, decisions)}
    if _refused_or_shown(source, target, plan.files, extra, how):
        return
    begun = time.monotonic()
    with new_directory(target) as staging:
        written = _write(staging, plan.files, how)
        for name, payload in extra.items():
            write_synced(staging / name, payload)
        sums = {name: (len(payload), zlib.crc32(payload)) for name, payload in extra.items()}
        write_synced(staging / "manifest.json", seal(finished_manifest(plan, written, sums)))
        if how.verify:
            _refuse_findings(chain(written_findings(staging, plan.files, written), small_findings(staging, extra)))
            _refuse_findings(header_findings(staging))
        logits = _compare_logits(staging, how)
    _report(source, target, plan.files, begun, decisions, how, logits)


def write_export(source: Path, target: Path, plan: ExportPlan, how: Settings) -> None:
    """Write a Hugging Face directory and report; parameters as those of :func:`write_native`."""
    small = {**plan.small_files, "conversion.json": _record(source, plan.decisions)}
    if _refused_or_shown(source, target, plan.files, small, how):
        return
    begun = time.monotonic()
    with new_directory(target) as staging:
        written = _write(staging, plan.files, how)
        for name, payload in small.items():
            write_synced(staging / name, payload)
        if how.verify:
            _refuse_findings(chain(written_findings(staging, plan.files, written), small_findings(staging, small)))
        logits = _compare_logits(staging, how)
    _report(source, target, plan.files, begun, plan.decisions, how, logits)


_CONVERSION = obj({**ENVELOPE, "source": string(), "decisions": mapping(anything())})


def _record(source: Path, decisions: Mapping[str, Any]) -> bytes:
    document = envelope("dynmo.conversion", 1, f"dynmo-ckpt {__version__}")
    payload = encode_json({**document, "source": str(source), "decisions": dict(decisions)})
    problems: list[Problem] = []
    _CONVERSION(parse_json(payload), "", problems)
    if problems:
        raise WriterError("conversion.json", problems)
    return payload


def _refused_or_shown(
    source: Path, target: Path, files: Sequence[Writable], small: Mapping[str, bytes], how: Settings
) -> bool:
    """Raise what forbids to begin; with ``--plan`` show what would be written and say so."""
    total = sum(file.num_bytes for file in files) + sum(map(len, small.values()))
    if not how.plan_only:
        check_target(target, source, overwrite=how.overwrite, need_bytes=total)
        return False
    sizes = {file.name: file.num_bytes for file in files} | {name: len(payload) for name, payload in small.items()}
    buffers = max((buffer_bytes(tensor) for file in files for tensor in file.tensors), default=0)
    memory = BASE_MEMORY_BYTES + how.jobs * buffers
    rate = copy_rate(target, min(PROBE_BYTES, max(1, total)))
    seconds = total / rate
    if how.format is Format.JSON:
        emit_json(
            {
                "source": str(source),
                "target": str(target),
                "files": sizes,
                "bytes": total,
                "memory_bytes_at_most": memory,
                "bytes_per_s": round(rate),
                "seconds": round(seconds, 3),
            }
        )
        return True
    emit_table(f"would write {target}", ("file", "bytes"), [(name, f"{size:,}") for name, size in sizes.items()])
    emit(
        f"{len(sizes)} files, {human_bytes(total)}, at most {human_bytes(memory)} of memory, "
        f"about {seconds:.1f} s at the {rate / 1e9:.2f} GB/s that the disk just gave; nothing was written"
    )
    return True


def copy_rate(target: Path, num_bytes: int) -> float:
    """Bytes a second that the disk of a new directory takes: written with checksums, flushed, and removed again."""
    place = next(parent for parent in target.resolve().parents if parent.is_dir())
    panel = bytes(min(num_bytes, 1 << 20))
    try:
        with tempfile.TemporaryFile(dir=place) as probe:
            begun = time.perf_counter()
            for _ in range(-(-num_bytes // len(panel))):
                zlib.crc32(panel)
                probe.write(panel)
            probe.flush()
            os.fsync(probe.fileno())
            return num_bytes / max(1e-9, time.perf_counter() - begun)
    except OSError as error:
        raise StorageError(f"{place}: {error.strerror or error}") from error


def _write(staging: Path, files: Sequence[Writable], how: Settings) -> dict[str, Written]:
    with progress("write", sum(file.num_bytes for file in files) / 1e6, "MB") as tick:
        return execute(staging, files, jobs=how.jobs, tick=tick, verify=how.verify)


def _compare_logits(staging: Path, how: Settings) -> Mapping[str, Any] | None:
    """Compare what was written with the input before it is put in place; None, and a line, where it is not compared."""
    if how.logits is None:
        return None
    reason = how.logits.skipped_because()
    if reason:
        say(f"logits of input and output were not compared: {reason}")
        return None
    found = how.logits.compare(staging)
    say(f"logits of input and output differ by {found['max_abs']:.3g} at most, on {found['tokens']} tokens")
    return found


def _refuse_findings(findings: Iterable[str]) -> None:
    found: list[str] = []
    try:
        found.extend(findings)
    except CorruptError as error:  # of what was just written, so it is no fault of the input
        found.append(str(error))
    if found:
        raise StorageError("\n  ".join(["read back otherwise than written; nothing was put in place", *found]))


def _report(
    source: Path,
    target: Path,
    files: Sequence[Writable],
    begun: float,
    decisions: Mapping[str, Any],
    how: Settings,
    logits: Mapping[str, Any] | None,
) -> None:
    seconds = time.monotonic() - begun
    result = Result(
        source=str(source),
        target=str(target),
        tensors=sum(len(file.tensors) for file in files),
        bytes=sum(file.num_bytes for file in files),
        seconds=round(seconds, 3),
        peak_rss_bytes=peak_rss_bytes(),
        verified=how.verify,
        decisions=decisions,
        logits=logits,
    )
    if how.format is Format.JSON:
        emit_json(asdict(result))
        return
    checked = "read back and compared" if how.verify else "not read back"
    emit(
        f"{target}: {result.tensors} tensors, {human_bytes(result.bytes)} in {seconds:.2f} s "
        f"({result.bytes / 1e9 / max(seconds, 1e-9):.2f} GB/s, {human_bytes(result.peak_rss_bytes)} of memory), "
        f"{checked}"
    )
    for name, value in decisions.items():
        say(f"  {name}: {value}")


def peak_rss_bytes() -> int:
    """Largest resident memory of this process so far.

    ``/proc`` counts this program alone; ``getrusage`` counts what its parent had before it as well.
    """
    status = Path("/proc/self/status")
    lines = status.read_text(encoding="ascii").splitlines() if status.exists() else []
    found = [int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM:")]
    return found[0] if found else peak_memory_bytes()
