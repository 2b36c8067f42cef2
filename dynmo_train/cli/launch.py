"""``dynmo-train launch local`` and ``launch node``: run a command in several processes."""

from __future__ import annotations

import shlex
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

from .._common.console import emit
from .._common.document import MAX_JOBS
from .._common.errors import UsageError
from .._common.help import CommandLine
from .._common.option_groups import grouped
from ..launch.options import SINGLE_NODE, Arguments, ExitOptions, NodeConfig, StartWith
from ..launch.schedulers.hostfile import end_with_stdin
from ..launch.worker_start import WorkerStart
from .common import need_torch

launch = CommandLine(help="Run a command in several processes, on one machine or on many.")

# As torchrun: all words from the first one that is not an option belong to COMMAND, with or without "--".
COMMAND_LAST = {"allow_interspersed_args": False}
LogDir = Annotated[Path | None, typer.Option("--log-dir", help="Folder of process logs [default: a temporary folder].")]
DryRun = Annotated[bool, typer.Option("--dry-run", help="Print the command of each process; do not start it.")]


def _show(arguments: list[str], nproc: int, nodes: NodeConfig) -> None:
    """Print the command of each process of this node with the environment variables of its rank."""
    from ..launch.launcher import WORKER

    for local_rank in range(nproc):
        variables = {
            "RANK": nodes.node_rank * nproc + local_rank,
            "LOCAL_RANK": local_rank,
            "WORLD_SIZE": nodes.max_nodes * nproc,
            "LOCAL_WORLD_SIZE": nproc,
            "MASTER_ADDR": nodes.master_addr,
        }
        emit(shlex.join([*(f"{name}={value}" for name, value in variables.items()), *WORKER, *arguments]))


def run_processes(
    arguments: Sequence[str],
    nproc: int,
    log_dir: Path | None,
    exits: ExitOptions,
    nodes: NodeConfig,
    worker_start: WorkerStart = WorkerStart.FORK,
) -> int:
    """Run a command in processes and wait for them; a temporary log folder is removed after success.

    Args:
        arguments: command and its arguments.
        nproc: processes on this node.
        log_dir: folder of process logs; None creates a temporary one.
        exits: what follows a failure or a signal.
        nodes: this node and the number of nodes.
        worker_start: how the processes start.

    Returns:
        The exit code.
    """
    from ..launch.launch_folder import temporary_folder
    from ..launch.launcher import LocalLaunch
    from ..launch.launcher import launch_local as run

    folder = log_dir or temporary_folder("dynmo-launch-")
    code = run(
        LocalLaunch(
            nproc=nproc,
            arguments=tuple(arguments),
            log_dir=folder,
            exits=exits,
            nodes=nodes,
            worker_start=worker_start,
        )
    )
    if log_dir is None and code == 0:
        shutil.rmtree(folder, ignore_errors=True)
    return code


def check_command(arguments: list[str]) -> None:
    """Check the words after the options of launch.

    Raises:
        UsageError: they start with an option, or with another launch, whose processes would be no peers.
    """
    if arguments[0].startswith("-"):
        raise UsageError(f"COMMAND cannot start with the option {arguments[0]}; options of launch must precede --")
    if arguments[0] == "launch":
        raise UsageError("launch cannot start another launch; give pretrain or another command")


def _launch(
    arguments: list[str],
    nproc: int,
    log_dir: Path | None,
    exits: ExitOptions,
    nodes: NodeConfig,
    worker_start: WorkerStart,
    *,
    dry_run: bool,
) -> None:
    """Run COMMAND on this node and exit with its exit code, or print the command of each process.

    Raises:
        typer.Exit: always after a run.
    """
    check_command(arguments)
    need_torch()
    if dry_run:
        _show(arguments, nproc, nodes)
        return
    if nodes.end_with_stdin:
        end_with_stdin()
    raise typer.Exit(run_processes(arguments, nproc, log_dir, exits, nodes, worker_start))


@launch.command("local", context_settings=COMMAND_LAST)
@grouped
def launch_local(
    arguments: Arguments,
    nproc: Annotated[int, typer.Option("--nproc", min=1, max=MAX_JOBS, help="Number of processes.")] = 1,
    log_dir: LogDir = None,
    *,
    exits: ExitOptions,
    worker_start: StartWith = WorkerStart.FORK,
    dry_run: DryRun = False,
) -> None:
    """Run COMMAND in several processes on this machine, and print the output of rank 0.

    Exits with the exit code of the process that failed. Exit code 75 of a process restarts all processes.
    """
    _launch(arguments, nproc, log_dir, exits, SINGLE_NODE, worker_start, dry_run=dry_run)


@launch.command("node", context_settings=COMMAND_LAST)
@grouped
def launch_node(
    arguments: Arguments,
    nproc: Annotated[
        int,
        typer.Option(
            "--nproc",
            "--nproc-per-node",
            "--nproc_per_node",
            min=1,
            max=MAX_JOBS,
            envvar="GPUS_PER_NODE",
            help="Processes per node.",
        ),
    ] = 1,
    *,
    nodes: NodeConfig,
    log_dir: LogDir = None,
    exits: ExitOptions,
    worker_start: StartWith = WorkerStart.FORK,
    dry_run: DryRun = False,
) -> None:
    """Run COMMAND on this node and, with the same command there, on the other nodes.

    Node 0 hosts the rendezvous. After the loss of a node or a failure the remaining nodes, at least MIN, restart from
    the last checkpoint, at most --max-restarts times. Nodes that come late or return join after the next save. Exits
    with code 75 if node 0 is lost and does not return.
    """
    _launch(arguments, nproc, log_dir, exits, nodes, worker_start, dry_run=dry_run)
