"""The lower bound of a partition's step over all orders of operations.

It shows what is left to gain by another order alone: ``bounds.bounds_of`` leaves partition and placement open, too.

Each worker is a machine of its own (Jackson 1955; Carlier 1982, EJOR 11, section 2). Its jobs are its operations, and
the ``j``-th in execution order of one kind and stage has

* a head: no order starts it earlier, because ``j`` operations before it take their time on this stage, and ``j + 1``
  have to arrive from the stage before;
* a tail: no order ends the step earlier after its end, because ``M - 1 - j`` operations follow on this stage, and at
  least one of them or itself is among the first ``j + 1`` of the next stage.

Both count microbatches by their place in the order, not by their number, so they hold for orders that differ between
stages. With interruptions permitted, executing the job with the longest tail among those that have arrived is optimal,
so the end of that schedule is a lower bound for one worker, and the largest of them is one for the step.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from ..partition.problem import PartitionProblem
from .shard_passes import WorkerShards, shards_of_workers
from .simulator import StageCosts, stage_costs


class _Job(NamedTuple):
    head: int
    length: int
    tail: int


def _one_machine_ns(jobs: Iterable[_Job]) -> int:
    """The shortest end of jobs with heads and tails on one machine that may interrupt them, in ns."""
    waiting = sorted(jobs)
    arrived: list[tuple[int, int]] = []
    time = end = at = 0
    while at < len(waiting) or arrived:
        if not arrived:
            time = max(time, waiting[at].head)
        while at < len(waiting) and waiting[at].head <= time:
            heapq.heappush(arrived, (-waiting[at].tail, waiting[at].length))
            at += 1
        tail, left = heapq.heappop(arrived)
        until = waiting[at].head if at < len(waiting) else time + left
        if time + left <= until:
            time += left
            end = max(end, time - tail)
        else:
            heapq.heappush(arrived, (tail, left - (until - time)))
            time = until
    return end


class _Operations:
    """Heads and tails of all operations: ``[stages][microbatches]`` in ns, by the place in the order.

    Args:
        stages: costs of the stages.
        shards: shards of the output layer of each worker; empty where it is whole.
        microbatches: of one step.
    """

    def __init__(self, stages: Sequence[StageCosts], shards: Sequence[WorkerShards], microbatches: int) -> None:
        self.stages, self.shards = stages, shards
        self.places = range(microbatches)
        count = len(stages)
        # Frozen stages pass no gradient on: the last one with a backward pass ends the chain.
        self.first = next((at for at, stage in enumerate(stages) if stage.has_backward), count)
        self.forward_heads = [[0] * microbatches for _ in stages]
        self.input_heads = [[0] * microbatches for _ in stages]
        self.forward_tails = [[0] * microbatches for _ in stages]
        self.input_tails = [[0] * microbatches for _ in stages]
        self._set_heads()
        self._set_tails()

    def _set_heads(self) -> None:
        lookup = max((each.lookup_ns for each in self.shards), default=0)
        for at, stage in enumerate(self.stages):
            for place in self.places:
                head = lookup
                if at:
                    head = self.forward_heads[at - 1][place] + self.stages[at - 1].forward_ns
                    head += self.stages[at - 1].send_ns
                if place:
                    head = max(head, self.forward_heads[at][place - 1] + stage.forward_ns)
                self.forward_heads[at][place] = head
        for at in range(len(self.stages) - 1, self.first - 1, -1):
            stage = self.stages[at]
            for place in self.places:
                head = self.forward_heads[at][place] + stage.forward_ns
                if at + 1 < len(self.stages):
                    following = self.input_heads[at + 1][place] + self.stages[at + 1].backward_input_ns
                    head = max(head, following + stage.send_ns)
                else:
                    head = max([head, *(self.shard_head(each, place) + _shard_ns(each) for each in self.shards)])
                if place:
                    head = max(head, self.input_heads[at][place - 1] + stage.backward_input_ns)
                self.input_heads[at][place] = head

    def shard_head(self, shards: WorkerShards, place: int) -> int:
        """The head of the pass S of a worker with ``shards`` at a ``place`` of the order."""
        # Passes before it cannot begin before the first stream has arrived.
        first = self.forward_heads[-1][0] + self.stages[-1].forward_ns + shards.stream_ns
        own = self.forward_heads[-1][place] + self.stages[-1].forward_ns + shards.stream_ns
        return max(own, first + place * shards.forward_ns)

    def _set_tails(self) -> None:
        for at in range(self.first, len(self.stages)):
            stage = self.stages[at]
            for place in reversed(self.places):
                tail = stage.backward_weight_ns
                if at > self.first:
                    before = self.stages[at - 1]
                    tail = max(tail, before.send_ns + before.backward_input_ns + self.input_tails[at - 1][place])
                if place + 1 < len(self.places):
                    tail = max(tail, stage.backward_input_ns + self.input_tails[at][place + 1])
                self.input_tails[at][place] = tail
        for at in range(len(self.stages) - 1, -1, -1):
            stage = self.stages[at]
            for place in reversed(self.places):
                tail = stage.backward_input_ns + self.input_tails[at][place] if stage.has_backward else 0
                if at + 1 < len(self.stages):
                    after = self.stages[at + 1].forward_ns + self.forward_tails[at + 1][place]
                    tail = max(tail, stage.send_ns + after)
                else:
                    tail += max((each.stream_ns + _shard_ns(each) for each in self.shards), default=0)
                if place + 1 < len(self.places):
                    tail = max(tail, stage.forward_ns + self.forward_tails[at][place + 1])
                self.forward_tails[at][place] = tail

    def jobs_of_stage(self, at: int) -> list[_Job]:
        """The jobs of stage ``at``."""
        stage, jobs = self.stages[at], []
        for place in self.places:
            jobs.append(_Job(self.forward_heads[at][place], stage.forward_ns, self.forward_tails[at][place]))
            if stage.has_backward:
                head = self.input_heads[at][place]
                jobs.append(_Job(head, stage.backward_input_ns, self.input_tails[at][place]))
                jobs.append(_Job(head + stage.backward_input_ns, stage.backward_weight_ns, 0))
        return jobs

    def jobs_of_shards(self, shards: WorkerShards) -> list[_Job]:
        """The passes S and T of one worker."""
        last, jobs = len(self.stages) - 1, []
        for place in self.places:
            tail = shards.part_ns
            if self.stages[last].has_backward:
                tail += self.stages[last].backward_input_ns + self.input_tails[last][place]
                jobs.append(_Job(self.input_heads[last][place] + shards.sums_ns, shards.weight_ns, 0))
            jobs.append(_Job(self.shard_head(shards, place), shards.forward_ns, tail))
        return jobs


def _shard_ns(shards: WorkerShards) -> int:
    """The time of S and of the message to the last stage."""
    return shards.forward_ns + shards.part_ns


def order_bound_ns(problem: PartitionProblem, boundaries: Sequence[int]) -> int:
    """The lower bound of a partition's step over all orders of operations, with whole or split backward passes, in ns.

    Memory limits are ignored. Its proof is at the top of the module.

    Args:
        problem: chain, workers, placement of the stages and microbatches; order and schedule have no other effect.
        boundaries: ``[stages + 1]`` item positions.
    """
    shards = shards_of_workers(problem) or ()
    return stages_bound_ns(stage_costs(problem, boundaries), problem.positions, problem.microbatches, shards)


def stages_bound_ns(
    stages: Sequence[StageCosts], positions: Sequence[int], microbatches: int, shards: Sequence[WorkerShards] = ()
) -> int:
    """The same bound for stages placed anywhere, with any number of them per worker, in ns.

    Args:
        stages: the costs of each stage, ``[stages]``.
        positions: index of the worker of each stage, ``[stages]``.
        microbatches: of one step.
        shards: shards of the output layer of each worker; empty where it is whole.
    """
    operations = _Operations(stages, shards, microbatches)
    found = 0
    for worker in range(1 + max(positions)):
        jobs = [job for at, place in enumerate(positions) if place == worker for job in operations.jobs_of_stage(at)]
        if shards:
            jobs += operations.jobs_of_shards(shards[worker])
        found = max(found, _one_machine_ns(jobs))
    return found
