"""Options of the launchers, each declared once: a launcher takes these dataclasses, and the command line shows them.

A job of a scheduler or of Kubernetes is a dataclass of its options that inherits those it shares (``SlurmJob``,
``LsfJob``, ``KubernetesJob``). The fields of the last base come first in help pages, as dataclasses order them.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, ClassVar

import typer

from .._common.document import (
    MAX_COUNT,
    MAX_JOBS,
    MAX_RANKS,
    is_count,
)
from .._common.errors import UsageError
from .._common.panel import Panel
from .worker_start import WorkerStart

Arguments = Annotated[
    list[str], typer.Argument(metavar="-- COMMAND...", help="Command of dynmo-train that each process runs.")
]
NodeCount = Annotated[
    str | None,
    typer.Option(
        "--nodes",
        metavar="N|MIN:MAX",
        envvar="NUM_NODES",
        help="Number of nodes  [default: 1].",
        rich_help_panel="Processes",
    ),
]
DryRun = Annotated[bool, typer.Option("--dry-run", help="Print what would be submitted; do not submit.")]
Exports = Annotated[
    list[str] | None,
    typer.Option("--export", metavar="NAME=VALUE", help="Environment variable of the run; repeatable."),
]
JobName = Annotated[str, typer.Option("--job-name", help="Name of the job.")]
LogFolder = Annotated[str, typer.Option("--log-dir", help="Folder of process logs.")]
MaxRestarts = Annotated[
    int,
    typer.Option(
        "--max-restarts",
        min=0,
        max=MAX_COUNT,
        help="Maximum restarts after failures without a newer checkpoint between them.",
        rich_help_panel=Panel("Exit and restart", rare=True),
    ),
]
Output = Annotated[str, typer.Option("--output", help="Log file of the job.")]
ScriptFile = Annotated[Path, typer.Option("--script", help="Batch script to write and submit.")]
StartWith = Annotated[
    WorkerStart,
    typer.Option(
        "--worker-start",
        envvar="DYNMO_WORKER_START",
        help="Fork processes from one that has imported torch, or execute each.",
        rich_help_panel=Panel("Processes", rare=True),
    ),
]
_RARE_RENDEZVOUS = Panel("Rendezvous", rare=True)


def parse_node_range(flag: str, text: str) -> tuple[int, int]:
    """Parse ``N`` or ``MIN:MAX``, the value of ``flag``, into minimum and maximum number of nodes.

    Raises:
        UsageError: the value has another form, or numbers out of range.
    """
    low, _, high = text.partition(":")
    if not is_count(low) or not is_count(high or low):
        raise UsageError(f"{flag} {text!r}: must be N or MIN:MAX")
    min_nodes, max_nodes = int(low), int(high or low)
    if not 1 <= min_nodes <= max_nodes <= MAX_RANKS:
        raise UsageError(f"{flag} {text}: must have 1 <= MIN <= MAX <= {MAX_RANKS:,}")
    return min_nodes, max_nodes


@dataclass(frozen=True, kw_only=True)
class NodeConfig:
    """This node and the rendezvous; port 0 selects a free one, for a single node."""

    PANEL: ClassVar[str] = "Rendezvous"

    nnodes: Annotated[str, typer.Option("--nnodes", envvar="NNODES", metavar="N|MIN:MAX", help="Number of nodes.")] = (
        "1"
    )
    node_rank: Annotated[
        int,
        typer.Option(
            "--node-rank",
            "--node_rank",
            min=0,
            max=MAX_RANKS,
            envvar="NODE_RANK",
            help="Rank of this node, from 0.",
        ),
    ] = 0
    master_addr: Annotated[
        str,
        typer.Option("--master-addr", "--master_addr", envvar="MASTER_ADDR", help="Host name or address of node 0."),
    ] = "127.0.0.1"
    master_port: Annotated[
        int,
        typer.Option(
            "--master-port",
            "--master_port",
            min=0,
            max=65535,
            envvar="MASTER_PORT",
            help="Port of the rendezvous store on node 0.",
        ),
    ] = 29500
    job: Annotated[
        str,
        typer.Option("--job", help="Name of the rendezvous, the same on all nodes.", rich_help_panel=_RARE_RENDEZVOUS),
    ] = "dynmo"
    join_timeout_s: Annotated[
        float,
        typer.Option(
            "--join-timeout-s",
            min=1,
            help="Seconds to wait for the other nodes.",
            rich_help_panel=_RARE_RENDEZVOUS,
        ),
    ] = 600.0
    node_timeout_s: Annotated[
        float,
        typer.Option(
            "--node-timeout-s",
            min=2,
            help="Seconds without heartbeat after which a node is lost.",
            rich_help_panel=_RARE_RENDEZVOUS,
        ),
    ] = 30.0
    rejoin_s: Annotated[
        float,
        typer.Option(
            "--rejoin-s",
            min=0,
            help="Seconds that a restart waits for nodes that left.",
            rich_help_panel=_RARE_RENDEZVOUS,
        ),
    ] = 30.0
    reconnect_s: Annotated[
        float,
        typer.Option(
            "--reconnect-s",
            min=0,
            help="Seconds to reach node 0 again after its loss; then exit 75.",
            rich_help_panel=_RARE_RENDEZVOUS,
        ),
    ] = 120.0
    end_with_stdin: Annotated[
        bool,
        typer.Option(
            "--end-with-stdin",
            help="Exit at the end of standard input, when the connection closes.",
            rich_help_panel=_RARE_RENDEZVOUS,
        ),
    ] = False

    def __post_init__(self) -> None:
        if self.node_rank >= self.max_nodes:
            raise UsageError(
                f"--node-rank {self.node_rank}: must be 0 to {self.max_nodes - 1} with --nnodes {self.max_nodes}"
            )

    @property
    def min_nodes(self) -> int:
        """Minimum number of nodes of a round."""
        return parse_node_range("--nnodes", self.nnodes)[0]

    @property
    def max_nodes(self) -> int:
        """Maximum number of nodes of a round."""
        return parse_node_range("--nnodes", self.nnodes)[1]


SINGLE_NODE = NodeConfig(master_port=0)


@dataclass(frozen=True, kw_only=True)
class HangOptions:
    """When the watchdog of the launchers ends a rank; all ways of launching have these options."""

    PANEL: ClassVar[str] = Panel("Exit and restart", rare=True)

    hang_factor: Annotated[
        float,
        typer.Option("--hang-factor", min=0, help="Median step times without progress of a hang; 0: no watchdog."),
    ] = 3.0
    hang_min_s: Annotated[
        float, typer.Option("--hang-min-s", min=1, help="Minimum seconds without progress of a hang.")
    ] = 60.0

    @property
    def hang_words(self) -> list[str]:
        """The options for ``launch node`` or ``launch local``; those that have their default are left out."""
        words = {"--hang-factor": (self.hang_factor, "hang_factor"), "--hang-min-s": (self.hang_min_s, "hang_min_s")}
        return [
            word
            for flag, (value, name) in words.items()
            if value != getattr(HangOptions, name)
            for word in (flag, f"{value:g}")
        ]


@dataclass(frozen=True, kw_only=True)
class ExitOptions(HangOptions):
    """What the launcher of a node does after a failure or a signal."""

    PANEL: ClassVar[str] = Panel("Exit and restart", rare=True)

    max_restarts: MaxRestarts = 0
    grace_s: Annotated[
        float, typer.Option("--grace-s", min=0, help="Seconds that processes have to exit after a failure elsewhere.")
    ] = 5.0
    save_s: Annotated[
        float, typer.Option("--save-s", min=0, help="Seconds that processes have to save after SIGTERM or Ctrl-C.")
    ] = 60.0
    verbose: Annotated[
        bool, typer.Option("--verbose", help="Print the stack of a failed process, with C++ frames.")
    ] = False


@dataclass(frozen=True, kw_only=True)
class ProcessOptions:
    """Processes and GPUs of each node."""

    PANEL: ClassVar[str] = "Processes"

    nproc: Annotated[
        int,
        typer.Option(
            "--nproc",
            "--nproc-per-node",
            min=1,
            max=MAX_JOBS,
            envvar="GPU_PER_NODE",
            help="Processes per node, one per GPU.",
        ),
    ] = 1
    gpus: Annotated[int, typer.Option("--gpus", min=0, max=MAX_JOBS, help="GPUs per node to request.")] = 0


@dataclass(frozen=True, kw_only=True)
class BatchOptions:
    """A batch job of any scheduler."""

    PANEL: ClassVar[str] = "Job"

    cpus: Annotated[
        int | None,
        typer.Option(
            "--cpus-per-task",
            "--cpus",
            min=0,
            max=MAX_JOBS,
            help="CPUs per node; 0: scheduler's default [default: 4 per GPU process, else --num-threads].",
        ),
    ] = None
    job_name: JobName = "dynmo"
    time_limit: Annotated[str, typer.Option("--time", help="Time limit: H:M:S for Slurm, H:M for LSF.")] = ""
    export: Exports = None
    log_dir: LogFolder = "logs"
    max_restarts: MaxRestarts = 3
    in_job: Annotated[bool, typer.Option("--in-job", help="Run on the nodes of the current job; do not submit.")] = (
        False
    )
    dry_run: DryRun = False


@dataclass(frozen=True, kw_only=True)
class ContainerOptions:
    """Container of a batch job; without an image the job runs on the host."""

    PANEL: ClassVar[str] = "Container"

    image: Annotated[
        str,
        typer.Option(
            "--image",
            "--container-image",
            help="Container image: Enroot squash file or URI, .sif file or sandbox.",
        ),
    ] = ""
    mount: Annotated[
        list[str] | None,
        typer.Option("--mount", "--container-mount", metavar="FROM:TO", help="Container mount; repeatable."),
    ] = None
    workdir: Annotated[
        str, typer.Option("--workdir", "--container-workdir", help="Working directory in the container.")
    ] = ""


@dataclass(frozen=True, kw_only=True)
class BatchJob(HangOptions, ContainerOptions, BatchOptions, ProcessOptions):
    """A command in a batch job; empty strings omit options of the script."""

    arguments: Arguments
