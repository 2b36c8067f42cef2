"""Number of processes and flags of a restarted run: pure functions of its previous configuration."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

# Seconds before the second restart without progress, and at most. A disk that is full or a device that is lost for a
# while would otherwise use all restarts within seconds.
FIRST_PAUSE_S, MAX_PAUSE_S = 5.0, 60.0


def restart_pause_s(restarts: int) -> float:
    """Seconds before a restart, which doubles with each one without progress; the first one has no pause.

    Args:
        restarts: number of restarts without progress, with this one.
    """
    return min(MAX_PAUSE_S, FIRST_PAUSE_S * 2.0 ** min(restarts - 2, 10)) if restarts > 1 else 0.0


@dataclass(frozen=True, kw_only=True)
class Layout:
    """Parallel sizes of a round.

    Attributes:
        config: configuration of the run, as in ``run.json``.
        processes: number of processes.
        is_derived: whether the pipeline size follows from the number of processes, as no option sets it.
    """

    config: Mapping[str, Mapping[str, Any]]
    processes: int
    is_derived: bool = False


def pipeline_size(config: Mapping[str, Mapping[str, Any]], before: int, processes: int) -> int | None:
    """Pipeline size of a run that resumes with another number of processes.

    The tensor-parallel size does not change, because the bits of the results depend on it. The pipeline size does not
    change if the processes make whole replicas. Otherwise the number of replicas is kept, if possible.

    Args:
        config: configuration of the run, as in ``run.json``.
        before: previous number of processes.
        processes: new number of processes.

    Returns:
        The new size; None if it does not change, or if no size fits.
    """
    parallel = config["parallel"]
    tensor, pipeline = int(parallel["tensor_model_parallel_size"]), int(parallel["pipeline_model_parallel_size"])
    if processes == before or processes % tensor or processes % (tensor * pipeline) == 0:
        return None
    replicas = max(1, before // (tensor * pipeline))
    if processes % (tensor * replicas) == 0:
        return processes // (tensor * replicas)
    return processes // tensor


def process_count(config: Mapping[str, Mapping[str, Any]], before: int, workers: int) -> int:
    """Number of processes of a run that had ``before`` of them and resumes with ``workers`` pipeline ranks."""
    return before // int(config["parallel"]["pipeline_model_parallel_size"]) * workers


def resume_flags(run_dir: str, pipeline: int | None) -> tuple[str, ...]:
    """Flags that, appended to the command, resume the run of ``run_dir``, on ``pipeline`` ranks where they changed."""
    size = () if pipeline is None else ("--pipeline-model-parallel-size", str(pipeline))
    return ("--run-dir", run_dir, "--save", run_dir, "--load", run_dir, *size)


def pack_to_flags(config: Mapping[str, Mapping[str, Any]], workers: int | None) -> tuple[str, ...]:
    """Flags that keep the planner from releasing any of the ``workers`` pipeline ranks that a user requested."""
    pack_to = config.get("balance", {}).get("pack_to")
    return () if workers is None or pack_to is None else ("--pack-to", str(max(int(pack_to), workers)))


def layout_flags(run_dir: str, layout: Layout, processes: int) -> tuple[str, ...]:
    """Flags that, appended to the command, resume the run of ``run_dir`` with ``processes``.

    They depend on the largest round of the launch (``layout``) and on the number of processes, not on the rounds in
    between: a run that lost nodes and got them again has its former sizes.
    """
    return resume_flags(run_dir, pipeline_size(layout.config, layout.processes, processes))


def join_layout(layout: Layout, processes: int) -> int | None:
    """Number of pipeline ranks with ``processes``; None if it is that of the command."""
    return pipeline_size(layout.config, layout.processes, processes)


def growth_workers(layout: Layout, processes: int) -> int:
    """Number of pipeline ranks of a run that grows in place: that of a restart.

    Args:
        layout: sizes of the largest round.
        processes: number of processes after the growth.
    """
    changed = pipeline_size(layout.config, layout.processes, processes)
    pipeline = int(layout.config["parallel"]["pipeline_model_parallel_size"])
    # A restart without another size derives it again from its number of processes.
    unchanged = processes if layout.is_derived and pipeline == layout.processes else pipeline
    return unchanged if changed is None else changed


def fitting_nodes(layout: Layout | None, processes: Sequence[int], min_nodes: int, refused: Collection[int]) -> int:
    """Number of nodes of the next round: the first ones, whose processes make whole tensor-parallel groups.

    Args:
        layout: sizes of the largest round; None before the first one.
        processes: number of processes of each node that is ready.
        min_nodes: minimum number of nodes. If no number fits, all are used, and the trainer reports the conflict.
        refused: numbers of processes that the trainer refused.
    """
    if layout is None:
        return len(processes)
    parallel = layout.config["parallel"]
    group = int(parallel["tensor_model_parallel_size"]) * int(parallel.get("context_parallel_size", 1))
    for count in range(len(processes), min_nodes - 1, -1):
        total = sum(processes[:count])
        if total % group == 0 and total not in refused:
            return count
    return len(processes)
