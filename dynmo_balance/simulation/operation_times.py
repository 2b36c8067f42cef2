"""The step of one partition with overlapped transfers, over arrays: twelve times as fast as ``simulator.run``.

An operation ends ``duration`` after the later of two ends: that of the previous operation on its worker, and that of
the operation whose tensor it needs, plus the transfer. Both are numbers of operations, computed once per order::

    OrderArrays --graph_of--> OperationGraph (needs, links)
    OperationGraph, durations, transfers --operation_ends--> ends [operations + 1]

``simulator.predict`` uses it where nothing else delays an operation: no shards of the output layer, no transfers that
block, no compressed gradients. Spans are made when they are read, because most callers read the step only.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise
from typing import NamedTuple, overload

import numpy as np
import numpy.typing as npt

from ..partition.problem import PartitionProblem
from ..schedules.order_arrays import BACKWARD, FORWARD, INPUT, KINDS, WEIGHT, OrderArrays
from ..schedules.registry import Kind, Order, build_arrays, from_order

Array = npt.NDArray[np.int64]


class Span(NamedTuple):
    """One operation of a simulated step; times in ns from the start of the step."""

    stage: int
    kind: Kind
    microbatch: int
    start_ns: int
    end_ns: int


@dataclass(frozen=True, kw_only=True, eq=False)
class OperationGraph:
    """What each operation of an order waits for; operations are numbered from 1 in the order of the workers.

    Attributes:
        order: the operations.
        stages: number of stages.
        microbatches: number of microbatches.
        needs: ``[operations + 1]``, the operation whose tensor is needed; 0, the start of the step, if none.
        links: ``[operations + 1]``, the stage whose transfer that tensor takes; ``stages`` if nothing is sent.
        is_sound: whether each operation has what it needs, and follows those of its microbatch on its own worker.
    """

    order: OrderArrays
    stages: int
    microbatches: int
    needs: npt.NDArray[np.int32]
    links: npt.NDArray[np.int32]
    is_sound: bool


def graph_of(order: OrderArrays) -> OperationGraph:
    """The graph of an order."""
    stage, kind, microbatch = order.stages, order.kinds, order.microbatches
    count = len(stage)
    stages, microbatches = (1 + int(each.max(initial=0)) for each in (stage, microbatch))
    numbers = np.arange(1, count + 1, dtype=np.int32)
    is_forward, is_weight = kind == FORWARD, kind == WEIGHT
    # What sends a gradient. Not one kind for the whole order: DualPipeV splits some backward passes and not others.
    is_gradient = (kind == BACKWARD) | (kind == INPUT)
    # One stage more on both sides: before the first and after the last there is nothing.
    forward, gradient = (np.zeros((stages + 2, microbatches), dtype=np.int32) for _ in range(2))
    for table, chosen in ((forward, is_forward), (gradient, is_gradient)):
        table[stage[chosen] + 1, microbatch[chosen]] = numbers[chosen]
    needs, links = (np.zeros(count + 1, dtype=np.int32) for _ in range(2))
    needs[1:] = np.where(is_forward, forward[stage, microbatch], gradient[stage + 2, microbatch] * is_gradient)
    links[1:] = np.where(
        is_forward & (stage > 0), stage - 1, np.where(is_gradient & (stage < stages - 1), stage, stages)
    )
    links[0] = stages
    own = np.where(is_weight, gradient[stage + 1, microbatch], forward[stage + 1, microbatch])
    has_needed = (needs[1:] > 0) | (links[1:] == stages)
    is_sound = bool((has_needed & (is_forward | ((own > 0) & (own < numbers)))).all())
    return OperationGraph(
        order=order,
        stages=stages,
        microbatches=microbatches,
        needs=needs,
        links=links,
        is_sound=is_sound,
    )


def graph_of_problem(problem: PartitionProblem) -> OperationGraph:
    """The graph of the operations of a problem, without those of shards."""
    if problem.order is not None:
        return graph_of_order(problem.order)
    return graph_of_schedule(problem.schedule, len(problem.slots), problem.virtual_stages, problem.microbatches)


@lru_cache(maxsize=8)
def graph_of_schedule(schedule: str, workers: int, virtual_stages: int, microbatches: int) -> OperationGraph:
    """The graph of a schedule by name.

    Args:
        schedule: a key of ``schedules.registry.SCHEDULES``.
        workers: number of workers.
        virtual_stages: stages per worker.
        microbatches: of one step.
    """
    return graph_of(build_arrays(schedule, workers, virtual_stages, microbatches))


@lru_cache(maxsize=8)
def graph_of_order(order: Order) -> OperationGraph:
    """The graph of an order of operations without shards."""
    return graph_of(from_order(order))


def operation_ends(graph: OperationGraph, durations: Array, transfers: Array, needs: npt.NDArray[np.int32]) -> Array:
    """The end of each operation in ns.

    Args:
        graph: of the order.
        durations: ``[operations + 1]`` in ns; element 0 is not used.
        transfers: ``[operations + 1]`` in ns, of the needed tensors.
        needs: ``[operations + 1]``, as in the graph; 0 where an operation waits for nothing.

    Returns:
        ``[operations + 1]`` int64; element 0 is the start of the step. -1 for an operation that is never reached.
    """
    ends = np.full(len(durations), -1, dtype=np.int64)
    ends[0] = 0
    # Each operation waits for the one before, so there is nothing to vectorize on a worker. A loop over memory views:
    # they return integers in half the time of arrays, and without the memory of lists.
    end, need = ends.data, needs.data
    duration, transfer = durations.data, transfers.data
    stops = [begin + 1 for begin in graph.order.begins[1:]]
    position, clock = [begin + 1 for begin in graph.order.begins[:-1]], [0] * len(stops)
    # A tensor is needed once, so at most one worker waits for an operation.
    waiting: dict[int, int] = {}
    ready = list(range(len(stops)))
    while ready:
        worker = ready.pop()
        at, stop, now = position[worker], stops[worker], clock[worker]
        while at < stop:
            arrival = end[need[at]]
            if arrival < 0:
                waiting[need[at]] = worker
                break
            arrival += transfer[at]
            if arrival > now:
                now = arrival
            now += duration[at]
            end[at] = now
            if at in waiting:
                ready.append(waiting.pop(at))
            at += 1
        position[worker], clock[worker] = at, now
    return ends


@dataclass(frozen=True, kw_only=True, eq=False)
class StageTimes:
    """The costs of the stages of one partition as arrays, in ns and bytes.

    Attributes:
        durations: ``[kinds, stages]`` of the operations.
        transfers: ``[stages + 1]`` of the output of each stage; the last is 0.
        has_backward: ``[stages]``, false for stages entirely in the frozen front.
    """

    durations: Array
    transfers: Array
    has_backward: npt.NDArray[np.bool_]


@dataclass(frozen=True, kw_only=True, eq=False)
class OperationTimes:
    """The operations of a simulated step, ``[operations]`` each.

    Attributes:
        starts, ends: in ns.
        runs: false for backward operations of the frozen front.
    """

    starts: Array
    ends: Array
    runs: npt.NDArray[np.bool_]


class SpanRows(Sequence[tuple[Span, ...]]):
    """The operations of each worker as ``Span``, made when a worker is read.

    Args:
        order: the operations.
        times: of the operations.
    """

    def __init__(self, order: OrderArrays, times: OperationTimes) -> None:
        self._order, self._times = order, times

    @property
    def last_ends_ns(self) -> tuple[int, ...]:
        """The end of the last operation of each worker."""
        ends = self._times.ends
        return tuple(int(ends[end - 1]) if end > begin else 0 for begin, end in pairwise(self._order.begins))

    def __len__(self) -> int:
        return len(self._order.begins) - 1

    @overload
    def __getitem__(self, at: int) -> tuple[Span, ...]: ...

    @overload
    def __getitem__(self, at: slice) -> tuple[tuple[Span, ...], ...]: ...

    def __getitem__(self, at: int | slice) -> tuple[Span, ...] | tuple[tuple[Span, ...], ...]:
        if isinstance(at, slice):
            return tuple(self[each] for each in range(len(self))[at])
        worker = range(len(self))[at]
        row = slice(self._order.begins[worker], self._order.begins[worker + 1])
        runs = self._times.runs[row]
        order, times = self._order, self._times
        columns = (order.stages, order.kinds, order.microbatches, times.starts, times.ends)
        stages, kinds, numbers, starts, ends = (column[row][runs].tolist() for column in columns)
        return tuple(map(Span, stages, [KINDS[kind] for kind in kinds], numbers, starts, ends))

    def __iter__(self) -> Iterator[tuple[Span, ...]]:
        return (self[worker] for worker in range(len(self)))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Sequence) and tuple(self) == tuple(other)

    __hash__ = None  # type: ignore[assignment]  # as a list


def operation_times(graph: OperationGraph, costs: StageTimes) -> OperationTimes | None:
    """The times of each operation; None where the order deadlocks.

    Args:
        graph: of the order.
        costs: of the stages.
    """
    order = graph.order
    runs = (order.kinds == FORWARD) | costs.has_backward[order.stages]
    durations, transfers = (np.zeros(len(runs) + 1, dtype=np.int64) for _ in range(2))
    # Orders are built without costs, so they have backward operations of the frozen front, which end at once.
    durations[1:] = costs.durations[order.kinds, order.stages] * runs
    transfers[1:] = costs.transfers[graph.links[1:]] * runs
    needs = graph.needs.copy()
    needs[1:] *= runs
    ends = operation_ends(graph, durations, transfers, needs)[1:]
    if not graph.is_sound or ends.min(initial=0) < 0:
        return None
    return OperationTimes(starts=ends - durations[1:], ends=ends, runs=runs)


@dataclass(frozen=True, kw_only=True, eq=False)
class CriticalPath:
    """A chain of operations and transfers without a wait, from the start of a step to its end.

    Attributes:
        operations: ``[kinds, stages]``, the number of operations on it.
        transfers: ``[stages + 1]``, the number of transfers of the output of each stage.
    """

    operations: Array
    transfers: Array


def critical_path(graph: OperationGraph, costs: StageTimes, times: OperationTimes) -> CriticalPath:
    """The critical path of a step.

    Args:
        graph: of the order.
        costs: of the stages.
        times: of the operations with these costs.
    """
    order = graph.order
    operations, transfers = np.zeros(costs.durations.shape, np.int64), np.zeros(len(costs.transfers), np.int64)
    begins = {begin + 1 for begin in order.begins}
    at = int(times.ends.argmax()) + 1
    while at:
        runs, need, link = times.runs[at - 1], int(graph.needs[at]), graph.links[at]
        if runs:
            operations[order.kinds[at - 1], order.stages[at - 1]] += 1
        if runs and need and times.ends[need - 1] + costs.transfers[link] == times.starts[at - 1]:
            transfers[link] += 1
            at = need
        else:
            at = 0 if at in begins else at - 1
    return CriticalPath(operations=operations, transfers=transfers)


def peak_memory(order: OrderArrays, static_bytes: Array, activation_bytes: Array) -> tuple[int, ...]:
    """For each worker the maximum of ``simulator.memory_curves``.

    Args:
        order: the operations.
        static_bytes: ``[stages]``.
        activation_bytes: ``[stages]``; 0 for stages without a backward pass.
    """
    stored = activation_bytes[order.stages]
    added = np.where(order.kinds == FORWARD, stored, 0)
    # In the moment of an operation that frees activations they are still there.
    freed = np.where((order.kinds == BACKWARD) | (order.kinds == WEIGHT), stored, 0)
    peaks = []
    for begin, end in pairwise(order.begins):
        curve = np.cumsum(added[begin:end] - freed[begin:end]) + freed[begin:end]
        static = int(static_bytes[np.unique(order.stages[begin:end])].sum())
        peaks.append(static + int(curve.max()) if end > begin else 0)
    return tuple(peaks)
