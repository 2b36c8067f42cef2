"""Simulate many partitions at once: the order of operations is compiled into levels of a few array operations each.

The step times equal those of ``simulator.run`` with overlapped transfers, to the nanosecond. An operation waits for
the previous one on its worker and for one tensor from another stage, so its level is one above the larger of theirs::

    order --compile_order--> levels     level 0: F(0,0)          one row of ends per operation,
                                        level 1: F(0,1) F(1,0)   one column per candidate partition
    costs [stages, candidates] --run_compiled--> step_ns [candidates]

The end of an operation is needed for a few levels only, so the ends are stored in a ring buffer that stays in the
cache.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from functools import lru_cache
from itertools import pairwise
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from ..costs.cost_window import SPEED_UNIT
from ..partition.problem import PartitionProblem
from ..schedules.registry import Order
from .operation_times import (
    OperationGraph,
    critical_path,
    graph_of_order,
    graph_of_problem,
    graph_of_schedule,
    operation_ends,
    operation_times,
)
from .simulator import predict, stage_costs, stage_times

Array = npt.NDArray[np.int64]
Index = Array | slice
MAX_BATCH_NUMBERS = 8_000_000
"""Numbers that a batch of candidates keeps: 64 MB. A larger one is simulated in parts."""
BOUNDED_BATCH = 256
"""Candidates that are simulated before the next ones are compared with the best of them."""


class Level(NamedTuple):
    """Operations that do not wait for each other; ``own``, ``before`` and ``needs`` are rows of the ring buffer.

    Attributes:
        own: the rows of the operations themselves, contiguous.
        before: the row of the previous operation on the same worker; 0 is the start of the step.
        needs: the row of the operation whose tensor is needed; 0 if none.
        pattern: index in ``CompiledOrder.patterns``.
        last: whether a worker's last operation is in this level.
    """

    own: slice
    before: Index
    needs: Index
    pattern: int
    last: bool


class Pattern(NamedTuple):
    """What a level computes: one element per operation.

    Attributes:
        kinds: indices of ``order_arrays.KINDS``.
        stages: the stage.
        links: the stage whose ``send_ns`` the needed tensor takes; the number of stages if nothing is sent.
    """

    kinds: Array
    stages: Array
    links: Array


@dataclass(frozen=True, kw_only=True)
class CompiledOrder:
    """An order of operations by levels.

    Attributes:
        levels: in the order of execution.
        patterns: the distinct patterns of the levels.
        repeated: the patterns that several levels have.
        ring: the number of rows of the ring buffer.
    """

    levels: tuple[Level, ...]
    patterns: tuple[Pattern, ...]
    repeated: tuple[int, ...]
    ring: int


def _index(slots: npt.NDArray[np.int32]) -> Index:
    """A slice if the rows are contiguous, because that is a view and not a copy."""
    first, count = int(slots[0]), len(slots)
    if slots[-1] == first + count - 1 and (np.diff(slots) == 1).all():
        return slice(first, first + count)
    return slots.astype(np.int64)


@lru_cache(maxsize=32)
def compile_schedule(schedule: str, workers: int, virtual_stages: int, microbatches: int) -> CompiledOrder:
    """The levels of a schedule by name.

    Args:
        schedule: a key of ``schedules.registry.SCHEDULES``.
        workers: number of workers.
        virtual_stages: stages per worker.
        microbatches: of one step.
    """
    return _compile(graph_of_schedule(schedule, workers, virtual_stages, microbatches))


@lru_cache(maxsize=8)
def compile_order(order: Order) -> CompiledOrder:
    """The levels of an order of operations."""
    return _compile(graph_of_order(order))


def _compile(graph: OperationGraph) -> CompiledOrder:
    order, needs = graph.order, graph.needs
    count = len(order.stages)
    # With operations of one unit and free transfers, an operation ends one above its level. Number 0 is the start of
    # the step, which is before level 0.
    level = operation_ends(graph, np.ones(count + 1, dtype=np.int64), np.zeros(count + 1, dtype=np.int64), needs) - 1
    before = np.arange(-1, count, dtype=np.int32)
    before[[begin + 1 for begin, end in pairwise(order.begins) if end > begin]] = 0
    last_use = level.copy()
    for used in (before, needs):
        np.maximum.at(last_use, used[1:], level[1:])
    lifetime = int((last_use - level)[1:].max())
    is_final = np.ones(count + 1, dtype=bool)
    is_final[before[1:]] = False
    by_level = 1 + np.argsort(level[1:], kind="stable")
    begins = np.concatenate([[0], np.cumsum(np.bincount(level[1:]))])
    widest = int(np.diff(begins).max())
    # Row 0 is the start of the step and is never overwritten. The rows of a level are contiguous, so the last ones
    # before the end of the ring may stay unused. With two spare levels, a row is still overwritten only after its last
    # reader.
    ring = 1 + (lifetime + 2) * widest
    slot = np.zeros(count + 1, dtype=np.int32)
    columns = np.stack([order.kinds, order.stages, graph.links[1:]]).astype(np.int64)[:, by_level - 1]
    free = 1
    patterns: dict[bytes, tuple[int, Pattern]] = {}
    levels = []
    for begin, end in pairwise(begins.tolist()):
        numbers, width = by_level[begin:end], end - begin
        if free + width > ring:
            free = 1
        pattern = columns[:, begin:end].copy()
        at, _ = patterns.setdefault(pattern.tobytes(), (len(patterns), Pattern(*pattern)))
        rows = _index(slot[before[numbers]]), _index(slot[needs[numbers]])
        slot[numbers] = np.arange(free, free + width)
        levels.append(Level(slice(free, free + width), *rows, at, bool(is_final[numbers].any())))
        free += width
    num_levels = np.bincount([level.pattern for level in levels])
    return CompiledOrder(
        levels=tuple(levels),
        patterns=tuple(pattern for _, pattern in patterns.values()),
        repeated=tuple(np.flatnonzero(num_levels > 1).tolist()),
        ring=ring,
    )


@dataclass(frozen=True, kw_only=True)
class Costs:
    """The costs of the stages of many partitions: ``[stages, candidates]`` each, as in ``StageCosts``."""

    forward_ns: Array
    backward_input_ns: Array
    backward_weight_ns: Array
    has_backward: npt.NDArray[np.bool_]
    send_ns: Array
    static_bytes: Array
    activation_bytes: Array

    def of(self, candidates: slice | Array) -> Costs:
        """The costs of some of the candidates."""
        return Costs(**{each.name: getattr(self, each.name)[:, candidates] for each in fields(self)})


def costs_of(problem: PartitionProblem, candidates: Sequence[Sequence[int]] | Array) -> Costs:
    """The costs of the stages of each candidate; ``candidates`` is ``[candidates, stages + 1]`` item positions."""
    chain = problem.chain
    cuts = np.array(candidates, dtype=np.int64).T
    begin, end = cuts[:-1], cuts[1:]
    speeds = np.array([problem.slot(stage).speed_ppm for stage in range(problem.num_stages)], dtype=np.int64)

    def sums(values: Sequence[int]) -> Array:
        prefix = np.concatenate([[0], np.cumsum(np.array(values, dtype=np.int64))])
        return np.asarray(prefix[end] - prefix[begin])

    def times(values: Sequence[int]) -> Array:
        work = sums(values)
        if (speeds == SPEED_UNIT).all():
            return work
        return -(-work * SPEED_UNIT // speeds[:, None])

    sends = [problem.transfer_ns(item.boundary_bytes) for item in chain.items]
    ids = [problem.slot(stage).worker for stage in range(problem.num_stages)]
    apart = np.array([*(a != b for a, b in pairwise(ids)), False])[:, None]
    # A stage that ends at ``end`` sends the output of item ``end - 1``; an empty stage passes on what it received.
    sent = np.array([problem.transfer_ns(0), *sends], dtype=np.int64)[end]
    return Costs(
        forward_ns=times(chain.costs.forward_ns),
        backward_input_ns=times(chain.costs.backward_input_ns),
        backward_weight_ns=times(chain.costs.backward_weight_ns),
        has_backward=end > chain.frozen_items,
        send_ns=np.where(apart, sent, 0),
        static_bytes=sums(chain.static_bytes),
        activation_bytes=sums(chain.stored_bytes),
    )


def step_times(
    problem: PartitionProblem, candidates: Sequence[Sequence[int]] | Array, overhead_ns: int = 0
) -> list[int]:
    """Simulate partitions given by their boundaries.

    Args:
        problem: chain, workers and schedule.
        candidates: ``[candidates, stages + 1]`` item positions.
        overhead_ns: time in ns added to every operation.

    Returns:
        The step in ns of each candidate.
    """
    if problem.chain.vocabulary is not None:
        # The last stage waits for all workers here, not for one operation: the levels have no form for it.
        return [predict(problem, [int(at) for at in each], overhead_ns).step_ns for each in candidates]
    found = steps_of(problem, costs_of(problem, candidates), overhead_ns)
    return [int(value) for value in found]


def find_shorter(problem: PartitionProblem, boundaries: Sequence[int], candidates: Array) -> tuple[int, int] | None:
    """The candidate with the shortest step, of equals the first; None if none is shorter than that of a partition.

    Candidates are simulated in the order of ``path_bounds``, until their bound is above the shortest step so far.

    Args:
        problem: chain, workers and schedule.
        boundaries: ``[stages + 1]`` item positions of the partition.
        candidates: ``[candidates, stages + 1]`` item positions.

    Returns:
        The step in ns, and the number of the candidate.
    """
    step_ns, bounds = path_bounds(problem, boundaries, candidates)
    below = np.flatnonzero(bounds < step_ns)
    below = below[np.argsort(bounds[below], kind="stable")]
    best = (step_ns, -1)
    for begin in range(0, len(below), BOUNDED_BATCH):
        batch = below[begin : begin + BOUNDED_BATCH]
        batch = batch[bounds[batch] <= best[0]]
        if not len(batch):
            break
        found = min(zip(step_times(problem, candidates[batch]), batch.tolist(), strict=True))
        if found[0] < step_ns:
            best = found if best[1] < 0 else min(best, found)
    return None if best[1] < 0 else best


def path_bounds(problem: PartitionProblem, boundaries: Sequence[int], candidates: Array) -> tuple[int, Array]:
    """The step of a partition, and a lower bound of that of each candidate, in ns.

    The critical path of the partition is a path of every candidate, so its operations and transfers take a step at
    least. Only a candidate with another frozen front has other operations; its bound is 0.

    Args:
        problem: chain, workers and schedule.
        boundaries: ``[stages + 1]`` item positions of the partition.
        candidates: ``[candidates, stages + 1]`` item positions.
    """
    paths_ns = np.zeros(len(candidates), dtype=np.int64)
    graph, costs = graph_of_problem(problem), stage_times(problem, stage_costs(problem, boundaries))
    times = None if costs is None else operation_times(graph, costs)
    if problem.chain.vocabulary is not None or costs is None or times is None:
        return step_times(problem, [boundaries])[0], paths_ns
    path, others = critical_path(graph, costs, times), costs_of(problem, candidates)
    first, second = others.backward_input_ns, others.backward_weight_ns
    durations = (others.forward_ns, first + second, first, second)
    for count, duration in zip((*path.operations, path.transfers[:-1]), (*durations, others.send_ns), strict=True):
        used = count > 0
        paths_ns += count[used] @ duration[used]
    has_same_front = (others.has_backward == costs.has_backward[:, None]).all(axis=0)
    return int(times.ends.max(initial=0)), paths_ns * has_same_front


def steps_of(problem: PartitionProblem, costs: Costs, overhead_ns: int = 0) -> Array:
    """Simulate partitions under the schedule or the order of a problem.

    Args:
        problem: schedule, workers and microbatches.
        costs: of the stages, ``[stages, candidates]`` each.
        overhead_ns: time in ns added to every operation.

    Returns:
        The step in ns of each candidate, ``[candidates]`` int64.
    """
    if problem.order is not None:
        return run_compiled(compile_order(problem.order), costs, overhead_ns)
    # The two caches are separate: a schedule by name is found without building its order.
    plan = compile_schedule(problem.schedule, len(problem.slots), problem.virtual_stages, problem.microbatches)
    return run_compiled(plan, costs, overhead_ns)


def run_compiled(plan: CompiledOrder, costs: Costs, overhead_ns: int = 0) -> Array:
    """Simulate partitions under a compiled order of operations.

    Args:
        plan: the levels of the order.
        costs: of the stages, ``[stages, candidates]`` each.
        overhead_ns: time in ns added to every operation.

    Returns:
        The step in ns of each candidate, ``[candidates]`` int64.
    """
    count = costs.forward_ns.shape[1]
    rows = plan.ring + sum(len(plan.patterns[at].kinds) for at in plan.repeated)
    size = max(1, MAX_BATCH_NUMBERS // rows)
    if count > size:
        parts = [costs.of(slice(begin, begin + size)) for begin in range(0, count, size)]
        return np.concatenate([run_compiled(plan, part, overhead_ns) for part in parts])
    first, second = costs.backward_input_ns, costs.backward_weight_ns
    durations = np.stack([costs.forward_ns, first + second, first, second]) + overhead_ns
    trained = costs.has_backward
    send = np.concatenate([costs.send_ns, np.zeros((1, count), dtype=np.int64)])
    sends, all_run = bool(send.any()), bool(trained.all())

    def columns(at: int) -> tuple[Array, Array | None, npt.NDArray[np.bool_] | None]:
        """Durations and transfers of the operations of a pattern, and whether each runs; None where all are 0 or do."""
        kinds, stages, links = plan.patterns[at]
        runs = None if all_run else (kinds == 0)[:, None] | trained[stages]
        return durations[kinds, stages], send[links] if sends else None, runs

    repeated = {at: columns(at) for at in plan.repeated}
    ends = np.zeros((plan.ring, count), dtype=np.int64)
    step = np.zeros(count, dtype=np.int64)
    for own, before, needs, pattern, last in plan.levels:
        length, lag, run = repeated[pattern] if pattern in repeated else columns(pattern)
        # ``after`` may be written in place: the ring is longer than any lifetime, so no level reads the rows that it
        # writes.
        started, after = ends[before], ends[own]
        if lag is None:
            np.maximum(started, ends[needs], out=after)
        else:
            np.add(ends[needs], lag, out=after)
            np.maximum(started, after, out=after)
        after += length
        if run is not None:
            # A stage in the frozen front executes no backward pass: its end is that of the operation before it.
            np.copyto(after, started, where=~run)
        if last:
            np.maximum(step, after.max(axis=0), out=step)
    return step
