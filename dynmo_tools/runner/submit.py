"""Work that is done by other processes than this one: one part of a phase, or everything as Slurm arrays."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from pathlib import Path

from .._common.errors import UsageError
from ..config.settings import ExecutorName, RunSettings
from ..io.jsonl import Slice
from .job import Execution, TaskSubset, discard_run, prepare_manifest, run_job, run_subset
from .recipe import Recipe, RecipeStep, jobs_of
from .registry import Step
from .slurm import DEFAULT_JOBS, Submission, check_jobs, job_arrays, sbatch_script, submit
from .task_manifest import Job, Limits, Source, TaskManifest, make_manifest

EXECUTOR_FLAGS = ("--executor", "--emit-sbatch", "--task-count")
SUBMIT_ONLY_SWITCHES = ("--overwrite", "--no-overwrite")
"""Switches of the submitting command alone: a job with ``--overwrite`` would discard the work of those before it."""
UNKNOWN_BYTES = 1 << 50


def _subset(run: RunSettings) -> TaskSubset | None:
    if run.task_index is None:
        return None
    if run.task_count is None:
        raise UsageError("--task-index needs --task-count")
    if run.overwrite:
        raise UsageError(
            "--overwrite with --task-index: each part would discard the work of the others; "
            "remove the old output and its work folder, and leave --overwrite out"
        )
    return TaskSubset(index=run.task_index, count=run.task_count, phase=run.phase)


def _write_and_submit(name: str, run: RunSettings, path: Path, submissions: Sequence[Submission], logs: Path) -> str:
    path.write_text(sbatch_script(submissions, logs), encoding="utf-8", errors="surrogateescape")  # names are bytes
    if run.emit_sbatch is None:
        return f"{name}: submitted; job {submit(path)} ends last"
    return f"{name}: wrote {path}: run it where Slurm is"


def remove_flags(arguments: Sequence[str], flags: Sequence[str], switches: Sequence[str] = ()) -> list[str]:
    """The arguments without these flags, each of which has one value, and these switches, which have none."""
    kept: list[str] = []
    skip = False
    for argument in arguments:
        if skip:
            skip = False
        elif argument in flags:
            skip = True
        elif argument.partition("=")[0] not in (*flags, *switches):
            kept.append(argument)
    return kept


def dispatch_step(job: Job, step: Step, run: RunSettings, execution: Execution, argv: Sequence[str]) -> str | None:
    """Hand a step to Slurm, or run one part of it; what was done, or None where neither was wanted.

    Args:
        job: the step's.
        step: which one.
        run: how it is to be run.
        execution: the same, for the parts.
        argv: the command line, which the jobs of an array repeat.
    """
    if (subset := _subset(run)) is not None:
        return run_subset(job, step.phases_of(), execution, subset)
    if run.executor is not ExecutorName.SLURM and run.emit_sbatch is None:
        return None
    check_jobs(run.task_count or DEFAULT_JOBS)
    phases = prepare_manifest(job, step.phases_of(), execution)
    line = ["dynmo-prep", *remove_flags(argv, EXECUTOR_FLAGS, SUBMIT_ONLY_SWITCHES)]
    submissions = [
        *job_arrays(line, phases, run.task_count or DEFAULT_JOBS),
        Submission(name="finish", line=shlex.join(line)),
    ]
    return _write_and_submit(step.name, run, run.emit_sbatch or job.work / "submit.sh", submissions, job.work / "logs")


def _placeholder_manifest(job: Job, jobs: int) -> TaskManifest:
    """The plan of a job whose input is not there yet: as many tasks as an array has jobs, which may find none."""
    source = Source(path=job.inputs[0], size_bytes=UNKNOWN_BYTES, mtime_ns=0)
    return TaskManifest(digest="", sources=(source,), tasks=(Slice(path=job.inputs[0]),) * jobs)


def _find_step(jobs: Sequence[tuple[RecipeStep, Job]], name: str, source: str) -> tuple[RecipeStep, Job]:
    for chosen, job in jobs:
        if chosen.name == name:
            return chosen, job
    raise UsageError(f"--step {name}: {source} has the steps {', '.join(chosen.name for chosen, _ in jobs)}")


def dispatch_pipeline(
    recipe: Recipe,
    inputs: Sequence[Path],
    folder: Path,
    limits: Limits,
    *,
    step: str | None,
    run: RunSettings,
    execution: Execution,
    argv: Sequence[str],
) -> str | None:
    """Hand a pipeline to Slurm, or run one step of it or a part of one; what was done, or None.

    A step's input is made by the steps before, so its number of tasks is not known when it is submitted: each of its
    arrays has ``--task-count`` jobs, and a job that finds no task left ends at once. Behind a step's arrays one job
    finishes the step; the last job is the whole pipeline, which finds all steps done and sums up.
    """
    jobs = jobs_of(recipe, inputs, folder, limits)
    subset = _subset(run)
    if step is not None:
        chosen, job = _find_step(jobs, step, recipe.source)
        if subset is not None:
            return run_subset(job, chosen.step.phases_of(), execution, subset)
        summary = run_job(job, chosen.step.phases_of(), execution)
        return f"{step}: done: {summary.tally.documents_in:,} documents in, {summary.tally.num_rejected:,} rejected"
    if subset is not None:
        raise UsageError("pipeline: --task-index is of one step; name it by --step")
    if run.executor is not ExecutorName.SLURM and run.emit_sbatch is None:
        return None
    count = run.task_count or DEFAULT_JOBS
    check_jobs(count)
    if execution.overwrite:
        for _, job in jobs:
            discard_run(job)
    line = ["dynmo-prep", *remove_flags(argv, EXECUTOR_FLAGS, SUBMIT_ONLY_SWITCHES)]
    submissions: list[Submission] = []
    for number, (chosen, job) in enumerate(jobs):
        manifest = make_manifest(job) if number == 0 else _placeholder_manifest(job, count)
        step_line = [*line, "--step", chosen.name]
        submissions += job_arrays(step_line, chosen.step.phases_of()(manifest), count, f"{chosen.name}-")
        submissions.append(Submission(name=f"{chosen.name}-finish", line=shlex.join(step_line)))
    submissions.append(Submission(name="pipeline", line=shlex.join(line)))
    folder.mkdir(parents=True, exist_ok=True)
    return _write_and_submit("pipeline", run, run.emit_sbatch or folder / "submit.sh", submissions, folder / "logs")
