"""``dynmo-train launch local`` and ``launch node``: run a command in several processes."""

from __future__ import annotations

import shlex
import shutil
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from .._common.console import emit
from .._common.document import MAX_COUNT, MAX_JOBS, MAX_RANKS
from .._common.errors import UsageError
from .._common.help import CommandLine
from .._common.panel import Panel
from .common import need_torch

if TYPE_CHECKING:
    from ..launch.rendezvous import NodeConfig

launch = CommandLine(help="Run a command in several processes, on one machine or on many.")

Arguments = Annotated[
    list[str], typer.Argument(metavar="-- COMMAND...", help="Command of dynmo-train that each process runs.")
]
# As torchrun: all words from the first one that is not an option belong to COMMAND, with or without "--".
COMMAND_LAST = {"allow_interspersed_args": False}
GRACE_S, SAVE_S = 5.0, 60.0
LogDir = Annotated[
    Path | None,
    typer.Option("--log-dir", help="Folder of process logs [default: a temporary folder]."),
]
MaxRestarts = Annotated[
    int,
    typer.Option(
        "--max-restarts",
        min=0,
        max=MAX_COUNT,
        help="Maximum restarts from the last checkpoint after failures.",
        rich_help_panel=Panel("Exit and restart", rare=True),
    ),
]
GraceS = Annotated[
    float,
    typer.Option(
        "--grace-s",
        min=0,
        help="Seconds that processes have to exit after a failure elsewhere.",
        rich_help_panel=Panel("Exit and restart", rare=True),
    ),
]
SaveS = Annotated[
    float,
    typer.Option(
        "--save-s",
        min=0,
        help="Seconds that processes have to save after SIGTERM or Ctrl-C.",
        rich_help_panel=Panel("Exit and restart", rare=True),
    ),
]
DryRun = Annotated[bool, typer.Option("--dry-run", help="Print the command of each process; do not start it.")]


def _show(arguments: list[str], nproc: int, nodes: NodeConfig) -> None:
    """Print the command of each process of this node with the environment variables of its rank."""
    from ..launch.launcher import WORKER

    for local_rank in range(nproc):
        variables = {
            "RANK": nodes.rank * nproc + local_rank,
            "LOCAL_RANK": local_rank,
            "WORLD_SIZE": nodes.max_nodes * nproc,
            "LOCAL_WORLD_SIZE": nproc,
            "MASTER_ADDR": nodes.host,
        }
        emit(shlex.join([*(f"{name}={value}" for name, value in variables.items()), *WORKER, *arguments]))


def run_processes(
    arguments: list[str],
    nproc: int,
    log_dir: Path | None,
    max_restarts: int,
    grace_s: float,
    save_s: float,
    nodes: NodeConfig,
) -> int:
    """Run a command in processes and wait for them; a temporary log folder is removed after success.

    Args:
        arguments: command and its arguments.
        nproc: processes on this node.
        log_dir: folder of process logs; None creates a temporary one.
        max_restarts: maximum restarts after failures.
        grace_s: seconds that processes have to exit after a failure elsewhere.
        save_s: seconds that processes have to save after SIGTERM or SIGINT.
        nodes: this node and the number of nodes.

    Returns:
        The exit code.
    """
    from ..launch.launcher import LocalLaunch
    from ..launch.launcher import launch_local as run

    folder = log_dir or Path(tempfile.mkdtemp(prefix="dynmo-launch-"))
    local = LocalLaunch(
        nproc=nproc, arguments=tuple(arguments), log_dir=folder, grace_s=grace_s, save_s=save_s, nodes=nodes
    )
    code = run(local, max_restarts=max_restarts)
    if log_dir is None and code == 0:
        shutil.rmtree(folder)
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


@launch.command("local", context_settings=COMMAND_LAST)
def launch_local(
    arguments: Arguments,
    nproc: Annotated[int, typer.Option("--nproc", min=1, max=MAX_JOBS, help="Number of processes.")] = 1,
    log_dir: LogDir = None,
    max_restarts: MaxRestarts = 0,
    grace_s: GraceS = GRACE_S,
    save_s: SaveS = SAVE_S,
    dry_run: DryRun = False,
) -> None:
    """Run COMMAND in several processes on this machine, and print the output of rank 0.

    Exits with the exit code of the process that failed. Exit code 75 of a process restarts all processes.
    """
    check_command(arguments)
    need_torch()
    from ..launch.rendezvous import NodeConfig

    if dry_run:
        _show(arguments, nproc, NodeConfig())
        return
    raise typer.Exit(run_processes(arguments, nproc, log_dir, max_restarts, grace_s, save_s, NodeConfig()))


def parse_node_range(flag: str, text: str) -> tuple[int, int]:
    """Parse ``N`` or ``MIN:MAX``, the value of ``flag``, into minimum and maximum number of nodes.

    Raises:
        UsageError: the value has another form, or numbers out of range.
    """
    low, _, high = text.partition(":")
    if not low.isdecimal() or not (high or low).isdecimal():
        raise UsageError(f"{flag} {text!r}: must be N or MIN:MAX")
    min_nodes, max_nodes = int(low), int(high or low)
    if not 1 <= min_nodes <= max_nodes <= MAX_RANKS:
        raise UsageError(f"{flag} {text}: must have 1 <= MIN <= MAX <= {MAX_RANKS:,}")
    return min_nodes, max_nodes


@launch.command("node", context_settings=COMMAND_LAST)
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
    nnodes: Annotated[
        str,
        typer.Option(
            "--nnodes", envvar="NNODES", metavar="N|MIN:MAX", help="Number of nodes.", rich_help_panel="Rendezvous"
        ),
    ] = "1",
    node_rank: Annotated[
        int,
        typer.Option(
            "--node-rank",
            "--node_rank",
            min=0,
            max=MAX_RANKS,
            envvar="NODE_RANK",
            help="Rank of this node, from 0.",
            rich_help_panel="Rendezvous",
        ),
    ] = 0,
    master_addr: Annotated[
        str,
        typer.Option(
            "--master-addr",
            "--master_addr",
            envvar="MASTER_ADDR",
            help="Host name or address of node 0.",
            rich_help_panel="Rendezvous",
        ),
    ] = "127.0.0.1",
    master_port: Annotated[
        int,
        typer.Option(
            "--master-port",
            "--master_port",
            min=0,
            max=65535,
            envvar="MASTER_PORT",
            help="Port of the rendezvous store on node 0.",
            rich_help_panel="Rendezvous",
        ),
    ] = 29500,
    job: Annotated[
        str,
        typer.Option(
            "--job",
            help="Name of the rendezvous, the same on all nodes.",
            rich_help_panel=Panel("Rendezvous", rare=True),
        ),
    ] = "dynmo",
    join_timeout_s: Annotated[
        float,
        typer.Option(
            "--join-timeout-s",
            min=1,
            help="Seconds to wait for the other nodes.",
            rich_help_panel=Panel("Rendezvous", rare=True),
        ),
    ] = 600.0,
    node_timeout_s: Annotated[
        float,
        typer.Option(
            "--node-timeout-s",
            min=2,
            help="Seconds without heartbeat after which a node is lost.",
            rich_help_panel=Panel("Rendezvous", rare=True),
        ),
    ] = 30.0,
    end_with_stdin: Annotated[
        bool,
        typer.Option(
            "--end-with-stdin",
            help="Exit at the end of standard input, when the connection closes.",
            rich_help_panel=Panel("Rendezvous", rare=True),
        ),
    ] = False,
    log_dir: LogDir = None,
    max_restarts: MaxRestarts = 0,
    grace_s: GraceS = GRACE_S,
    save_s: SaveS = SAVE_S,
    dry_run: DryRun = False,
) -> None:
    """Run COMMAND on this node and, with the same command there, on the other nodes.

    Node 0 hosts the rendezvous. After the loss of a node or a failure the remaining nodes, at least MIN, restart from
    the last checkpoint, at most --max-restarts times. Exits with code 75 if node 0 is lost.
    """
    check_command(arguments)
    min_nodes, max_nodes = parse_node_range("--nnodes", nnodes)
    need_torch()
    from ..launch.rendezvous import NodeConfig

    nodes = NodeConfig(
        rank=node_rank,
        min_nodes=min_nodes,
        max_nodes=max_nodes,
        host=master_addr,
        port=master_port,
        name=job,
        join_timeout_s=join_timeout_s,
        node_timeout_s=node_timeout_s,
    )
    if dry_run:
        _show(arguments, nproc, nodes)
        return
    if end_with_stdin:
        from ..launch.hostfile import end_with_stdin as watch_stdin

        watch_stdin()
    raise typer.Exit(run_processes(arguments, nproc, log_dir, max_restarts, grace_s, save_s, nodes))
