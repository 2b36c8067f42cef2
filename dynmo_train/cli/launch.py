"""``dynmo-train launch``: a command in several processes, on one machine or on many."""

from __future__ import annotations

import shlex
import shutil
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from .._common.console import command_list, emit
from .._common.document import MAX_COUNT, MAX_JOBS, MAX_RANKS
from .._common.errors import UsageError
from .common import need_torch

if TYPE_CHECKING:
    from ..launch.rendezvous import Nodes

launch = typer.Typer(
    cls=command_list(),
    no_args_is_help=True,
    help="Run a command in several processes, on one machine or on many.",
)

Arguments = Annotated[
    list[str], typer.Argument(metavar="-- COMMAND...", help="What each process runs: a command of dynmo-train.")
]
# As torchrun: from the first word that is not an option on, every word belongs to COMMAND, with or without "--".
COMMAND_LAST = {"allow_interspersed_args": False}
GRACE_S, SAVE_S = 5.0, 60.0
LogDir = Annotated[
    Path | None,
    typer.Option("--log-dir", help="Folder for the output of every process [default: a temporary folder]."),
]
MaxRestarts = Annotated[
    int,
    typer.Option(
        "--max-restarts", min=0, max=MAX_COUNT, help="Times to resume from the last checkpoint after a failure."
    ),
]
GraceS = Annotated[
    float, typer.Option("--grace-s", min=0, help="Seconds that a process may take to end when others have failed.")
]
SaveS = Annotated[
    float, typer.Option("--save-s", min=0, help="Seconds to save and end in when the launch gets SIGTERM or Ctrl-C.")
]


DryRun = Annotated[bool, typer.Option("--dry-run", help="Print the command of each process, and start nothing.")]


def _show(arguments: list[str], nproc: int, nodes: Nodes) -> None:
    """Print the command of each process of this node, with what its environment says of its place."""
    from ..launch.launcher import WORKER

    for local_rank in range(nproc):
        place = {
            "RANK": nodes.rank * nproc + local_rank,
            "LOCAL_RANK": local_rank,
            "WORLD_SIZE": nodes.most * nproc,
            "LOCAL_WORLD_SIZE": nproc,
            "MASTER_ADDR": nodes.host,
        }
        emit(shlex.join([*(f"{name}={value}" for name, value in place.items()), *WORKER, *arguments]))


def run_processes(
    arguments: list[str],
    nproc: int,
    log_dir: Path | None,
    max_restarts: int,
    patience: tuple[float, float],
    nodes: Nodes,
) -> int:
    """Run to the end; the temporary folder of logs goes where all went well. ``patience``: --grace-s, --save-s."""
    from ..launch.launcher import LocalLaunch
    from ..launch.launcher import launch_local as run

    folder = log_dir or Path(tempfile.mkdtemp(prefix="dynmo-launch-"))
    grace_s, save_s = patience
    asked = LocalLaunch(
        nproc=nproc, arguments=tuple(arguments), log_dir=folder, grace_s=grace_s, save_s=save_s, nodes=nodes
    )
    code = run(asked, max_restarts=max_restarts)
    if log_dir is None and code == 0:
        shutil.rmtree(folder)
    return code


def check_command(arguments: list[str]) -> None:
    """Raise ``UsageError`` where a launch should start a launch, or options of it stand where a command belongs."""
    if arguments[0].startswith("-"):
        raise UsageError(f"COMMAND cannot begin with the option {arguments[0]}; write the options of launch before --")
    if arguments[0] == "launch":
        raise UsageError("launch cannot start another launch; give it pretrain or another command that computes")


@launch.command("local", context_settings=COMMAND_LAST)
def launch_local(
    arguments: Arguments,
    nproc: Annotated[int, typer.Option("--nproc", min=1, max=MAX_JOBS, help="Processes to start.")] = 1,
    log_dir: LogDir = None,
    max_restarts: MaxRestarts = 0,
    grace_s: GraceS = GRACE_S,
    save_s: SaveS = SAVE_S,
    dry_run: DryRun = False,
) -> None:
    """Run COMMAND in several processes on this machine; shows what rank 0 says.

    Ends with the exit code of the process that failed. A process that ends with 75 asks for all to be started again.
    """
    check_command(arguments)
    need_torch()
    from ..launch.rendezvous import Nodes

    if dry_run:
        _show(arguments, nproc, Nodes())
        return
    raise typer.Exit(run_processes(arguments, nproc, log_dir, max_restarts, (grace_s, save_s), Nodes()))


def count_of_nodes(flag: str, text: str) -> tuple[int, int]:
    """``N`` or ``LEAST:MOST``, the value of ``flag``."""
    least, _, most = text.partition(":")
    if not least.isdecimal() or not (most or least).isdecimal():
        raise UsageError(f"{flag} must be N or LEAST:MOST, is {text!r}")
    if not 1 <= int(least) <= int(most or least):
        raise UsageError(f"{flag} needs 1 <= LEAST <= MOST, is {text}")
    if int(most or least) > MAX_RANKS:
        raise UsageError(f"{flag} {text}: must be at most {MAX_RANKS:,} nodes")
    return int(least), int(most or least)


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
            help="Processes a node.",
        ),
    ] = 1,
    nnodes: Annotated[
        str, typer.Option("--nnodes", envvar="NNODES", metavar="N|LEAST:MOST", help="Nodes that take part.")
    ] = "1",
    node_rank: Annotated[
        int,
        typer.Option(
            "--node-rank", "--node_rank", min=0, max=MAX_RANKS, envvar="NODE_RANK", help="Number of this node, from 0."
        ),
    ] = 0,
    master_addr: Annotated[
        str, typer.Option("--master-addr", "--master_addr", envvar="MASTER_ADDR", help="Name or address of node 0.")
    ] = "127.0.0.1",
    master_port: Annotated[
        int,
        typer.Option(
            "--master-port", "--master_port", min=0, max=65535, envvar="MASTER_PORT", help="Port of node 0's store."
        ),
    ] = 29500,
    job: Annotated[str, typer.Option("--job", help="Name of the launch, the same on all nodes.")] = "dynmo",
    join_timeout_s: Annotated[
        float, typer.Option("--join-timeout-s", min=1, help="Seconds to wait for the other nodes.")
    ] = 600.0,
    node_timeout_s: Annotated[
        float, typer.Option("--node-timeout-s", min=2, help="Seconds of silence after which a node is lost.")
    ] = 30.0,
    end_with_stdin: Annotated[
        bool,
        typer.Option("--end-with-stdin", help="End when standard input does: with the connection that started it."),
    ] = False,
    log_dir: LogDir = None,
    max_restarts: MaxRestarts = 0,
    grace_s: GraceS = GRACE_S,
    save_s: SaveS = SAVE_S,
    dry_run: DryRun = False,
) -> None:
    """Run COMMAND on this node, together with the same command on the other nodes.

    Node 0 holds the meeting. When a node is lost or its processes fail, all begin again from the last checkpoint with
    the nodes that are left, --max-restarts times and with LEAST nodes or more. Ends with 75 where node 0 is gone.
    """
    check_command(arguments)
    least, most = count_of_nodes("--nnodes", nnodes)
    need_torch()
    from ..launch.rendezvous import Nodes

    nodes = Nodes(
        rank=node_rank,
        least=least,
        most=most,
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
    raise typer.Exit(run_processes(arguments, nproc, log_dir, max_restarts, (grace_s, save_s), nodes))
