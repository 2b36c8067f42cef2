"""``dynmo-train launch slurm|lsf``: the same command as a batch script of a scheduler."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from .._common.console import emit, say
from .._common.document import MAX_COUNT, MAX_JOBS, MAX_RANKS
from .._common.errors import UsageError
from ..formats.os_errors import reason
from .cluster_options import (
    DryRun,
    Exports,
    Gpus,
    Image,
    InJob,
    JobName,
    LogFolder,
    Mounts,
    NodeCount,
    Nproc,
    ScriptFile,
    TimeLimit,
    Workdir,
)
from .launch import COMMAND_LAST, Arguments, MaxRestarts, check_command, count_of_nodes, launch

Cpus = Annotated[
    int | None,
    typer.Option(
        "--cpus-per-task",
        "--cpus",
        min=0,
        max=MAX_JOBS,
        help="CPUs of each node, for all its processes; 0 leaves it to the scheduler [default: 4 a process with a GPU,"
        " else its threads].",
    ),
]


@dataclass(frozen=True, kw_only=True)
class _Submission:
    """How a script is handed over: ``job_variable`` is set within a job of this scheduler."""

    command: tuple[str, ...]
    by_stdin: bool
    job_variable: str


_SLURM = _Submission(command=("sbatch", "--parsable"), by_stdin=False, job_variable="SLURM_JOB_ID")
_LSF = _Submission(command=("bsub",), by_stdin=True, job_variable="LSB_JOBID")


def _write_and_submit(text: str, file: Path, how: _Submission, *, dry_run: bool, in_job: bool) -> None:
    """Print a script, or run it in the place of this process, or write it and hand it to the scheduler."""
    if dry_run:
        emit(text.rstrip("\n"))
        return
    if in_job:
        if how.job_variable not in os.environ:
            raise UsageError(f"--in-job: this is no job: {how.job_variable} is not set; leave it out to submit one")
        os.execvp("bash", ["bash", "-c", text])
    from ..launch.slurm import submit_script

    try:
        file.write_text(text, encoding="utf-8")
    except OSError as error:
        raise UsageError(f"cannot write {file}: {reason(error)}") from error
    say(f"dynmo-train: submitted {submit_script(file, how.command, by_stdin=how.by_stdin)} ({file})")


@launch.command("slurm", context_settings=COMMAND_LAST)
def launch_slurm(
    arguments: Arguments,
    nodes: NodeCount = None,
    nproc: Nproc = 1,
    gpus: Gpus = 0,
    cpus: Cpus = None,
    job_name: JobName = "dynmo",
    time_limit: TimeLimit = "",
    partition: Annotated[str, typer.Option("--partition", help="Partition.")] = "",
    account: Annotated[str, typer.Option("--account", help="Account.")] = "",
    qos: Annotated[str, typer.Option("--qos", help="Quality of service.")] = "",
    output: Annotated[str, typer.Option("--output", help="Log of the job.")] = "slurm-%x-%j.out",
    array: Annotated[
        int,
        typer.Option("--array", min=0, max=MAX_COUNT, help="Run this many times in sequence; each resumes the run."),
    ] = 0,
    het: Annotated[
        list[str] | None,
        typer.Option("--het", metavar="NODES:PARTITION[:GPUS]", help="Group of a heterogeneous job; may be repeated."),
    ] = None,
    save_before_s: Annotated[
        int,
        typer.Option(
            "--save-before-s", min=1, max=MAX_COUNT, help="Seconds before the time limit to save and requeue at."
        ),
    ] = 120,
    image: Image = "",
    mount: Mounts = None,
    workdir: Workdir = "",
    export: Exports = None,
    sbatch: Annotated[
        list[str] | None, typer.Option("--sbatch", metavar="--OPTION=VALUE", help="Any other option of sbatch.")
    ] = None,
    log_dir: LogFolder = "logs",
    max_restarts: MaxRestarts = 3,
    script: ScriptFile = Path("dynmo.sbatch"),
    in_job: InJob = False,
    dry_run: DryRun = False,
) -> None:
    """Write a batch script for Slurm that runs COMMAND on its nodes, and submit it.

    The run should have --save and --load of one folder that all nodes see: on a time-out or a lost node the job goes
    back into the queue and resumes there. Nodes whose workers are released leave the job.
    """
    check_command(arguments)
    from ..launch.job_script import parse_exports, task_cpus
    from ..launch.slurm import SlurmJob, parse_part, slurm_script

    all_nodes = os.environ.get("SLURM_JOB_NUM_NODES", "1") if in_job else "1"
    least, most = count_of_nodes("--nodes", nodes or all_nodes)
    exported = parse_exports(export or ())
    environment = {**os.environ, **exported}
    job = SlurmJob(
        arguments=tuple(arguments),
        name=job_name,
        least=least,
        most=most,
        nproc=nproc,
        gpus=gpus,
        cpus=cpus if cpus is not None else 0 if in_job else task_cpus(nproc, gpus or bool(het), arguments, environment),
        time=time_limit,
        partition=partition,
        account=account,
        qos=qos,
        output=output,
        array=array,
        parts=tuple(parse_part(text) for text in het or ()),
        save_before_s=save_before_s,
        max_restarts=max_restarts,
        log_dir=log_dir,
        image=image,
        mounts=tuple(mount or ()),
        workdir=workdir,
        exports=exported,
        more=tuple(sbatch or ()),
    )
    _write_and_submit(slurm_script(job), script, _SLURM, dry_run=dry_run, in_job=in_job)


@launch.command("lsf", context_settings=COMMAND_LAST)
def launch_lsf(
    arguments: Arguments,
    nodes: Annotated[
        int, typer.Option("--nodes", min=1, max=MAX_RANKS, envvar="NUM_NODES", help="Hosts that take part.")
    ] = 1,
    nproc: Nproc = 1,
    gpus: Gpus = 0,
    cpus: Cpus = None,
    job_name: JobName = "dynmo",
    time_limit: TimeLimit = "",
    queue: Annotated[str, typer.Option("--queue", help="Queue.")] = "",
    project: Annotated[str, typer.Option("--project", help="Project.")] = "",
    output: Annotated[str, typer.Option("--output", help="Log of the job.")] = "lsf-%J.out",
    image: Image = "",
    container: Annotated[str, typer.Option("--container", help="singularity or apptainer.")] = "singularity",
    mount: Mounts = None,
    workdir: Workdir = "",
    export: Exports = None,
    bsub: Annotated[list[str] | None, typer.Option("--bsub", help="Any other word of bsub; repeatable.")] = None,
    log_dir: LogFolder = "logs",
    max_restarts: MaxRestarts = 3,
    script: ScriptFile = Path("dynmo.lsf"),
    in_job: InJob = False,
    dry_run: DryRun = False,
) -> None:
    """Write a batch script for IBM Spectrum LSF that runs COMMAND on its hosts, and submit it with bsub."""
    check_command(arguments)
    from ..launch.job_script import parse_exports, task_cpus
    from ..launch.lsf import LsfJob, lsf_script

    if container not in ("singularity", "apptainer"):
        raise UsageError(f"--container must be singularity or apptainer, is {container!r}")
    exported = parse_exports(export or ())
    job = LsfJob(
        arguments=tuple(arguments),
        name=job_name,
        nodes=nodes,
        nproc=nproc,
        gpus=gpus,
        slots=max(1, task_cpus(nproc, gpus, arguments, {**os.environ, **exported}) if cpus is None else cpus),
        time=time_limit,
        queue=queue,
        project=project,
        output=output,
        max_restarts=max_restarts,
        log_dir=log_dir,
        image=image,
        container=container,
        mounts=tuple(mount or ()),
        workdir=workdir,
        exports=exported,
        more=tuple(bsub or ()),
    )
    _write_and_submit(lsf_script(job), script, _LSF, dry_run=dry_run, in_job=in_job)
