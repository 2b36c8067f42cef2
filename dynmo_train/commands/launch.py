"""``dynmo-train launch``: a command in several processes."""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path
from typing import Annotated

import typer

from ..errors import UsageError
from .common import need_torch

launch = typer.Typer(no_args_is_help=True, help="Run a command in several processes.")


@launch.command("local")
def launch_local(
    arguments: Annotated[
        list[str], typer.Argument(metavar="-- COMMAND...", help="What each process runs: a command of dynmo-train.")
    ],
    nproc: Annotated[int, typer.Option("--nproc", min=1, help="Processes to start.")] = 1,
    log_dir: Annotated[
        Path | None,
        typer.Option("--log-dir", help="Folder for the output of every process [default: a temporary folder]."),
    ] = None,
    max_restarts: Annotated[
        int, typer.Option("--max-restarts", min=0, help="Times to go on from the last checkpoint after a failure.")
    ] = 0,
    grace_s: Annotated[
        float, typer.Option("--grace-s", min=0, help="Seconds that a process may take to end when it is told to.")
    ] = 5.0,
) -> None:
    """Run COMMAND in several processes on this machine; shows what rank 0 says.

    Ends with the exit code of the process that failed. A process that ends with 75 asks for all to be started again.
    """
    if arguments[0] == "launch":
        raise UsageError("launch cannot start another launch; give it pretrain or another command that computes")
    need_torch()
    from ..launch.local import LocalLaunch
    from ..launch.local import launch_local as run

    folder = log_dir or Path(tempfile.mkdtemp(prefix="dynmo-launch-"))
    asked = LocalLaunch(nproc=nproc, arguments=tuple(arguments), log_dir=folder, grace_s=grace_s)
    code = run(asked, max_restarts=max_restarts)
    if log_dir is None and code == 0:
        shutil.rmtree(folder)
    raise typer.Exit(code)
