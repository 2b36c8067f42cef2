"""With how many processes, and with which flags, a run goes on: pure functions of what it was."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def pipeline_size(config: Mapping[str, Mapping[str, Any]], before: int, processes: int) -> int | None:
    """Workers of the pipeline when a run goes on with another number of processes.

    The tensor-parallel size stays as it is, because it fixes the mathematics. The pipeline stays where the processes
    still make whole replicas, whose number follows by itself; else it takes all the processes that a replica can have.

    Args:
        config: of the run, as in ``run.json``.
        before: processes that the run had.
        processes: that it has now.

    Returns:
        The new size; None where nothing has to be said, or where no size fits.
    """
    parallel = config["parallel"]
    tensor, pipeline = int(parallel["tensor_model_parallel_size"]), int(parallel["pipeline_model_parallel_size"])
    if processes == before or processes % tensor or processes % (tensor * pipeline) == 0:
        return None
    replicas = max(1, before // (tensor * pipeline))
    if processes % (tensor * replicas) == 0:
        return processes // (tensor * replicas)
    return processes // tensor


def processes_of(config: Mapping[str, Mapping[str, Any]], before: int, workers: int) -> int:
    """Processes of a run that goes on with ``workers`` pipeline positions: each has the processes that it had."""
    return before // int(config["parallel"]["pipeline_model_parallel_size"]) * workers


def place_flags(run_dir: str, pipeline: int | None) -> tuple[str, ...]:
    """The flags behind the command of a first start that make it go on with a run."""
    size = () if pipeline is None else ("--pipeline-model-parallel-size", str(pipeline))
    return ("--run-dir", run_dir, "--save", run_dir, "--load", run_dir, *size)


def packing_flags(config: Mapping[str, Mapping[str, Any]], workers: int | None) -> tuple[str, ...]:
    """What keeps the planner from releasing at once the workers that somebody asked for."""
    pack_to = config.get("balance", {}).get("pack_to")
    return () if workers is None or pack_to is None else ("--pack-to", str(max(int(pack_to), workers)))
