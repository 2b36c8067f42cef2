"""The passes S and T of an output layer in shards on all workers: their times, and what waits for them.

::

    worker of the last stage   F(m) --stream--> ............ [all parts of m] --> B(m) --log-sums--> ...
    every worker                               S(m) --part-->                                   T(m)

S of a microbatch needs the stream of the last stage, the backward of the last stage needs the parts of all workers, and
T needs the log-sums that are sent when this backward starts.

Where the word table is in shards, too, all workers look rows up for the first stage, several microbatches ahead: its
first forward waits for them, and the last gradient that it sends back is awaited at the end of the step.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ..partition.problem import PartitionProblem
from ..schedules.operations import Kind


@dataclass(frozen=True, kw_only=True)
class WorkerShards:
    """The shards of one worker, in one microbatch.

    Attributes:
        forward_ns, weight_ns: times of S and T on the worker.
        stream_ns, part_ns, sums_ns: transfer times from, to and from the worker of the last stage; 0 on that worker.
        static_bytes: parameters, gradients and optimizer state.
        activation_bytes: stored from S to T.
        lookup_ns: transfer time of the rows that the worker looks up, to that of the first stage; 0 on that worker.
    """

    forward_ns: int
    weight_ns: int
    stream_ns: int = 0
    part_ns: int = 0
    sums_ns: int = 0
    static_bytes: int = 0
    activation_bytes: int = 0
    lookup_ns: int = 0


def shards_of_workers(problem: PartitionProblem) -> tuple[WorkerShards, ...] | None:
    """The shards of each worker, at its speed; None where the output layer is whole."""
    costs, workers = problem.chain.vocabulary, len(problem.slots)
    if costs is None:
        return None
    last, first = problem.positions[-1], problem.positions[0]

    def transfer_ns(worker: int, size: int) -> int:
        """The transfer time in ns of ``size`` bytes between ``worker`` and that of the last stage."""
        return 0 if worker == last else problem.transfer_ns(size)

    return tuple(
        WorkerShards(
            forward_ns=slot.time_ns(costs.share(costs.forward_ns, worker, workers)),
            weight_ns=slot.time_ns(costs.share(costs.weight_ns, worker, workers)),
            stream_ns=transfer_ns(worker, costs.stream_bytes),
            part_ns=transfer_ns(worker, costs.part_bytes),
            sums_ns=transfer_ns(worker, costs.sums_bytes),
            static_bytes=costs.share(costs.static_bytes, worker, workers),
            activation_bytes=costs.share(costs.activation_bytes, worker, workers),
            lookup_ns=problem.transfer_ns(costs.share(costs.lookup_bytes, worker, workers))
            if costs.lookup_bytes and worker != first
            else 0,
        )
        for worker, slot in enumerate(problem.slots)
    )


class ShardPasses:
    """The state of the passes in a simulated step.

    Args:
        shards: of each worker; None where the output layer is whole.

    Attributes:
        lookup_ns: time from the start of a step until the first stage has the rows of its first microbatch, and from
            its last backward until all workers have their gradient.
    """

    def __init__(self, shards: Sequence[WorkerShards] | None) -> None:
        self._shards = tuple(shards or ())
        self._stream: dict[int, int] = {}
        self._parts: dict[int, list[int]] = {}
        self._backward: dict[int, int] = {}
        self.lookup_ns = max((each.lookup_ns for each in self._shards), default=0)

    def barrier_ns(self, microbatch: int) -> int:
        """The time at which the parts of all workers have arrived for ``microbatch``, or -1; 0 without shards."""
        if not self._shards:
            return 0
        arrived = self._parts.get(microbatch, [])
        return max(arrived) if len(arrived) == len(self._shards) else -1

    def ready_ns(self, worker: int, kind: Kind, microbatch: int) -> int:
        """The time at which S or T (``kind``) of a ``microbatch`` may start on a ``worker``, or -1."""
        shards = self._shards[worker]
        if kind is Kind.SHARD_FORWARD:
            return self._stream[microbatch] + shards.stream_ns if microbatch in self._stream else -1
        return self._backward[microbatch] + shards.sums_ns if microbatch in self._backward else -1

    def duration_ns(self, worker: int, kind: Kind) -> int:
        """The time of S or T (``kind``) on a ``worker``."""
        shards = self._shards[worker]
        return shards.forward_ns if kind is Kind.SHARD_FORWARD else shards.weight_ns

    def finish_part(self, worker: int, microbatch: int, end_ns: int) -> None:
        """Record that S of a ``microbatch`` ended on a ``worker`` at ``end_ns``."""
        self._parts.setdefault(microbatch, []).append(end_ns + self._shards[worker].part_ns)

    def finish_last(self, kind: Kind, microbatch: int, start_ns: int, end_ns: int) -> bool:
        """Record an operation of the last stage; whether other workers may wait for it.

        Args:
            kind: of the operation.
            microbatch: of the operation.
            start_ns: its start.
            end_ns: its end.
        """
        if kind is Kind.FORWARD:
            self._stream[microbatch] = end_ns
        elif kind is not Kind.BACKWARD_WEIGHT:
            self._backward[microbatch] = start_ns
        return bool(self._shards) and kind is not Kind.BACKWARD_WEIGHT
