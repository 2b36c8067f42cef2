"""``dynmo-train launch kubernetes`` and ``launch hostfile``: run a command in pods, or on hosts over ssh."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, ClassVar

import typer

from .._common.console import emit, print_message
from .._common.document import MAX_COUNT, MAX_JOBS, MAX_RANKS
from .._common.errors import UsageError
from .._common.option_groups import grouped
from .._common.panel import Panel
from .cluster_options import DryRun, Exports, JobName, LogFolder, NodeCount, ProcessOptions
from .common import need_torch
from .launch import (
    COMMAND_LAST,
    GRACE_S,
    SAVE_S,
    Arguments,
    MaxRestarts,
    check_command,
    launch,
    parse_node_range,
    run_processes,
)

if TYPE_CHECKING:
    from ..launch.hostfile import Host, HostJob
    from ..launch.kubernetes import KubernetesJob, Requirement


class ManifestKind(StrEnum):
    """Kind of the Kubernetes object that runs the command."""

    PYTORCHJOB = "pytorchjob"
    TRAINJOB = "trainjob"
    INDEXED = "indexed-job"
    DATA = "job"


def _documents(
    kind: ManifestKind, job: KubernetesJob, volumes: VolumeOptions, kubernetes: str | None
) -> tuple[str, list[Requirement]]:
    """The manifests of a job as YAML, and the versions that they require.

    Args:
        kind: kind of object that runs the command.
        job: the job.
        volumes: size and storage class of the volume claims to create; without a size, none is created.
        kubernetes: version of the cluster, if given.

    Raises:
        UsageError: the cluster is older than the manifests require.
    """
    from ..launch.kubernetes import (
        check_version,
        data_job,
        indexed_job,
        indexed_requirements,
        parse_version,
        pytorch_job,
        pytorch_requirements,
        to_yaml,
        train_job,
        trainer_requirements,
        volume_claim,
    )

    requirements_of: Mapping[ManifestKind, Callable[[KubernetesJob], list[Requirement]]] = {
        ManifestKind.PYTORCHJOB: pytorch_requirements,
        ManifestKind.TRAINJOB: trainer_requirements,
        ManifestKind.INDEXED: indexed_requirements,
    }
    requirements = requirements_of[kind](job) if kind in requirements_of else []
    if kubernetes is not None:
        option = "--kubernetes-version"
        check_version(requirements, "Kubernetes", parse_version(option, kubernetes), option)

    size, storage_class = volumes.claim_size, volumes.storage_class
    claims = [volume_claim(claim, job.namespace, size, storage_class) for claim in job.claims if size]
    objects = {
        ManifestKind.PYTORCHJOB: lambda: [pytorch_job(job)],
        ManifestKind.TRAINJOB: lambda: [train_job(job)],
        ManifestKind.INDEXED: lambda: indexed_job(job),
        ManifestKind.DATA: lambda: [data_job(job)],
    }[kind]()
    return to_yaml([*claims, *objects], requirements), requirements


@dataclass(frozen=True, kw_only=True)
class PodOptions:
    """Resources of a pod."""

    PANEL: ClassVar[str] = "Pod"

    efa: Annotated[
        int, typer.Option("--efa", min=0, max=MAX_JOBS, envvar="EFA_PER_NODE", help="EFA devices per node.")
    ] = 0
    cpus: Annotated[str, typer.Option("--cpus", help="CPUs per pod.")] = ""
    memory: Annotated[str, typer.Option("--memory", help="Memory per pod, such as 64Gi.")] = ""
    instance_type: Annotated[
        str, typer.Option("--instance-type", envvar="INSTANCE_TYPE", help="Instance type of the nodes.")
    ] = ""


@dataclass(frozen=True, kw_only=True)
class VolumeOptions:
    """Persistent volume claims."""

    PANEL: ClassVar[str] = "Volumes"

    claim: Annotated[
        list[str] | None,
        typer.Option("--claim", metavar="NAME:/PATH", help="Persistent volume claim and its mount path; repeatable."),
    ] = None
    claim_size: Annotated[
        str, typer.Option("--claim-size", help="Create the claims with this size, such as 1200Gi.")
    ] = ""
    storage_class: Annotated[str, typer.Option("--storage-class", help="Storage class of created claims.")] = ""


@dataclass(frozen=True, kw_only=True)
class VersionOptions:
    """What is installed on the cluster."""

    PANEL: ClassVar[Panel] = Panel("Versions", rare=True)

    runtime: Annotated[str, typer.Option("--runtime", help="Training runtime of a trainjob.")] = "torch-distributed"
    trainer_version: Annotated[
        str, typer.Option("--trainer-version", help="Kubeflow Trainer version of a trainjob.")
    ] = "2.3"
    kubernetes_version: Annotated[
        str | None,
        typer.Option("--kubernetes-version", help="Kubernetes version of the cluster [default: from kubectl]."),
    ] = None


@launch.command("kubernetes", context_settings=COMMAND_LAST)
@grouped
def launch_kubernetes(
    arguments: Arguments,
    image: Annotated[str, typer.Option("--image", envvar="IMAGE_URI", help="Container image.")],
    kind: Annotated[
        ManifestKind,
        typer.Option("--kind", help="Kubeflow pytorchjob or trainjob, indexed-job, or job for a data command."),
    ] = ManifestKind.PYTORCHJOB,
    *,
    processes: ProcessOptions,
    pod: PodOptions,
    volumes: VolumeOptions,
    versions: VersionOptions,
    nodes: NodeCount = None,
    job_name: JobName = "dynmo",
    namespace: Annotated[str, typer.Option("--namespace", help="Kubernetes namespace.")] = "default",
    export: Exports = None,
    max_restarts: MaxRestarts = 3,
    save_s: Annotated[
        int, typer.Option("--save-s", min=0, max=MAX_COUNT, help="Seconds that a pod has to save at termination.")
    ] = 60,
    dry_run: DryRun = False,
) -> None:
    """Run COMMAND in pods: apply the manifests with kubectl, or print them with --dry-run.

    COMMAND is a command of dynmo-train, or with --kind job any program, such as `dynmo-prep binarize ...`. Environment
    variables (NUM_LAYERS, HIDDEN_SIZE, TENSOR_PARALLEL, ...) override sizes in COMMAND.
    """
    from ..launch.job_script import parse_exports, with_environment
    from ..launch.kubernetes import KubernetesJob, apply, parse_claim, parse_version, usable_save_s

    if kind is not ManifestKind.DATA:
        check_command(arguments)
    min_nodes, max_nodes = parse_node_range("--nodes", nodes or "1")
    if min_nodes != max_nodes and kind in (ManifestKind.TRAINJOB, ManifestKind.DATA):
        raise UsageError(
            f"--nodes {nodes}: must be a fixed number with --kind {kind}; use --nodes N, or --kind pytorchjob"
        )
    job = KubernetesJob(
        name=job_name,
        image=image,
        arguments=with_environment(arguments, os.environ),
        min_nodes=min_nodes,
        max_nodes=max_nodes,
        nproc=processes.nproc,
        gpus=processes.gpus,
        efa=pod.efa,
        cpus=pod.cpus,
        memory=pod.memory,
        instance_type=pod.instance_type,
        namespace=namespace,
        claims=tuple(parse_claim(text) for text in volumes.claim or ()),
        environment=parse_exports(export or ()),
        max_restarts=max_restarts,
        save_s=save_s,
        runtime=versions.runtime,
        trainer=parse_version("--trainer-version", versions.trainer_version),
    )
    if kind is ManifestKind.TRAINJOB and usable_save_s(job) < save_s:
        print_message(
            f"warning: --save-s {save_s}: Kubeflow Trainer {versions.trainer_version} cannot change the grace period of"
            f" pods; the manifest has --save-s {usable_save_s(job)}. Use Trainer 2.3, or --kind pytorchjob"
        )
    text, requirements = _documents(kind, job, volumes, versions.kubernetes_version)
    emit(text.rstrip("\n")) if dry_run else print_message(apply(text, requirements))


# Default hostfile of DeepSpeed's launcher.
DEFAULT_HOSTFILE = Path("/job/hostfile")


def _check_single_host(flag: str, hosts: int | None) -> None:
    """Raise ``UsageError`` if an option requires more hosts than this machine."""
    if (hosts or 1) > 1:
        raise UsageError(f"{flag} {hosts}: must be 1 without --hostfile; give --hostfile FILE")


def _hosts_text(count: int, include: str | None, exclude: str | None) -> str:
    source = "the hostfile" + (" with --include" if include else " with --exclude" if exclude else "")
    return f"{source} has {count} host{'' if count == 1 else 's'}; add hosts, or use a smaller number"


def _local_slots(include: str | None, exclude: str | None, num_nodes: int | None, num_gpus: int | None) -> Host:
    """This machine as the only host: its GPUs, or ``--num-gpus`` CPU processes on a machine without GPU.

    Raises:
        UsageError: more nodes or GPUs than available, or filters that exclude all slots.
    """
    need_torch()
    import torch

    from ..launch.hostfile import Host, filter_hosts

    _check_single_host("--num-nodes", num_nodes)
    found = torch.cuda.device_count()
    if not found and not num_gpus:
        raise UsageError("this machine has no GPU; give --num-gpus N for N CPU processes, or --hostfile FILE")
    if found and (num_gpus or 1) > found:
        raise UsageError(f"--num-gpus {num_gpus}: must be at most the {found} of this machine")
    (host,) = filter_hosts([Host(name="localhost", slots=tuple(range(found or num_gpus or 1)))], include, exclude)
    if found and num_gpus and num_gpus > len(host.slots):
        raise UsageError(f"--num-gpus {num_gpus}: must be at most the {len(host.slots)} after --include and --exclude")
    return Host(name=host.name, slots=host.slots[:num_gpus])


def _visible_devices(host: Host) -> dict[str, str]:
    """``CUDA_VISIBLE_DEVICES`` for slots of this machine, as a subset of its present value; empty without a GPU."""
    import torch

    if not torch.cuda.is_available():
        return {}
    present = os.environ.get("CUDA_VISIBLE_DEVICES")
    names = present.split(",") if present else [str(slot) for slot in range(torch.cuda.device_count())]
    return {"CUDA_VISIBLE_DEVICES": ",".join(names[slot] for slot in host.slots)}


def _launch_locally(
    arguments: list[str], host: Host, environment: Mapping[str, str], log_dir: str, max_restarts: int, *, dry_run: bool
) -> int:
    """Run COMMAND in one process per slot of this machine, and return the exit code."""
    import shlex

    from ..launch.rendezvous import NodeConfig

    if dry_run:
        options = ("--nproc", str(len(host.slots)), "--max-restarts", str(max_restarts), "--log-dir", log_dir)
        variables = [f"{name}={value}" for name, value in environment.items()]
        emit(shlex.join([*variables, "dynmo-train", "launch", "local", *options, "--", *arguments]))
        return 0
    os.environ.update(environment)
    return run_processes(arguments, len(host.slots), Path(log_dir), max_restarts, GRACE_S, SAVE_S, NodeConfig())


@launch.command("hostfile", context_settings=COMMAND_LAST)
def launch_hostfile(
    arguments: Arguments,
    hostfile: Annotated[
        Path | None,
        typer.Option("--hostfile", "-H", help="File of 'HOST slots=N' lines [default: only this machine]."),
    ] = None,
    include: Annotated[
        str | None, typer.Option("--include", "-i", metavar="HOST@HOST:SLOT,SLOT", help="Hosts and slots to use.")
    ] = None,
    exclude: Annotated[
        str | None, typer.Option("--exclude", "-e", metavar="HOST@HOST:SLOT,SLOT", help="Hosts and slots not to use.")
    ] = None,
    num_nodes: Annotated[
        int | None, typer.Option("--num-nodes", "--num_nodes", min=1, max=MAX_RANKS, help="Number of hosts to use.")
    ] = None,
    num_gpus: Annotated[
        int | None,
        typer.Option("--num-gpus", "--num_gpus", min=1, max=MAX_JOBS, help="Number of slots to use per host."),
    ] = None,
    min_nodes: Annotated[
        int | None,
        typer.Option(
            "--min-nodes", min=1, max=MAX_RANKS, help="Minimum number of hosts to continue with [default: all]."
        ),
    ] = None,
    master_addr: Annotated[
        str | None,
        typer.Option("--master-addr", "--master_addr", help="Address of the first host [default: its name]."),
    ] = None,
    master_port: Annotated[
        int, typer.Option("--master-port", "--master_port", min=1, max=65535, help="Port on the first host.")
    ] = 29500,
    ssh: Annotated[str, typer.Option("--ssh", help="Remote shell command.")] = "ssh -o BatchMode=yes",
    devices: Annotated[
        bool, typer.Option("--devices/--no-devices", help="Set CUDA_VISIBLE_DEVICES to the slots of the host.")
    ] = True,
    export: Exports = None,
    log_dir: LogFolder = "logs",
    max_restarts: MaxRestarts = 0,
    dry_run: DryRun = False,
) -> None:
    """Run COMMAND on the hosts of a file over ssh, in this folder, and print the output of rank 0.

    Without a file, run --num-gpus processes on this machine, by default one per GPU, as DeepSpeed's launcher does.
    """
    check_command(arguments)
    import shlex

    from ..launch.hostfile import (
        HostJob,
        filter_hosts,
        forwarded_environment,
        host_command,
        read_hostfile,
        run_on_hosts,
    )
    from ..launch.job_script import parse_exports

    if hostfile is None and not DEFAULT_HOSTFILE.is_file():
        _check_single_host("--min-nodes", min_nodes)
        host = _local_slots(include, exclude, num_nodes, num_gpus)
        here = parse_exports(export or ()) | (_visible_devices(host) if devices else {})
        raise typer.Exit(_launch_locally(arguments, host, here, log_dir, max_restarts, dry_run=dry_run))
    hosts = filter_hosts(read_hostfile(hostfile or DEFAULT_HOSTFILE), include, exclude)
    if num_nodes is not None and num_nodes > len(hosts):
        raise UsageError(f"--num-nodes {num_nodes}: {_hosts_text(len(hosts), include, exclude)}")
    hosts = hosts[:num_nodes]
    if num_gpus:
        if short := [host.name for host in hosts if len(host.slots) < num_gpus]:
            raise UsageError(
                f"--num-gpus {num_gpus}: must be at most the slots of a host; {', '.join(short)} has fewer"
            )
        hosts = [type(host)(name=host.name, slots=host.slots[:num_gpus]) for host in hosts]
    if min_nodes is not None and min_nodes > len(hosts):
        raise UsageError(f"--min-nodes {min_nodes}: must be at most {len(hosts)}, the number of hosts")
    job: HostJob = HostJob(
        hosts=tuple(hosts),
        arguments=tuple(arguments),
        options=("--max-restarts", str(max_restarts), "--log-dir", log_dir),
        environment=forwarded_environment(os.environ, parse_exports(export or ())),
        folder=str(Path.cwd()),
        min_nodes=min_nodes or len(hosts),
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
