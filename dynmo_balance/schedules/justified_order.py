"""Orders of operations within the workers' memory, improved by scheduling forward and backward in turn.

A list schedule executes, on each free worker, the operation of the highest priority that is ready. Its priorities are
times at which operations are due. They come from the due dates of a steady flow first, then from the previous schedule,
which is known as justification (Valls, Ballestin, Quintanilla 2005, EJOR 165, section 2)::

    due dates --forward--> starts --backward, latest end first--> latest starts --forward, earliest first--> starts ...

The backward schedule is a list schedule of the reversed graph: the step begins at its end. It moves every operation as
far back as its successors permit, so that its start shows how urgent the operation is. Each schedule is an order of
operations, and the shortest is the result.

**Memory.** The activations of a microbatch are stored on a worker from the start of the forward pass of a stage to the
end of its weight gradient. A forward pass of a stage starts only if the worker has room for this stage *and* all its
later stages. So the order has no deadlock. Proof: only forward passes wait for memory, so in a deadlock every
microbatch in the pipeline waits for one; let ``s`` be the last stage at which one waits, and ``w`` its worker. No
microbatch has activations of ``s`` or a later stage, because it would wait behind ``s``. Take the last forward pass
that started on ``w`` among the stages up to ``s``. It left room for all later stages of ``w``; what started there since
is gone; so there is room for ``s`` and all later stages of ``w``, a contradiction. (If none started, the worker is
empty, and one microbatch fits or nothing does.)

The reversed graph stores in the opposite direction, from the weight gradient to the forward pass. There a deadlock is
possible; the improvement ends then.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate

from .list_scheduler import FORWARD, INPUT, KINDS, RULES, WEIGHT, OperationTimes
from .operations import Operation, Order, check_operations

Priority = tuple[float, ...]
"""A sort key of operations; the smallest first."""
STRETCHES = (1.0, 1.1, 1.2, 1.35, 1.5, 2.0)
"""Factors on the rate at which microbatches are due, next to that of work over workers. Above 1, more microbatches
enter before the first gradient returns; the memory limits their number."""
MAX_SHORT_SHARE = 0.02
"""Gradients shorter than this share of the mean work of a worker are executed at once: they delay nothing, and weight
gradients free memory. An output layer that computes its gradients with the loss has such."""


@dataclass(frozen=True, kw_only=True)
class DueRule:
    """The due dates of a first schedule.

    Attributes:
        stretch: factor on the rate of microbatches, a value of ``STRETCHES``.
        weights: whether weight gradients are due with the last input gradient of their microbatch, instead of filling
            gaps. They free memory.
    """

    stretch: float
    weights: bool = False


Rule = DueRule | str
"""Due dates, or the name of a rule of ``list_scheduler.RULES``."""
START_RULES: tuple[Rule, ...] = (
    *(DueRule(stretch=stretch, weights=weights) for stretch in STRETCHES for weights in (False, True)),
    "backward first",
    "later stage first",
)
"""All rules to start from."""


@dataclass(frozen=True, kw_only=True)
class _Graph:
    """Operations in one direction of time; one element per operation.

    Attributes:
        following: pairs of an operation that needs this one, and the transfer time in ns.
        waits: number of operations that it needs.
        stores: bytes stored from its start on.
        needs: bytes that must be free at its start.
        frees: bytes freed at its end.
    """

    following: Sequence[Sequence[tuple[int, int]]]
    waits: Sequence[int]
    stores: Sequence[int]
    needs: Sequence[int]
    frees: Sequence[int]


@dataclass(frozen=True, kw_only=True)
class _Schedule:
    """The start of each operation in ns, the operations by start, and the step."""

    starts: Sequence[int]
    sequence: Sequence[int]
    step_ns: int


class _Scheduler:
    """List schedules of a step in both directions.

    Operations are numbered by kind, stage and microbatch; a stage that is not trained has forward passes only.

    Args:
        lengths: times, placement and memory.
        microbatches: of one step.
    """

    def __init__(self, lengths: OperationTimes, microbatches: int) -> None:
        self.lengths, self.microbatches = lengths, microbatches
        self.stages = len(lengths.forward)
        self.size = self.stages * microbatches
        durations = (lengths.forward, lengths.backward_input, lengths.backward_weight)
        self.durations = [times[stage] for times in durations for stage in range(self.stages) for _ in self.range]
        self.workers = [lengths.positions[stage] for _ in KINDS for stage in range(self.stages) for _ in self.range]
        self.operations = [
            number
            for kind in (FORWARD, INPUT, WEIGHT)
            for stage in range(self.stages)
            if kind == FORWARD or lengths.trained[stage]
            for number in range(self.number(kind, stage, 0), self.number(kind, stage, microbatches))
        ]
        self.forward, self.reversed = self._graphs()

    @property
    def range(self) -> range:
        """The microbatches."""
        return range(self.microbatches)

    def number(self, kind: int, stage: int, m: int) -> int:
        """The number of an operation."""
        return kind * self.size + stage * self.microbatches + m

    def _graphs(self) -> tuple[_Graph, _Graph]:
        lengths, count = self.lengths, 3 * self.size
        edges: list[tuple[int, int, int]] = []
        for stage in range(self.stages):
            for m in self.range:
                forward, gradient = self.number(FORWARD, stage, m), self.number(INPUT, stage, m)
                if stage + 1 < self.stages:
                    edges.append((forward, self.number(FORWARD, stage + 1, m), lengths.send[stage]))
                elif lengths.trained[stage]:
                    edges.append((forward, gradient, 0))
                if not lengths.trained[stage]:
                    continue
                edges.append((gradient, self.number(WEIGHT, stage, m), 0))
                if stage and lengths.trained[stage - 1]:
                    edges.append((gradient, self.number(INPUT, stage - 1, m), lengths.send[stage - 1]))
        stored = lengths.stored or [0] * self.stages
        # A stage that is not trained has no weight gradient at which it could free anything.
        stored = [size * trained for size, trained in zip(stored, lengths.trained, strict=True)]
        begins, ends, room = [0] * count, [0] * count, [0] * count
        for stage in range(self.stages):
            own = [at for at in range(stage, self.stages) if lengths.positions[at] == lengths.positions[stage]]
            for m in self.range:
                begins[self.number(FORWARD, stage, m)] = ends[self.number(WEIGHT, stage, m)] = stored[stage]
                room[self.number(FORWARD, stage, m)] = sum(stored[at] for at in own)
        return (
            _graph(edges, begins, room, ends),
            _graph([(after, before, lag) for before, after, lag in edges], ends, ends, begins),
        )

    def run(self, graph: _Graph, priority: Sequence[Priority]) -> _Schedule | None:
        """A list schedule; None after a deadlock.

        Args:
            graph: the direction.
            priority: one per operation; the smallest first.
        """
        state = _State(self, graph, priority)
        events, touched, time = state.events, set(range(self.lengths.workers)), 0
        while True:
            for worker in touched:
                if not state.busy[worker]:
                    state.dispatch(worker, time)
            if not events:
                break
            time, touched = events[0][0], set()
            # All events of a time are applied before a worker starts: it then chooses among all that is ready.
            while events and events[0][0] == time:
                _, ends, operation = heapq.heappop(events)
                if ends or state.arrive(operation):
                    touched.add(self.workers[operation])
                if ends:
                    state.complete(operation, time)
        if len(state.sequence) < len(self.operations):
            return None
        return _Schedule(starts=state.starts, sequence=state.sequence, step_ns=time)

    def room(self, worker: int) -> float:
        """The bytes for activations of a worker."""
        room = self.lengths.room[worker] if self.lengths.room else None
        return float("inf") if room is None else room

    def priorities(self, rule: Rule) -> list[Priority]:
        """The priority of each operation by a rule."""
        if isinstance(rule, DueRule):
            return [(due,) for due in self._due(rule)]
        urgency = RULES[rule](self.lengths)
        return [
            urgency(kind, stage, m) for kind in range(len(KINDS)) for stage in range(self.stages) for m in self.range
        ]

    def _due(self, rule: DueRule) -> list[float]:
        """The due date of each operation in ns if a microbatch entered every period and none waited."""
        lengths = self.lengths
        work = sum((*lengths.forward, *lengths.backward_input, *lengths.backward_weight))
        mean = max(1, work) / lengths.workers
        period, whole = mean / rule.stretch, sum(lengths.forward)
        down = list(accumulate(lengths.forward, initial=0))
        up = list(accumulate(reversed(lengths.backward_input), initial=0))
        end = whole + up[-1] + lengths.workers * period
        last = end + self.microbatches * period
        due = [0.0] * (3 * self.size)
        for stage in range(self.stages):
            is_short = [
                times[stage] < MAX_SHORT_SHARE * mean for times in (lengths.backward_input, lengths.backward_weight)
            ]
            for m in self.range:
                due[self.number(FORWARD, stage, m)] = m * period + down[stage]
                gradient = -1.0 if is_short[0] else m * period + whole + up[self.stages - 1 - stage]
                due[self.number(INPUT, stage, m)] = gradient
                if is_short[1]:
                    weight = -1.0
                elif rule.weights:
                    weight = m * period + end
                else:
                    weight = last + m * period + stage
                due[self.number(WEIGHT, stage, m)] = weight
        return due

    def improve(self, first: _Schedule, rounds: int) -> _Schedule:
        """The shortest of the schedule and those after up to ``rounds`` backward and forward schedules."""
        best = now = first
        for _ in range(rounds):
            back = self.run(self.reversed, [(-start - length,) for start, length in self._spans(now)])
            if back is None:
                break
            latest = [(back.step_ns - start - length,) for start, length in self._spans(back)]
            found = self.run(self.forward, latest)
            if found is None:
                break
            now = found
            if now.step_ns < best.step_ns:
                best = now
        return best

    def _spans(self, schedule: _Schedule) -> Iterator[tuple[int, int]]:
        return zip(schedule.starts, self.durations, strict=True)

    def order(self, schedule: _Schedule) -> Order:
        """The operations of each worker.

        Stages that are not trained have backward operations of no duration at the end, so that every stage has the same
        operations.
        """
        rows: list[list[Operation]] = [[] for _ in range(self.lengths.workers)]
        for number in schedule.sequence:
            stage, m = divmod(number % self.size, self.microbatches)
            rows[self.workers[number]].append(Operation(stage, KINDS[number // self.size], m))
        for stage in reversed(range(self.stages)):
            if not self.lengths.trained[stage]:
                idle = [Operation(stage, kind, m) for m in self.range for kind in KINDS[1:]]
                rows[self.lengths.positions[stage]].extend(idle)
        return tuple(tuple(row) for row in rows)


class _State:
    """The state of one list schedule under construction; see ``_Scheduler.run``."""

    def __init__(self, scheduler: _Scheduler, graph: _Graph, priority: Sequence[Priority]) -> None:
        self.workers, self.durations, self.graph, self.priority = (
            scheduler.workers,
            scheduler.durations,
            graph,
            priority,
        )
        count = scheduler.lengths.workers
        self.waits = list(graph.waits)
        self.room = [scheduler.room(worker) for worker in range(count)]
        self.ready: list[list[tuple[Priority, int]]] = [[] for _ in range(count)]
        self.busy = [False] * count
        self.starts = [0] * len(self.durations)
        self.sequence: list[int] = []
        # Time, whether an operation ends or its input arrives, and the operation.
        self.events: list[tuple[int, bool, int]] = []
        for operation in scheduler.operations:
            if not self.waits[operation]:
                heapq.heappush(self.ready[self.workers[operation]], (priority[operation], operation))

    def dispatch(self, worker: int, time: int) -> None:
        """Start the operation of the highest priority that fits the memory on a free ``worker``, at ``time`` ns."""
        queue, needs, aside = self.ready[worker], self.graph.needs, []
        # What does not fit the memory is set aside, so that an operation behind it can free some.
        while queue and needs[queue[0][1]] > self.room[worker]:
            aside.append(heapq.heappop(queue))
        if queue:
            _, operation = heapq.heappop(queue)
            self.room[worker] -= self.graph.stores[operation]
            self.busy[worker], self.starts[operation] = True, time
            self.sequence.append(operation)
            heapq.heappush(self.events, (time + self.durations[operation], True, operation))
        for entry in aside:
            heapq.heappush(queue, entry)

    def complete(self, operation: int, time: int) -> None:
        """Free the worker and the memory of an ``operation`` that ends at ``time`` ns, and send its output."""
        worker = self.workers[operation]
        self.busy[worker] = False
        self.room[worker] += self.graph.frees[operation]
        for after, lag in self.graph.following[operation]:
            heapq.heappush(self.events, (time + lag, False, after))

    def arrive(self, operation: int) -> bool:
        """Count an input of an ``operation``; whether it was the last."""
        self.waits[operation] -= 1
        if self.waits[operation]:
            return False
        heapq.heappush(self.ready[self.workers[operation]], (self.priority[operation], operation))
        return True


def _graph(edges: Sequence[tuple[int, int, int]], stores: list[int], needs: list[int], frees: list[int]) -> _Graph:
    following: list[list[tuple[int, int]]] = [[] for _ in stores]
    waits = [0] * len(stores)
    for before, after, lag in edges:
        following[before].append((after, lag))
        waits[after] += 1
    return _Graph(following=following, waits=waits, stores=stores, needs=needs, frees=frees)


@dataclass(frozen=True, kw_only=True)
class JustifiedOrder:
    """An order of operations.

    Attributes:
        order: the operations of each worker.
        step_ns: the step.
        rules: the rules that were tried, best first.
    """

    order: Order
    step_ns: int
    rules: tuple[Rule, ...]


def justified_order(
    lengths: OperationTimes,
    microbatches: int,
    rules: Sequence[Rule] = START_RULES,
    *,
    improved: int = 6,
    rounds: int = 6,
) -> JustifiedOrder | None:
    """The best order found within the memory, or None if a worker has no room for one microbatch.

    Args:
        lengths: the times, the placement and the memory; no shards of the output layer.
        microbatches: of one step.
        rules: to start from.
        improved: number of schedules to improve, the shortest first.
        rounds: backward and forward schedules for each of them.

    Raises:
        UsageError: there are more operations than a command simulates.
    """
    check_operations(len(lengths.forward), microbatches)
    scheduler = _Scheduler(lengths, microbatches)
    started = []
    for at, rule in enumerate(rules):
        found = scheduler.run(scheduler.forward, scheduler.priorities(rule))
        if found is not None:
            started.append((found.step_ns, at, found))
    if not started:
        return None
    started.sort(key=lambda one: one[:2])
    best = min(
        (scheduler.improve(first, rounds) for _, _, first in started[: max(1, improved)]),
        key=lambda schedule: schedule.step_ns,
    )
    return JustifiedOrder(
        order=scheduler.order(best), step_ns=best.step_ns, rules=tuple(rules[at] for _, at, _ in started)
    )
