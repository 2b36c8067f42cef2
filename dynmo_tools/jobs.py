"""Runs a job: plan, phases, resume, accounting. Decides nothing about documents."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import shutil
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from . import __version__
from .console import say
from .errors import DynmoError, UsageError
from .executors import Crew, run_inline
from .formats._document import encode_json, envelope, write_whole
from .options import files_of, outputs_of
from .plan import Job, Plan, Source, check_output, load_plan, make_plan, store_plan
from .progress import meter
from .records import Tally
from .settings import ExecutorName
from .tasks import Phase, Report, finished, marker_path
from .wholefile import whole_file

SUMMARY_FORMAT = "dynmo.prep-summary"
SUMMARY_VERSION = 1
EXIT_SOME_REJECTED = 3
EXIT_TOO_MANY_REJECTED = 4


class TooManyRejectedError(DynmoError):
    """More lines than ``--max-rejects`` were no usable documents."""

    exit_code = EXIT_TOO_MANY_REJECTED


@dataclass(frozen=True, kw_only=True)
class Part:
    """The tasks ``index``, ``index + count``, ... of one phase, by default of the first that is not complete."""

    index: int
    count: int
    phase: str | None = None


@dataclass(frozen=True, kw_only=True)
class Execution:
    """How a job is run; nothing here changes the bytes of its output."""

    workers: int = 1
    executor: ExecutorName = ExecutorName.LOCAL
    part: Part | None = None
    overwrite: bool = False
    redo_changed: bool = False
    max_rejects: float = 0.01
    log_interval: int = 1000


@dataclass(frozen=True, kw_only=True)
class Summary:
    """What a finished job did."""

    step: str
    inputs: tuple[Path, ...]
    output: Path
    tally: Tally
    seconds: float
    facts: dict[str, Any] = field(default_factory=dict)
    reused: bool = False

    def as_json(self) -> dict[str, Any]:
        """The summary as a document."""
        rate = self.tally.bytes_in / 1e6 / self.seconds if self.seconds else 0.0
        return {
            "step": self.step,
            "inputs": [str(path) for path in self.inputs],
            "output": str(self.output),
            **self.tally.as_json(),
            "seconds": round(self.seconds, 3),
            "megabytes_per_second": round(rate, 3),
            "facts": self.facts,
        }


@contextlib.contextmanager
def locked(work: Path, *, shared: bool = False) -> Iterator[Callable[[], None]]:
    """Hold the work folder alone; ``UsageError`` where another run holds it.

    With ``shared``, wait for it, and share it with other parts of the same run once the function given is called.
    """
    descriptor = os.open(work / "lock", os.O_RDWR | os.O_CREAT, 0o644)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX if shared else fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise UsageError(f"{work}: another run works here; wait for it, or choose another --work-dir") from error
        yield lambda: fcntl.flock(descriptor, fcntl.LOCK_SH)
    finally:
        os.close(descriptor)


def open_work(job: Job, execution: Execution) -> Plan:
    """The plan to follow: the stored one where it is of this job, else a new one.

    Raises:
        UsageError: the folder belongs to a run with other settings or inputs, and nothing allows to redo it.
    """
    plan = make_plan(job)
    job.output.parent.mkdir(parents=True, exist_ok=True)
    if (job.work / "plan.json").exists() and not execution.overwrite:
        stored = load_plan(job.work)
        if stored.digest == plan.digest:
            return stored
        if not execution.redo_changed:
            raise UsageError(
                f"{job.work}: holds a run of this step with other settings or inputs; "
                "use --overwrite to begin anew, or another --work-dir"
            )
        say(f"{job.step}: settings or inputs changed since the last run: begins anew")
    for name in ("parts", "done", "rejects"):
        shutil.rmtree(job.work / name, ignore_errors=True)
    for name in ("plan.json", "summary.json"):
        (job.work / name).unlink(missing_ok=True)
    store_plan(job, plan)
    return plan


def enter_work(job: Job) -> None:
    """Make the work folder; before that, refuse what would write over what is read, or twice into one file.

    Raises:
        UsageError: see ``plan.check_output``; or an input or a file of the settings is not there.
    """
    for path in (*job.inputs, *files_of(job.settings)):
        Source.of(path)
    check_output([*job.inputs, *files_of(job.settings)], [job.output, *outputs_of(job.settings)])
    job.work.mkdir(parents=True, exist_ok=True)


def sweep(job: Job) -> None:
    """Remove what killed runs left under temporary names."""
    own = ((folder, "") for folder in (job.work, job.work / "parts", job.work / "done", job.work / "rejects"))
    for folder, name in (*own, (job.output.parent, job.output.name)):
        for path in folder.glob(f".{name}*.tmp-*"):
            path.unlink(missing_ok=True)


def run_job(job: Job, phases_of: Callable[[Plan], Sequence[Phase]], execution: Execution) -> Summary:
    """Run a job to its end, or finish a run of it that was stopped.

    Args:
        job: what to do.
        phases_of: makes its phases, in order, from the plan.
        execution: how to run them.
    """
    enter_work(job)
    with locked(job.work):
        plan = open_work(job, execution)
        chosen = phases_of(plan)
        (job.work / "parts").mkdir(exist_ok=True)
        (job.work / "done").mkdir(exist_ok=True)
        sweep(job)
        began = time.monotonic()
        try:
            markers, ran = _run_phases(job, plan, chosen, execution)
        except (KeyboardInterrupt, SystemExit):
            sweep(job)  # a worker that was ended between making a file and noting it leaves it behind
            say(f"{job.step}: stopped; finished tasks are kept: run the same command again to go on")
            raise
        finished_before = not ran and (job.work / "summary.json").exists()
        summary = _summarize(job, plan, markers, time.monotonic() - began, reused=finished_before)
        if finished_before:
            return _stored_seconds(job, summary)
        _finish(job, plan, chosen, summary)
        return summary


def _run_phases(
    job: Job, plan: Plan, phases: Sequence[Phase], execution: Execution
) -> tuple[dict[str, list[dict[str, Any]]], int]:
    known = _known_markers(job, plan, phases)
    total = plan.input_bytes
    ran = 0
    rejects = Tally()
    with (
        meter(job.step, total, log_interval=execution.log_interval) as gauge,
        Crew(job, execution.workers) as crew,
    ):
        for phase in phases:
            done = known[phase.name]
            pending = [index for index in range(phase.tasks) if index not in done]
            gauge.resume(phase, len(done))
            for index, marker in _execute(crew, phase, pending, execution, gauge.report if phase.reads else _ignore):
                done[index] = marker
                ran += 1
                if phase.reads:
                    _check_rejects(job, rejects, done.values(), execution.max_rejects, partial=True)
            if phase.reads:
                _check_rejects(job, rejects, done.values(), execution.max_rejects, partial=False)
    return {phase.name: [known[phase.name][i] for i in range(phase.tasks)] for phase in phases}, ran


def prepare(job: Job, phases_of: Callable[[Plan], Sequence[Phase]], execution: Execution) -> Sequence[Phase]:
    """Freeze the plan of a job that others will run; its phases."""
    enter_work(job)
    with locked(job.work):
        return phases_of(open_work(job, execution))


def run_part(job: Job, phases_of: Callable[[Plan], Sequence[Phase]], execution: Execution, part: Part) -> str:
    """Run one part of one phase beside other parts; a line that tells what was done.

    Raises:
        UsageError: the part or its phase does not exist, or the phases before are not complete.
    """
    if not 0 <= part.index < part.count:
        raise UsageError(f"--task-index is {part.index}; it must be between 0 and --task-count - 1 = {part.count - 1}")
    enter_work(job)
    with locked(job.work, shared=True) as share:
        plan = open_work(job, execution)
        for name in ("parts", "done"):
            (job.work / name).mkdir(exist_ok=True)
        share()
        phases = phases_of(plan)
        known = _known_markers(job, plan, phases)
        waiting = [phase for phase in phases if len(known[phase.name]) < phase.tasks]
        chosen = next((p for p in phases if p.name == part.phase), None) if part.phase else next(iter(waiting), None)
        if part.phase and chosen is None:
            raise UsageError(f"--phase {part.phase}: {job.step} has the phases {', '.join(p.name for p in phases)}")
        if chosen is None:
            return f"{job.step}: everything is done"
        if chosen in waiting and chosen is not waiting[0]:
            raise UsageError(f"phase {chosen.name} needs {waiting[0].name}, of which tasks are left to do")
        mine = [i for i in range(part.index, chosen.tasks, part.count) if i not in known[chosen.name]]
        with (
            meter(job.step, plan.input_bytes, log_interval=execution.log_interval) as gauge,
            Crew(job, execution.workers) as crew,
        ):
            done = sum(1 for _ in _execute(crew, chosen, mine, execution, gauge.report if chosen.reads else _ignore))
        left = chosen.tasks - len(known[chosen.name]) - done
        return (
            f"{job.step}: {chosen.name}: part {part.index} of {part.count} did {done} tasks; {left} are left to others"
        )


def _ignore(_documents: int, _size: int) -> None:
    return


def _execute(
    crew: Crew, phase: Phase, pending: list[int], execution: Execution, report: Report
) -> Iterator[tuple[int, dict[str, Any]]]:
    if execution.executor is ExecutorName.RAY and pending:
        from .ray_executor import run_ray

        return run_ray(crew.job, phase, pending, execution.workers, report)
    if min(execution.workers, len(pending)) <= 1:
        return run_inline(crew.job, phase, pending, report)
    return crew.run(phase, pending, report)


def _known_markers(job: Job, plan: Plan, phases: Sequence[Phase]) -> dict[str, dict[int, dict[str, Any]]]:
    known: dict[str, dict[int, dict[str, Any]]] = {}
    used_up = False
    for phase in reversed(phases):
        found = {
            index: marker
            for index in range(phase.tasks)
            if (marker := finished(job, phase, index, plan.digest, outputs_used_up=used_up)) is not None
        }
        known[phase.name] = found
        used_up = used_up or (len(found) == phase.tasks and phase is phases[-1])
    return known


def _check_rejects(job: Job, total: Tally, markers: Any, limit: float, *, partial: bool) -> None:
    documents = sum(marker["tally"]["documents_in"] for marker in markers)
    rejected = sum(sum(marker["tally"]["rejected"].values()) for marker in markers)
    if rejected <= limit * documents or (partial and documents < 10_000):
        return
    raise TooManyRejectedError(
        f"{job.step}: {rejected} of {documents} lines are no usable documents, "
        f"more than --max-rejects {limit:g} allows; "
        f"see {job.work / 'parts'}/*-rejects.jsonl"
    )


def _summarize(
    job: Job, plan: Plan, markers: dict[str, list[dict[str, Any]]], seconds: float, *, reused: bool
) -> Summary:
    tally = Tally()
    facts: dict[str, Any] = {}
    for phase_markers in markers.values():
        for marker in phase_markers:
            tally.add(Tally(**marker["tally"]))
            for name, fact in marker["facts"].items():
                facts[name] = facts[name] + fact if name in facts and isinstance(fact, int) else fact
    return Summary(
        step=job.step, inputs=job.inputs, output=job.output, tally=tally, seconds=seconds, facts=facts, reused=reused
    )


def _stored_seconds(job: Job, summary: Summary) -> Summary:
    try:
        stored = json.loads((job.work / "summary.json").read_bytes())
    except (OSError, ValueError):
        return summary
    return Summary(**{**vars(summary), "seconds": stored["seconds"]})


def _finish(job: Job, plan: Plan, phases: Sequence[Phase], summary: Summary) -> None:
    _gather_rejects(job, plan, phases)
    document = {**envelope(SUMMARY_FORMAT, SUMMARY_VERSION, f"dynmo-prep {__version__}"), **summary.as_json()}
    write_whole(job.work / "summary.json", encode_json(document))
    _remove_parts(job.work / "parts")


def _remove_parts(folder: Path) -> None:
    """Remove the parts, several at a time: giving back the memory and the blocks of large files takes a while."""
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(lambda path: path.unlink(missing_ok=True), list(folder.glob("*"))))
    shutil.rmtree(folder, ignore_errors=True)


def _gather_rejects(job: Job, plan: Plan, phases: Sequence[Phase]) -> None:
    """Move rejected records to ``rejects/``, their line numbers counted from the start of the file."""
    before: dict[Path, int] = {}
    reading = next((phase for phase in phases if phase.reads), None)
    if reading is None:
        return
    for index in range(reading.tasks):
        path = plan.tasks[index].path
        source = job.work / "parts" / f"{index:05d}-rejects.jsonl"
        shift = before.get(path, 0)
        if source.exists():
            with open(source, "rb") as lines, whole_file(job.work / "rejects" / f"part-{index:05d}.jsonl") as target:
                for line in lines:
                    row = json.loads(line)
                    row["line"] += shift
                    target.write(json.dumps(row, ensure_ascii=False).encode() + b"\n")
        marker = json.loads(marker_path(job.work, reading.name, index).read_bytes())
        before[path] = shift + marker["tally"]["lines"]
