"""Many partitions simulated at once: the order of operations is compiled into levels, each a few array operations.

It gives the same step times as ``simulate.run`` with overlapped transfers, to the nanosecond. An operation waits for
the one before it on its worker and for one tensor from another stage, so its level is one more than the larger of
theirs.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import numpy.typing as npt

from .problem import Problem
from .schedules import Kind, order_of
from .simulate import stage_costs

KINDS = (Kind.FORWARD, Kind.BACKWARD, Kind.BACKWARD_INPUT, Kind.BACKWARD_WEIGHT)
Array = npt.NDArray[np.int64]


@dataclass(frozen=True, kw_only=True)
class Level:
    """Operations that do not wait for each other; all arrays are of the same length.

    Attributes:
        own: the numbers of the operations, side by side.
        before, needs: of the one before each on its worker, of the one whose tensor it needs; 0 is the beginning.
        link: the stage whose ``send_ns`` the tensor takes; the number of stages for none.
        kind, stage: what is done, as an index of ``KINDS``, and where.
    """

    own: slice
    before: Array
    needs: Array
    link: Array
    kind: Array
    stage: Array


@lru_cache(maxsize=8)
def compiled(schedule: str, workers: int, virtual_stages: int, microbatches: int) -> tuple[Level, ...]:
    """The levels of a schedule."""
    order = order_of(schedule, workers, virtual_stages, microbatches)
    stages = workers * virtual_stages
    number = {op: at for at, op in enumerate((op for operations in order for op in operations), start=1)}
    back = Kind.BACKWARD_INPUT if any(op.kind is Kind.BACKWARD_INPUT for op in order[0]) else Kind.BACKWARD
    level: dict[int, int] = {0: -1}
    rows: list[list[tuple[int, int, int, int, int, int]]] = []
    done = [0] * workers
    waiting = list(range(workers))
    while waiting:
        worker = waiting.pop()
        while done[worker] < len(order[worker]):
            op = order[worker][done[worker]]
            needs, link = 0, stages
            if op.kind is Kind.FORWARD and op.stage:
                needs, link = number[op._replace(stage=op.stage - 1)], op.stage - 1
            elif op.kind is back and op.stage < stages - 1:
                needs, link = number[op._replace(stage=op.stage + 1)], op.stage
            if needs not in level:
                break
            before = number[order[worker][done[worker] - 1]] if done[worker] else 0
            own = number[op]
            level[own] = 1 + max(level[before], level[needs])
            while len(rows) <= level[own]:
                rows.append([])
            rows[level[own]].append((own, before, needs, link, KINDS.index(op.kind), op.stage))
            done[worker] += 1
            waiting.extend(other for other in ((worker + 1) % workers, (worker - 1) % workers) if other != worker)
    return tuple(_level(columns) for columns in _renumbered(rows))


def _renumbered(rows: list[list[tuple[int, int, int, int, int, int]]]) -> Iterator[Array]:
    """The columns of each level, with operations numbered level by level so that a level's ends lie side by side."""
    renumber = {0: 0}
    for row in rows:
        for own, *_ in row:
            renumber[own] = len(renumber)
    for row in rows:
        changed = [(renumber[own], renumber[before], renumber[needs], *rest) for own, before, needs, *rest in row]
        yield np.array(changed, dtype=np.int64).T.copy()


def _level(columns: Array) -> Level:
    own, before, needs, link, kind, stage = columns
    first = int(own[0])
    return Level(own=slice(first, first + len(own)), before=before, needs=needs, link=link, kind=kind, stage=stage)


def step_times(problem: Problem, candidates: Sequence[Sequence[int]], overhead_ns: int = 0) -> list[int]:
    """The simulated step of each candidate's boundaries, in ns."""
    levels = compiled(problem.schedule, len(problem.places), problem.virtual_stages, problem.microbatches)
    table = [stage_costs(problem, boundaries) for boundaries in candidates]

    def column(name: str) -> Array:
        return np.array([[getattr(cost, name) for cost in row] for row in table], dtype=np.int64).T

    first, second = column("backward_input_ns"), column("backward_weight_ns")
    durations = np.stack([column("forward_ns"), first + second, first, second]) + overhead_ns
    trained = column("has_backward").astype(bool)
    runs = np.stack([np.ones_like(trained), trained, trained, trained])
    send = np.concatenate([column("send_ns"), np.zeros((1, len(candidates)), dtype=np.int64)])
    ends = np.zeros((1 + sum(len(level.kind) for level in levels), len(candidates)), dtype=np.int64)
    all_run = bool(runs.all())
    for level in levels:
        before = ends[level.before]
        arrived = ends[level.needs]
        arrived += send[level.link]
        after = np.maximum(before, arrived, out=arrived)
        after += durations[level.kind, level.stage]
        ends[level.own] = after if all_run else np.where(runs[level.kind, level.stage], after, before)
    return [int(value) for value in ends.max(axis=0)]
