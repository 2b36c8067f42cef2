"""``dynmo-train launch slurm`` and ``launch lsf``: run a command by a batch script."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, ClassVar

import typer

from .._common.console import emit, print_message
from .._common.document import MAX_COUNT, MAX_JOBS, MAX_RANKS
from .._common.errors import UsageError
from .._common.option_groups import grouped
from ..formats.os_errors import reason
from .cluster_options import (
    ContainerOptions,
    DryRun,
    Exports,
    InJob,
    JobName,
    LogFolder,
    NodeCount,
    ProcessOptions,
    ScriptFile,
    TimeLimit,
)
from .launch import COMMAND_LAST, Arguments, MaxRestarts, check_command, launch, parse_node_range

Cpus = Annotated[
    int | None,
    typer.Option(
        "--cpus-per-task",
        "--cpus",
        min=0,
        max=MAX_JOBS,
        help="CPUs per node; 0: scheduler's default [default: 4 per GPU process, else --num-threads].",
    ),
]


@dataclass(frozen=True, kw_only=True)
class _Scheduler:
    """How a scheduler accepts a script; ``job_variable`` is set inside its jobs."""

    command: tuple[str, ...]
    by_stdin: bool
    job_variable: str


_SLURM = _Scheduler(command=("sbatch", "--parsable"), by_stdin=False, job_variable="SLURM_JOB_ID")
_LSF = _Scheduler(command=("bsub",), by_stdin=True, job_variable="LSB_JOBID")


def _write_and_submit(text: str, file: Path, scheduler: _Scheduler, *, dry_run: bool, in_job: bool) -> None:
    """Print a script, execute it inside a job, or write and submit it."""
    if dry_run:
        emit(text.rstrip("\n"))
        return
    if in_job:
        if scheduler.job_variable not in os.environ:
            raise UsageError(
                f"--in-job: {scheduler.job_variable} must be set, as inside a job; remove --in-job to submit one"
            )
        os.execvp("bash", ["bash", "-c", text])
    from ..launch.slurm import submit_script

    try:
        file.write_text(text, encoding="utf-8")
    except OSError as error:
        raise UsageError(f"cannot write {file}: {reason(error)}") from error
    print_message(
        f"dynmo-train: submitted {submit_script(file, scheduler.command, by_stdin=scheduler.by_stdin)} ({file})"
    )


@dataclass(frozen=True, kw_only=True)
class BatchOptions:
    """A batch job of any scheduler."""

    PANEL: ClassVar[str] = "Job"

    cpus: Cpus = None
    job_name: JobName = "dynmo"
    time_limit: TimeLimit = ""
    export: Exports = None
    log_dir: LogFolder = "logs"
    max_restarts: MaxRestarts = 3
    in_job: InJob = False
    dry_run: DryRun = False


@dataclass(frozen=True, kw_only=True)
class SlurmOptions:
    """What only Slurm has."""

    PANEL: ClassVar[str] = "Slurm"

    partition: Annotated[str, typer.Option("--partition", help="Slurm partition.")] = ""
    account: Annotated[str, typer.Option("--account", help="Slurm account.")] = ""
    qos: Annotated[str, typer.Option("--qos", help="Quality of service.")] = ""
    array: Annotated[
        int,
        typer.Option("--array", min=0, max=MAX_COUNT, help="Number of sequential jobs; each resumes the run."),
    ] = 0
    het: Annotated[
        list[str] | None,
        typer.Option("--het", metavar="NODES:PARTITION[:GPUS]", help="Group of a heterogeneous job; repeatable."),
    ] = None
    save_before_s: Annotated[
        int,
        typer.Option(
            "--save-before-s", min=1, max=MAX_COUNT, help="Seconds before the time limit at which to save and requeue."
        ),
    ] = 120
    sbatch: Annotated[
        list[str] | None, typer.Option("--sbatch", metavar="--OPTION=VALUE", help="Other option of sbatch; repeatable.")
    ] = None


@launch.command("slurm", context_settings=COMMAND_LAST)
@grouped
def launch_slurm(
    arguments: Arguments,
    processes: ProcessOptions,
    batch: BatchOptions,
    job_container: ContainerOptions,
    slurm: SlurmOptions,
    nodes: NodeCount = None,
    output: Annotated[str, typer.Option("--output", help="Log file of the job.")] = "slurm-%x-%j.out",
    script: ScriptFile = Path("dynmo.sbatch"),
) -> None:
    """Write and submit a Slurm batch script that runs COMMAND on its nodes.

    Give COMMAND --save and --load with one folder on a shared file system: after the time limit or the loss of a node
    the job is requeued and resumes. Nodes whose ranks are released leave the job.
    """
    check_command(arguments)
    from ..launch.job_script import parse_exports, task_cpus
    from ..launch.slurm import SlurmJob, parse_het_group, slurm_script

    all_nodes = os.environ.get("SLURM_JOB_NUM_NODES", "1") if batch.in_job else "1"
    min_nodes, max_nodes = parse_node_range("--nodes", nodes or all_nodes)
    exported = parse_exports(batch.export or ())
    environment = {**os.environ, **exported}
    cpus = batch.cpus
    if cpus is None:
        requests_gpus = processes.gpus or bool(slurm.het)
        cpus = 0 if batch.in_job else task_cpus(processes.nproc, requests_gpus, arguments, environment)
    job = SlurmJob(
        arguments=tuple(arguments),
        name=batch.job_name,
        min_nodes=min_nodes,
        max_nodes=max_nodes,
        nproc=processes.nproc,
        gpus=processes.gpus,
        cpus=cpus,
        time=batch.time_limit,
        partition=slurm.partition,
        account=slurm.account,
        qos=slurm.qos,
        output=output,
        array=slurm.array,
        het_groups=tuple(parse_het_group(text) for text in slurm.het or ()),
        save_before_s=slurm.save_before_s,
        max_restarts=batch.max_restarts,
        log_dir=batch.log_dir,
        image=job_container.image,
        mounts=tuple(job_container.mount or ()),
        workdir=job_container.workdir,
        exports=exported,
        extra_options=tuple(slurm.sbatch or ()),
    )
    _write_and_submit(slurm_script(job), script, _SLURM, dry_run=batch.dry_run, in_job=batch.in_job)


@dataclass(frozen=True, kw_only=True)
class LsfOptions:
    """What only LSF has."""

    PANEL: ClassVar[str] = "LSF"

    queue: Annotated[str, typer.Option("--queue", help="LSF queue.")] = ""
    project: Annotated[str, typer.Option("--project", help="LSF project.")] = ""
    container: Annotated[str, typer.Option("--container", help="Container runtime: singularity or apptainer.")] = (
        "singularity"
    )
    bsub: Annotated[list[str] | None, typer.Option("--bsub", help="Other option of bsub; repeatable.")] = None


@launch.command("lsf", context_settings=COMMAND_LAST)
@grouped
def launch_lsf(
    arguments: Arguments,
    processes: ProcessOptions,
    batch: BatchOptions,
    job_container: ContainerOptions,
    lsf: LsfOptions,
    nodes: Annotated[
        int, typer.Option("--nodes", min=1, max=MAX_RANKS, envvar="NUM_NODES", help="Number of hosts.")
    ] = 1,
    output: Annotated[str, typer.Option("--output", help="Log file of the job.")] = "lsf-%J.out",
    script: ScriptFile = Path("dynmo.lsf"),
) -> None:
    """Write and submit an IBM Spectrum LSF batch script that runs COMMAND on its hosts."""
    check_command(arguments)
    from ..launch.job_script import parse_exports, task_cpus
    from ..launch.lsf import LsfJob, lsf_script

    if lsf.container not in ("singularity", "apptainer"):
        raise UsageError(f"--container {lsf.container!r}: must be singularity or apptainer")
    exported = parse_exports(batch.export or ())
    cpus = batch.cpus
    if cpus is None:
        cpus = task_cpus(processes.nproc, processes.gpus, arguments, {**os.environ, **exported})
    job = LsfJob(
        arguments=tuple(arguments),
        name=batch.job_name,
        nodes=nodes,
        nproc=processes.nproc,
        gpus=processes.gpus,
        slots=max(1, cpus),
        time=batch.time_limit,
        queue=lsf.queue,
        project=lsf.project,
        output=output,
        max_restarts=batch.max_restarts,
        log_dir=batch.log_dir,
        image=job_container.image,
        container=lsf.container,
        mounts=tuple(job_container.mount or ()),
        workdir=job_container.workdir,
        exports=exported,
        extra_options=tuple(lsf.bsub or ()),
    )
    _write_and_submit(lsf_script(job), script, _LSF, dry_run=batch.dry_run, in_job=batch.in_job)
