"""Slurm arrays: one array a phase, each job of it a part of the phase's tasks, the next phase behind its success."""

from __future__ import annotations

import shlex
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path

from .errors import DynmoError, UsageError
from .tasks import Phase

DEFAULT_JOBS = 64
MAX_ARRAY = 1000  # the index limit that a cluster has unless it is configured otherwise is 1001


def script(command: Sequence[str], phases: Sequence[Phase], jobs: int, log_folder: Path) -> str:
    """The script that submits everything.

    Args:
        command: the command line that the jobs run, without the flags of this executor.
        phases: of the job.
        jobs: of an array at most.
        log_folder: where the jobs' logs go.
    """
    if not 1 <= jobs <= MAX_ARRAY:
        raise UsageError(f"--task-count is {jobs}; an array has between 1 and {MAX_ARRAY} jobs")
    line = shlex.join(command)
    logs = shlex.quote(f"{log_folder}/slurm-%A-%a.log")
    rows = [
        "#!/bin/bash",
        "# One array a phase, then one job that finishes. SBATCH_OPTIONS are given to every sbatch.",
        "set -euo pipefail",
        f"mkdir -p {shlex.quote(str(log_folder))}",
        'after=""',
    ]
    for phase in phases:
        count = min(phase.tasks, jobs)
        part = f"{line} --phase {phase.name} --task-index $SLURM_ARRAY_TASK_ID --task-count {count}"
        rows.append(
            f"after=$(sbatch --parsable ${{SBATCH_OPTIONS:-}} $after --job-name {phase.name} --array 0-{count - 1} "
            f"--output {logs} --wrap {shlex.quote(part)})"
        )
        rows.append('after="--dependency=afterok:${after%%;*}"')
    rows.append(
        f"sbatch --parsable ${{SBATCH_OPTIONS:-}} $after --job-name finish --output {logs} --wrap {shlex.quote(line)}"
    )
    return "\n".join(rows) + "\n"


def submit(path: Path) -> str:
    """Run the script; the number of the last job, which ends when everything is done.

    Raises:
        UsageError: this machine has no ``sbatch``.
        DynmoError: ``sbatch`` refused.
    """
    if shutil.which("sbatch") is None:
        raise UsageError("sbatch is not on PATH; use --emit-sbatch FILE here and run the file where Slurm is")
    done = subprocess.run(["bash", str(path)], capture_output=True, text=True, check=False)
    if done.returncode:
        raise DynmoError(f"sbatch refused: {done.stderr.strip() or done.stdout.strip()}")
    return done.stdout.strip().splitlines()[-1]
