"""One compressed step beside the same step without compression: what it saves, what it costs, whether it pays."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from .._common.errors import UsageError
from ..costs.devices import Device
from ..formats.profile import Header
from ..partition.problem import Problem
from ..simulation.compression_cost import Compression, compression_of, factor_bytes, packed_costs, predict_compressed
from ..simulation.simulator import Communication, Timeline, predict, stage_costs
from ..simulation.step_tail import TailOptions, reduced_bytes, tail_of

AUTO = "auto"


@dataclass(frozen=True, kw_only=True)
class CompressionQuestion:
    """The options of a command; ``way`` is a number of workers, ``auto``, or None for all."""

    boundary_rank: int | None
    epilogue_only: bool
    feedback: bool
    replica_rank: int | None
    way: str | None
    fuse_ties: bool
    device: Device

    @property
    def asks(self) -> bool:
        """Whether anything is compressed or fused."""
        return self.boundary_rank is not None or self.replica_rank is not None or self.fuse_ties


@dataclass(frozen=True, kw_only=True)
class Answer:
    """The step, the rates with which its tail goes on, and what is to be told about compression."""

    timeline: Timeline
    rates: TailOptions
    lines: tuple[str, ...] = ()
    document: dict[str, Any] = field(default_factory=dict)


def _ways(question: CompressionQuestion, workers: int) -> list[int | None]:
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


def answer_of(
    header: Header,
    problem: Problem,
    boundaries: Sequence[int],
    rates: TailOptions,
    question: CompressionQuestion,
    overhead_ns: int,
    communication: Communication,
) -> Answer:
    """Simulate the step as the question has it; of several ways the one with the least step, the fewest workers first.

    Raises:
        UsageError: a rank whose factors are no smaller, or a way that the pipeline does not have.
    """
    whole = predict(problem, boundaries, overhead_ns, communication)
    if not question.asks:
        if question.way is not None:
            _ways(question, len(problem.places))
        return Answer(timeline=whole, rates=rates)
    given = replace(
        compression_of(header, question.device),
        boundary_rank=question.boundary_rank,
        epilogue_only=question.epilogue_only,
        feedback=question.feedback,
        replica_rank=question.replica_rank,
        fuse_ties=question.fuse_ties,
    )
    timeline = predict_compressed(problem, boundaries, given, overhead_ns, communication)
    tried = []
    for way in _ways(question, len(problem.places)):
        tail = replace(rates, compression=replace(given, replica_workers=way))
        tried.append((tail_of(problem, boundaries, timeline, tail).step_ns, way, tail))
    step_ns, way, tail = min(tried, key=lambda one: (one[0], one[1] or 0))
    before_ns = tail_of(problem, boundaries, whole, rates).step_ns
    document = _document(problem, boundaries, given, rates, tail)
    document |= {"step_whole_ns": before_ns, "gain": before_ns / step_ns - 1 if step_ns else 0.0}
    if question.way == AUTO:
        document["selective_grad_comp_way"] = way
        document["ways_ns"] = {str(each): ns for ns, each, _ in tried}
    return Answer(timeline=timeline, rates=tail, lines=_lines(document, step_ns), document={"compression": document})


def _document(
    problem: Problem, boundaries: Sequence[int], given: Compression, rates: TailOptions, tail: TailOptions
) -> dict[str, Any]:
    """Bytes of a step on each worker, and the time of making and undoing factors."""
    costs = packed_costs(problem, boundaries, stage_costs(problem, boundaries), given)
    told: dict[str, Any] = {}
    if given.boundary_rank is not None:
        told["boundary_bytes"] = factor_bytes(given)
        told["boundary_whole_bytes"] = max(item.boundary_bytes for item in problem.chain.items)
        told["packed_microbatches"] = [len(cost.packed) for cost in costs]
        told["compress_ns"] = max(cost.compress_ns for cost in costs)
        told["decompress_ns"] = max(cost.decompress_ns for cost in costs)
    if rates.data_parallel > 1:
        told["replica_bytes"] = list(reduced_bytes(problem, boundaries, tail))
        told["replica_whole_bytes"] = list(reduced_bytes(problem, boundaries, rates))
    return told


def _lines(told: dict[str, Any], step_ns: int) -> tuple[str, ...]:
    lines = []
    if "boundary_bytes" in told:
        lines.append(
            f"between stages {told['boundary_whole_bytes']:,} -> {told['boundary_bytes']:,} bytes a gradient,"
            f" {told['compress_ns'] / 1e6:.2f} ms to make, {told['decompress_ns'] / 1e6:.2f} ms to undo; microbatches"
            f" by stage: {', '.join(str(each) for each in told['packed_microbatches'])}"
        )
    if "replica_bytes" in told:
        pairs = zip(told["replica_whole_bytes"], told["replica_bytes"], strict=True)
        lines.append("between replicas, by worker: " + ", ".join(f"{one:,} -> {two:,} bytes" for one, two in pairs))
    if "selective_grad_comp_way" in told:
        lines.append(f"fastest with {told['selective_grad_comp_way']} workers that compress between replicas")
    word = "pays" if told["gain"] > 0 else "does not pay"
    lines.append(
        f"compression {word}: {told['step_whole_ns'] / 1e6:.2f} ms without, {step_ns / 1e6:.2f} ms with it"
        f" ({1 + told['gain']:.2f} x)"
    )
    return tuple(lines)
