"""Options that several cluster launchers share; related ones form a dataclass."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, ClassVar

import typer

from .._common.document import MAX_JOBS

Nproc = Annotated[
    int,
    typer.Option(
        "--nproc",
        "--nproc-per-node",
        min=1,
        max=MAX_JOBS,
        envvar="GPU_PER_NODE",
        help="Processes per node, one per GPU.",
    ),
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
Gpus = Annotated[int, typer.Option("--gpus", min=0, max=MAX_JOBS, help="GPUs per node to request.")]
DryRun = Annotated[bool, typer.Option("--dry-run", help="Print what would be submitted; do not submit.")]
Exports = Annotated[
    list[str] | None,
    typer.Option("--export", metavar="NAME=VALUE", help="Environment variable of the run; repeatable."),
]
JobName = Annotated[str, typer.Option("--job-name", help="Name of the job.")]
TimeLimit = Annotated[str, typer.Option("--time", help="Time limit: H:M:S for Slurm, H:M for LSF.")]
Mounts = Annotated[
    list[str] | None,
    typer.Option("--mount", "--container-mount", metavar="FROM:TO", help="Container mount; repeatable."),
]
Image = Annotated[
    str,
    typer.Option(
        "--image",
        "--container-image",
        help="Container image: Enroot squash file or URI, .sif file or sandbox.",
    ),
]
Workdir = Annotated[str, typer.Option("--workdir", "--container-workdir", help="Working directory in the container.")]
ScriptFile = Annotated[Path, typer.Option("--script", help="Batch script to write and submit.")]
InJob = Annotated[
    bool,
    typer.Option("--in-job", help="Run on the nodes of the current job; do not submit."),
]
LogFolder = Annotated[str, typer.Option("--log-dir", help="Folder of process logs.")]


@dataclass(frozen=True, kw_only=True)
class ProcessOptions:
    """Processes and GPUs of each node."""

    PANEL: ClassVar[str] = "Processes"

    nproc: Nproc = 1
    gpus: Gpus = 0


@dataclass(frozen=True, kw_only=True)
class ContainerOptions:
    """Container of a batch job; without an image the job runs on the host."""

    PANEL: ClassVar[str] = "Container"

    image: Image = ""
    mount: Mounts = None
    workdir: Workdir = ""
