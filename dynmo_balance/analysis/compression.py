"""One compressed step beside the same step without compression: what it saves, what it costs, whether it pays."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

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
    """The options of a command; ``way`` is a number of workers, ``auto``, or None for all."""

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
    """The step, the rates with which its tail goes on, and what is to be told about compression."""

    timeline: Timeline
    rates: TailOptions
    lines: tuple[str, ...] = ()
    document: dict[str, Any] = field(default_factory=dict)


def _worker_counts(question: CompressionOptions, workers: int) -> list[int | None]:
    """The numbers of workers to try."""
    if question.way is None:
        return [None]
    if question.replica_rank is None:
        raise UsageError("--selective-grad-comp-way needs --grad-comp-rank: nothing is compressed between replicas")
    if question.way == AUTO:
        return list(range(workers + 1))
    if not question.way.isdigit() or not 1 <= int(question.way) <= workers:
        raise UsageError(f"--selective-grad-comp-way {question.way!r}: write auto, or a number from 1 to {workers}")
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
    """Simulate the step as the question has it; of several ways the one with the least step, the fewest workers first.

    Raises:
        UsageError: a rank whose factors are no smaller, or a way that the pipeline does not have.
    """
    whole = predict(problem, boundaries, overhead_ns, communication)
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
    """Bytes of a step on each worker, and the time of making and undoing factors."""
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
        lines.append("between replicas, by worker: " + ", ".join(f"{one:,} -> {two:,} bytes" for one, two in pairs))
    if "selective_grad_comp_way" in figures:
        lines.append(f"fastest with {figures['selective_grad_comp_way']} workers that compress between replicas")
    word = "pays" if figures["gain"] > 0 else "does not pay"
    lines.append(
        f"compression {word}: {figures['step_whole_ns'] / 1e6:.2f} ms without, {step_ns / 1e6:.2f} ms with it"
        f" ({1 + figures['gain']:.2f} x)"
    )
    return tuple(lines)
