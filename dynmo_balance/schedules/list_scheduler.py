"""An order of operations made for given costs: a free worker executes the most urgent operation that is ready.

The schedules by name are made for even stages. If stages are uneven, or forward, input gradient and weight gradient
differ in length, a list schedule leaves a smaller bubble: input gradients and forward passes by urgency, weight
gradients in the gaps. A rule defines the urgency; ``RULES`` contains those that were best on some profile::

    events (time)  --complete--> ready operations per worker --dispatch (urgency, memory)--> order, next events

With an output layer in shards (``PassTimes``) the passes S and T take their place between the operations by the rule
of ``_common/vocabulary_order.py``: S first, T in gaps or once ``MAX_PENDING`` of them wait. The order contains neither,
because the trainer places them itself.

The result is deterministic: ready operations are ordered by urgency, then kind, stage and microbatch, and events of
the same time by the number in which they were made.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Protocol

from .._common.vocabulary_order import MAX_PENDING
from .operations import Kind, Operation, Order, check_operations

FORWARD, INPUT, WEIGHT, SHARD, SHARD_GRADIENT = 0, 1, 2, 3, 4
KINDS = (Kind.FORWARD, Kind.BACKWARD_INPUT, Kind.BACKWARD_WEIGHT)
Urgency = Callable[[int, int, int], tuple[float, ...]]
"""From kind (0 forward, 1 input gradient, 2 weight gradient), stage and microbatch to a sort key."""


class PassTimes(Protocol):
    """The times of S and T of one worker in ns, and those of its messages from, to and from the last stage."""

    @property
    def forward_ns(self) -> int:
        """Of S."""

    @property
    def weight_ns(self) -> int:
        """Of T."""

    @property
    def stream_ns(self) -> int:
        """Of the stream that S needs."""

    @property
    def part_ns(self) -> int:
        """Of the part that S sends."""

    @property
    def sums_ns(self) -> int:
        """Of the log-sums that T needs."""


@dataclass(frozen=True, kw_only=True)
class OperationTimes:
    """The times that a list schedule is made for, in ns, one element per stage.

    Attributes:
        forward, backward_input, backward_weight: of the forward pass, the input and the weight gradient.
        send: transfer time of an output to the next stage.
        trained: false for a stage without a backward pass.
        positions: the worker of each stage.
        passes: for each worker S and T of its shards of the output layer; empty where it is whole.
        stored: bytes that a microbatch stores on each stage; empty: none. ``list_order`` counts microbatches instead.
        room: for each worker the bytes for stored activations, None without a limit; empty: no limits.
    """

    forward: Sequence[int]
    backward_input: Sequence[int]
    backward_weight: Sequence[int]
    send: Sequence[int]
    trained: Sequence[bool]
    positions: Sequence[int]
    passes: Sequence[PassTimes] = ()
    stored: Sequence[int] = ()
    room: Sequence[int | None] = ()

    @property
    def workers(self) -> int:
        """The number of workers."""
        return 1 + max(self.positions)


def _backward_first(lengths: OperationTimes) -> Urgency:
    """Input gradients before forward passes, older microbatches first, forward passes of later stages first."""
    return lambda kind, stage, m: ((1, -stage, m), (0, m, 0), (2, m, stage))[kind]


def _later_stage_first(lengths: OperationTimes) -> Urgency:
    """Operations of later stages first."""
    return lambda kind, stage, m: ((0, -stage, 1, m), (0, -stage, 0, m), (1, m, stage, 0))[kind]


def _due(stretch: float, *, weights: bool = False) -> Callable[[OperationTimes], Urgency]:
    """The start of each operation if microbatches entered at a constant rate and none waited, stretched.

    Args:
        stretch: factor on the time that a microbatch is assumed to take through the pipeline, because operations wait
            for workers and transfers. A larger value lets more microbatches enter before the first gradient returns.
        weights: whether weight gradients are due as well, instead of filling gaps.
    """

    def rule(lengths: OperationTimes) -> Urgency:
        # Without the stretch: total work over workers, the shortest period that any order can sustain.
        period = (
            max(1, sum((*lengths.forward, *lengths.backward_input, *lengths.backward_weight)))
            / lengths.workers
            / stretch
        )
        whole = sum(lengths.forward)
        down = [before / period for before in accumulate(lengths.forward, initial=0)]
        up = [(whole + after) / period for after in accumulate(reversed(lengths.backward_input), initial=0)]
        last = (whole + sum(lengths.backward_input)) / period + lengths.workers
        stages = len(lengths.forward)

        def urgency(kind: int, stage: int, m: int) -> tuple[float, ...]:
            """When microbatch ``m`` is due at ``stage``, in periods; ``kind`` is one of ``FORWARD`` to ``WEIGHT``."""
            if kind == WEIGHT:
                return (0, m + last) if weights else (1, m, stage)
            return (0, m + (down[stage] if kind == FORWARD else up[stages - 1 - stage]))

        return urgency

    return rule


RULES: Mapping[str, Callable[[OperationTimes], Urgency]] = {
    "backward first": _backward_first,
    "later stage first": _later_stage_first,
    "due": _due(1.0),
    "due, 1.5": _due(1.5),
    "due, 2": _due(2.0),
    "due, 3": _due(3.0),
    "due with weights": _due(1.0, weights=True),
}


class _ListSchedule:
    """The state of one list schedule under construction."""

    def __init__(self, lengths: OperationTimes, microbatches: int, most_in_flight: int, urgency: Urgency) -> None:
        self.lengths, self.urgency, self.most = lengths, urgency, most_in_flight
        self.durations = (lengths.forward, lengths.backward_input, lengths.backward_weight)
        self.ready: list[list[tuple[tuple[float, ...], int, int, int]]] = [[] for _ in range(lengths.workers)]
        self.busy = [False] * lengths.workers
        self.in_flight = [0] * len(lengths.forward)
        self.order: list[list[Operation]] = [[] for _ in range(lengths.workers)]
        self.events: list[tuple[int, int, bool, int, int, int]] = []
        self.number = 0
        # Of each worker, in the order of the microbatches: S and T that may start, and S without their T.
        self.shards: list[deque[int]] = [deque() for _ in range(lengths.workers)]
        self.gradients: list[deque[int]] = [deque() for _ in range(lengths.workers)]
        self.pending = [0] * lengths.workers
        self.parts = [0] * microbatches
        for m in range(microbatches):
            self.add_ready(FORWARD, 0, m)

    def add_ready(self, kind: int, stage: int, m: int) -> None:
        """Add an operation of ``stage`` whose inputs are present; ``kind`` indexes ``KINDS``, ``m`` is a microbatch."""
        entry = (self.urgency(kind, stage, m), kind, stage, m)
        heapq.heappush(self.ready[self.lengths.positions[stage]], entry)

    def add_event(self, time: int, ends: bool, kind: int, stage: int, m: int) -> None:
        """Add the end of an operation (``ends``) or the arrival of its input at ``stage``, at ``time`` ns.

        ``kind`` is an index of ``KINDS``, ``m`` the microbatch.
        """
        # Events of the same time are ordered by this number, so the schedule does not depend on the tie-breaking of the
        # heap.
        self.number += 1
        heapq.heappush(self.events, (time, self.number, ends, kind, stage, m))

    def dispatch(self, worker: int, time: int) -> None:
        """Start the most urgent operation on a free worker that its memory permits, at ``time`` ns."""
        if self.shards[worker] or (self.gradients[worker] and self.pending[worker] >= MAX_PENDING):
            self.start_pass(worker, time)
            return
        ready, waiting, found = self.ready[worker], [], None
        while ready:
            entry = heapq.heappop(ready)
            if entry[1] == FORWARD and self.in_flight[entry[2]] >= self.most:
                # A forward pass above the memory limit is set aside, so that a backward pass behind it can start and
                # free memory.
                waiting.append(entry)
                continue
            found = entry
            break
        for entry in waiting:
            heapq.heappush(ready, entry)
        if found is None:
            if self.gradients[worker]:
                self.start_pass(worker, time)
            return
        _, kind, stage, m = found
        self.in_flight[stage] += kind == FORWARD
        self.busy[worker] = True
        self.order[worker].append(Operation(stage, KINDS[kind], m))
        self.add_event(time + self.durations[kind][stage], True, kind, stage, m)
        if kind == INPUT and stage == len(self.lengths.forward) - 1:
            # The log-sums leave when the last stage starts its backward.
            for at, passes in enumerate(self.lengths.passes):
                self.add_event(time + passes.sums_ns, False, SHARD_GRADIENT, at, m)

    def start_pass(self, worker: int, time: int) -> None:
        """Start S on a free ``worker`` at ``time`` ns, or T where no S may start."""
        is_shard = bool(self.shards[worker])
        m = (self.shards if is_shard else self.gradients)[worker].popleft()
        passes = self.lengths.passes[worker]
        self.pending[worker] += 1 if is_shard else -1
        self.busy[worker] = True
        end = time + (passes.forward_ns if is_shard else passes.weight_ns)
        self.add_event(end, True, SHARD if is_shard else SHARD_GRADIENT, worker, m)

    def end_pass(self, time: int, kind: int, worker: int, m: int) -> None:
        """Free the ``worker`` of a pass (``kind``) at ``time`` ns; S sends the part of the microbatch ``m``."""
        self.busy[worker] = False
        if kind == SHARD:
            self.add_event(time + self.lengths.passes[worker].part_ns, False, INPUT, len(self.lengths.forward) - 1, m)

    def arrive(self, kind: int, stage: int, m: int) -> None:
        """Add what an arrived message permits; ``stage`` is a worker for S and T, ``kind`` an index."""
        if kind == SHARD:
            self.shards[stage].append(m)
        elif kind == SHARD_GRADIENT:
            self.gradients[stage].append(m)
        elif kind == INPUT and stage == len(self.lengths.forward) - 1:
            self.parts[m] += 1
            if self.parts[m] == self.lengths.workers:
                self.add_ready(INPUT, stage, m)
        else:
            self.add_ready(kind, stage, m)

    def complete(self, time: int, kind: int, stage: int, m: int) -> None:
        """Free the worker of ``stage`` at ``time`` ns, and add what depends on the operation.

        What needs its output on the same worker (``kind`` is an index of ``KINDS``, ``m`` the microbatch) is ready now,
        on another worker when the tensor has arrived.
        """
        lengths = self.lengths
        self.busy[lengths.positions[stage]] = False
        following = stage
        if kind == FORWARD and stage < len(lengths.forward) - 1:
            following, lag = stage + 1, lengths.send[stage]
        elif kind == INPUT and stage > 0 and lengths.trained[stage - 1]:
            following, lag = stage - 1, lengths.send[stage - 1]
        elif kind == FORWARD and lengths.passes:
            for at, passes in enumerate(lengths.passes):
                self.add_event(time + passes.stream_ns, False, SHARD, at, m)
        elif kind == FORWARD and lengths.trained[stage]:
            self.add_ready(INPUT, stage, m)
        if kind == INPUT:
            self.add_ready(WEIGHT, stage, m)
        # Activations are needed until the weight gradient; a stage without a backward pass stores none.
        if kind == WEIGHT or not lengths.trained[stage]:
            self.in_flight[stage] -= 1
        if following != stage:
            self.add_event(time + lag, False, kind, following, m)


def list_order(lengths: OperationTimes, microbatches: int, most_in_flight: int, rule: str) -> tuple[Order, int]:
    """The order of operations, and the step in ns.

    Stages that are not trained have backward operations of no duration at the end, so that every stage has the same
    operations.

    Args:
        lengths: the times of the operations.
        microbatches: of one step.
        most_in_flight: maximum number of microbatches in flight per stage.
        rule: a key of ``RULES``.

    Raises:
        UsageError: there are more operations than a command simulates.
    """
    check_operations(len(lengths.forward), microbatches)
    run = _ListSchedule(lengths, microbatches, most_in_flight, RULES[rule](lengths))
    run.dispatch(lengths.positions[0], 0)
    time = 0
    while run.events:
        time = run.events[0][0]
        # All events of a time are applied before a worker starts: it then chooses among all operations that are ready
        # at this time.
        touched = set()
        while run.events and run.events[0][0] == time:
            _, _, ends, kind, stage, m = heapq.heappop(run.events)
            if ends and kind in (SHARD, SHARD_GRADIENT):
                run.end_pass(time, kind, stage, m)
            elif ends:
                run.complete(time, kind, stage, m)
            else:
                run.arrive(kind, stage, m)
            touched.add(stage if kind in (SHARD, SHARD_GRADIENT) else lengths.positions[stage])
        for worker in sorted(touched):
            if not run.busy[worker]:
                run.dispatch(worker, time)
    for stage in reversed(range(len(lengths.forward))):
        if not lengths.trained[stage]:
            kinds = (Kind.BACKWARD_INPUT, Kind.BACKWARD_WEIGHT)
            idle = [Operation(stage, kind, m) for m in range(microbatches) for kind in kinds]
            run.order[lengths.positions[stage]].extend(idle)
    return tuple(tuple(operations) for operations in run.order), time
