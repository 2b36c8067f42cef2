"""Results as tables for people, and as documents for programs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from itertools import pairwise
from typing import Any

from .._common.console import emit, emit_table, human_bytes, print_message
from ..analysis.search import Search
from ..analysis.what_if import NEUTRAL_DYNAMICS, Cell, Row
from ..analysis.what_if_compression import CompressedRow
from ..partition.exact import Solution
from ..partition.problem import PartitionProblem
from ..planning.plan_builder import Proposal
from ..simulation.bounds import bounds_of
from ..simulation.simulator import Timeline

OBJECTIVES = {"bottleneck": "bottleneck", "simulated": "simulated step"}
"""What a solution minimized, for people."""


def milliseconds(ns: int | float | None, digits: int = 3) -> str:
    """Nanoseconds as milliseconds with ``digits`` decimals; a dash for None."""
    return "-" if ns is None else f"{ns / 1e6:,.{digits}f}"


def span_name(names: Sequence[str]) -> str:
    """A short name for a run of items."""
    if not names:
        return "(empty)"
    return names[0] if len(names) == 1 else f"{names[0]} .. {names[-1]} ({len(names)})"


def print_stages(problem: PartitionProblem, boundaries: Sequence[int], timeline: Timeline) -> None:
    """Print one line per stage: items, time of a microbatch, load and memory of its worker."""
    work = problem.chain.work_ns
    rows = []
    for stage, (begin, end) in enumerate(pairwise(boundaries)):
        slot = problem.slot(stage)
        at = problem.positions[stage]
        limit = problem.slots[at].memory_bytes
        cap = "-" if limit is None else human_bytes(limit)
        rows.append(
            [
                str(stage),
                str(slot.worker),
                span_name(problem.chain.names[begin:end]),
                milliseconds(slot.time_ns(sum(work[begin:end]))),
                f"{timeline.busy_ns[at] / timeline.step_ns:.1%}" if timeline.step_ns else "-",
                human_bytes(timeline.peak_memory_bytes[at]),
                cap,
            ]
        )
    columns = ["stage", "worker", "items", "ms/microbatch", "busy", "memory", "limit"]
    emit_table(f"{problem.schedule}, {problem.microbatches} microbatches", columns, rows)
    sentence = shards_sentence(problem)
    if sentence is not None:
        emit(sentence)


def shards_sentence(problem: PartitionProblem) -> str | None:
    """Where the shards of the output layer are, and their costs; None where the output layer is whole."""
    shards = problem.chain.vocabulary
    if shards is None:
        return None
    local = [shards.count_on(worker, len(problem.slots)) for worker in range(len(problem.slots))]
    least, most = min(local), max(local)
    each = str(most) if least == most else f"{least} to {most}"
    forward, weight = (milliseconds(total * most // shards.count) for total in (shards.forward_ns, shards.weight_ns))
    return (
        f"output layer: {shards.count} shards, {each} on each worker, on which they add {forward} ms (S) and"
        f" {weight} ms (T) to a microbatch"
    )


def certificate(
    problem: PartitionProblem, solution: Solution, timeline: Timeline, *, is_minimized: bool = True
) -> list[str]:
    """The quality of the result by its objective, and the distance of the bottleneck to its bound, as lines.

    Args:
        problem: the partitioning problem.
        solution: the partition.
        timeline: its simulation.
        is_minimized: whether the balancer minimizes the objective; other balancers are only measured by it.
    """
    begin, end = solution.blocking
    run = f" | blocking run: {span_name(problem.chain.names[begin:end])}" if end > begin else ""
    name = OBJECTIVES[solution.objective]
    by = f"objective: minimum {name}" if is_minimized else f"measured by: {name}"
    bottleneck = f"bottleneck {milliseconds(solution.bottleneck_ns)} ms"
    bound = f"lower bound {milliseconds(solution.lower_bound_ns)} ms"
    if solution.objective == "bottleneck":
        proof = "optimal: yes" if solution.optimal else "optimal: not proven"
        return [f"{by} | {bottleneck}, {bound}, {proof}{run}"]
    bound_ns = bounds_of(problem).step_ns
    return [
        f"{by} | step {milliseconds(timeline.step_ns, 2)} ms, lower bound {milliseconds(bound_ns, 2)} ms,"
        f" optimal: {'yes' if timeline.step_ns <= bound_ns else 'not proven'}",
        f"{bottleneck} | minimum: {milliseconds(solution.lower_bound_ns)} ms{run}",
    ]


def print_proposal(proposal: Proposal, static_step_ns: int, *, is_minimized: bool = True) -> None:
    """Print a partition with its certificate and predictions.

    Args:
        proposal: the partition.
        static_step_ns: simulated step in ns of the uniform partition, for comparison.
        is_minimized: whether the balancer minimizes the objective.
    """
    problem, solution, timeline = proposal.problem, proposal.solution, proposal.timeline
    print_stages(problem, solution.boundaries, timeline)
    for line in certificate(problem, solution, timeline, is_minimized=is_minimized):
        emit(line)
    emit(
        f"predicted step {milliseconds(timeline.step_ns, 2)} ms, bubble {timeline.bubble_fraction:.1%}; uniform"
        f" {milliseconds(static_step_ns, 2)} ms: {static_step_ns / max(1, timeline.step_ns):.2f} x"
    )
    if proposal.migration.moves:
        moved = proposal.migration
        emit(
            f"{len(moved.moves)} items move, {human_bytes(moved.bytes)}, at most {human_bytes(moved.max_link_bytes)}"
            f" on a link, pause about {milliseconds(moved.pause_ns, 0)} ms"
        )


def log_search(found: Search, shown: int = 8) -> None:
    """Log the best ``shown`` results of a search on stderr, and their distance to the lower bound."""
    bounds = found.bounds
    for candidate in (found.best, *found.others[: shown - 1]):
        print_message(
            f"{candidate.label}: step {milliseconds(candidate.timeline.step_ns, 2)} ms,"
            f" {candidate.timeline.step_ns / bounds.step_ns:.3f} x the bound"
        )
    print_message(
        f"bound {milliseconds(bounds.step_ns, 2)} ms: work over workers {milliseconds(bounds.work_ns, 2)}, heaviest"
        f" unit {milliseconds(bounds.unit_ns, 2)}, path {milliseconds(bounds.path_ns, 2)}"
    )
    if found.assumed_split:
        print_message("the profile does not split the backward pass: half of it is assumed to be the weight gradient")


def _cell_columns(cells: Sequence[Cell]) -> tuple[list[str], list[list[str]]]:
    """The columns that identify a cell, and their values; axes that are not varied are left out."""
    varied = [
        name for name, neutral in NEUTRAL_DYNAMICS.items() if any(getattr(cell, name) != neutral for cell in cells)
    ]
    schedules = len({cell.schedule for cell in cells}) > 1
    columns = ["stages", "microbatches", *(["schedule"] if schedules else []), *varied]
    slots = []
    for cell in cells:
        slot = [str(cell.stages), str(cell.microbatches), *([cell.schedule] if schedules else [])]
        slots.append([*slot, *(f"{getattr(cell, name):.2f}" for name in varied)])
    return columns, slots


def print_rows(rows: Sequence[Row], keep: float) -> None:
    """Print the what-if table; ``keep`` is the share of the throughput to keep, for the title."""
    columns, slots = _cell_columns([row.cell for row in rows])
    columns += ["step ms", "uniform ms", "bubble", "samples/s", "memory", "front"]
    columns += ["release (balanced)", "release (uniform)"]
    cells = [[*slot, *_numbers(row)] for slot, row in zip(slots, rows, strict=True)]
    emit_table(f"what-if (release: workers to release while keeping {keep:.0%} of the throughput)", columns, cells)


def print_compressed(rows: Sequence[CompressedRow]) -> None:
    """Print the what-if table with compression: steps with and without, bytes, and compression time."""
    columns, slots = _cell_columns([row.cell for row in rows])
    columns += ["GB/s", "rank", "replica rank", "step ms", "compressed ms", "gain", "gradient", "factors"]
    columns += ["compress ms", "decompress ms", "between replicas", "as factors", "way"]
    cells = [[*slot, *_compressed(row)] for slot, row in zip(slots, rows, strict=True)]
    emit_table("what-if with gradient compression (rank -: uncompressed)", columns, cells)


def _compressed(row: CompressedRow) -> list[str]:
    given = ["-" if row.link_gbps is None else f"{row.link_gbps:g}", *(str(rank or "-") for rank in row.ranks)]
    if row.step_ns is None or row.gain is None:
        return [*given, "infeasible", *["-"] * 9]
    figures = row.figures
    sizes = [human_bytes(figures[key]) if key in figures else "-" for key in ("boundary_whole_bytes", "boundary_bytes")]
    times = [milliseconds(figures.get(key), 2) if key in figures else "-" for key in ("compress_ns", "decompress_ns")]
    sums = [human_bytes(sum(figures[k])) if k in figures else "-" for k in ("replica_whole_bytes", "replica_bytes")]
    steps = [milliseconds(row.step_whole_ns, 2), milliseconds(row.step_ns, 2), f"{row.gain:.2f}"]
    return [*given, *steps, *sizes, *times, *sums, str(figures.get("selective_grad_comp_way", "-"))]


def compressed_document(row: CompressedRow) -> dict[str, Any]:
    """A what-if cell with compression for JSON."""
    document = asdict(row)
    return {**document.pop("cell"), **document.pop("figures"), **document, "gain": row.gain}


def _numbers(row: Row) -> list[str]:
    if row.step_ns is None or row.bubble_fraction is None or row.peak_memory_bytes is None:
        return ["infeasible", *["-"] * 7]
    return [
        milliseconds(row.step_ns, 2),
        milliseconds(row.static_step_ns, 2),
        f"{row.bubble_fraction:.1%}",
        "-" if row.samples_per_s is None else f"{row.samples_per_s:,.1f}",
        human_bytes(row.peak_memory_bytes),
        "*" if row.pareto else "",
        "-" if row.from_balanced is None else str(row.cell.stages - row.from_balanced.workers),
        "-" if row.from_static is None else str(row.cell.stages - row.from_static.workers),
    ]


def row_document(row: Row) -> dict[str, Any]:
    """A what-if cell for JSON."""
    document = asdict(row)
    document = {**document.pop("cell"), **document}
    for name in ("from_static", "from_balanced"):
        packing = document.pop(name)
        document[f"release_{name}"] = None if packing is None else row.cell.stages - packing["workers"]
        document[f"throughput_fraction_{name}"] = None if packing is None else packing["throughput_fraction"]
    return document


def timeline_document(timeline: Timeline) -> dict[str, Any]:
    """A simulated step for JSON; spans are ``[stage, kind, microbatch, start_ns, end_ns]``."""
    return {
        "step_ns": timeline.step_ns,
        "bubble_fraction": timeline.bubble_fraction,
        "busy_ns": list(timeline.busy_ns),
        "peak_memory_bytes": list(timeline.peak_memory_bytes),
        "spans": [[[s, k.value, m, a, b] for s, k, m, a, b in row] for row in timeline.spans],
    }
