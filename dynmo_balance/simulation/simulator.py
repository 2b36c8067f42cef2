"""Discrete-event simulation of one training step: uneven stages, transfers, split backward pass, frozen front.

Each worker executes its operations in the order of the schedule. An operation starts when its worker is free and its
inputs have arrived::

    worker 0   F(0,0) F(0,1) F(0,2) .......... B(0,0) ...        F(s, m)  forward of stage s, microbatch m
                  | send_ns              ^ send_ns               B(s, m)  full backward
    worker 1       F(1,0) F(1,1) B(1,0) F(1,2) ...               I(s, m)  input gradient, W(s, m) weight gradient

    stage_costs(problem, boundaries) --> StageCosts --+
    problem.operations (order per worker) ------------+--> run --> Timeline (spans, step_ns, busy_ns, peak memory)

* ``F(s, m)`` needs ``F(s-1, m)``; ``B(s, m)`` and ``I(s, m)`` need ``F(s, m)`` and the gradient from ``s+1``;
  ``W(s, m)`` needs ``I(s, m)``.
* A transfer takes latency plus bytes over bandwidth. ``overlapped``: both workers continue. ``serial``: both
  continue, but a link carries one tensor at a time in each direction. ``blocking``: the sender waits until the tensor
  is sent, and the receiver executes nothing while it arrives.
* Stages entirely in the frozen front have no backward pass and receive no gradient.
* An output layer in shards on all workers adds the passes S and T, see ``shard_passes``.
* Compressed gradients have their own transfer time, and add time to the backward passes that compress and decompress.

All times are integer nanoseconds, so that closed forms of step times hold exactly (tests compare them). ``batched``
computes the same step times for many partitions at once.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from itertools import pairwise

import numpy as np

from .._common.errors import UsageError
from ..partition.problem import PartitionProblem
from ..schedules.operations import SHARD_KINDS
from ..schedules.registry import Kind, Operation, Order
from .operation_times import (
    Span,
    SpanRows,
    StageTimes,
    graph_of_problem,
    operation_times,
    peak_memory,
)
from .shard_passes import ShardPasses, WorkerShards, shards_of_workers


@dataclass(frozen=True, kw_only=True)
class StageCosts:
    """The costs of a stage in one microbatch on its worker.

    Attributes:
        forward_ns: time of the forward pass.
        backward_input_ns, backward_weight_ns: time of the input and of the weight gradient; a full backward pass
            takes their sum.
        has_backward: false for a stage entirely in the frozen front.
        send_ns: transfer time of its output, or of the output's gradient, to or from the next stage's worker; 0 on
            the same worker.
        static_bytes: parameters, gradients and optimizer state.
        activation_bytes: activations stored from forward to backward.
        compressed: microbatches whose gradient this stage sends back as low-rank factors.
        compressed_send_ns: transfer time of the factors to the previous stage's worker.
        compress_ns, decompress_ns: time that compression adds to this stage's backward pass, and decompression to
            that of the previous stage.
    """

    forward_ns: int
    backward_input_ns: int
    backward_weight_ns: int
    has_backward: bool = True
    send_ns: int = 0
    static_bytes: int = 0
    activation_bytes: int = 0
    compressed: frozenset[int] = frozenset()
    compressed_send_ns: int = 0
    compress_ns: int = 0
    decompress_ns: int = 0


@dataclass(frozen=True, kw_only=True)
class Timeline:
    """One simulated step; all tuples are per worker, in the order of the workers' first stages.

    Attributes:
        step_ns: the end of the last operation.
        busy_ns: time in operations.
        peak_memory_bytes: maximum memory.
        spans: the operations.
    """

    step_ns: int
    busy_ns: tuple[int, ...]
    peak_memory_bytes: tuple[int, ...]
    spans: Sequence[tuple[Span, ...]]

    @property
    def ends_ns(self) -> tuple[int, ...]:
        """The end of the last operation of each worker."""
        if isinstance(self.spans, SpanRows):
            return self.spans.last_ends_ns
        return tuple(row[-1].end_ns if row else 0 for row in self.spans)

    @property
    def bubble_fraction(self) -> float:
        """The idle share of the workers' time, ``1 - sum(busy) / (workers * step)``; 0 for an empty step.

        For even stages under GPipe and 1F1B it is ``(P - 1) / (M + P - 1)``. Narayanan et al. 2021 (arXiv 2104.04473,
        section 2.2) divide by the ideal time instead of the step and get ``(P - 1) / M``.
        """
        whole = self.step_ns * len(self.busy_ns)
        return 1 - sum(self.busy_ns) / whole if whole else 0.0


def stage_costs(problem: PartitionProblem, boundaries: Sequence[int]) -> tuple[StageCosts, ...]:
    """The costs of the stages of a partition, at the speeds of their workers."""
    chain = problem.chain
    costs, frozen = chain.costs, chain.frozen_items
    result = []
    boundary_bytes = 0
    for stage, (begin, end) in enumerate(pairwise(boundaries)):
        slot = problem.slot(stage)
        # An empty stage sends what it received, so it has the size of the last item before it.
        if end > begin:
            boundary_bytes = chain.items[end - 1].boundary_bytes
        next_stage = stage + 1
        apart = next_stage < problem.num_stages and problem.slot(next_stage).worker != slot.worker
        result.append(
            StageCosts(
                forward_ns=slot.time_ns(sum(costs.forward_ns[begin:end])),
                backward_input_ns=slot.time_ns(sum(costs.backward_input_ns[begin:end])),
                backward_weight_ns=slot.time_ns(sum(costs.backward_weight_ns[begin:end])),
                has_backward=end > frozen,
                send_ns=problem.transfer_ns(boundary_bytes) if apart else 0,
                static_bytes=sum(chain.static_bytes[begin:end]),
                activation_bytes=sum(chain.stored_bytes[begin:end]),
            )
        )
    return tuple(result)


class Communication(StrEnum):
    """What a transfer blocks: nothing, its link, or both workers.

    ``blocking`` is a trainer whose sends and receives wait, such as Megatron without overlapped p2p communication.
    """

    OVERLAPPED = "overlapped"
    SERIAL = "serial"
    BLOCKING = "blocking"


class _Arrivals:
    """The times at which the outputs of operations arrive at the operations that need them; -1 if not known yet."""

    def __init__(
        self,
        stages: Sequence[StageCosts],
        microbatches: int,
        worker_of: Mapping[int, int],
        communication: Communication,
        first_ns: int,
    ) -> None:
        self._stages = stages
        self._serial = communication is Communication.SERIAL
        self.is_blocking = communication is Communication.BLOCKING
        self._forward = [[-1] * microbatches for _ in range(len(stages) + 1)]
        self._gradient = [[-1] * microbatches for _ in range(len(stages) + 1)]
        self._own = [[-1] * microbatches for _ in stages]
        self._input_done = [[-1] * microbatches for _ in stages]
        self._worker_of = worker_of
        self._link_free: dict[tuple[int, int], int] = {}
        # The inputs of the first stage are available at the start: loading data is not part of the model. Lookups of
        # other workers are not, see ``ShardPasses``.
        self._forward[0] = [first_ns] * microbatches

    def ready(self, stage: int, kind: Kind, microbatch: int) -> int:
        """The time in ns at which the inputs of the operation (``stage``, ``kind``, ``microbatch``) arrive, or -1."""
        if kind is Kind.FORWARD:
            return self._forward[stage][microbatch]
        if kind is Kind.BACKWARD_WEIGHT:
            return self._input_done[stage][microbatch]
        if stage == len(self._stages) - 1:
            return self._own[stage][microbatch]
        gradient, own = self._gradient[stage][microbatch], self._own[stage][microbatch]
        return -1 if gradient < 0 or own < 0 else max(gradient, own)

    def gradient_ns(self, stage: int, microbatch: int) -> int:
        """The transfer time of a microbatch's gradient from ``stage`` to the previous stage."""
        sender = self._stages[stage]
        return sender.compressed_send_ns if microbatch in sender.compressed else self._stages[stage - 1].send_ns

    def receive_ns(self, stage: int, kind: Kind, microbatch: int) -> int:
        """The time for which the inputs of an operation of ``stage`` for ``microbatch`` block its worker."""
        if not self.is_blocking or kind is Kind.BACKWARD_WEIGHT:
            return 0
        if kind is Kind.FORWARD:
            return self._stages[stage - 1].send_ns if stage else 0
        return self.gradient_ns(stage + 1, microbatch) if stage + 1 < len(self._stages) else 0

    def finish(self, stage: int, kind: Kind, microbatch: int, end: int) -> int:
        """Send the output of an operation of ``stage`` for ``microbatch`` that ended at ``end`` ns.

        Returns:
            the time in ns at which its worker is free.
        """
        if kind is Kind.BACKWARD_WEIGHT:
            return end
        if kind is Kind.FORWARD:
            self._own[stage][microbatch] = end
            if stage == len(self._stages) - 1:
                return end
            self._forward[stage + 1][microbatch], free = self._send(stage, 1, self._stages[stage].send_ns, end)
            return free
        self._input_done[stage][microbatch] = end
        # The frozen front receives no gradient, so its link stays free.
        if stage == 0 or not self._stages[stage - 1].has_backward:
            return end
        self._gradient[stage - 1][microbatch], free = self._send(stage, -1, self.gradient_ns(stage, microbatch), end)
        return free

    def _send(self, stage: int, direction: int, send_ns: int, end: int) -> tuple[int, int]:
        """The arrival of a tensor (blocking: the time at which it is offered), and when the sender is free."""
        if self.is_blocking:
            return end, end + send_ns
        if not self._serial or not send_ns:
            return end + send_ns, end
        # Tensors of one link are sent in the order in which their operations are simulated. Those of one worker are in
        # time order, so each direction of a link between two workers is first come, first served.
        link = self._worker_of[stage], self._worker_of[stage + direction]
        arrival = max(end, self._link_free.get(link, 0)) + send_ns
        self._link_free[link] = arrival
        return arrival, end


def run(
    order: Order,
    stages: Sequence[StageCosts],
    overhead_ns: int = 0,
    communication: Communication = Communication.OVERLAPPED,
    shards: Sequence[WorkerShards] | None = None,
) -> Timeline:
    """Simulate one step.

    Args:
        order: the operations of each worker.
        stages: the costs of each stage.
        overhead_ns: time added to every operation: what the framework takes beyond the arithmetic. ``calibrate`` fits
            it; torch with gloo on four processes had 775 us (``tests/benchmarks/plan_quality.md``).
        communication: what transfers block.
        shards: shards of the output layer of each worker; None where it is whole, and the order has no S and T.

    Raises:
        UsageError: the order of operations deadlocks.
    """
    microbatches = 1 + max((op.microbatch for operations in order for op in operations), default=0)
    worker_of = {op.stage: worker for worker, operations in enumerate(order) for op in operations}
    passes, last, rows_end = ShardPasses(shards), len(stages) - 1, 0
    arrivals = _Arrivals(stages, microbatches, worker_of, communication, passes.lookup_ns)
    done = [0] * len(order)
    clock = [0] * len(order)
    spans: list[list[Span]] = [[] for _ in order]
    waiting = list(range(len(order)))
    while waiting:
        worker = waiting.pop()
        operations = order[worker]
        while done[worker] < len(operations):
            stage, kind, microbatch = operations[done[worker]]
            if kind in SHARD_KINDS:
                ready = passes.ready_ns(worker, kind, microbatch)
                if ready < 0:
                    break
                start = max(clock[worker], ready)
                clock[worker] = start + overhead_ns + passes.duration_ns(worker, kind)
                done[worker] += 1
                spans[worker].append(Span(stage, kind, microbatch, start, clock[worker]))
                if kind is Kind.SHARD_FORWARD:
                    passes.finish_part(worker, microbatch, clock[worker])
                    waiting.append(worker_of[last])
                continue
            cost = stages[stage]
            # Orders are built without costs, so they have backward operations of the frozen front, which do not run.
            if kind is not Kind.FORWARD and not cost.has_backward:
                done[worker] += 1
                continue
            ready = arrivals.ready(stage, kind, microbatch)
            barrier = 0 if stage < last or kind is Kind.FORWARD else passes.barrier_ns(microbatch)
            if ready < 0 or barrier < 0:
                break
            start = max(clock[worker], ready, barrier) + arrivals.receive_ns(stage, kind, microbatch)
            end = start + overhead_ns + _duration(cost, kind) + _compression_ns(stages, stage, kind, microbatch)
            clock[worker] = arrivals.finish(stage, kind, microbatch, end)
            done[worker] += 1
            spans[worker].append(Span(stage, kind, microbatch, start, end))
            if stage == 0 and kind is not Kind.FORWARD:
                rows_end = end + passes.lookup_ns
            # Only the worker that needs this output can become ready by it, so the work is linear in the operations.
            other = worker_of.get(stage + 1 if kind is Kind.FORWARD else stage - 1, worker)
            if other != worker:
                waiting.append(other)
            if stage == last and passes.finish_last(kind, microbatch, start, end):
                waiting.extend(range(len(order)))
    stuck = [worker for worker, operations in enumerate(order) if done[worker] < len(operations)]
    if stuck:
        operation = order[stuck[0]][done[stuck[0]]]
        raise UsageError(
            f"the order of operations deadlocks: worker {stuck[0]} never reaches {operation}; change the order"
        )
    return Timeline(
        step_ns=max([rows_end, *(row[-1].end_ns for row in spans if row)]),
        busy_ns=tuple(sum(span.end_ns - span.start_ns for span in row) for row in spans),
        peak_memory_bytes=tuple(
            max((memory for _, memory in curve), default=0) for curve in memory_curves(order, stages, shards)
        ),
        spans=tuple(tuple(row) for row in spans),
    )


def _duration(cost: StageCosts, kind: Kind) -> int:
    if kind is Kind.FORWARD:
        return cost.forward_ns
    if kind is Kind.BACKWARD_INPUT:
        return cost.backward_input_ns
    if kind is Kind.BACKWARD_WEIGHT:
        return cost.backward_weight_ns
    return cost.backward_input_ns + cost.backward_weight_ns


def _compression_ns(stages: Sequence[StageCosts], stage: int, kind: Kind, microbatch: int) -> int:
    """The time that compression adds to a backward pass: decompress what arrived, compress what is sent."""
    if kind is Kind.FORWARD or kind is Kind.BACKWARD_WEIGHT:
        return 0
    added = stages[stage].compress_ns if microbatch in stages[stage].compressed else 0
    if stage + 1 < len(stages) and microbatch in stages[stage + 1].compressed:
        added += stages[stage + 1].decompress_ns
    return added


def memory_curves(
    order: Order, stages: Sequence[StageCosts], shards: Sequence[WorkerShards] | None = None
) -> tuple[tuple[tuple[Operation, int], ...], ...]:
    """For each worker the memory in bytes during each of its operations; it follows from the order alone.

    The memory is static memory plus the activations between their forward and their last backward operation, and for
    shards of the output layer between S and T. A stage without a backward pass stores none.

    Args:
        order: the operations of each worker.
        stages: the costs of each stage.
        shards: shards of the output layer of each worker; None where it is whole.
    """
    result = []
    for worker, operations in enumerate(order):
        memory = sum(stages[stage].static_bytes for stage in {op.stage for op in operations})
        memory += shards[worker].static_bytes if shards else 0
        curve = []
        for operation in operations:
            stage, kind, _ = operation
            # The weight gradient needs the activations too, so an input gradient alone frees nothing.
            stored = stages[stage].activation_bytes if stages[stage].has_backward else 0
            if shards and kind in SHARD_KINDS:
                stored = shards[worker].activation_bytes
            if kind in (Kind.FORWARD, Kind.SHARD_FORWARD):
                memory += stored
            curve.append((operation, memory))
            if kind in (Kind.BACKWARD, Kind.BACKWARD_WEIGHT, Kind.SHARD_WEIGHT):
                memory -= stored
        result.append(tuple(curve))
    return tuple(result)


def predict(
    problem: PartitionProblem,
    boundaries: Sequence[int],
    overhead_ns: int = 0,
    communication: Communication = Communication.OVERLAPPED,
) -> Timeline:
    """Simulate one step of a partition under the schedule of the problem.

    Args:
        problem: chain, workers and schedule.
        boundaries: ``[stages + 1]`` item positions.
        overhead_ns: time in ns added to every operation.
        communication: what transfers block.
    """
    costs, shards = stage_costs(problem, boundaries), shards_of_workers(problem)
    if shards is None and communication is Communication.OVERLAPPED:
        timeline = _predict_overlapped(problem, costs, overhead_ns)
        if timeline is not None:
            return timeline
    return run(problem.operations, costs, overhead_ns, communication, shards)


def stage_times(problem: PartitionProblem, costs: Sequence[StageCosts], overhead_ns: int = 0) -> StageTimes | None:
    """The costs of the stages as arrays, without compression; None where a step may not fit into 64 bits.

    Args:
        problem: has the number of microbatches.
        costs: of the stages.
        overhead_ns: time in ns added to every operation.
    """
    whole_ns = sum(c.forward_ns + c.backward_input_ns + c.backward_weight_ns + c.send_ns for c in costs)
    whole_bytes = sum(c.static_bytes + problem.microbatches * c.activation_bytes for c in costs)
    if max(2 * problem.microbatches * (whole_ns + 3 * overhead_ns * len(costs)), whole_bytes) >= 1 << 62:
        return None
    inputs, weights = (
        np.array([getattr(cost, name) for cost in costs], dtype=np.int64)
        for name in ("backward_input_ns", "backward_weight_ns")
    )
    forward = np.array([cost.forward_ns for cost in costs], dtype=np.int64)
    return StageTimes(
        durations=np.stack([forward, inputs + weights, inputs, weights]) + overhead_ns,
        transfers=np.array([*(cost.send_ns for cost in costs), 0], dtype=np.int64),
        has_backward=np.array([cost.has_backward for cost in costs]),
    )


def _predict_overlapped(problem: PartitionProblem, costs: Sequence[StageCosts], overhead_ns: int) -> Timeline | None:
    """``run`` over arrays; None where numbers may not fit into 64 bits or the order deadlocks."""
    graph, times = graph_of_problem(problem), stage_times(problem, costs, overhead_ns)
    if times is None:
        return None
    found = operation_times(graph, times)
    if found is None:
        return None
    order = graph.order
    busy = np.concatenate([[0], np.cumsum(found.ends - found.starts)])[list(order.begins)]
    static, stored = (
        np.array([getattr(cost, name) for cost in costs], dtype=np.int64)
        for name in ("static_bytes", "activation_bytes")
    )
    return Timeline(
        step_ns=int(found.ends.max(initial=0)),
        busy_ns=tuple(np.diff(busy).tolist()),
        peak_memory_bytes=peak_memory(order, static, stored * times.has_backward),
        spans=SpanRows(order, found),
    )
