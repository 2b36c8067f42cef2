"""Runs a job, one step over its inputs: manifest, phases, resume, accounting. Knows nothing about documents.

    Job ─> task manifest ─> phase 1: task 0 .. n ─> phase 2 ─> ... ─> summary.json
           manifest.json        │
                                ├─ parts/NNNNN-KIND         intermediate files, removed at the end
                                ├─ rejects/part-NNNNN.jsonl lines that are not documents
                                └─ done/PHASE-NNNNN.json    marker, written after the outputs

All files except the outputs are in the work folder, which one run locks. Invariants of resuming:

* The manifest is written once. A resumed run uses the stored one, so tasks never change their slices.
* A task whose marker matches the manifest and whose outputs have their recorded sizes is not run again.
* The outputs of a task depend on the manifest only, not on workers, executor or order. A run that was killed at any
  time and resumed therefore writes the same bytes.
* Parts may be removed when the last phase is complete; markers of earlier phases then count without their outputs.

``run_job`` runs everything in this process tree. ``run_subset`` runs every N-th task of one phase, for Slurm arrays;
several subsets share the lock.
"""

from __future__ import annotations

import contextlib
import fcntl
import glob
import json
import os
import shutil
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from .._common.console import print_message
from .._common.document import ESCAPED, MAX_TABLE_BYTES, DocumentError, parse_any_json
from .._common.errors import DynmoError, UsageError
from ..config.options import files_of, output_folders_of
from ..config.settings import ExecutorName
from ..formats.workfiles import SUMMARY, TASK
from ..io.atomic_write import open_atomic, refuse_existing
from ..io.foreign import hint_of_line
from ..io.jsonl import DocumentCounts
from ..io.paths import check_output, check_writable
from .local import WorkerPool, run_inline
from .progress import progress_meter
from .task import FIRST_FAILURE, FIRST_INVALID, KEYS_FOUND, Phase, Report, marker_path, read_valid_marker
from .task_manifest import (
    Job,
    Source,
    TaskManifest,
    check_tasks,
    current_digest,
    load_manifest,
    make_manifest,
    store_manifest,
    written_files,
)

FAILED = "failed.txt"
SUBSET_FOLDERS = ("parts", "done")
# A wrong key or a damaged file shows in any sample of this size, so a run ends before it has read everything.
MIN_DOCUMENTS_TO_STOP = 10_000
EXIT_TOO_MANY_REJECTED = 4


class TooManyRejectedError(DynmoError):
    """More than ``--max-rejects`` of the lines are not documents."""

    exit_code = EXIT_TOO_MANY_REJECTED


@dataclass(frozen=True, kw_only=True)
class TaskSubset:
    """The tasks ``index``, ``index + count``, ... of one phase.

    Attributes:
        index: number of the subset, from 0 to ``count - 1``.
        count: number of subsets.
        phase: name of the phase; None is the first incomplete one.
    """

    index: int
    count: int
    phase: str | None = None


@dataclass(frozen=True, kw_only=True)
class Execution:
    """How a job runs; nothing here changes the bytes of its output.

    Attributes:
        workers: number of worker processes; 1 runs the tasks in this process.
        executor: where the tasks run.
        subset: the tasks to run; None is all.
        overwrite: replace existing outputs, and discard an earlier run.
        rerun_changed: discard an earlier run with other settings or inputs, as a pipeline does for a changed step.
        max_rejects: maximum fraction of lines that are not documents, from 0 to 1.
        log_interval: documents between two progress lines.
    """

    workers: int = 1
    executor: ExecutorName = ExecutorName.LOCAL
    subset: TaskSubset | None = None
    overwrite: bool = False
    rerun_changed: bool = False
    max_rejects: float = 0.01
    log_interval: int = 1000


@dataclass(frozen=True, kw_only=True)
class Summary:
    """The result of a completed job.

    Attributes:
        step: name of the step.
        inputs: input files.
        output: output file, or its prefix.
        counts: document counts of all tasks.
        seconds: wall time of the run that completed the job.
        facts: further results of the step, such as ``tokens``.
        reused: an earlier run completed the job, and this one ran no task.
    """

    step: str
    inputs: tuple[Path, ...]
    output: Path
    counts: DocumentCounts
    seconds: float
    facts: dict[str, Any] = field(default_factory=dict)
    reused: bool = False

    def as_json(self) -> dict[str, Any]:
        """The summary as a JSON document."""
        rate = self.counts.bytes_in / 1e6 / self.seconds if self.seconds else 0.0
        return {
            "step": self.step,
            "inputs": [str(path) for path in self.inputs],
            "output": str(self.output),
            **self.counts.as_json(),
            "seconds": round(self.seconds, 3),
            "megabytes_per_second": round(rate, 3),
            "facts": self.facts,
        }


@contextlib.contextmanager
def lock_work_folder(work: Path, *, shared: bool = False) -> Iterator[Callable[[int], object]]:
    """Lock the work folder exclusively; with ``shared``, wait for the lock and share it with other subsets.

    Yields:
        A function that converts the lock to ``fcntl.LOCK_EX`` or ``LOCK_SH`` and waits if necessary. The conversion is
        not atomic: another process may hold the lock in between.

    Raises:
        UsageError: another run holds the lock.
    """
    # The file is never removed: a process that waits for the lock has it open, and would then hold the lock of a file
    # that other processes no longer find.
    descriptor = os.open(work / "lock", os.O_RDWR | os.O_CREAT, 0o644)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_SH if shared else fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise UsageError(
                f"{work}: another run uses this work folder; wait for it, or choose another --work-dir"
            ) from error
        yield lambda operation: fcntl.flock(descriptor, operation)
    finally:
        # Closing releases the lock. So does the end of the process, however it ends: no lock remains after a kill.
        os.close(descriptor)


def open_manifest(job: Job, execution: Execution) -> TaskManifest:
    """The manifest to follow: the stored one if it belongs to this job, else a new one.

    Raises:
        UsageError: an output exists that this run did not write, or the folder has an incomplete run with other
            settings or inputs, and replacing is not allowed.
    """
    if (job.work / "manifest.json").exists() and not execution.overwrite:
        stored = load_manifest(job.work)
        if stored.digest == current_digest(job):
            _refuse_changed_outputs(job)
            return stored
        if not execution.rerun_changed:
            _refuse_other_run(job)
        print_message(f"{job.step}: settings or inputs changed since the last run: starting from scratch")
    elif not execution.overwrite:
        refuse_existing(written_files(job))
    manifest = make_manifest(job)
    # Markers and the summary of the old run go first: they must never be next to the new manifest.
    _remove_run(job)
    store_manifest(job, manifest)
    return manifest


def _remove_run(job: Job) -> None:
    """Remove everything of a run from the work folder except its manifest."""
    for name in ("parts", "done", "rejects"):
        shutil.rmtree(job.work / name, ignore_errors=True)
    for name in ("summary.json", FAILED):
        (job.work / name).unlink(missing_ok=True)
    job.output.parent.mkdir(parents=True, exist_ok=True)


def discard_run(job: Job) -> None:
    """Discard the run of a job whose input may not exist yet; with ``rerun_changed``, its outputs can then be replaced.

    The manifest is replaced by one of no job: without a manifest, existing outputs would be refused.
    """
    job.work.mkdir(parents=True, exist_ok=True)
    with lock_work_folder(job.work):
        _remove_run(job)
        store_manifest(job, TaskManifest(digest="discarded", sources=(), tasks=()))


def _refuse_other_run(job: Job) -> None:
    """Refuse to discard a run with other settings or inputs that has an output or was interrupted by a signal.

    A failed run may be discarded, so that the corrected command can run.
    """
    refuse_existing(written_files(job))
    if not (job.work / "summary.json").exists() and not (job.work / FAILED).exists():
        raise UsageError(
            f"{job.work}: contains an interrupted run of this step with other settings or inputs; "
            "use --overwrite to discard it, or choose another --work-dir"
        )


def _refuse_changed_outputs(job: Job) -> None:
    """Refuse to overwrite an output that was changed after this run wrote it."""
    written = set(map(str, written_files(job)))
    for path in (job.work / "done").glob("*.json"):
        try:
            outputs = TASK.read(path)["outputs"]
        except DocumentError:  # damaged marker: the task runs again
            continue
        for name, size in outputs.items():
            # By size: markers have no checksums, because every start would have to read all outputs.
            if name in written and os.path.exists(name) and os.path.getsize(name) != size:
                raise UsageError(
                    f"{name}: changed after this run wrote it; use --overwrite to replace it, or choose another output"
                )


@contextlib.contextmanager
def _marked_failure(job: Job) -> Iterator[None]:
    """Record in the work folder that a run failed; a signal is not a failure."""
    failed = job.work / FAILED
    try:
        yield
    except Exception as error:
        with contextlib.suppress(OSError):  # the disk may be full; the original error matters
            failed.write_text(f"{error}\n", encoding="utf-8", errors="replace")
        raise


def create_work_folder(job: Job) -> None:
    """Create the work folder, after checking that all outputs can be written and none replaces an input.

    Raises:
        UsageError: see ``paths.check_output`` and ``paths.check_writable``; or an input or a file of the settings does
            not exist.
    """
    sources = [Source.of(path) for path in (*job.inputs, *files_of(job.settings))]
    check_tasks(sources[: len(job.inputs)], job.limits.task_bytes)
    outputs = written_files(job)
    check_output([*job.inputs, *files_of(job.settings)], outputs)
    check_writable(outputs, output_folders_of(job.settings))
    job.work.mkdir(parents=True, exist_ok=True)


def remove_temporary_files(job: Job) -> None:
    """Remove temporary files of killed runs."""
    # Other files next to the output belong to other runs, which may be active: there, only names of this output go.
    own = ((folder, "") for folder in (job.work, job.work / "parts", job.work / "done", job.work / "rejects"))
    for folder, name in (*own, (job.output.parent, job.output.name)):
        for path in folder.glob(f".{glob.escape(name)}*.tmp-*"):
            path.unlink(missing_ok=True)


def run_job(job: Job, phases_of: Callable[[TaskManifest], Sequence[Phase]], execution: Execution) -> Summary:
    """Run a job to its end, resuming an earlier run of it.

    Args:
        job: the job.
        phases_of: makes the phases from the manifest.
        execution: how to run them.

    Returns:
        The result, with the time of the earlier run if that completed the job.

    Raises:
        UsageError: see ``open_manifest`` and ``create_work_folder``.
        TooManyRejectedError: too many lines are not documents.
        DynmoError: a task failed.
    """
    create_work_folder(job)
    with lock_work_folder(job.work):
        manifest = open_manifest(job, execution)
        phases = phases_of(manifest)
        (job.work / "parts").mkdir(exist_ok=True)
        (job.work / "done").mkdir(exist_ok=True)
        # The lock is exclusive and subsets share it, so no running process has a temporary file here.
        remove_temporary_files(job)
        started = time.monotonic()
        try:
            with _marked_failure(job):
                markers, ran = _run_phases(job, manifest, phases, execution)
            (job.work / FAILED).unlink(missing_ok=True)  # not in run_subset: another subset may have failed
        except (KeyboardInterrupt, SystemExit):
            remove_temporary_files(job)  # a terminated worker may leave a file that it has not registered yet
            print_message(f"{job.step}: stopped; completed tasks are saved; run the same command again to resume")
            raise
        finished_before = not ran and (job.work / "summary.json").exists()
        summary = _summarize(job, markers, time.monotonic() - started, reused=finished_before)
        if finished_before:
            return _stored_seconds(job, summary)
        _finish(job, manifest, phases, summary)
        return summary


def _run_phases(
    job: Job, manifest: TaskManifest, phases: Sequence[Phase], execution: Execution
) -> tuple[dict[str, list[dict[str, Any]]], int]:
    known = _known_markers(job, manifest, phases)
    total = manifest.input_bytes
    ran = 0
    with (
        # One pool for all phases, so that each worker imports its libraries once.
        progress_meter(job.step, total, log_interval=execution.log_interval) as meter,
        WorkerPool(job, execution.workers) as pool,
    ):
        for phase in phases:
            done = known[phase.name]
            pending = [index for index in range(phase.tasks) if index not in done]
            meter.resume(phase, len(done))
            # Tasks end in any order. Markers are stored by index, so nothing after this line depends on the order.
            for index, marker in _execute(pool, phase, pending, execution, meter.report if phase.reads else _ignore):
                done[index] = marker
                ran += 1
                if phase.reads:
                    _check_rejects(job, done.values(), execution.max_rejects, partial=True)
            if phase.reads:
                _check_rejects(job, done.values(), execution.max_rejects, partial=False)
    return {phase.name: [known[phase.name][i] for i in range(phase.tasks)] for phase in phases}, ran


def prepare_manifest(
    job: Job, phases_of: Callable[[TaskManifest], Sequence[Phase]], execution: Execution
) -> Sequence[Phase]:
    """Write the manifest of a job that other processes run; returns its phases.

    Args:
        job: the job.
        phases_of: makes the phases from the manifest.
        execution: whether an existing output or run may be discarded.

    Raises:
        UsageError: see ``open_manifest`` and ``create_work_folder``.
    """
    create_work_folder(job)
    with lock_work_folder(job.work):
        return phases_of(open_manifest(job, execution))


def _manifest_of_other_subsets(job: Job) -> TaskManifest | None:
    """The manifest that an earlier subset of the same job has stored; None for the first subset."""
    if not all((job.work / name).exists() for name in ("manifest.json", *SUBSET_FOLDERS)):
        return None
    stored = load_manifest(job.work)
    if stored.digest != current_digest(job):
        return None
    _refuse_changed_outputs(job)
    return stored


def run_subset(
    job: Job, phases_of: Callable[[TaskManifest], Sequence[Phase]], execution: Execution, subset: TaskSubset
) -> str:
    """Run a subset of one phase's tasks, concurrently with other subsets.

    The job is not completed here: ``run_job`` with the same job runs what is left and writes the summary.

    Args:
        job: the job.
        phases_of: makes the phases from the manifest.
        execution: how to run the tasks of the subset.
        subset: the tasks.

    Returns:
        One line for the user, with the number of tasks that remain in the phase.

    Raises:
        UsageError: the subset or phase does not exist, or earlier phases are incomplete; or see ``open_manifest`` and
            ``create_work_folder``.
        DynmoError: a task failed.
    """
    if not 0 <= subset.index < subset.count:
        raise UsageError(f"--task-index {subset.index}: must be from 0 to --task-count - 1 = {subset.count - 1}")
    create_work_folder(job)
    with lock_work_folder(job.work, shared=True) as convert:
        manifest = _manifest_of_other_subsets(job)
        if manifest is None:
            # Between the two locks another subset may have stored the manifest; open_manifest then returns the stored
            # one.
            convert(fcntl.LOCK_EX)
            manifest = open_manifest(job, execution)
            for name in SUBSET_FOLDERS:
                (job.work / name).mkdir(exist_ok=True)
            convert(fcntl.LOCK_SH)
        phases = phases_of(manifest)
        known = _known_markers(job, manifest, phases)
        incomplete = [phase for phase in phases if len(known[phase.name]) < phase.tasks]
        phase = (
            next((p for p in phases if p.name == subset.phase), None) if subset.phase else next(iter(incomplete), None)
        )
        if subset.phase and phase is None:
            raise UsageError(f"--phase {subset.phase}: {job.step} has the phases {', '.join(p.name for p in phases)}")
        if phase is None:
            return f"{job.step}: all phases are complete"
        if phase in incomplete and phase is not incomplete[0]:
            raise UsageError(f"phase {phase.name} needs {incomplete[0].name}, which is incomplete; run it first")
        own_tasks = [i for i in range(subset.index, phase.tasks, subset.count) if i not in known[phase.name]]
        with (
            _marked_failure(job),
            progress_meter(job.step, manifest.input_bytes, log_interval=execution.log_interval) as meter,
            WorkerPool(job, execution.workers) as pool,
        ):
            done = sum(1 for _ in _execute(pool, phase, own_tasks, execution, meter.report if phase.reads else _ignore))
        left = phase.tasks - len(known[phase.name]) - done
        return f"{job.step}: {phase.name}: subset {subset.index} of {subset.count}: ran {done} tasks; {left} remain"


def _ignore(_documents: int, _size: int) -> None:
    return


def _execute(
    pool: WorkerPool, phase: Phase, pending: list[int], execution: Execution, report: Report
) -> Iterator[tuple[int, dict[str, Any]]]:
    if execution.executor is ExecutorName.RAY and pending:
        from .ray import run_ray

        return run_ray(pool.job, phase, pending, execution.workers, report)
    # A single worker would add its start and imports, and nothing would run in parallel.
    if min(execution.workers, len(pending)) <= 1:
        return run_inline(pool.job, phase, pending, report)
    return pool.run(phase, pending, report)


def _known_markers(job: Job, manifest: TaskManifest, phases: Sequence[Phase]) -> dict[str, dict[int, dict[str, Any]]]:
    known: dict[str, dict[int, dict[str, Any]]] = {}
    removed = False
    # From the last phase: where it is complete, the parts of the earlier phases may have been removed.
    for phase in reversed(phases):
        found = {
            index: marker
            for index in range(phase.tasks)
            if (marker := read_valid_marker(job, phase, index, manifest.digest, outputs_removed=removed)) is not None
        }
        known[phase.name] = found
        removed = removed or (len(found) == phase.tasks and phase is phases[-1])
    return known


def _check_rejects(job: Job, markers: Collection[Mapping[str, Any]], limit: float, *, partial: bool) -> None:
    documents = sum(marker["tally"]["documents_in"] for marker in markers)
    rejected = sum(sum(marker["tally"]["rejected"].values()) for marker in markers)
    # A share of few documents is not meaningful, so a phase in progress is not stopped by one.
    if rejected <= limit * documents or (partial and documents < MIN_DOCUMENTS_TO_STOP):
        return
    raise TooManyRejectedError(
        f"{job.step}: {rejected:,} of {documents:,} lines are invalid documents, "
        f"more than --max-rejects {limit:g} allows{_missing_key(job, markers)}{_first_failure(markers)}"
        f"{_other_format(job, markers)}; see {job.work / 'parts'}/*-rejects.jsonl"
    )


def _missing_key(job: Job, markers: Collection[Mapping[str, Any]]) -> str:
    """The number of documents without text under the key of the settings, and the keys of the first one."""
    found = next((keys for marker in markers if (keys := marker["result"].get(KEYS_FOUND)) is not None), None)
    if found is None:
        return ""
    count = sum(marker["tally"]["rejected"].get("key", 0) for marker in markers)
    if hasattr(job.settings, "messages_key"):
        option = f"--messages-key {job.settings.messages_key or 'messages or conversations'}"
    else:
        keys = getattr(job.settings, "json_keys", None) or (job.settings.json_key,)
        option = f"--json-key {' or '.join(keys)}"
    return f"; {count:,} lack {option}; the first of them has the keys {', '.join(found)}"


def _first_failure(markers: Collection[Mapping[str, Any]]) -> str:
    """The first error of a library on a document, where a task stored one."""
    found = next((error for marker in markers if (error := marker["result"].get(FIRST_FAILURE)) is not None), None)
    return "" if found is None else f"; the first error is: {found}"


def _other_format(job: Job, markers: Collection[Mapping[str, Any]]) -> str:
    """What the inputs are, if most lines are not JSON."""
    tallies = [marker["tally"]["rejected"] for marker in markers]
    num_invalid = sum(tally.get("json", 0) + tally.get("utf8", 0) for tally in tallies)
    first = next((line for marker in markers if (line := marker["result"].get(FIRST_INVALID)) is not None), None)
    if first is None or 2 * num_invalid < sum(marker["tally"]["documents_in"] for marker in markers):
        return ""
    hint = hint_of_line(first, has_plain_text=hasattr(job.settings, "plain_text"))
    return hint and f"; {hint}"


def _summarize(job: Job, markers: dict[str, list[dict[str, Any]]], seconds: float, *, reused: bool) -> Summary:
    counts = DocumentCounts()
    facts: dict[str, Any] = {}
    # In the order of phases and tasks: a fact that is not a number is the one of the last task, in every run.
    for phase_markers in markers.values():
        for marker in phase_markers:
            counts.add(DocumentCounts(**marker["tally"]))
            for name, fact in marker["facts"].items():
                facts[name] = facts[name] + fact if name in facts and isinstance(fact, int) else fact
    return Summary(
        step=job.step, inputs=job.inputs, output=job.output, counts=counts, seconds=seconds, facts=facts, reused=reused
    )


def _stored_seconds(job: Job, summary: Summary) -> Summary:
    # This run only read markers; a rate from its time would be wrong.
    try:
        stored = SUMMARY.read(job.work / "summary.json")
    except DocumentError:
        return summary
    return Summary(**{**vars(summary), "seconds": stored["seconds"]})


def _finish(job: Job, manifest: TaskManifest, phases: Sequence[Phase], summary: Summary) -> None:
    remove_temporary_files(job)  # a task that Ray restarted may leave files of its first attempt
    _collect_rejects(job, manifest, phases)
    # Before the parts are removed: a run that is killed in between counts as complete when it is resumed.
    SUMMARY.write(job.work / "summary.json", summary.as_json())
    _remove_parts(job.work / "parts")


def _remove_parts(folder: Path) -> None:
    """Remove the parts with several threads: freeing the page cache and blocks of large files takes time."""
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(lambda path: path.unlink(missing_ok=True), list(folder.glob("*"))))
    shutil.rmtree(folder, ignore_errors=True)


def _collect_rejects(job: Job, manifest: TaskManifest, phases: Sequence[Phase]) -> None:
    """Move rejected lines to ``rejects/``, with line numbers relative to the file instead of the slice."""
    # A task knows the lines of its slice only. How many lines precede the slice is known when all tasks are complete.
    before: dict[Path, int] = {}
    reading = next((phase for phase in phases if phase.reads), None)
    if reading is None:
        return
    for index in range(reading.tasks):
        path = manifest.tasks[index].path
        source = job.work / "parts" / f"{index:05d}-rejects.jsonl"
        shift = before.get(path, 0)
        if source.exists():
            with open(source, "rb") as lines, open_atomic(job.work / "rejects" / f"part-{index:05d}.jsonl") as target:
                for line in lines:
                    row = parse_any_json(line, MAX_TABLE_BYTES)
                    row["line"] += shift
                    target.write(json.dumps(row, ensure_ascii=False).encode("utf-8", ESCAPED) + b"\n")
        marker = TASK.read(marker_path(job.work, reading.name, index))
        before[path] = shift + marker["tally"]["lines"]
