"""All balancers on one problem, measured alike."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from .formats.plan import Plan
from .partition import BALANCERS, best_of, certified
from .planning import present
from .problem import Problem


@dataclass(frozen=True, kw_only=True)
class Row:
    """One balancer's partition; ``gap`` is how far its bottleneck is above the optimum, as a fraction."""

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
        """For a program."""
        return asdict(self)


def compare(problem: Problem, base: Plan | None) -> list[Row]:
    """The balancers in the order of their registry; raises what the exact solver raises."""
    best = best_of(problem)
    rows = []
    for name, balancer in BALANCERS.items():
        solution = best if name == "exact" else certified(problem, balancer(problem), best)
        proposal = present(problem, solution, owner=None if base is None else base.owner)
        peaks = proposal.timeline.peak_memory_bytes
        limits = [place.memory_bytes for place in problem.places]
        rows.append(
            Row(
                balancer=name,
                boundaries=solution.boundaries,
                bottleneck_ns=solution.bottleneck_ns,
                gap=solution.bottleneck_ns / best.bottleneck_ns - 1 if best.bottleneck_ns else 0.0,
                step_ns=proposal.timeline.step_ns,
                bubble_fraction=proposal.timeline.bubble_fraction,
                peak_memory_bytes=max(peaks),
                over_memory=any(cap is not None and peak > cap for peak, cap in zip(peaks, limits, strict=True)),
                bytes_to_move=proposal.migration.bytes,
            )
        )
    return rows
