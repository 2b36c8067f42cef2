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
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from ..costs.cost_window import SPEED_UNIT
from ..partition.problem import PartitionProblem
from ..schedules.registry import Kind, Order, build_order
from .simulator import predict

KINDS = (Kind.FORWARD, Kind.BACKWARD, Kind.BACKWARD_INPUT, Kind.BACKWARD_WEIGHT)
Array = npt.NDArray[np.int64]
Index = Array | slice


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
        kinds: indices of ``KINDS``.
        stages: the stage.
        links: the stage whose ``send_ns`` the needed tensor takes; the number of stages if nothing is sent.
    """

    kinds: Array
    stages: Array
    links: Array


@dataclass(frozen=True, kw_only=True)
class CompiledOrder:
    """The levels of an order of operations, their distinct patterns, and the number of rows of the ring buffer."""

    levels: tuple[Level, ...]
    patterns: tuple[Pattern, ...]
    ring: int


class _Row(NamedTuple):
    own: int
    before: int
    needs: int
    link: int
    kind: int
    stage: int


def _rows(order: Order) -> list[list[_Row]]:
    """The operations of each level, numbered from 1 in the order of the workers."""
    workers = len(order)
    stages = 1 + max(op.stage for operations in order for op in operations)
    worker_of = {op.stage: worker for worker, operations in enumerate(order) for op in operations}
    number = {op: at for at, op in enumerate((op for operations in order for op in operations), start=1)}
    # What sends a gradient. Not one kind for the whole order: DualPipeV splits some backward passes and not others.
    backs = (Kind.BACKWARD, Kind.BACKWARD_INPUT)
    gradient = {(op.stage, op.microbatch): at for op, at in number.items() if op.kind in backs}
    # Number 0 is the start of the step, which is before level 0.
    level: dict[int, int] = {0: -1}
    rows: list[list[_Row]] = []
    done = [0] * workers
    waiting = list(range(workers))
    while waiting:
        worker = waiting.pop()
        while done[worker] < len(order[worker]):
            op = order[worker][done[worker]]
            needs, link = 0, stages
            if op.kind is Kind.FORWARD and op.stage:
                needs, link = number[op._replace(stage=op.stage - 1)], op.stage - 1
            elif op.kind in backs and op.stage < stages - 1:
                needs, link = gradient.get((op.stage + 1, op.microbatch), 0), op.stage
            if needs not in level:
                break
            before = number[order[worker][done[worker] - 1]] if done[worker] else 0
            own = number[op]
            level[own] = 1 + max(level[before], level[needs])
            while len(rows) <= level[own]:
                rows.append([])
            rows[level[own]].append(_Row(own, before, needs, link, KINDS.index(op.kind), op.stage))
            done[worker] += 1
            neighbor = worker_of.get(op.stage + (1 if op.kind is Kind.FORWARD else -1), worker)
            if neighbor != worker:
                waiting.append(neighbor)
    return [sorted(row) for row in rows]


def _last_uses(rows: list[list[_Row]], count: int) -> list[int]:
    """For each operation the last level that reads its end; its own level if none does."""
    last = [0] * (count + 1)
    for at, row in enumerate(rows):
        for own in row:
            last[own.own] = last[own.before] = last[own.needs] = at
    return last


def _index(slots: list[int]) -> Index:
    """A slice if the rows are contiguous, because that is a view and not a copy."""
    first = slots[0]
    if slots == list(range(first, first + len(slots))):
        return slice(first, first + len(slots))
    return np.array(slots, dtype=np.int64)


@lru_cache(maxsize=32)
def compile_schedule(schedule: str, workers: int, virtual_stages: int, microbatches: int) -> CompiledOrder:
    """The levels of a schedule by name.

    Args:
        schedule: a key of ``schedules.registry.SCHEDULES``.
        workers: number of workers.
        virtual_stages: stages per worker.
        microbatches: of one step.
    """
    return compile_order(build_order(schedule, workers, virtual_stages, microbatches))


@lru_cache(maxsize=8)
def compile_order(order: Order) -> CompiledOrder:
    """The levels of an order of operations."""
    rows = _rows(order)
    count = sum(map(len, rows))
    last_use = _last_uses(rows, count)
    lifetime = max(last_use[o.own] - at for at, row in enumerate(rows) for o in row)
    final = set(range(1, count + 1)).difference(o.before for row in rows for o in row)
    widest = max(map(len, rows))
    # Row 0 is the start of the step and is never overwritten. The rows of a level are contiguous, so the last ones
    # before the end of the ring may stay unused. With two spare levels, a row is still overwritten only after its last
    # reader.
    ring = 1 + (lifetime + 2) * widest
    slot = [0] * (count + 1)
    free = 1
    patterns: dict[bytes, tuple[int, Pattern]] = {}
    levels = []
    for row in rows:
        if free + len(row) > ring:
            free = 1
        columns = np.array([(o.kind, o.stage, o.link) for o in row], dtype=np.int64).T.copy()
        number, _ = patterns.setdefault(columns.tobytes(), (len(patterns), Pattern(*columns)))
        before, needs = _index([slot[o.before] for o in row]), _index([slot[o.needs] for o in row])
        for at, o in enumerate(row, start=free):
            slot[o.own] = at
        last = any(o.own in final for o in row)
        levels.append(Level(slice(free, free + len(row)), before, needs, number, last))
        free += len(row)
    return CompiledOrder(levels=tuple(levels), patterns=tuple(pattern for _, pattern in patterns.values()), ring=ring)


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
    first, second = costs.backward_input_ns, costs.backward_weight_ns
    durations = np.stack([costs.forward_ns, first + second, first, second]) + overhead_ns
    trained = costs.has_backward
    send = np.concatenate([costs.send_ns, np.zeros((1, count), dtype=np.int64)])
    sends, all_run = bool(send.any()), bool(trained.all())
    lengths = [durations[pattern.kinds, pattern.stages] for pattern in plan.patterns]
    lags = [send[pattern.links] if sends else None for pattern in plan.patterns]
    runs = [None if all_run else (pattern.kinds == 0)[:, None] | trained[pattern.stages] for pattern in plan.patterns]
    ends = np.zeros((plan.ring, count), dtype=np.int64)
    step = np.zeros(count, dtype=np.int64)
    for own, before, needs, pattern, last in plan.levels:
        # ``after`` may be written in place: the ring is longer than any lifetime, so no level reads the rows that it
        # writes.
        started, after, lag, run = ends[before], ends[own], lags[pattern], runs[pattern]
        if lag is None:
            np.maximum(started, ends[needs], out=after)
        else:
            np.add(ends[needs], lag, out=after)
            np.maximum(started, after, out=after)
        after += lengths[pattern]
        if run is not None:
            # A stage in the frozen front executes no backward pass: its end is that of the operation before it.
            np.copyto(after, started, where=~run)
        if last:
            np.maximum(step, after.max(axis=0), out=step)
    return step
