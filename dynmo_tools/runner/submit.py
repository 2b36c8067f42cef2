"""Runs work in other processes: a subset of one phase's tasks, or everything as Slurm job arrays."""

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
"""Switches of the submitting command only: a job with ``--overwrite`` would discard the work of earlier jobs."""
# Larger than any input: a phase whose number of tasks follows from the bytes of the inputs then has its maximum.
UNKNOWN_BYTES = 1 << 50


def _subset(run: RunSettings) -> TaskSubset | None:
    if run.task_index is None:
        return None
    if run.task_count is None:
        raise UsageError("--task-index: requires --task-count")
    if run.overwrite:
        raise UsageError(
            "--overwrite with --task-index: each subset would discard the work of the others; "
            "remove the old output and its work folder, and omit --overwrite"
        )
    return TaskSubset(index=run.task_index, count=run.task_count, phase=run.phase)


def _write_and_submit(name: str, run: RunSettings, path: Path, submissions: Sequence[Submission], logs: Path) -> str:
    path.write_text(sbatch_script(submissions, logs), encoding="utf-8", errors="surrogateescape")  # paths are bytes
    if run.emit_sbatch is None:
        return f"{name}: submitted; the last job is {submit(path)}"
    return f"{name}: wrote {path}; run it on a Slurm machine"


def remove_flags(arguments: Sequence[str], flags: Sequence[str], switches: Sequence[str] = ()) -> list[str]:
    """Remove flags with one value each, and switches without values, from arguments."""
    remaining: list[str] = []
    skip = False
    for argument in arguments:
        if skip:
            skip = False
        elif argument in flags:
            skip = True
        elif argument.partition("=")[0] not in (*flags, *switches):
            remaining.append(argument)
    return remaining


def dispatch_step(job: Job, step: Step, run: RunSettings, execution: Execution, argv: Sequence[str]) -> str | None:
    """Submit a step to Slurm, or run a subset of its tasks.

    Args:
        job: job of the step.
        step: the step.
        run: settings of the run.
        execution: how subsets run.
        argv: command line, which the jobs of an array repeat.

    Returns:
        One line for the user; None if neither was requested.

    Raises:
        UsageError: the subset or the number of jobs is not allowed, or see ``run_subset`` and ``prepare_manifest``.
        DynmoError: a task or ``sbatch`` failed.
    """
    if (subset := _subset(run)) is not None:
        return run_subset(job, step.phases_of(), execution, subset)
    if run.executor is not ExecutorName.SLURM and run.emit_sbatch is None:
        return None
    # Before the manifest is written: a refused command leaves nothing behind.
    check_jobs(run.task_count or DEFAULT_JOBS)
    phases = prepare_manifest(job, step.phases_of(), execution)
    line = ["dynmo-prep", *remove_flags(argv, EXECUTOR_FLAGS, SUBMIT_ONLY_SWITCHES)]
    submissions = [
        *job_arrays(line, phases, run.task_count or DEFAULT_JOBS),
        Submission(name="finish", line=shlex.join(line)),
    ]
    return _write_and_submit(step.name, run, run.emit_sbatch or job.work / "submit.sh", submissions, job.work / "logs")


def _placeholder_manifest(job: Job, jobs: int) -> TaskManifest:
    """The manifest of a job whose input does not exist yet: one task per job of the array."""
    source = Source(path=job.inputs[0], size_bytes=UNKNOWN_BYTES, mtime_ns=0)
    return TaskManifest(digest="", sources=(source,), tasks=(Slice(path=job.inputs[0]),) * jobs)


def _find_step(jobs: Sequence[tuple[RecipeStep, Job]], name: str, source: str) -> tuple[RecipeStep, Job]:
    for chosen, job in jobs:
        if chosen.name == name:
            return chosen, job
    raise UsageError(
        f"--step {name}: not a step of {source}; its steps are {', '.join(chosen.name for chosen, _ in jobs)}"
    )


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
    """Submit a pipeline to Slurm, run one step of it, or run a subset of a step's tasks.

    The input of a step is written by the steps before it, so its number of tasks is unknown at submission. Each array
    has ``--task-count`` jobs, and a job without tasks exits immediately. One job completes each step after its arrays.
    The last job is the complete pipeline: it finds all steps complete and writes the summary.

    Args:
        recipe: the recipe.
        inputs: inputs of its first step.
        folder: folder of all outputs.
        limits: limits of dividing and reading.
        step: name of the step to run alone; None is the complete pipeline.
        run: settings of the run; ``task_count`` None is ``DEFAULT_JOBS`` jobs per array.
        execution: how steps and subsets run.
        argv: command line, which the jobs of the arrays repeat.

    Returns:
        One line for the user; None if nothing of this was requested.

    Raises:
        UsageError: the recipe has no step of this name, a subset is requested without a step, the number of jobs is not
            allowed, or see ``jobs_of`` and ``run_subset``.
        DynmoError: a task or ``sbatch`` failed.
    """
    jobs = jobs_of(recipe, inputs, folder, limits)
    subset = _subset(run)
    if step is not None:
        chosen, job = _find_step(jobs, step, recipe.source)
        if subset is not None:
            return run_subset(job, chosen.step.phases_of(), execution, subset)
        summary = run_job(job, chosen.step.phases_of(), execution)
        return f"{step}: done: {summary.counts.documents_in:,} documents in, {summary.counts.num_rejected:,} rejected"
    if subset is not None:
        raise UsageError("pipeline --task-index: applies to one step; select it with --step")
    if run.executor is not ExecutorName.SLURM and run.emit_sbatch is None:
        return None
    count = run.task_count or DEFAULT_JOBS
    check_jobs(count)
    # Here and once: the jobs run without --overwrite, so that none of them discards the work of an earlier one.
    if execution.overwrite:
        for _, job in jobs:
            discard_run(job)
    line = ["dynmo-prep", *remove_flags(argv, EXECUTOR_FLAGS, SUBMIT_ONLY_SWITCHES)]
    submissions: list[Submission] = []
    for number, (chosen, job) in enumerate(jobs):
        # Only the inputs of the first step exist now. Later phases have at most one task per job of the array.
        manifest = make_manifest(job) if number == 0 else _placeholder_manifest(job, count)
        step_line = [*line, "--step", chosen.name]
        submissions += job_arrays(step_line, chosen.step.phases_of()(manifest), count, f"{chosen.name}-")
        submissions.append(Submission(name=f"{chosen.name}-finish", line=shlex.join(step_line)))
    submissions.append(Submission(name="pipeline", line=shlex.join(line)))
    folder.mkdir(parents=True, exist_ok=True)
    return _write_and_submit("pipeline", run, run.emit_sbatch or folder / "submit.sh", submissions, folder / "logs")
