"""A compressed step compared with the same step without compression: what it saves and what it costs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from .._common.document import is_count
from .._common.errors import UsageError
from ..costs.devices import Device
from ..formats.profile import Header
from ..partition.problem import PartitionProblem
from ..simulation.compression_cost import (
    Compression,
    compressed_costs,
    factor_bytes,
    no_compression,
    predict_compressed,
)
from ..simulation.simulator import Communication, Timeline, predict, stage_costs
from ..simulation.step_tail import TailOptions, reduced_bytes, tail_of

AUTO = "auto"


@dataclass(frozen=True, kw_only=True)
class CompressionOptions:
    """The compression options of a command.

    Attributes:
        boundary_rank, replica_rank: rank of gradients between stages and between replicas; None is uncompressed.
        epilogue_only: compress only after a worker's last forward pass.
        feedback: error feedback.
        way: number of workers that compress between replicas, ``auto``, or None for all.
        fuse_ties: reduce tied weights in one all-reduce.
        device: computes the factors.
    """

    boundary_rank: int | None
    epilogue_only: bool
    feedback: bool
    replica_rank: int | None
    way: str | None
    fuse_ties: bool
    device: Device

    @property
    def is_enabled(self) -> bool:
        """Whether anything is compressed or fused."""
        return self.boundary_rank is not None or self.replica_rank is not None or self.fuse_ties


@dataclass(frozen=True, kw_only=True)
class CompressionResult:
    """The simulated step and its compression figures.

    Attributes:
        timeline: of the step.
        rates: of the step's tail.
        lines: the figures as text.
        document: the figures for JSON.
    """

    timeline: Timeline
    rates: TailOptions
    lines: tuple[str, ...] = ()
    document: dict[str, Any] = field(default_factory=dict)


def _worker_counts(question: CompressionOptions, workers: int) -> list[int | None]:
    """The numbers of compressing workers to try.

    Raises:
        UsageError: there is no such number of workers, or nothing is compressed between replicas.
    """
    if question.way is None:
        return [None]
    if question.replica_rank is None:
        raise UsageError(
            "--selective-grad-comp-way needs --grad-comp-rank; without it nothing is compressed between replicas"
        )
    if question.way == AUTO:
        return list(range(workers + 1))
    if not is_count(question.way) or not 1 <= int(question.way) <= workers:
        raise UsageError(f"--selective-grad-comp-way {question.way!r}: must be auto or a number from 1 to {workers}")
    return [int(question.way)]


def simulate_compressed(
    header: Header,
    problem: PartitionProblem,
    boundaries: Sequence[int],
    rates: TailOptions,
    question: CompressionOptions,
    overhead_ns: int,
    communication: Communication,
) -> CompressionResult:
    """Simulate the step with compression; of several worker counts, the one with the shortest step.

    Args:
        header: of the profile.
        problem: the partitioning problem.
        boundaries: item positions.
        rates: of the step's tail.
        question: the compression options.
        overhead_ns: time added to every operation.
        communication: what transfers block.

    Raises:
        UsageError: the factors of a rank are not smaller than the gradient, or a number of workers is invalid.
    """
    whole = predict(problem, boundaries, overhead_ns, communication)
    # Options without effect are still checked, so that a typing error does not look like a result.
    if not question.is_enabled:
        if question.way is not None:
            _worker_counts(question, len(problem.slots))
        return CompressionResult(timeline=whole, rates=rates)
    given = replace(
        no_compression(header, question.device),
        boundary_rank=question.boundary_rank,
        epilogue_only=question.epilogue_only,
        feedback=question.feedback,
        replica_rank=question.replica_rank,
        fuse_ties=question.fuse_ties,
    )
    timeline = predict_compressed(problem, boundaries, given, overhead_ns, communication)
    # The number of compressing workers changes the reductions only, so the operations are simulated once.
    tried = []
    for way in _worker_counts(question, len(problem.slots)):
        tail = replace(rates, compression=replace(given, replica_workers=way))
        tried.append((tail_of(problem, boundaries, timeline, tail).step_ns, way, tail))
    step_ns, way, tail = min(tried, key=lambda one: (one[0], one[1] or 0))
    before_ns = tail_of(problem, boundaries, whole, rates).step_ns
    document = _document(problem, boundaries, given, rates, tail)
    document |= {"step_whole_ns": before_ns, "gain": before_ns / step_ns - 1 if step_ns else 0.0}
    if question.way == AUTO:
        document["selective_grad_comp_way"] = way
        document["ways_ns"] = {str(each): ns for ns, each, _ in tried}
    return CompressionResult(
        timeline=timeline, rates=tail, lines=_lines(document, step_ns), document={"compression": document}
    )


def _document(
    problem: PartitionProblem, boundaries: Sequence[int], given: Compression, rates: TailOptions, tail: TailOptions
) -> dict[str, Any]:
    """Bytes of a step on each worker, and the time to compress and decompress."""
    costs = compressed_costs(problem, boundaries, stage_costs(problem, boundaries), given)
    figures: dict[str, Any] = {}
    if given.boundary_rank is not None:
        figures["boundary_bytes"] = factor_bytes(given)
        figures["boundary_whole_bytes"] = max(item.boundary_bytes for item in problem.chain.items)
        figures["packed_microbatches"] = [len(cost.compressed) for cost in costs]
        figures["compress_ns"] = max(cost.compress_ns for cost in costs)
        figures["decompress_ns"] = max(cost.decompress_ns for cost in costs)
    if rates.data_parallel > 1:
        figures["replica_bytes"] = list(reduced_bytes(problem, boundaries, tail))
        figures["replica_whole_bytes"] = list(reduced_bytes(problem, boundaries, rates))
    return figures


def _lines(figures: dict[str, Any], step_ns: int) -> tuple[str, ...]:
    lines = []
    if "boundary_bytes" in figures:
        counts = ", ".join(map(str, figures["packed_microbatches"]))
        lines.append(
            f"gradient between stages: {figures['boundary_whole_bytes']:,} -> {figures['boundary_bytes']:,} bytes"
            f" | compress: {figures['compress_ns'] / 1e6:.2f} ms | decompress: {figures['decompress_ns'] / 1e6:.2f} ms"
            f" | compressed microbatches by stage: {counts}"
        )
    if "replica_bytes" in figures:
        pairs = zip(figures["replica_whole_bytes"], figures["replica_bytes"], strict=True)
        lines.append(
            "gradients between replicas, by worker: " + ", ".join(f"{one:,} -> {two:,} bytes" for one, two in pairs)
        )
    if "selective_grad_comp_way" in figures:
        lines.append(f"fastest number of workers that compress between replicas: {figures['selective_grad_comp_way']}")
    verdict = "is faster" if figures["gain"] > 0 else "is not faster"
    lines.append(
        f"compression {verdict}: {figures['step_whole_ns'] / 1e6:.2f} ms without, {step_ns / 1e6:.2f} ms with it"
        f" ({1 + figures['gain']:.2f} x)"
    )
    return tuple(lines)
