"""``dynmo-train launch kubernetes`` and ``launch hostfile``: run a command in pods, or on hosts over ssh."""

from __future__ import annotations

import os
import shlex
from dataclasses import replace
from pathlib import Path

import typer

from .._common.console import emit, print_message
from .._common.errors import UsageError
from .._common.option_groups import grouped
from ..launch.options import SINGLE_NODE, ExitOptions
from ..launch.schedulers.hostfile import (
    DEFAULT_SSH,
    Host,
    HostfileOptions,
    HostJob,
    filter_hosts,
    forwarded_environment,
    host_command,
    is_this_machine,
    read_hostfile,
    run_on_hosts,
)
from ..launch.schedulers.job_script import parse_exports, with_environment
from ..launch.schedulers.kubernetes import KubernetesJob, ManifestKind, apply, manifests, usable_save_s
from .common import need_torch
from .launch import COMMAND_LAST, check_command, launch, run_processes


@launch.command("kubernetes", context_settings=COMMAND_LAST)
@grouped
def launch_kubernetes(job: KubernetesJob) -> None:
    """Run COMMAND in pods: apply the manifests with kubectl, or print them with --dry-run.

    COMMAND is a command of dynmo-train, or with --kind job any program, such as `dynmo-prep binarize ...`. Environment
    variables (NUM_LAYERS, HIDDEN_SIZE, TENSOR_PARALLEL, ...) override sizes in COMMAND.
    """
    if job.kind is not ManifestKind.DATA:
        check_command(job.arguments)
    job = replace(job, arguments=list(with_environment(job.arguments, os.environ)))
    if job.kind is ManifestKind.TRAINJOB and usable_save_s(job) < job.save_s:
        print_message(
            f"warning: --save-s {job.save_s}: Kubeflow Trainer {job.trainer_version} cannot change the grace period of"
            f" pods; the manifest has --save-s {usable_save_s(job)}. Use Trainer 2.3, or --kind pytorchjob"
        )
    text, requirements = manifests(job)
    emit(text.rstrip("\n")) if job.dry_run else print_message(apply(text, requirements))


# Default hostfile of DeepSpeed's launcher.
DEFAULT_HOSTFILE = Path("/job/hostfile")


def _check_single_host(flag: str, hosts: int | None) -> None:
    """Raise ``UsageError`` if an option requires more hosts than this machine."""
    if (hosts or 1) > 1:
        raise UsageError(f"{flag} {hosts}: must be 1 without --hostfile; give --hostfile FILE")


def _local_slots(options: HostfileOptions) -> Host:
    """This machine as the only host: its GPUs, or ``--num-gpus`` CPU processes on a machine without GPU.

    Raises:
        UsageError: more nodes or GPUs than available, or filters that exclude all slots.
    """
    need_torch()
    import torch

    num_gpus = options.num_gpus
    _check_single_host("--num-nodes", options.num_nodes)
    found = torch.cuda.device_count()
    if not found and not num_gpus:
        raise UsageError("this machine has no GPU; give --num-gpus N for N CPU processes, or --hostfile FILE")
    if found and (num_gpus or 1) > found:
        raise UsageError(f"--num-gpus {num_gpus}: must be at most the {found} of this machine")
    here = Host(name="localhost", slots=tuple(range(found or num_gpus or 1)))
    (host,) = filter_hosts([here], options.include, options.exclude)
    if found and num_gpus and num_gpus > len(host.slots):
        raise UsageError(f"--num-gpus {num_gpus}: must be at most the {len(host.slots)} after --include and --exclude")
    return replace(host, slots=host.slots[:num_gpus])


def _visible_devices(host: Host) -> dict[str, str]:
    """``CUDA_VISIBLE_DEVICES`` for slots of this machine, as a subset of its present value; empty without a GPU."""
    import torch

    if not torch.cuda.is_available():
        return {}
    present = os.environ.get("CUDA_VISIBLE_DEVICES")
    names = present.split(",") if present else [str(slot) for slot in range(torch.cuda.device_count())]
    if host.slots[-1] >= len(names):
        raise UsageError(f"{host.name}: slot {host.slots[-1]}: this machine has {len(names)} GPUs")
    return {"CUDA_VISIBLE_DEVICES": ",".join(names[slot] for slot in host.slots)}


def _launch_locally(options: HostfileOptions, host: Host) -> int:
    """Run COMMAND in one process per slot of this machine, and return the exit code."""
    need_torch()
    environment = parse_exports(options.export or ()) | (_visible_devices(host) if options.devices else {})
    nproc, restarts = len(host.slots), options.max_restarts
    if options.dry_run:
        words = ("--nproc", str(nproc), "--max-restarts", str(restarts), *options.hang_words)
        words += ("--log-dir", options.log_dir)
        variables = [f"{name}={value}" for name, value in environment.items()]
        emit(shlex.join([*variables, "dynmo-train", "launch", "local", *words, "--", *options.arguments]))
        return 0
    os.environ.update(environment)
    exits = ExitOptions(max_restarts=restarts, hang_factor=options.hang_factor, hang_min_s=options.hang_min_s)
    return run_processes(options.arguments, nproc, Path(options.log_dir), exits, SINGLE_NODE)


def _selected_hosts(options: HostfileOptions, file: Path) -> list[Host]:
    """The hosts and slots of a file that the options select.

    Raises:
        UsageError: more hosts or slots than the file has, or an invalid file.
    """
    hosts = filter_hosts(read_hostfile(file), options.include, options.exclude)
    num_nodes, num_gpus = options.num_nodes, options.num_gpus
    if num_nodes is not None and num_nodes > len(hosts):
        source = "the hostfile" + (
            " with --include" if options.include else " with --exclude" if options.exclude else ""
        )
        raise UsageError(
            f"--num-nodes {num_nodes}: {source} has {len(hosts)} host{'' if len(hosts) == 1 else 's'}; add hosts, or"
            " use a smaller number"
        )
    hosts = hosts[:num_nodes]
    if short := [host.name for host in hosts if len(host.slots) < (num_gpus or 0)]:
        raise UsageError(f"--num-gpus {num_gpus}: must be at most the slots of a host; {', '.join(short)} has fewer")
    if options.min_nodes is not None and options.min_nodes > len(hosts):
        raise UsageError(f"--min-nodes {options.min_nodes}: must be at most {len(hosts)}, the number of hosts")
    return [replace(host, slots=host.slots[:num_gpus]) for host in hosts]


@launch.command("hostfile", context_settings=COMMAND_LAST)
@grouped
def launch_hostfile(options: HostfileOptions) -> None:
    """Run COMMAND on the hosts of a file over ssh, in this folder, and print the output of rank 0.

    Without a file, run --num-gpus processes on this machine, by default one per GPU, as DeepSpeed's launcher does. A
    file that names this machine alone needs no ssh either.
    """
    check_command(options.arguments)
    if options.hostfile is None and not DEFAULT_HOSTFILE.is_file():
        _check_single_host("--min-nodes", options.min_nodes)
        raise typer.Exit(_launch_locally(options, _local_slots(options)))
    hosts = _selected_hosts(options, options.hostfile or DEFAULT_HOSTFILE)
    if len(hosts) == 1 and options.ssh == DEFAULT_SSH and is_this_machine(hosts[0].name):
        raise typer.Exit(_launch_locally(options, hosts[0]))
    job = HostJob(
        options=options,
        hosts=tuple(hosts),
        environment=forwarded_environment(os.environ, parse_exports(options.export or ())),
        folder=str(Path.cwd()),
    )
    if not options.dry_run:
        raise typer.Exit(run_on_hosts(job))
    for rank in range(len(job.hosts)):
        emit(shlex.join(host_command(job, rank)))
