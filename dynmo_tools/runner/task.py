"""A task: reads its slice, writes temporary files, and is complete when its marker exists.

    slice ─> rows, documents ─> task function ─> create() ─> .NAME.tmp-PID ─ fsync, rename ─> outputs ─> marker
                  └─ lines that are not documents ─────────> NNNNN-rejects.jsonl

Outputs are flushed to disk and renamed before ``done/PHASE-NNNNN.json`` is written. A marker whose outputs have the
recorded sizes is a completed task; any other task runs again from its start.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import IO, Any, Self

from .._common.document import ESCAPED, DocumentError, sync_directory
from .._common.errors import DynmoError
from ..formats.workfiles import TASK
from ..io.codecs import is_compressed, wrap_write
from ..io.jsonl import (
    EXCERPT_CHARACTERS,
    MAX_KEYS,
    BadLineError,
    DocumentCounts,
    Row,
    Slice,
    contains_surrogates,
    excerpt,
    parse_line,
    read_lines,
    read_parquet,
    repair_utf8,
    text_of,
)
from .task_manifest import Job, TaskManifest, load_manifest

# A report of a worker is a message through a pipe; one per document would cost more than most filters.
REPORT_EVERY_DOCUMENTS = 256
REPORT_EVERY_S = 0.2
KEYS_FOUND = "keys_found"
"""Entry of a task's result: the keys of the first document that lacks the key of the settings."""
FIRST_INVALID = "first_invalid"
"""Entry of a task's result: first characters of its first line that is not JSON."""
FIRST_FAILURE = "first_failure"
"""Entry of a task's result: what a library reports of the first document on which it fails."""

Report = Callable[[int, int], None]
"""Receives the number of documents and bytes read since the last call."""


@dataclass(frozen=True, kw_only=True)
class Phase:
    """One kind of task of a job. Phases run in sequence, the tasks of one phase in parallel.

    Attributes:
        name: name in file names and messages.
        run: task function ``folder.module:function``, called with a ``Task``.
        tasks: number of tasks.
        reads: the tasks read the slices of the manifest; their documents are counted as input.
    """

    name: str
    run: str
    tasks: int
    reads: bool = False


class WorkerDiedError(DynmoError):
    """A worker process ended without a result."""

    @classmethod
    def of(cls, phase: Phase, index: int | None, how: str) -> WorkerDiedError:
        """The error with the name of the task.

        Args:
            phase: phase of the task.
            index: number of the task within its phase, from 0; None is taken as 0.
            how: how the worker ended, such as its exit code.
        """
        return cls(
            f"the worker of task {phase.name}-{index or 0:05d} died ({how}); completed tasks are saved: "
            "run the same command again, with fewer workers if memory was insufficient"
        )


class TaskFailedError(DynmoError):
    """An error of a task in another process, with its exit code."""

    def __init__(self, message: str, exit_code: int) -> None:
        super().__init__(message)
        self.exit_code = exit_code


def marker_path(work: Path, phase: str, index: int) -> Path:
    """The path of the marker of task ``index`` of a phase, from 0."""
    return work / "done" / f"{phase}-{index:05d}.json"


@dataclass(kw_only=True)
class Task:
    """The interface of task functions.

    Attributes:
        job: the job.
        manifest: task manifest of the job.
        phase: phase of the task.
        index: number of the task within its phase, from 0.
        report: receives progress.
        counts: document counts.
        result: data for later phases; JSON values.
        facts: entries of the summary; integers are summed over tasks.
    """

    job: Job
    manifest: TaskManifest
    phase: Phase
    index: int
    report: Report
    counts: DocumentCounts = field(default_factory=DocumentCounts)
    result: dict[str, Any] = field(default_factory=dict)
    facts: dict[str, Any] = field(default_factory=dict)
    _outputs: list[_Output] = field(default_factory=list)
    _rejects: IO[bytes] | None = None
    _source: Path | None = None
    _lines_before: int = 0

    @property
    def slice(self) -> Slice:
        """The slice of the input that this task reads."""
        return self.manifest.tasks[self.index]

    def part(self, kind: str, index: int | None = None) -> Path:
        """The path of an intermediate file of this task, or of task ``index``; ``kind`` is a name with an extension."""
        return self.job.work / "parts" / f"{self.index if index is None else index:05d}-{kind}"

    def create(self, path: Path, *, plain: bool = False) -> IO[bytes]:
        """Open an output that is renamed when the task succeeds; compressed by its extension unless ``plain``."""
        output = _Output(path, plain=plain)
        # Registered before anything is written: a task that fails at once still removes its temporary file.
        self._outputs.append(output)
        return output.writer

    def rename_part(self, path: Path, target: Path) -> None:
        """Rename the completed part ``path`` to the output ``target`` at the end of the task."""
        self._outputs.append(_Output(target, existing=path))

    def reject(self, line: int, offset: int, reason: str, raw: bytes) -> None:
        """Record a line that is not a document. A phase that reads the inputs again does not record it again.

        Args:
            line: line number within the current slice, from 1.
            offset: byte offset in the file.
            reason: one word.
            raw: bytes of the line.
        """
        if not self.phase.reads:
            return
        file, line = str(self._source), line + self._lines_before
        self.counts.reject(reason)
        if reason in ("json", "utf8"):
            self.result.setdefault(FIRST_INVALID, excerpt(raw))
        if self._rejects is None:
            self._rejects = self.create(self.part("rejects.jsonl"))
        row = {"file": file, "line": line, "offset": offset, "reason": reason, "excerpt": excerpt(raw)}
        self._rejects.write(json.dumps(row, ensure_ascii=False).encode("utf-8", ESCAPED) + b"\n")

    def reject_row(self, row: Row, reason: str) -> None:
        """Record a document without usable text; for the first one without the key, store the keys that it has."""
        if reason == "key":
            self.result.setdefault(KEYS_FOUND, [key[:EXCERPT_CHARACTERS] for key in list(row.value)[:MAX_KEYS]])
        self.reject(row.line, row.offset, reason, row.raw)

    def rows(self, part: Slice | None = None) -> Iterator[Row]:
        """The documents of a slice, by default this task's own; rows with lone surrogates are rejected.

        Steps that read a text use ``documents``, which checks the text only.
        """
        for row in self.objects(part):
            if b"\\u" in row.raw and contains_surrogates(row.value):
                self.reject(row.line, row.offset, "surrogate", row.raw)
            else:
                yield row

    def objects(
        self, part: Slice | None = None, *, parse: Callable[[bytes], dict[str, Any]] = parse_line
    ) -> Iterator[Row]:
        """The JSON objects of a slice, as ``rows``, but with lone surrogates let through; ``parse`` reads a line."""
        part = part or self.slice
        # Line numbers count from the begin of a file, so they continue over slices of the same file.
        if part.path != self._source:
            self._source, self._lines_before = part.path, 0
        if part.path.suffix == ".parquet":
            yield from self._report_progress(read_parquet(part, repair=self.job.limits.repair_utf8))
            return
        yield from self._report_progress(self._parsed(part, parse))

    def _parsed(self, part: Slice, parse: Callable[[bytes], dict[str, Any]]) -> Iterator[Row]:
        limits = self.job.limits
        last_line = 0
        for number, offset, raw, head, size in read_lines(part, limits.max_line_bytes):
            self._count(lines=number - last_line)
            last_line = number
            if raw is None:
                self._count(documents=1, size=size)
                self.report(1, size)
                self.reject(number, offset, "long", head)
            elif not raw.strip():
                self._count(blank_lines=1, size=size)
                self.report(0, size)
            else:
                if limits.repair_utf8:
                    raw = repair_utf8(raw)
                try:
                    yield Row(number, offset, raw, parse(raw), size)
                except BadLineError as error:
                    self._count(documents=1, size=size)
                    self.report(1, size)
                    self.reject(number, offset, error.reason, raw)
        self._lines_before += last_line

    def count(self, text: str) -> None:
        """Count and report one document that is not a line of JSON."""
        size = len(text.encode("utf-8", "surrogatepass"))
        self._count(documents=1, size=size)
        self.report(1, size)

    def _count(self, *, documents: int = 0, size: int = 0, lines: int = 0, blank_lines: int = 0) -> None:
        if self.phase.reads:
            self.counts.documents_in += documents
            self.counts.bytes_in += size
            self.counts.lines += lines
            self.counts.blank_lines += blank_lines

    def _report_progress(self, rows: Iterator[Row]) -> Iterator[Row]:
        documents = size = 0
        clock = time.monotonic()
        for row in rows:
            documents += 1
            size += row.size or len(row.raw) + 1
            yield row
            if documents % REPORT_EVERY_DOCUMENTS == 0 or time.monotonic() - clock > REPORT_EVERY_S:
                self._count(documents=documents, size=size)
                self.report(documents, size)
                documents, size, clock = 0, 0, time.monotonic()
        self._count(documents=documents, size=size)
        self.report(documents, size)

    def documents(
        self, key: str, part: Slice | None = None, *, allow_surrogates: bool = False
    ) -> Iterator[tuple[Row, str]]:
        """The documents of a slice with the text under ``key``; documents without text are rejected."""
        for row in self.objects(part):
            try:
                text = text_of(row.value, key, allow_surrogates=allow_surrogates)
            except BadLineError as error:
                self.reject_row(row, error.reason)
                continue
            yield row, text

    def write_row(self, writer: IO[bytes], raw: bytes, *, documents: int = 1) -> None:
        """Write one line and count it as output; ``documents`` is 0 for a further piece of the same document."""
        # Every line gets its own newline, so that the last line of a part cannot run into the first one of the next.
        writer.write(raw)
        writer.write(b"\n")
        self.counts.documents_out += documents
        self.counts.bytes_out += len(raw) + 1

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        # In the order of creation: a step that creates the file that completes its output last can rely on it.
        for output in self._outputs:
            output.finish(keep=kind is None)

    def outputs(self) -> dict[str, int]:
        """Path and size in bytes of each renamed output."""
        return {str(output.path): os.path.getsize(output.path) for output in self._outputs}


class _Output:
    """A file with a temporary name until its task succeeds."""

    def __init__(self, path: Path, *, plain: bool = False, existing: Path | None = None) -> None:
        self.path = path
        self._existing = existing
        if existing is not None:
            return
        path.parent.mkdir(parents=True, exist_ok=True)
        # In the folder of the output, because a rename is atomic within one file system only. With the process id: Ray
        # may restart a task while its lost worker still writes.
        self._temporary = path.with_name(f".{path.name}.tmp-{os.getpid()}")
        self._handle = open(self._temporary, "wb", buffering=1 << 20)  # noqa: SIM115 - closed by finish()
        self.writer: IO[bytes] = self._handle
        if not plain and is_compressed(path):
            self.writer = wrap_write(self._handle, path.suffix)

    def finish(self, *, keep: bool) -> None:
        if self._existing is not None:
            if keep:
                os.replace(self._existing, self.path)
            return
        try:
            if self.writer is not self._handle:
                self.writer.close()
            if keep:
                self._handle.flush()
                # Before the rename: after a power loss, an output has its complete contents or does not exist.
                os.fsync(self._handle.fileno())
        finally:
            with contextlib.suppress(OSError):
                self._handle.close()
            if not keep:
                self._temporary.unlink(missing_ok=True)
        if keep:
            os.replace(self._temporary, self.path)


def resolve(name: str) -> Callable[[Task], None]:
    """The function named ``folder.module:function`` of this package."""
    # Tasks carry the name, not the function: a worker imports only the step that it runs.
    module, _, function = name.partition(":")
    found: Callable[[Task], None] = getattr(importlib.import_module(f"dynmo_tools.{module}"), function)
    return found


def run_task(job: Job, phase: Phase, index: int, report: Report) -> dict[str, Any]:
    """Run one task.

    Args:
        job: the job; its manifest must be stored.
        phase: phase of the task.
        index: number of the task within its phase, from 0.
        report: receives the numbers of documents and bytes that were read.

    Returns:
        The marker that was written.

    Raises:
        DynmoError: the file system failed, or the task function raised it.
    """
    started = time.monotonic()
    # From the work folder: every process, also one on another node, then uses the slices that were stored.
    task = Task(job=job, manifest=load_manifest(job.work), phase=phase, index=index, report=report)
    try:
        with task:
            resolve(phase.run)(task)
    except OSError as error:
        where = f" {error.filename}" if error.filename else ""
        raise DynmoError(
            f"task {phase.name}-{index:05d}:{where} {error.strerror or error}; "
            "its partial output was removed; free disk space or fix the error, and run the same command again"
        ) from error
    outputs = task.outputs()
    # The marker is written last, when all renames are on disk: a marker implies its outputs.
    for folder in {Path(name).parent for name in outputs}:
        sync_directory(folder)
    fields = {
        "task": f"{phase.name}-{index:05d}",
        "digest": task.manifest.digest,
        "outputs": outputs,
        "tally": task.counts.as_json(),
        "result": task.result,
        "facts": task.facts,
        "seconds": round(time.monotonic() - started, 6),
    }
    TASK.write(marker_path(job.work, phase.name, index), fields)
    return fields


def read_valid_marker(
    job: Job, phase: Phase, index: int, digest: str, *, outputs_removed: bool
) -> dict[str, Any] | None:
    """The marker of a completed task; None if the task must run.

    Args:
        job: the job.
        phase: phase of the task.
        index: number of the task within its phase, from 0.
        digest: digest of the manifest.
        outputs_removed: the last phase is complete, which removes the parts of earlier phases.
    """
    # A marker that cannot be read, or that another run wrote, only costs one repeated task.
    try:
        marker = TASK.read(marker_path(job.work, phase.name, index))
    except DocumentError:
        return None
    if marker["digest"] != digest:
        return None
    if not outputs_removed:
        for name, size in marker["outputs"].items():
            try:
                if os.path.getsize(name) != size:
                    return None
            except OSError:
                return None
    return marker


def read_marker(task: Task, phase: str, index: int) -> dict[str, Any]:
    """The marker of the completed task ``index`` of an earlier phase of the same job.

    Raises:
        DocumentError: the task has no marker, or the marker violates its format.
    """
    return TASK.read(marker_path(task.job.work, phase, index))
