"""All balancers on one problem, measured alike."""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from typing import Any

from ..formats.plan import Plan
from ..partition.balance import certify
from ..partition.problem import PartitionProblem
from ..partition.registry import balancer_names, run_balancer
from ..planning.plan_builder import make_proposal, propose


@dataclass(frozen=True, kw_only=True)
class Row:
    """The partition of one balancer.

    Attributes:
        balancer: its name.
        boundaries: item positions.
        bottleneck_ns, step_ns, bubble_fraction, peak_memory_bytes: of the simulated step.
        gap: relative distance to the best one by the objective.
        over_memory: whether a worker is above its memory limit.
        bytes_to_move: of the migration.
    """

    balancer: str
    boundaries: tuple[int, ...]
    bottleneck_ns: int
    gap: float
    step_ns: int
    bubble_fraction: float
    peak_memory_bytes: int
    over_memory: bool
    bytes_to_move: int

    def document(self) -> dict[str, Any]:
        """The row for JSON."""
        return asdict(self)


def compare(problem: PartitionProblem, base: Plan | None, objective: str = "auto") -> tuple[str, list[Row]]:
    """The objective of ``exact``, and one row per balancer in the order of the registry.

    Args:
        problem: the partitioning problem.
        base: the active plan; None if there is none.
        objective: as for ``propose``; the gaps of all rows refer to it.

    Raises:
        UsageError: there are more stages than units, or a balancer of another package fails.
        InfeasibleError: no partition satisfies the constraints.
    """
    owner = None if base is None else base.owner
    exact = propose(problem, "exact", objective=objective, owner=owner)
    rows = []
    for name in balancer_names():
        solution = certify(problem, run_balancer(problem, name), exact.solution)
        proposal = exact if name == "exact" else make_proposal(problem, solution, owner=owner)
        peaks = proposal.timeline.peak_memory_bytes
        limits = [slot.memory_bytes for slot in problem.slots]
        rows.append(
            Row(
                balancer=name,
                boundaries=proposal.solution.boundaries,
                bottleneck_ns=proposal.solution.bottleneck_ns,
                gap=0.0,
                step_ns=proposal.timeline.step_ns,
                bubble_fraction=proposal.timeline.bubble_fraction,
                peak_memory_bytes=max(peaks),
                over_memory=any(cap is not None and peak > cap for peak, cap in zip(peaks, limits, strict=True)),
                bytes_to_move=proposal.migration.bytes,
            )
        )
    # The gap refers to what ``exact`` minimizes. A partition above a memory limit cannot run, so it sets no mark.
    by = exact.solution.objective
    values = [row.step_ns if by == "simulated" else row.bottleneck_ns for row in rows]
    allowed = [value for row, value in zip(rows, values, strict=True) if not row.over_memory]
    best = min(allowed, default=0)
    return by, [replace(row, gap=value / best - 1 if best else 0.0) for row, value in zip(rows, values, strict=True)]
