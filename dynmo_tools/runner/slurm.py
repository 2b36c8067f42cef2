"""Slurm arrays: one array a phase, each job of it a part of the phase's tasks, the next phase behind its success."""

from __future__ import annotations

import shlex
import shutil
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from .._common.errors import DynmoError, UsageError
from .task import Phase

DEFAULT_JOBS = 64
MAX_ARRAY = 1000  # the index limit that a cluster has unless it is configured otherwise is 1001


@dataclass(frozen=True, kw_only=True)
class Submission:
    """One call of ``sbatch``.

    Attributes:
        name: of the job.
        line: what it runs, in shell.
        jobs: of the array; None is one job that is no array.
    """

    name: str
    line: str
    jobs: int | None = None


def check_jobs(jobs: int) -> None:
    """``UsageError`` where an array cannot have so many jobs."""
    if not 1 <= jobs <= MAX_ARRAY:
        raise UsageError(f"--task-count is {jobs}; an array has between 1 and {MAX_ARRAY} jobs")


def job_arrays(command: Sequence[str], phases: Sequence[Phase], jobs: int, prefix: str = "") -> list[Submission]:
    """The arrays that do the phases of one step, each phase cut into ``jobs`` parts at most.

    Args:
        command: the command line that the jobs run, without the flags of this executor.
        phases: of the step.
        jobs: of an array at most.
        prefix: what stands before a phase's name in that of its job.
    """
    check_jobs(jobs)
    submissions = []
    for phase in phases:
        count = min(phase.tasks, jobs)
        part = f"--phase {phase.name} --task-index $SLURM_ARRAY_TASK_ID --task-count {count}"
        submissions.append(Submission(name=f"{prefix}{phase.name}", line=f"{shlex.join(command)} {part}", jobs=count))
    return submissions


def sbatch_script(submissions: Sequence[Submission], log_folder: Path) -> str:
    """The script that submits everything, each job behind the success of the one before.

    A job whose predecessor failed is cancelled, else it would stay queued for ever. Where ``sbatch`` refuses a job, the
    jobs submitted before it are cancelled. All run in the current directory of the process that writes the script.
    """
    here = Path.cwd()
    log_folder = here / log_folder
    logs = shlex.quote(f"{log_folder}/slurm-%A-%a.log")
    lines = [
        "#!/bin/bash",
        "# Each job waits for the one before. SBATCH_OPTIONS are given to every sbatch.",
        "set -euo pipefail",
        f"cd {shlex.quote(str(here))}",
        f"mkdir -p {shlex.quote(str(log_folder))}",
        "jobs=()",
        "trap 'if [ ${#jobs[@]} -gt 0 ]; then scancel \"${jobs[@]}\"; fi' ERR",
        'after=""',
    ]
    for one in submissions:
        array = "" if one.jobs is None else f"--array 0-{one.jobs - 1} "
        lines.append(
            f"job=$(sbatch --parsable ${{SBATCH_OPTIONS:-}} $after --job-name {shlex.quote(one.name)} {array}"
            f"--output {logs} --wrap {shlex.quote(one.line)})"
        )
        lines.append('jobs+=("${job%%;*}")')
        lines.append('after="--dependency=afterok:${job%%;*} --kill-on-invalid-dep=yes"')
    lines.append('echo "$job"')
    return "\n".join(lines) + "\n"


def submit(path: Path) -> str:
    """Run the script; the number of the last job, which ends when everything is done.

    Raises:
        UsageError: this machine has no ``sbatch``.
        DynmoError: ``sbatch`` refused.
    """
    if shutil.which("sbatch") is None:
        raise UsageError("sbatch is not on PATH; use --emit-sbatch FILE here and run the file where Slurm is")
    completed = subprocess.run(["bash", str(path)], capture_output=True, text=True, check=False)
    if completed.returncode:
        raise DynmoError(f"sbatch refused: {completed.stderr.strip() or completed.stdout.strip()}")
    return completed.stdout.strip().splitlines()[-1]
