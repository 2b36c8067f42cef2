"""Discrete-event simulation of one training step: uneven stages, communication, split backward, a frozen front.

Each worker does its operations in the order of the schedule; an operation starts when the worker is free and what it
needs has arrived:

* ``F(s, m)`` needs ``F(s-1, m)``; ``B(s, m)`` needs ``F(s, m)`` and ``B(s+1, m)``; ``W(s, m)`` needs ``I(s, m)``;
* between two workers a tensor takes latency plus bytes over bandwidth, during which both workers go on;
* stages wholly in the frozen front have no backward and are sent no gradient.

All times are integer nanoseconds, so that closed forms hold exactly.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

from .errors import UsageError
from .problem import Problem
from .schedules import Kind, Order, order_of


@dataclass(frozen=True, kw_only=True)
class StageCosts:
    """What a stage costs in one microbatch on its worker.

    Attributes:
        forward_ns, backward_input_ns, backward_weight_ns: a whole backward takes the sum of the last two.
        has_backward: false for a stage wholly in the frozen front.
        send_ns: how long its output, or the gradient of it, takes to the next stage's worker; 0 on the same worker.
        static_bytes: parameters, gradients, optimizer state.
        activation_bytes: kept from forward to backward.
    """

    forward_ns: int
    backward_input_ns: int
    backward_weight_ns: int
    has_backward: bool = True
    send_ns: int = 0
    static_bytes: int = 0
    activation_bytes: int = 0


class Span(NamedTuple):
    """One operation on the clock, in ns from the start of the step."""

    stage: int
    kind: Kind
    microbatch: int
    start_ns: int
    end_ns: int


@dataclass(frozen=True, kw_only=True)
class Timeline:
    """One simulated step; everything per worker in the order of the stages.

    ``bubble_fraction`` is the share of the workers' time that is idle: ``1 - sum(busy) / (workers x step)``.
    """

    step_ns: int
    busy_ns: tuple[int, ...]
    peak_memory_bytes: tuple[int, ...]
    spans: tuple[tuple[Span, ...], ...]

    @property
    def bubble_fraction(self) -> float:
        """The idle share of all workers' time; 0 for an empty step."""
        whole = self.step_ns * len(self.busy_ns)
        return 1 - sum(self.busy_ns) / whole if whole else 0.0


def stage_costs(problem: Problem, boundaries: Sequence[int]) -> tuple[StageCosts, ...]:
    """The costs of the stages of a partition, on their workers' speeds."""
    chain = problem.chain
    costs, frozen = chain.costs, chain.frozen_items
    result = []
    boundary_bytes = 0
    for stage, (begin, end) in enumerate(pairwise(boundaries)):
        place = problem.place(stage)
        if end > begin:
            boundary_bytes = chain.items[end - 1].boundary_bytes
        next_stage = stage + 1
        apart = next_stage < problem.num_stages and problem.place(next_stage).worker != place.worker
        result.append(
            StageCosts(
                forward_ns=place.time_ns(sum(costs.forward_ns[begin:end])),
                backward_input_ns=place.time_ns(sum(costs.backward_input_ns[begin:end])),
                backward_weight_ns=place.time_ns(sum(costs.backward_weight_ns[begin:end])),
                has_backward=end > frozen,
                send_ns=problem.transfer_ns(boundary_bytes) if apart else 0,
                static_bytes=sum(chain.static_bytes[begin:end]),
                activation_bytes=sum(costs.activation_bytes[begin:end]),
            )
        )
    return tuple(result)


def run(order: Order, stages: Sequence[StageCosts], overhead_ns: int = 0) -> Timeline:
    """Simulate one step.

    Args:
        order: the operations of each worker.
        stages: the costs of each stage.
        overhead_ns: added to every operation.

    Raises:
        UsageError: the order waits for itself.
    """
    microbatches = 1 + max((op.microbatch for operations in order for op in operations), default=0)
    forward = [[-1] * microbatches for _ in stages]
    backward = [[-1] * microbatches for _ in stages]
    worker_of = {op.stage: worker for worker, operations in enumerate(order) for op in operations}
    done = [0] * len(order)
    clock = [0] * len(order)
    spans: list[list[Span]] = [[] for _ in order]
    waiting = list(range(len(order)))
    while waiting:
        worker = waiting.pop()
        operations = order[worker]
        while done[worker] < len(operations):
            stage, kind, microbatch = operations[done[worker]]
            cost = stages[stage]
            if kind is not Kind.FORWARD and not cost.has_backward:
                done[worker] += 1
                continue
            ready = _ready(stages, forward, backward, stage, kind, microbatch)
            if ready < 0:
                break
            start = max(clock[worker], ready)
            end = start + overhead_ns + _duration(cost, kind)
            clock[worker] = end
            done[worker] += 1
            spans[worker].append(Span(stage, kind, microbatch, start, end))
            if kind is Kind.FORWARD:
                forward[stage][microbatch] = end
                neighbour = stage + 1
            else:
                if kind is not Kind.BACKWARD_WEIGHT:
                    backward[stage][microbatch] = end
                neighbour = stage - 1
            other = worker_of.get(neighbour, worker)
            if other != worker:
                waiting.append(other)
    stuck = [worker for worker, operations in enumerate(order) if done[worker] < len(operations)]
    if stuck:
        operation = order[stuck[0]][done[stuck[0]]]
        raise UsageError(f"the order of operations waits for itself: worker {stuck[0]} never gets to {operation}")
    return Timeline(
        step_ns=max(clock, default=0),
        busy_ns=tuple(sum(span.end_ns - span.start_ns for span in row) for row in spans),
        peak_memory_bytes=_peak_memory(order, stages),
        spans=tuple(tuple(row) for row in spans),
    )


def _ready(
    stages: Sequence[StageCosts],
    forward: Sequence[Sequence[int]],
    backward: Sequence[Sequence[int]],
    stage: int,
    kind: Kind,
    microbatch: int,
) -> int:
    """When what the operation needs has arrived; negative while it is not known."""
    if kind is Kind.FORWARD:
        if stage == 0:
            return 0
        sent = forward[stage - 1][microbatch]
        return sent + stages[stage - 1].send_ns if sent >= 0 else -1
    if kind is Kind.BACKWARD_WEIGHT:
        return backward[stage][microbatch]
    if stage == len(stages) - 1:
        return forward[stage][microbatch]
    sent = backward[stage + 1][microbatch]
    if sent < 0 or forward[stage][microbatch] < 0:
        return -1
    return max(sent + stages[stage].send_ns, forward[stage][microbatch])


def _duration(cost: StageCosts, kind: Kind) -> int:
    if kind is Kind.FORWARD:
        return cost.forward_ns
    if kind is Kind.BACKWARD_INPUT:
        return cost.backward_input_ns
    if kind is Kind.BACKWARD_WEIGHT:
        return cost.backward_weight_ns
    return cost.backward_input_ns + cost.backward_weight_ns


def _peak_memory(order: Order, stages: Sequence[StageCosts]) -> tuple[int, ...]:
    """Static memory plus the most activations held at once, from the order of operations."""
    result = []
    for operations in order:
        held = sum(stages[stage].static_bytes for stage in {op.stage for op in operations})
        peak = held
        for stage, kind, _ in operations:
            if kind is Kind.FORWARD:
                held += stages[stage].activation_bytes
                peak = max(peak, held)
            elif kind is not Kind.BACKWARD_INPUT:
                held -= stages[stage].activation_bytes
        result.append(peak)
    return tuple(result)


def predict(problem: Problem, boundaries: Sequence[int], overhead_ns: int = 0) -> Timeline:
    """Simulate one step of a partition under the problem's schedule."""
    order = order_of(problem.schedule, len(problem.places), problem.virtual_stages, problem.microbatches)
    return run(order, stage_costs(problem, boundaries), overhead_ns)
