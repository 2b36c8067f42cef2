"""``dynmo-train launch kubernetes|hostfile``: the same command in pods, or on hosts over ssh."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from .._common.console import emit, say
from .._common.document import MAX_COUNT, MAX_JOBS, MAX_RANKS
from .._common.errors import UsageError
from .cluster_options import DryRun, Exports, Gpus, JobName, LogFolder, NodeCount, Nproc
from .common import need_torch
from .launch import (
    COMMAND_LAST,
    GRACE_S,
    SAVE_S,
    Arguments,
    MaxRestarts,
    check_command,
    count_of_nodes,
    launch,
    run_processes,
)

if TYPE_CHECKING:
    from ..launch.hostfile import Host, HostJob
    from ..launch.kubernetes import KubernetesJob, Need


class ManifestKind(StrEnum):
    """Which objects of Kubernetes run the command."""

    PYTORCHJOB = "pytorchjob"
    TRAINJOB = "trainjob"
    INDEXED = "indexed-job"
    DATA = "job"


def _documents(
    kind: ManifestKind, job: KubernetesJob, claim_size: str, storage_class: str, kubernetes: str | None
) -> tuple[str, list[Need]]:
    """The manifests of a job as YAML, and what they need of the cluster.

    Raises:
        UsageError: the cluster's version, as it is given, does not serve what the manifests need.
    """
    from ..launch.kubernetes import (
        check_version,
        data_job,
        indexed_job,
        indexed_needs,
        parse_version,
        pytorch_job,
        pytorch_needs,
        to_yaml,
        train_job,
        trainer_needs,
        volume_claim,
    )

    needs_of: Mapping[ManifestKind, Callable[[KubernetesJob], list[Need]]] = {
        ManifestKind.PYTORCHJOB: pytorch_needs,
        ManifestKind.TRAINJOB: trainer_needs,
        ManifestKind.INDEXED: indexed_needs,
    }
    needs = needs_of[kind](job) if kind in needs_of else []
    if kubernetes is not None:
        option = "--kubernetes-version"
        check_version(needs, "Kubernetes", parse_version(option, kubernetes), option)

    claims = [volume_claim(claim, job.namespace, claim_size, storage_class) for claim in job.claims if claim_size]
    made = {
        ManifestKind.PYTORCHJOB: lambda: [pytorch_job(job)],
        ManifestKind.TRAINJOB: lambda: [train_job(job)],
        ManifestKind.INDEXED: lambda: indexed_job(job),
        ManifestKind.DATA: lambda: [data_job(job)],
    }[kind]()
    return to_yaml([*claims, *made], needs), needs


@launch.command("kubernetes", context_settings=COMMAND_LAST)
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
    efa: Annotated[
        int, typer.Option("--efa", min=0, max=MAX_JOBS, envvar="EFA_PER_NODE", help="EFA devices of each node.")
    ] = 0,
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
    trainer_version: Annotated[
        str, typer.Option("--trainer-version", help="Version of Kubeflow Trainer that a trainjob is for.")
    ] = "2.3",
    kubernetes_version: Annotated[
        str | None,
        typer.Option("--kubernetes-version", help="Version of the cluster [default: kubectl asks the cluster]."),
    ] = None,
    export: Exports = None,
    max_restarts: MaxRestarts = 3,
    save_s: Annotated[
        int, typer.Option("--save-s", min=0, max=MAX_COUNT, help="Seconds that a pod has to save in when it ends.")
    ] = 60,
    dry_run: DryRun = False,
) -> None:
    """Run COMMAND in pods: prints the manifests with --dry-run, else applies them with kubectl.

    With --kind job COMMAND is run as it is, such as `dynmo-prep binarize ...`; else it is a command of dynmo-train.
    Sizes in the environment (NUM_LAYERS, HIDDEN_SIZE, TENSOR_PARALLEL, ...) go before those of COMMAND.
    """
    from ..launch.job_script import parse_exports, with_environment
    from ..launch.kubernetes import KubernetesJob, apply, parse_claim, parse_version, usable_save_s

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
        trainer=parse_version("--trainer-version", trainer_version),
    )
    if kind is ManifestKind.TRAINJOB and usable_save_s(job) < save_s:
        say(
            f"warning: --save-s {save_s}: Kubeflow Trainer {trainer_version} cannot change the time that a pod has to"
            f" end; the manifest has --save-s {usable_save_s(job)}. Trainer 2.3, or --kind pytorchjob, has it"
        )
    text, needs = _documents(kind, job, claim_size, storage_class, kubernetes_version)
    emit(text.rstrip("\n")) if dry_run else say(apply(text, needs))


# Where DeepSpeed's launcher looks for a hostfile that nobody names.
DEFAULT_HOSTFILE = Path("/job/hostfile")


def _check_alone(flag: str, hosts: int | None) -> None:
    """Raise ``UsageError`` where an option needs more hosts than this machine."""
    if (hosts or 1) > 1:
        raise UsageError(f"{flag} {hosts}: without --hostfile there is this machine alone; give --hostfile FILE")


def _hosts_text(count: int, include: str | None, exclude: str | None) -> str:
    source = "the hostfile" + (" with --include" if include else " with --exclude" if exclude else "")
    return f"{source} has {count} host{'' if count == 1 else 's'}; add hosts, or give a smaller number"


def _slots_here(include: str | None, exclude: str | None, num_nodes: int | None, num_gpus: int | None) -> Host:
    """This machine as the only host: its GPUs, or ``--num-gpus`` processes on CPU where it has none.

    Raises:
        UsageError: more nodes or GPUs than there are, or filters that leave nothing.
    """
    need_torch()
    import torch

    from ..launch.hostfile import Host, choose

    _check_alone("--num-nodes", num_nodes)
    found = torch.cuda.device_count()
    if not found and not num_gpus:
        raise UsageError("without --hostfile and without a GPU: give --num-gpus N for N processes on CPU")
    if found and (num_gpus or 1) > found:
        raise UsageError(f"--num-gpus {num_gpus}: this machine has {found}")
    (host,) = choose([Host(name="localhost", slots=tuple(range(found or num_gpus or 1)))], include, exclude)
    if found and num_gpus and num_gpus > len(host.slots):
        raise UsageError(f"--num-gpus {num_gpus}: the filters leave {len(host.slots)}")
    return Host(name=host.name, slots=host.slots[:num_gpus])


def _visible_devices(host: Host) -> dict[str, str]:
    """``CUDA_VISIBLE_DEVICES`` for the slots of this machine: of those that are visible now; empty without a GPU."""
    import torch

    if not torch.cuda.is_available():
        return {}
    present = os.environ.get("CUDA_VISIBLE_DEVICES")
    names = present.split(",") if present else [str(slot) for slot in range(torch.cuda.device_count())]
    return {"CUDA_VISIBLE_DEVICES": ",".join(names[slot] for slot in host.slots)}


def _launch_here(
    arguments: list[str], host: Host, environment: Mapping[str, str], log_dir: str, max_restarts: int, *, dry_run: bool
) -> int:
    """Run COMMAND in a process for each slot of this machine; the exit code."""
    import shlex

    from ..launch.rendezvous import Nodes

    if dry_run:
        options = ("--nproc", str(len(host.slots)), "--max-restarts", str(max_restarts), "--log-dir", log_dir)
        variables = [f"{name}={value}" for name, value in environment.items()]
        emit(shlex.join([*variables, "dynmo-train", "launch", "local", *options, "--", *arguments]))
        return 0
    os.environ.update(environment)
    return run_processes(arguments, len(host.slots), Path(log_dir), max_restarts, (GRACE_S, SAVE_S), Nodes())


@launch.command("hostfile", context_settings=COMMAND_LAST)
def launch_hostfile(
    arguments: Arguments,
    hostfile: Annotated[
        Path | None,
        typer.Option("--hostfile", "-H", help="File of 'HOST slots=N' lines [default: this machine alone]."),
    ] = None,
    include: Annotated[
        str | None, typer.Option("--include", "-i", metavar="HOST@HOST:SLOT,SLOT", help="Use only these.")
    ] = None,
    exclude: Annotated[
        str | None, typer.Option("--exclude", "-e", metavar="HOST@HOST:SLOT,SLOT", help="Use all but these.")
    ] = None,
    num_nodes: Annotated[
        int | None, typer.Option("--num-nodes", "--num_nodes", min=1, max=MAX_RANKS, help="Use this many hosts.")
    ] = None,
    num_gpus: Annotated[
        int | None,
        typer.Option("--num-gpus", "--num_gpus", min=1, max=MAX_JOBS, help="Use this many slots of each host."),
    ] = None,
    least: Annotated[
        int | None,
        typer.Option("--least", min=1, max=MAX_RANKS, help="Minimum number of hosts to continue with [default: all]."),
    ] = None,
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
    """Run COMMAND on the hosts of a file, over ssh, in this folder; shows what rank 0 says.

    Without a file it runs on this machine, as DeepSpeed's launcher does: --num-gpus processes, by default one for each
    GPU.
    """
    check_command(arguments)
    import shlex

    from ..launch.hostfile import HostJob, carried, choose, host_command, read_hostfile, run_on_hosts
    from ..launch.job_script import parse_exports

    if hostfile is None and not DEFAULT_HOSTFILE.is_file():
        _check_alone("--least", least)
        host = _slots_here(include, exclude, num_nodes, num_gpus)
        here = parse_exports(export or ()) | (_visible_devices(host) if devices else {})
        raise typer.Exit(_launch_here(arguments, host, here, log_dir, max_restarts, dry_run=dry_run))
    hosts = choose(read_hostfile(hostfile or DEFAULT_HOSTFILE), include, exclude)
    if num_nodes is not None and num_nodes > len(hosts):
        raise UsageError(f"--num-nodes {num_nodes}: {_hosts_text(len(hosts), include, exclude)}")
    hosts = hosts[:num_nodes]
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
