"""Slurm job arrays: one array per phase, each after the success of the previous one."""

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
# The default MaxArraySize of a cluster is 1001, and indices must be below it.
MAX_ARRAY = 1000


@dataclass(frozen=True, kw_only=True)
class Submission:
    """One call of ``sbatch``.

    Attributes:
        name: name of the job.
        line: shell command of the job.
        jobs: number of jobs of the array; None is a single job.
    """

    name: str
    line: str
    jobs: int | None = None


def check_jobs(jobs: int) -> None:
    """Refuse a number of ``jobs`` that an array cannot have.

    Raises:
        UsageError: it is not from 1 to ``MAX_ARRAY``.
    """
    if not 1 <= jobs <= MAX_ARRAY:
        raise UsageError(f"--task-count {jobs}: must be from 1 to {MAX_ARRAY}, the jobs of an array")


def job_arrays(command: Sequence[str], phases: Sequence[Phase], jobs: int, prefix: str = "") -> list[Submission]:
    """The arrays of one step, one per phase, each with at most ``jobs`` jobs.

    Args:
        command: command line of the jobs, without the flags of this executor.
        phases: phases of the step.
        jobs: maximum number of jobs per array.
        prefix: prefix of the job names.

    Raises:
        UsageError: see ``check_jobs``.
    """
    check_jobs(jobs)
    submissions = []
    for phase in phases:
        count = min(phase.tasks, jobs)
        # The count is in the command: with Slurm's own, a resubmitted part of an array would run other tasks.
        part = f"--phase {phase.name} --task-index $SLURM_ARRAY_TASK_ID --task-count {count}"
        submissions.append(Submission(name=f"{prefix}{phase.name}", line=f"{shlex.join(command)} {part}", jobs=count))
    return submissions


def sbatch_script(submissions: Sequence[Submission], log_folder: Path) -> str:
    """The script that submits everything; each job starts after the success of the previous one.

    A job whose predecessor failed is cancelled; otherwise it would be queued forever. If ``sbatch`` refuses a job, the
    earlier jobs are cancelled. All jobs run in the current directory of the process that writes the script.

    Args:
        submissions: the jobs, in order.
        log_folder: folder of the logs, relative to the current directory.
    """
    here = Path.cwd()
    log_folder = here / log_folder
    logs = shlex.quote(f"{log_folder}/slurm-%A-%a.log")
    lines = [
        "#!/bin/bash",
        "# Each job starts after the success of the previous one. SBATCH_OPTIONS are passed to every sbatch.",
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
        # --parsable prints JOB, or JOB;CLUSTER in a federation.
        lines.append('jobs+=("${job%%;*}")')
        lines.append('after="--dependency=afterok:${job%%;*} --kill-on-invalid-dep=yes"')
    lines.append('echo "$job"')
    return "\n".join(lines) + "\n"


def submit(path: Path) -> str:
    """Run the script.

    Returns:
        The id of the last job, which ends when everything is complete.

    Raises:
        UsageError: this machine has no ``sbatch``.
        DynmoError: ``sbatch`` failed.
    """
    if shutil.which("sbatch") is None:
        raise UsageError("sbatch is not on PATH; use --emit-sbatch FILE and run the file on a Slurm machine")
    completed = subprocess.run(["bash", str(path)], capture_output=True, text=True, check=False)
    if completed.returncode:
        raise DynmoError(f"sbatch failed: {completed.stderr.strip() or completed.stdout.strip()}")
    return completed.stdout.strip().splitlines()[-1]
