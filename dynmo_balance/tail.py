"""What follows the last operation of a step: gradients are reduced, a tied weight is reduced, the optimizer runs.

* Data parallel: a ring all-reduce of a worker's gradients, ``2 (D - 1) / D`` of their bytes over the bandwidth
  (Patarasuk and Yuan 2009), after its last operation.
* Tied weights: the two workers that hold a tied weight reduce its gradient between them, after both have theirs.
* A norm of all gradients (clipping) is a barrier: no optimizer starts before all gradients are reduced.
* The optimizer touches parameters, gradients and state once: bytes over the memory bandwidth.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from .problem import Problem
from .simulate import Timeline


@dataclass(frozen=True, kw_only=True)
class TailOptions:
    """Rates in bytes per second; None leaves a part out."""

    data_parallel: int = 1
    data_parallel_bandwidth: int | None = None
    memory_bandwidth: int | None = None
    barrier: bool = True


@dataclass(frozen=True, kw_only=True)
class Tail:
    """When each worker is through with each part, in ns from the start of the step, and the whole step."""

    reduced_ns: tuple[int, ...]
    tied_ns: tuple[int, ...]
    step_ns: int


def tail_of(problem: Problem, boundaries: Sequence[int], timeline: Timeline, options: TailOptions) -> Tail:
    """The end of the step."""
    count = len(problem.places)
    items = problem.chain.items
    gradient, touched = [0] * count, [0] * count
    worker_of: dict[str, int] = {}
    for stage, (begin, end) in enumerate(pairwise(boundaries)):
        for item in items[begin:end]:
            worker_of[item.name] = problem.positions[stage]
            gradient[problem.positions[stage]] += item.gradient_bytes
            touched[problem.positions[stage]] += item.param_bytes + item.gradient_bytes + item.optimizer_bytes
    ends = [row[-1].end_ns if row else 0 for row in timeline.spans]
    replicas = options.data_parallel
    if replicas > 1 and options.data_parallel_bandwidth:
        rate = replicas * options.data_parallel_bandwidth
        ends = [end + 2 * (replicas - 1) * size * 10**9 // rate for end, size in zip(ends, gradient, strict=True)]
    reduced = tuple(ends)
    for item in items:
        other = worker_of.get(item.tied_to or "")
        own = worker_of[item.name]
        if other is not None and other != own:
            both = max(ends[own], ends[other]) + problem.transfer_ns(item.gradient_bytes)
            ends[own] = ends[other] = both
    tied = tuple(ends)
    if options.barrier:
        ends = [max(ends)] * count
    if options.memory_bandwidth:
        pairs = zip(ends, touched, strict=True)
        ends = [end + size * 10**9 // options.memory_bandwidth for end, size in pairs]
    return Tail(reduced_ns=reduced, tied_ns=tied, step_ns=max(ends))
