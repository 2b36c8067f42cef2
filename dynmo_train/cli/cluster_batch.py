"""``dynmo-train launch slurm`` and ``launch lsf``: run a command by a batch script."""

from __future__ import annotations

import os
from dataclasses import dataclass, replace

from .._common.console import emit, print_message
from .._common.errors import UsageError
from .._common.option_groups import grouped
from ..formats.os_errors import reason
from ..launch.options import BatchJob
from ..launch.schedulers.job_script import parse_exports, task_cpus
from ..launch.schedulers.lsf import LsfJob, lsf_script
from ..launch.schedulers.slurm import SlurmJob, slurm_script, submit_script
from .launch import COMMAND_LAST, check_command, launch


@dataclass(frozen=True, kw_only=True)
class _Scheduler:
    """How a scheduler accepts a script; ``job_variable`` is set inside its jobs."""

    command: tuple[str, ...]
    by_stdin: bool
    job_variable: str


_SLURM = _Scheduler(command=("sbatch", "--parsable"), by_stdin=False, job_variable="SLURM_JOB_ID")
_LSF = _Scheduler(command=("bsub",), by_stdin=True, job_variable="LSB_JOBID")


def _default_cpus(job: BatchJob, *, has_gpus: bool) -> int:
    environment = {**os.environ, **parse_exports(job.export or ())}
    return task_cpus(job.nproc, has_gpus, job.arguments, environment)


def _write_and_submit(text: str, job: SlurmJob | LsfJob, scheduler: _Scheduler) -> None:
    """Print a script, execute it inside a job, or write and submit it."""
    if job.dry_run:
        emit(text.rstrip("\n"))
        return
    if job.in_job:
        if scheduler.job_variable not in os.environ:
            raise UsageError(
                f"--in-job: {scheduler.job_variable} must be set, as inside a job; remove --in-job to submit one"
            )
        os.execvp("bash", ["bash", "-c", text])
    try:
        job.script.write_text(text, encoding="utf-8")
    except OSError as error:
        raise UsageError(f"cannot write {job.script}: {reason(error)}") from error
    submitted = submit_script(job.script, scheduler.command, by_stdin=scheduler.by_stdin)
    print_message(f"dynmo-train: submitted {submitted} ({job.script})")


@launch.command("slurm", context_settings=COMMAND_LAST)
@grouped
def launch_slurm(job: SlurmJob) -> None:
    """Write and submit a Slurm batch script that runs COMMAND on its nodes.

    Give COMMAND --save and --load with one folder on a shared file system: after the time limit or the loss of a node
    the job is requeued and resumes. Nodes whose ranks are released leave the job.
    """
    check_command(job.arguments)
    if job.in_job:  # nodes and CPUs are already allocated
        job = replace(job, nodes=job.nodes or os.environ.get("SLURM_JOB_NUM_NODES"), cpus=job.cpus or 0)
    if job.cpus is None:
        job = replace(job, cpus=_default_cpus(job, has_gpus=bool(job.gpus or job.het)))
    _write_and_submit(slurm_script(job), job, _SLURM)


@launch.command("lsf", context_settings=COMMAND_LAST)
@grouped
def launch_lsf(job: LsfJob) -> None:
    """Write and submit an IBM Spectrum LSF batch script that runs COMMAND on its hosts."""
    check_command(job.arguments)
    if job.cpus is None:
        job = replace(job, cpus=_default_cpus(job, has_gpus=bool(job.gpus)))
    _write_and_submit(lsf_script(job), job, _LSF)
