"""Where the passes of a sharded output layer stand in the order of a pipeline schedule. Pure functions.

Two passes per microbatch and pipeline rank join the forwards F and backwards B (Yeung et al., arXiv 2411.05288,
algorithm 2, one barrier)::

    last stage's rank   F(m), stream to all ranks        parts of m merged, B(m), log-sums to all
    every rank                            S(m): logits, parts to that rank         T(m): gradient of its shards

B(m) of the last stage needs S(m) of all ranks. 1F1B therefore runs one more forward ahead, during which the others
finish S: a rank holds one more microbatch in flight.

Where the word table is in shards as well, two more passes copy rows, which takes no time next to the others::

    every rank           E(m): rows of its tokens, to the first stage      G(m): gradient of its rows
    first stage's rank   all rows of m, F(m)        B(m) (W(m) if split), gradient of each rank's tokens to that rank

F(m) of the first stage needs E(m) of all ranks, which run it ``LEAD`` microbatches ahead. Nothing waits for G.

Every rank computes the same order for all ranks, from the same numbers. It is the order of a simulated step, so that it
can run whatever the real times are: no cycle of ranks that wait for one another exists.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from .errors import UsageError

FORWARD, BACKWARD, INPUT, WEIGHT = "F", "B", "I", "W"
SHARD_FORWARD, SHARD_WEIGHT = "S", "T"
LOOKUP, LOOKUP_GRADIENT = "E", "G"
# Ratios of times; only their order matters. A backward takes as long as two forwards.
UNITS = {
    FORWARD: 2,
    BACKWARD: 4,
    INPUT: 2,
    WEIGHT: 2,
    SHARD_FORWARD: 2,
    SHARD_WEIGHT: 1,
    LOOKUP: 0,
    LOOKUP_GRADIENT: 0,
}
# Microbatches by which E is ahead of F: the two forwards between them last as long as any operation of another rank, so
# that no forward waits for E.
LEAD = 3
# Microbatches whose exponentials a rank keeps from S to T before it prefers T to its stage.
MAX_PENDING = 2


class Operation(NamedTuple):
    """One operation of a rank; ``stage`` is -1 for S, T, E and G."""

    stage: int
    kind: str
    microbatch: int


Order = Sequence[Sequence[Operation]]


def gpipe_order(num_stages: int, microbatches: int) -> list[list[Operation]]:
    """All forwards, then all backwards, of ``microbatches`` on each of ``num_stages`` ranks with one stage."""
    return [
        [Operation(stage, kind, m) for kind in (FORWARD, BACKWARD) for m in range(microbatches)]
        for stage in range(num_stages)
    ]


def one_f_one_b_order(num_stages: int, microbatches: int) -> list[list[Operation]]:
    """1F1B with one more forward ahead: stage ``s`` of ``P`` runs ``P - s + 1`` forwards before its first backward.

    Example: the last stage runs F0 F1 B0 F2 B1 F3 B2 B3 for 4 microbatches.

    Args:
        num_stages: number of stages, one per rank.
        microbatches: of one step.
    """
    order = []
    for stage in range(num_stages):
        ahead = min(microbatches, num_stages - stage + 1)
        operations = [Operation(stage, FORWARD, m) for m in range(ahead)]
        for m in range(microbatches):
            operations.append(Operation(stage, BACKWARD, m))
            if ahead + m < microbatches:
                operations.append(Operation(stage, FORWARD, ahead + m))
        order.append(operations)
    return order


class _Step:
    """A simulated step in which the passes are placed between the operations of each rank."""

    def __init__(self, order: Order, num_stages: int, microbatches: int, *, lookups: bool) -> None:
        self.order, self.last = order, num_stages - 1
        # Microbatches that E and G run for.
        self.lookup_count = microbatches if lookups else 0
        self.placed: list[list[Operation]] = [[] for _ in order]
        self.next = [0] * len(order)
        self.free = [0] * len(order)
        self.rank_of = {operation.stage: rank for rank, row in enumerate(order) for operation in row}
        # (stage, kind, microbatch) -> end; I and B of a stage share one entry.
        self.ends: dict[tuple[int, str, int], int] = {}
        # Of S and E, microbatch -> the number of ranks that ran it, and the end of the last one.
        self.shard_ends: dict[int, tuple[int, int]] = {}
        self.shards = [0] * len(order)
        self.weights = [0] * len(order)
        self.lookup_ends: dict[int, tuple[int, int]] = {}
        self.lookups = [0] * len(order)
        self.gradients = [0] * len(order)
        # A split backward of the first stage leaves everything to W: no stage before it waits for a gradient.
        self.split = {one.microbatch for row in order for one in row if one.stage == 0 and one.kind == WEIGHT}

    def ready(self, operation: Operation) -> int | None:
        """The time at which the inputs of an operation are there; None if not known yet."""
        stage, kind, m = operation
        if kind == FORWARD:
            return self.words(m) if stage == 0 else self.ends.get((stage - 1, FORWARD, m))
        if kind == WEIGHT:
            return self.ends.get((stage, BACKWARD, m))
        own = self.ends.get((stage, FORWARD, m))
        above = self.end_of_all(self.shard_ends, m) if stage == self.last else self.ends.get((stage + 1, BACKWARD, m))
        return None if own is None or above is None else max(own, above)

    def words(self, m: int) -> int | None:
        """The time at which the rows of all ranks are there for a microbatch; None if not known yet."""
        if not self.lookup_count:
            return 0
        return self.end_of_all(self.lookup_ends, m)

    def end_of_all(self, ends: dict[int, tuple[int, int]], m: int) -> int | None:
        """The time at which all ranks have run a pass of a microbatch; None if not known yet."""
        count, end = ends.get(m, (0, 0))
        return end if count == len(self.order) else None

    def candidate(self, rank: int) -> tuple[int, int, Operation] | None:
        """The operation that a rank starts next: (start, precedence, operation); None if it has to wait."""
        found: list[tuple[int, int, Operation]] = []

        def add(ready: int | None, precedence: int, operation: Operation) -> None:
            if ready is not None:
                found.append((max(self.free[rank], ready), precedence, operation))

        m = self.lookups[rank]
        if m < self.lookup_count:
            add(0 if m < LEAD else self.ends.get((0, FORWARD, m - LEAD)), -1, Operation(-1, LOOKUP, m))
        m = self.gradients[rank]
        if m < self.lookup_count:
            behind = WEIGHT if m in self.split else BACKWARD
            add(self.ends.get((0, behind, m)), -1, Operation(-1, LOOKUP_GRADIENT, m))
        # All ranks wait for the slowest S: it comes before the rank's own stage.
        m = self.shards[rank]
        add(self.ends.get((self.last, FORWARD, m)), 0, Operation(-1, SHARD_FORWARD, m))
        m = self.weights[rank]
        is_late = self.shards[rank] - m >= MAX_PENDING
        if m < self.shards[rank]:
            # The log-sums are known once the last stage has started its backward.
            add(self.ends.get((self.last, BACKWARD, m)), 1 if is_late else 3, Operation(-1, SHARD_WEIGHT, m))
        if self.next[rank] < len(self.order[rank]):
            operation = self.order[rank][self.next[rank]]
            add(self.ready(operation), 2, operation)
        return min(found, default=None)

    def run(self, rank: int, start: int, operation: Operation) -> Iterable[int]:
        """Run an operation of a rank; returns the ranks whose next operation may be another one now."""
        stage, kind, m = operation
        end = self.free[rank] = start + UNITS[kind]
        self.placed[rank].append(operation)
        if kind == SHARD_FORWARD:
            self.shards[rank] += 1
            return self._after_pass_of_all(self.shard_ends, rank, m, end, self.last)
        if kind == LOOKUP:
            self.lookups[rank] += 1
            return self._after_pass_of_all(self.lookup_ends, rank, m, end, 0)
        if kind in (SHARD_WEIGHT, LOOKUP_GRADIENT):
            (self.weights if kind == SHARD_WEIGHT else self.gradients)[rank] += 1
            return {rank}
        self.next[rank] += 1
        self.ends[stage, BACKWARD if kind == INPUT else kind, m] = end
        # S and T follow the last stage, E and G the first one.
        if (stage == self.last and kind != WEIGHT) or (stage == 0 and self.lookup_count):
            return range(len(self.order))
        neighbor = stage + 1 if kind == FORWARD else stage - 1
        return {rank, self.rank_of.get(neighbor, rank)}

    def _after_pass_of_all(
        self, ends: dict[int, tuple[int, int]], rank: int, m: int, end: int, reader: int
    ) -> Iterable[int]:
        """Count a pass for which the stage ``reader`` waits until all ranks have run it; the ranks as in ``run``."""
        count, latest = ends.get(m, (0, 0))
        ends[m] = count + 1, max(latest, end)
        return {rank, self.rank_of[reader]} if count + 1 == len(self.order) else {rank}


def with_shard_passes(order: Order, num_stages: int, *, lookups: bool = False) -> list[list[Operation]]:
    """Place S and T of every microbatch in the order of each pipeline rank.

    Args:
        order: F and B, or F, I and W, of each pipeline rank, all with the same microbatches.
        num_stages: number of stages.
        lookups: also place E and G, which changes the order of the others nowhere.

    Raises:
        UsageError: the order cannot run, with or without the passes.
    """
    microbatches = 1 + max(operation.microbatch for operations in order for operation in operations)
    step = _Step(order, num_stages, microbatches, lookups=lookups)
    total = sum(len(operations) for operations in order) + (4 if lookups else 2) * microbatches * len(order)
    # ((start, precedence, operation), rank) of each rank that need not wait; entries that changed since are skipped.
    current = [step.candidate(rank) for rank in range(len(order))]
    waiting = [(found, rank) for rank, found in enumerate(current) if found is not None]
    heapq.heapify(waiting)
    for _ in range(total):
        while waiting and waiting[0][0] != current[waiting[0][1]]:
            heapq.heappop(waiting)
        if not waiting:
            stuck = [operations[at] for operations, at in zip(order, step.next, strict=True) if at < len(operations)]
            raise UsageError(
                "the operations of the schedule cannot run with --vocabulary-parallel:"
                f" {', '.join(f'{one.stage}{one.kind}{one.microbatch}' for one in stuck)} wait for one another;"
                " use --schedule 1f1b"
            )
        (start, _, operation), rank = heapq.heappop(waiting)
        for changed in step.run(rank, start, operation):
            found = step.candidate(changed)
            if found is not None and (changed == rank or found != current[changed]):
                heapq.heappush(waiting, (found, changed))
            current[changed] = found
    return step.placed
