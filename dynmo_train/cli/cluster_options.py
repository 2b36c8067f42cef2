"""Options that the launchers of clusters share."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

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
        help="Processes a node, one for each GPU.",
    ),
]
NodeCount = Annotated[
    str | None,
    typer.Option("--nodes", metavar="N|LEAST:MOST", envvar="NUM_NODES", help="Nodes that take part.  [default: 1]"),
]
Gpus = Annotated[int, typer.Option("--gpus", min=0, max=MAX_JOBS, help="GPUs to ask for on each node.")]
DryRun = Annotated[bool, typer.Option("--dry-run", help="Print exactly what would be submitted, and submit nothing.")]
Exports = Annotated[
    list[str] | None, typer.Option("--export", metavar="NAME=VALUE", help="Variable to set there; may be repeated.")
]
JobName = Annotated[str, typer.Option("--job-name", help="Name of the job.")]
TimeLimit = Annotated[str, typer.Option("--time", help="Time limit, as the scheduler writes it: Slurm H:M:S, LSF H:M.")]
Mounts = Annotated[
    list[str] | None,
    typer.Option("--mount", "--container-mount", metavar="FROM:TO", help="Mount in the container; may be repeated."),
]
Image = Annotated[
    str,
    typer.Option(
        "--image",
        "--container-image",
        help="Container image: a squash file or URI of Enroot, a .sif or sandbox folder.",
    ),
]
Workdir = Annotated[str, typer.Option("--workdir", "--container-workdir", help="Folder to run in, in the container.")]
ScriptFile = Annotated[Path, typer.Option("--script", help="File to write and submit.")]
InJob = Annotated[
    bool,
    typer.Option("--in-job", help="Submit nothing: this is in the job already, in its batch script; use its nodes."),
]
LogFolder = Annotated[str, typer.Option("--log-dir", help="Folder for the output of every process.")]
