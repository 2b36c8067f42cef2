"""``dynmo-train launch kubernetes|hostfile``: the same command in pods, or on hosts over ssh."""

from __future__ import annotations

import os
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ..console import emit, say
from ..errors import UsageError
from .cluster_options import DryRun, Exports, Gpus, JobName, LogFolder, NodeCount, Nproc
from .launch import Arguments, MaxRestarts, check_command, count_of_nodes, launch

if TYPE_CHECKING:
    from ..launch.hostfile import HostJob
    from ..launch.kubernetes import KubernetesJob


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
    nodes: NodeCount = None,
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
    save_s: Annotated[
        int, typer.Option("--save-s", min=0, help="Seconds that a pod has to save in when it ends.")
    ] = 60,
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
    least, most = count_of_nodes("--nodes", nodes or "1")
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
        save_s=save_s,
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
