"""What-if sweeps of gradient compression: steps over a grid of ranks and bandwidths, with and without compression."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import groupby, product
from typing import Any

from .._common.errors import UsageError
from ..formats.profile import Header
from ..partition.balance import balance
from ..partition.problem import InfeasibleError, PartitionProblem
from ..simulation.simulator import Communication
from ..simulation.step_tail import TailOptions, tail_of
from .compression import CompressionOptions, simulate_compressed
from .sweep_axes import Axis
from .what_if import MAX_CELLS, Cell, Grid, cells_of

LINK, BOUNDARY, REPLICA = "link-gbps", "inter-grad-comp-rank", "grad-comp-rank"
COMPRESSION_AXES: Mapping[str, Axis] = {
    LINK: Axis(),
    BOUNDARY: Axis(integers=True),
    REPLICA: Axis(integers=True),
}
"""Axes in addition to those of ``what_if``; rank 0 means uncompressed gradients."""


@dataclass(frozen=True, kw_only=True)
class CompressedRow:
    """One cell of the grid.

    Attributes:
        cell: the pipeline.
        link_gbps: GB/s between workers, and between replicas unless given separately; None is unlimited.
        boundary_rank, replica_rank: 0 is uncompressed.
        step_ns, step_whole_ns: with the reductions, with and without compression; None if no partition is feasible,
            see ``reason``.
        figures: compression figures of ``simulate``.
        reason: why there is no partition.
    """

    cell: Cell
    link_gbps: float | None
    boundary_rank: int
    replica_rank: int
    step_ns: int | None = None
    step_whole_ns: int | None = None
    figures: Mapping[str, Any] = field(default_factory=dict)
    reason: str = ""

    @property
    def gain(self) -> float | None:
        """The speed-up over the step without compression."""
        if self.step_whole_ns is None or not self.step_ns:
            return None
        return self.step_whole_ns / self.step_ns

    @property
    def ranks(self) -> tuple[int, int]:
        """The ranks between stages and between replicas."""
        return self.boundary_rank, self.replica_rank


@dataclass(frozen=True, kw_only=True)
class CompressedGrid:
    """Predicts cells with compression.

    Attributes:
        grid: of the pipelines.
        header: of the profile.
        question: the options that are not varied.
        rates: of the step's tail.
        replica_gbps: GB/s between replicas; None is that of the link.
        clock: overhead in ns per operation, and what a transfer blocks.
    """

    grid: Grid
    header: Header
    question: CompressionOptions
    rates: TailOptions
    replica_gbps: float | None
    clock: tuple[int, Communication]

    def rows(self, axes: Mapping[str, Sequence[float | str]]) -> list[CompressedRow]:
        """The prediction for each cell; an axis that is not varied has the value of the option or the profile.

        Raises:
            UsageError: there are too many cells, or a rank or rate is negative.
        """
        link = self.header.link.bandwidth_bytes_per_s / 1e9 if self.header.link else None
        links: list[float | None] = [float(value) for value in axes.get(LINK, ())]
        links = links or [link]
        boundary = [int(value) for value in axes.get(BOUNDARY, (self.question.boundary_rank or 0,))]
        replica = [int(value) for value in axes.get(REPLICA, (self.question.replica_rank or 0,))]
        if any(one is not None and one <= 0 for one in links):
            raise UsageError("--vary link-gbps: must be above 0")
        if min(*boundary, *replica) < 0:
            raise UsageError("ranks must not be negative; use 0 for uncompressed gradients")
        cells = cells_of(self.grid, self.header, {name: axes[name] for name in axes if name not in COMPRESSION_AXES})
        found = list(product(cells, links, boundary, replica))
        if len(found) > MAX_CELLS:
            raise UsageError(f"the grid has {len(found):,} cells; vary less, at most {MAX_CELLS:,} cells")
        return [self._row(*one) for one in found]

    def _row(self, cell: Cell, link_gbps: float | None, boundary_rank: int, replica_rank: int) -> CompressedRow:
        row = CompressedRow(cell=cell, link_gbps=link_gbps, boundary_rank=boundary_rank, replica_rank=replica_rank)
        problem = self.grid.problem(cell)
        rates = self.rates
        if link_gbps is not None:
            problem = replace(problem, link_bandwidth=max(1, round(link_gbps * 1e9)))
        # In a cluster without a network of its own for replicas, both use the same links.
        between = self.replica_gbps or link_gbps
        if between is not None:
            rates = replace(rates, data_parallel_bandwidth=max(1, round(between * 1e9)))
        question = replace(
            self.question,
            boundary_rank=boundary_rank or None,
            replica_rank=replica_rank or None,
            way=self.question.way if replica_rank else None,
        )
        # A rank that is too high for one cell leaves that row without a step, with the reason, instead of ending the
        # sweep.
        try:
            boundaries = balance(problem, "exact").boundaries
            return self._answered(row, problem, boundaries, rates, question)
        except (InfeasibleError, UsageError) as error:
            return replace(row, reason=str(error))

    def _answered(
        self,
        row: CompressedRow,
        problem: PartitionProblem,
        boundaries: Sequence[int],
        rates: TailOptions,
        question: CompressionOptions,
    ) -> CompressedRow:
        answer = simulate_compressed(self.header, problem, boundaries, rates, question, *self.clock)
        step_ns = tail_of(problem, boundaries, answer.timeline, answer.rates).step_ns
        figures = answer.document.get("compression", {})
        whole_ns = figures.get("step_whole_ns", step_ns)
        return replace(row, step_ns=step_ns, step_whole_ns=whole_ns, figures=figures)


def headline(found: Sequence[CompressedRow]) -> str:
    """For each pair of ranks, up to which bandwidth compression is faster."""
    lines = []
    usable = [row for row in found if row.gain is not None and (any(row.ranks) or row.figures)]
    for ranks, group in groupby(sorted(usable, key=lambda row: row.ranks), key=lambda row: row.ranks):
        rows = list(group)
        faster = [row for row in rows if (row.gain or 0.0) > 1]
        best = max(rows, key=lambda row: row.gain or 0.0)
        name = f"rank {ranks[0] or 'none'} between stages, {ranks[1] or 'none'} between replicas"
        if not faster:
            lines.append(f"{name}: faster nowhere ({best.gain:.2f} x at best)")
            continue
        at = "" if best.link_gbps is None else f" at {best.link_gbps:g} GB/s"
        fastest = max((row.link_gbps for row in faster if row.link_gbps is not None), default=None)
        limit = "everywhere" if len(faster) == len(rows) else "in some cells"
        if fastest is not None and len(faster) < len(rows):
            limit += f", up to {fastest:g} GB/s"
        lines.append(f"{name}: faster {limit} ({best.gain:.2f} x{at})")
    return "\n".join(lines) or "no cell of the grid has a feasible partition"
