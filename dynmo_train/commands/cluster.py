"""``dynmo-train launch slurm|kubernetes|hostfile|lsf``: the same command on a cluster's own ways of running jobs."""

from __future__ import annotations

import os
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ..console import emit, say
from ..errors import UsageError
from .launch import Arguments, MaxRestarts, check_command, count_of_nodes, launch

if TYPE_CHECKING:
    from ..launch.hostfile import HostJob
    from ..launch.kubernetes import KubernetesJob

Nproc = Annotated[
    int,
    typer.Option(
        "--nproc", "--nproc-per-node", min=1, envvar="GPU_PER_NODE", help="Processes a node, one for each GPU."
    ),
]
NodeCount = Annotated[
    str, typer.Option("--nodes", metavar="N|LEAST:MOST", envvar="NUM_NODES", help="Nodes that take part.")
]
Gpus = Annotated[int, typer.Option("--gpus", min=0, help="GPUs to ask for on each node.")]
DryRun = Annotated[bool, typer.Option("--dry-run", help="Print exactly what would be submitted, and submit nothing.")]
Exports = Annotated[
    list[str] | None, typer.Option("--export", metavar="NAME=VALUE", help="Variable to set there; may be repeated.")
]
JobName = Annotated[str, typer.Option("--job-name", help="Name of the job.")]
LogFolder = Annotated[str, typer.Option("--log-dir", help="Folder for the output of every process.")]


def _write_and_submit(text: str, file: Path, dry_run: bool, submit: tuple[str, ...], *, by_stdin: bool) -> None:
    """Print a script, or write it and hand it to the scheduler."""
    if dry_run:
        emit(text.rstrip("\n"))
        return
    from ..launch.slurm import submit_script

    try:
        file.write_text(text, encoding="utf-8")
    except OSError as error:
        raise UsageError(f"cannot write {file}: {error}") from error
    say(f"dynmo-train: submitted {submit_script(file, submit, by_stdin=by_stdin)} ({file})")


@launch.command("slurm")
def launch_slurm(
    arguments: Arguments,
    nodes: NodeCount = "1",
    nproc: Nproc = 1,
    gpus: Gpus = 0,
    cpus: Annotated[int, typer.Option("--cpus", min=0, help="CPUs to ask for on each node.")] = 0,
    job_name: JobName = "dynmo",
    time_limit: Annotated[str, typer.Option("--time", help="Time limit, as Slurm writes it.")] = "",
    partition: Annotated[str, typer.Option("--partition", help="Partition.")] = "",
    account: Annotated[str, typer.Option("--account", help="Account.")] = "",
    qos: Annotated[str, typer.Option("--qos", help="Quality of service.")] = "",
    output: Annotated[str, typer.Option("--output", help="Log of the job.")] = "slurm-%x-%j.out",
    array: Annotated[
        int, typer.Option("--array", min=0, help="Run this many times one after another; each goes on with the run.")
    ] = 0,
    het: Annotated[
        list[str] | None,
        typer.Option("--het", metavar="NODES:PARTITION[:GPUS]", help="Group of a heterogeneous job; may be repeated."),
    ] = None,
    save_before_s: Annotated[
        int, typer.Option("--save-before-s", min=1, help="Seconds before the time limit to save and requeue at.")
    ] = 120,
    container_image: Annotated[str, typer.Option("--container-image", help="Image for Pyxis and Enroot.")] = "",
    container_mount: Annotated[
        list[str] | None, typer.Option("--container-mount", metavar="FROM:TO", help="Mount; may be repeated.")
    ] = None,
    container_workdir: Annotated[str, typer.Option("--container-workdir", help="Folder to run in, inside.")] = "",
    export: Exports = None,
    sbatch: Annotated[
        list[str] | None, typer.Option("--sbatch", metavar="--OPTION=VALUE", help="Any other option of sbatch.")
    ] = None,
    log_dir: LogFolder = "logs",
    max_restarts: MaxRestarts = 3,
    script: Annotated[Path, typer.Option("--script", help="File to write and submit.")] = Path("dynmo.sbatch"),
    dry_run: DryRun = False,
) -> None:
    """Write a batch script for Slurm that runs COMMAND on its nodes, and submit it.

    The run should have --save and --load of one folder that all nodes see: on a time-out or a lost node the job goes
    back into the queue and on from there. Nodes whose workers are released are given back.
    """
    check_command(arguments)
    from ..launch.script import parse_exports
    from ..launch.slurm import SlurmJob, parse_part, slurm_script

    least, most = count_of_nodes(nodes)
    job = SlurmJob(
        arguments=tuple(arguments),
        name=job_name,
        least=least,
        most=most,
        nproc=nproc,
        gpus=gpus,
        cpus=cpus,
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
        image=container_image,
        mounts=tuple(container_mount or ()),
        workdir=container_workdir,
        exports=parse_exports(export or ()),
        more=tuple(sbatch or ()),
    )
    _write_and_submit(slurm_script(job), script, dry_run, ("sbatch", "--parsable"), by_stdin=False)


@launch.command("lsf")
def launch_lsf(
    arguments: Arguments,
    nodes: Annotated[int, typer.Option("--nodes", min=1, envvar="NUM_NODES", help="Hosts that take part.")] = 1,
    nproc: Nproc = 1,
    gpus: Gpus = 0,
    job_name: JobName = "dynmo",
    time_limit: Annotated[str, typer.Option("--time", help="Time limit, HOURS:MINUTES.")] = "",
    queue: Annotated[str, typer.Option("--queue", help="Queue.")] = "",
    project: Annotated[str, typer.Option("--project", help="Project.")] = "",
    output: Annotated[str, typer.Option("--output", help="Log of the job.")] = "lsf-%J.out",
    image: Annotated[str, typer.Option("--image", help="Image or sandbox folder of Singularity or Apptainer.")] = "",
    container: Annotated[str, typer.Option("--container", help="singularity or apptainer.")] = "singularity",
    mount: Annotated[list[str] | None, typer.Option("--mount", metavar="FROM:TO", help="Mount; repeatable.")] = None,
    workdir: Annotated[str, typer.Option("--workdir", help="Folder to run in, inside.")] = "",
    export: Exports = None,
    bsub: Annotated[list[str] | None, typer.Option("--bsub", help="Any other word of bsub; repeatable.")] = None,
    log_dir: LogFolder = "logs",
    max_restarts: MaxRestarts = 3,
    script: Annotated[Path, typer.Option("--script", help="File to write and submit.")] = Path("dynmo.lsf"),
    dry_run: DryRun = False,
) -> None:
    """Write a batch script for IBM Spectrum LSF that runs COMMAND on its hosts, and submit it with bsub."""
    check_command(arguments)
    from ..launch.lsf import LsfJob, lsf_script
    from ..launch.script import parse_exports

    if container not in ("singularity", "apptainer"):
        raise UsageError(f"--container must be singularity or apptainer, is {container!r}")
    job = LsfJob(
        arguments=tuple(arguments),
        name=job_name,
        nodes=nodes,
        nproc=nproc,
        gpus=gpus,
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
        exports=parse_exports(export or ()),
        more=tuple(bsub or ()),
    )
    _write_and_submit(lsf_script(job), script, dry_run, ("bsub",), by_stdin=True)


class ManifestKind(StrEnum):
    """Which objects of Kubernetes run the command."""

    PYTORCHJOB = "pytorchjob"
    TRAINJOB = "trainjob"
    INDEXED = "indexed-job"
    DATA = "job"


def _documents(kind: ManifestKind, job: KubernetesJob, claim_size: str, storage_class: str) -> str:
    """The manifests of a job as YAML."""
    from ..launch.kubernetes import data_job, indexed_job, pytorch_job, to_yaml, train_job, volume_claim

    claims = [volume_claim(claim, job.namespace, claim_size, storage_class) for claim in job.claims if claim_size]
    made = {
        ManifestKind.PYTORCHJOB: lambda: [pytorch_job(job)],
        ManifestKind.TRAINJOB: lambda: [train_job(job)],
        ManifestKind.INDEXED: lambda: indexed_job(job),
        ManifestKind.DATA: lambda: [data_job(job)],
    }[kind]()
    return to_yaml([*claims, *made])


@launch.command("kubernetes")
def launch_kubernetes(
    arguments: Arguments,
    image: Annotated[str, typer.Option("--image", envvar="IMAGE_URI", help="Container image.")],
    kind: Annotated[
        ManifestKind,
        typer.Option(
            "--kind", help="pytorchjob or trainjob of Kubeflow, indexed-job without it, or job for one data command."
        ),
    ] = ManifestKind.PYTORCHJOB,
    nodes: NodeCount = "1",
    nproc: Nproc = 1,
    gpus: Gpus = 0,
    efa: Annotated[int, typer.Option("--efa", min=0, envvar="EFA_PER_NODE", help="EFA devices of each node.")] = 0,
    cpus: Annotated[str, typer.Option("--cpus", help="CPUs of each pod.")] = "",
    memory: Annotated[str, typer.Option("--memory", help="Memory of each pod, such as 64Gi.")] = "",
    instance_type: Annotated[
        str, typer.Option("--instance-type", envvar="INSTANCE_TYPE", help="Type of node to run on.")
    ] = "",
    job_name: JobName = "dynmo",
    namespace: Annotated[str, typer.Option("--namespace", help="Namespace.")] = "default",
    claim: Annotated[
        list[str] | None,
        typer.Option("--claim", metavar="NAME:/PATH", help="Persistent volume claim and its mount; repeatable."),
    ] = None,
    claim_size: Annotated[
        str, typer.Option("--claim-size", help="Make the claims as well, of this size, such as 1200Gi.")
    ] = "",
    storage_class: Annotated[str, typer.Option("--storage-class", help="Storage class of claims that are made.")] = "",
    runtime: Annotated[str, typer.Option("--runtime", help="Training runtime of a trainjob.")] = "torch-distributed",
    export: Exports = None,
    max_restarts: MaxRestarts = 3,
    dry_run: DryRun = False,
) -> None:
    """Run COMMAND in pods: prints the manifests with --dry-run, else applies them with kubectl.

    With --kind job COMMAND is run as it is, such as `dynmo-prep binarize ...`; else it is a command of dynmo-train.
    Sizes in the environment (NUM_LAYERS, HIDDEN_SIZE, TENSOR_PARALLEL, ...) go before those of COMMAND.
    """
    from ..launch.kubernetes import KubernetesJob, apply, parse_claim
    from ..launch.script import parse_exports, with_environment

    if kind is not ManifestKind.DATA:
        check_command(arguments)
    least, most = count_of_nodes(nodes)
    if least != most and kind in (ManifestKind.TRAINJOB, ManifestKind.DATA):
        raise UsageError(f"--kind {kind} runs a fixed number of nodes; give --nodes N, or --kind pytorchjob")
    job = KubernetesJob(
        name=job_name,
        image=image,
        arguments=with_environment(arguments, os.environ),
        least=least,
        most=most,
        nproc=nproc,
        gpus=gpus,
        efa=efa,
        cpus=cpus,
        memory=memory,
        instance_type=instance_type,
        namespace=namespace,
        claims=tuple(parse_claim(text) for text in claim or ()),
        environment=parse_exports(export or ()),
        max_restarts=max_restarts,
        runtime=runtime,
    )
    text = _documents(kind, job, claim_size, storage_class)
    emit(text.rstrip("\n")) if dry_run else say(apply(text))


@launch.command("hostfile")
def launch_hostfile(
    arguments: Arguments,
    hostfile: Annotated[Path, typer.Option("--hostfile", "-H", help="File of 'HOST slots=N' lines.")],
    include: Annotated[
        str | None, typer.Option("--include", "-i", metavar="HOST@HOST:SLOT,SLOT", help="Use only these.")
    ] = None,
    exclude: Annotated[
        str | None, typer.Option("--exclude", "-e", metavar="HOST@HOST:SLOT,SLOT", help="Use all but these.")
    ] = None,
    num_nodes: Annotated[
        int | None, typer.Option("--num-nodes", "--num_nodes", min=1, help="Use this many hosts.")
    ] = None,
    num_gpus: Annotated[
        int | None, typer.Option("--num-gpus", "--num_gpus", min=1, help="Use this many slots of each host.")
    ] = None,
    least: Annotated[int | None, typer.Option("--least", min=1, help="Go on with so few hosts [default: all].")] = None,
    master_addr: Annotated[
        str | None,
        typer.Option("--master-addr", "--master_addr", help="Address of the first host [default: its name]."),
    ] = None,
    master_port: Annotated[
        int, typer.Option("--master-port", "--master_port", min=1, max=65535, help="Port on the first host.")
    ] = 29500,
    ssh: Annotated[str, typer.Option("--ssh", help="Command that reaches a host.")] = "ssh -o BatchMode=yes",
    devices: Annotated[
        bool, typer.Option("--devices/--no-devices", help="Set CUDA_VISIBLE_DEVICES to the slots of a host.")
    ] = True,
    export: Exports = None,
    log_dir: LogFolder = "logs",
    max_restarts: MaxRestarts = 0,
    dry_run: DryRun = False,
) -> None:
    """Run COMMAND on the hosts of a file, over ssh, in this folder; shows what rank 0 says."""
    check_command(arguments)
    import shlex

    from ..launch.hostfile import HostJob, carried, choose, host_command, read_hostfile, run_on_hosts
    from ..launch.script import parse_exports

    hosts = choose(read_hostfile(hostfile), include, exclude)[:num_nodes]
    if num_gpus:
        if short := [host.name for host in hosts if len(host.slots) < num_gpus]:
            raise UsageError(f"--num-gpus {num_gpus}: {', '.join(short)} has fewer slots")
        hosts = [type(host)(name=host.name, slots=host.slots[:num_gpus]) for host in hosts]
    if least is not None and least > len(hosts):
        raise UsageError(f"--least {least} is more than the {len(hosts)} hosts")
    job: HostJob = HostJob(
        hosts=tuple(hosts),
        arguments=tuple(arguments),
        options=("--max-restarts", str(max_restarts), "--log-dir", log_dir),
        environment=carried(os.environ, parse_exports(export or ())),
        folder=str(Path.cwd()),
        least=least or len(hosts),
        master_addr=master_addr or hosts[0].name,
        master_port=master_port,
        ssh=tuple(shlex.split(ssh)),
        devices=devices,
    )
    if dry_run:
        for rank in range(len(hosts)):
            emit(shlex.join(host_command(job, rank)))
        return
    raise typer.Exit(run_on_hosts(job))
