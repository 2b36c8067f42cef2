"""The step of a plan's pipeline, derived for ``verify`` without the simulator and the solvers.

The simulator advances the workers on a clock. Here the step is a graph: its nodes are the operations, an edge leads
from each operation to those that wait for it, and the end of an operation is the longest path to it. The nodes are
visited in topological order (Kahn 1962). Memory and work are sums over the items of the stages.

Only the definition of the question is shared with the planner: the profile, the median costs, and the orders of
operations of the schedules.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import cached_property

from ...costs.cost_window import SPEED_UNIT, ItemCosts
from ...costs.vocabulary import ShardCosts
from ...formats.plan import V_SCHEDULES, Plan
from ...formats.profile import Item
from ...schedules.operations import SHARD_KINDS
from ...schedules.registry import Kind, Operation, Order


@dataclass(frozen=True, kw_only=True)
class PlanWorker:
    """A worker of the plan: id, speed in parts per million, memory limit in bytes (None: unlimited)."""

    worker: int
    speed_ppm: int
    memory_bytes: int | None

    def time_ns(self, work_ns: int) -> int:
        """The time in ns that ``work_ns`` of a normal worker takes here, rounded up."""
        # Not ``WorkerSlot.time_ns``: a fault in a formula of the planner must not hide itself here.
        whole, rest = divmod(work_ns * SPEED_UNIT, self.speed_ppm)
        return whole + bool(rest)


@dataclass(frozen=True, kw_only=True)
class Pipeline:
    """A plan with the costs of its items.

    Attributes:
        items, costs: in layer order.
        spans: for each stage the positions of its first item and of the item after its last.
        plan_workers: in the order of their first stages.
        worker_of_stage: for each stage the index of its worker.
        order: the operations of each worker.
        bandwidth: bytes per second between workers; None if unknown.
        latency_ns: of a transfer.
        vocabulary: costs of an output layer in shards on all workers; None without.
    """

    items: tuple[Item, ...]
    costs: ItemCosts
    spans: tuple[tuple[int, int], ...]
    plan_workers: tuple[PlanWorker, ...]
    worker_of_stage: tuple[int, ...]
    order: Order
    bandwidth: int | None = None
    latency_ns: int = 0
    vocabulary: ShardCosts | None = None

    @cached_property
    def frozen(self) -> int:
        """The number of items at the front without a backward pass; 0 if no item has one."""
        trained = [a + b > 0 for a, b in zip(self.costs.backward_input_ns, self.costs.backward_weight_ns, strict=True)]
        return trained.index(True) if True in trained else 0

    @cached_property
    def state_bytes(self) -> list[int]:
        """Of each item the parameters, and gradients and optimizer state unless it is in the frozen front.

        A weight that an item of the front shares with another item may be trained there.
        """
        shared = {item.tied_to for item in self.items} | {item.name for item in self.items if item.tied_to}
        return [
            item.param_bytes
            + (item.gradient_bytes + item.optimizer_bytes) * (position >= self.frozen or item.name in shared)
            for position, item in enumerate(self.items)
        ]

    def is_trained(self, stage: int) -> bool:
        """Whether the stage has a backward pass."""
        return self.spans[stage][1] > self.frozen

    def plan_worker(self, stage: int) -> PlanWorker:
        """The worker of a stage."""
        return self.plan_workers[self.worker_of_stage[stage]]

    def transfer_ns(self, stage: int) -> int:
        """The transfer time in ns between a stage and the next, in either direction."""
        if stage + 1 >= len(self.spans) or self.worker_of_stage[stage] == self.worker_of_stage[stage + 1]:
            return 0
        end = self.spans[stage][1]
        return self.sending_ns(self.items[end - 1].boundary_bytes if end else 0)

    def sending_ns(self, size: int) -> int:
        """The time in ns that ``size`` bytes take between two workers."""
        return self.latency_ns + (0 if not self.bandwidth else _up(size * 10**9, self.bandwidth))

    @property
    def lookup_ns(self) -> int:
        """The longest transfer in ns of rows of the word table to the first stage, and of their gradient back."""
        if self.vocabulary is None or not self.vocabulary.lookup_bytes:
            return 0
        others = [at for at in range(len(self.plan_workers)) if at != self.worker_of_stage[0]]
        return max(
            (self.sending_ns(self.of_shards(worker, self.vocabulary.lookup_bytes)) for worker in others), default=0
        )

    def of_shards(self, worker: int, total: int) -> int:
        """The part of a ``worker`` in ``total``, a sum over all shards of the output layer."""
        if self.vocabulary is None:
            return 0
        count, workers = self.vocabulary.count, len(self.plan_workers)
        # Shard k of n is on worker k * workers // n: the first of worker w is the first with k * workers >= w * n.
        first, behind = (_up(at * count, workers) for at in (worker, worker + 1))
        return total * (behind - first) // count


@dataclass(frozen=True, kw_only=True)
class StepMetrics:
    """A step: its length, per worker busy time and peak memory, and the bottleneck."""

    step_ns: int
    busy_ns: tuple[int, ...]
    peak_memory_bytes: tuple[int, ...]
    bottleneck_ns: int

    @property
    def bubble(self) -> Fraction:
        """The idle share of the workers' time."""
        whole = self.step_ns * len(self.busy_ns)
        return Fraction(max(0, whole - sum(self.busy_ns)), whole) if whole else Fraction(0)


def _up(value: int, by: int) -> int:
    whole, rest = divmod(value, by)
    return whole + bool(rest)


def spans_of(plan: Plan) -> tuple[tuple[int, int], ...]:
    """The item positions of each stage of a plan."""
    spans, at = [], 0
    for stage in plan.stages:
        spans.append((at, at + len(stage.items)))
        at += len(stage.items)
    return tuple(spans)


def workers_of_stages(plan: Plan) -> tuple[int, ...]:
    """For each stage the index of its worker among the plan's workers."""
    workers = list(plan.workers)
    return tuple(workers.index(stage.worker) for stage in plan.stages)


def is_v_placement(plan: Plan) -> bool:
    """Whether the stages form a V over the workers."""
    count = len(plan.workers)
    if plan.schedule in V_SCHEDULES:
        return True
    is_v = (*range(count), *range(count - 1, -1, -1))
    return plan.operations is not None and count > 1 and workers_of_stages(plan) == is_v


def _length(pipeline: Pipeline, stage: int, kind: Kind) -> int:
    """The time in ns of an operation."""
    first, last = pipeline.spans[stage]
    plan_worker, costs = pipeline.plan_worker(stage), pipeline.costs
    if kind in SHARD_KINDS and pipeline.vocabulary is not None:
        shards = pipeline.vocabulary
        total = shards.forward_ns if kind is Kind.SHARD_FORWARD else shards.weight_ns
        return plan_worker.time_ns(pipeline.of_shards(pipeline.worker_of_stage[stage], total))
    if kind is Kind.FORWARD:
        return plan_worker.time_ns(sum(costs.forward_ns[first:last]))
    inputs = plan_worker.time_ns(sum(costs.backward_input_ns[first:last]))
    weights = plan_worker.time_ns(sum(costs.backward_weight_ns[first:last]))
    return {Kind.BACKWARD: inputs + weights, Kind.BACKWARD_INPUT: inputs, Kind.BACKWARD_WEIGHT: weights}[kind]


def _edges(pipeline: Pipeline, rows: Sequence[Sequence[Operation]]) -> list[tuple[Operation, Operation, int]]:
    """``(first, then, ns)``: an operation, one that waits for it, and the transfer time between them."""
    of: dict[tuple[int, int], dict[str, Operation]] = defaultdict(dict)
    for row in rows:
        for one in row:
            if one.kind in SHARD_KINDS:
                continue
            part = {Kind.FORWARD: "forward", Kind.BACKWARD_WEIGHT: "weight"}.get(one.kind, "gradient")
            of[one.stage, one.microbatch][part] = one
    edges = [(row[at], row[at + 1], 0) for row in rows for at in range(len(row) - 1)]
    for (stage, microbatch), parts in of.items():
        behind = of.get((stage + 1, microbatch), {})
        under_way = pipeline.transfer_ns(stage)
        pairs = [
            (parts.get("forward"), behind.get("forward"), under_way),
            (parts.get("forward"), parts.get("gradient"), 0),
            (behind.get("gradient"), parts.get("gradient"), under_way),
            (parts.get("gradient"), parts.get("weight"), 0),
        ]
        edges += [(first, then, ns) for first, then, ns in pairs if first is not None and then is not None]
    last = len(pipeline.spans) - 1
    for one in (one for row in rows for one in row if one.kind in SHARD_KINDS):
        edges += _shard_edges(pipeline, one, of[last, one.microbatch])
    return edges


def _shard_edges(
    pipeline: Pipeline, one: Operation, last: Mapping[str, Operation]
) -> list[tuple[Operation, Operation, int]]:
    """The edges between S or T of a worker (``one``) and the operations of the ``last`` stage for its microbatch."""
    shards, forward, backward = pipeline.vocabulary, last["forward"], last["gradient"]
    if shards is None:
        return []
    is_away = pipeline.worker_of_stage[one.stage] != pipeline.worker_of_stage[backward.stage]
    stream, part, sums = (
        pipeline.sending_ns(size) if is_away else 0
        for size in (shards.stream_bytes, shards.part_bytes, shards.sums_bytes)
    )
    if one.kind is Kind.SHARD_FORWARD:
        return [(forward, one, stream), (one, backward, part)]
    # The log-sums leave at the start of the backward: its own length is taken off the edge.
    return [(backward, one, sums - _length(pipeline, backward.stage, backward.kind))]


def _ends(
    pipeline: Pipeline, rows: Sequence[Sequence[Operation]], lengths: Mapping[tuple[int, Kind], int]
) -> dict[Operation, int]:
    """The end of each operation in ns; operations in a deadlock are left out."""
    waiting: dict[Operation, int] = {one: 0 for row in rows for one in row}
    # ``waiting`` is the number of operations that one still waits for; those in a cycle never reach 0.
    after: dict[Operation, list[tuple[Operation, int]]] = defaultdict(list)
    for first, then, ns in _edges(pipeline, rows):
        waiting[then] += 1
        after[first].append((then, ns))
    start = {one: pipeline.lookup_ns if one[:2] == (0, Kind.FORWARD) else 0 for one in waiting}
    ends: dict[Operation, int] = {}
    ready = deque(one for one, count in waiting.items() if not count)
    while ready:
        one = ready.popleft()
        ends[one] = start[one] + lengths[one.stage, one.kind]
        for then, ns in after[one]:
            start[then] = max(start[then], ends[one] + ns)
            waiting[then] -= 1
            if not waiting[then]:
                ready.append(then)
    return ends


def _peak(pipeline: Pipeline, worker: int, row: Sequence[Operation]) -> int:
    """The peak memory of a worker in bytes: the state of its items, and activations until their last backward."""
    shards = pipeline.vocabulary
    state = 0 if shards is None else pipeline.of_shards(worker, shards.static_bytes)
    pending, of_pending = 0, 0 if shards is None else pipeline.of_shards(worker, shards.activation_bytes)
    stored = {}
    for stage, (first, last) in enumerate(pipeline.spans):
        if pipeline.worker_of_stage[stage] == worker and any(one.stage == stage for one in row):
            state += sum(pipeline.state_bytes[first:last])
            # The frozen front may end inside of a stage: only the items behind it store activations.
            stored[stage] = sum(pipeline.costs.activation_bytes[max(first, min(last, pipeline.frozen)) : last])
    alive: dict[int, int] = dict.fromkeys(stored, 0)
    peak = 0
    for stage, kind, _ in row:
        alive[stage] += kind is Kind.FORWARD
        pending += kind is Kind.SHARD_FORWARD
        peak = max(peak, state + sum(alive[one] * stored[one] for one in alive) + pending * of_pending)
        pending -= kind is Kind.SHARD_WEIGHT
        alive[stage] -= kind in (Kind.BACKWARD, Kind.BACKWARD_WEIGHT)
    return peak


def in_flight(row: Sequence[Operation], stages: Sequence[int]) -> set[tuple[int, ...]]:
    """The combinations of microbatches in flight on these stages of a worker that occur at the same time."""
    alive, found = dict.fromkeys(stages, 0), set()
    for stage, kind, _ in row:
        if stage not in alive:
            continue
        if kind is Kind.FORWARD:
            alive[stage] += 1
            found.add(tuple(alive.values()))
        elif kind in (Kind.BACKWARD, Kind.BACKWARD_WEIGHT):
            alive[stage] -= 1
    return found


def bytes_of_shards(vocabulary: ShardCosts | None, worker: int, row: Sequence[Operation], workers: int) -> int:
    """The memory of the shards of a worker in bytes, with the microbatches between S and T.

    Args:
        vocabulary: costs of the shards; None without.
        worker: index of the worker.
        row: operations of the worker.
        workers: number of workers.
    """
    if vocabulary is None:
        return 0
    pending = peak = 0
    for one in row:
        pending += (one.kind is Kind.SHARD_FORWARD) - (one.kind is Kind.SHARD_WEIGHT)
        peak = max(peak, pending)
    first, behind = (_up(at * vocabulary.count, workers) for at in (worker, worker + 1))
    local = behind - first
    return vocabulary.static_bytes * local // vocabulary.count + peak * (
        vocabulary.activation_bytes * local // vocabulary.count
    )


def measure(pipeline: Pipeline) -> StepMetrics | None:
    """The step of a pipeline; None if its operations deadlock."""
    rows = [
        [one for one in row if one.kind is Kind.FORWARD or one.kind in SHARD_KINDS or pipeline.is_trained(one.stage)]
        for row in pipeline.order
    ]
    lengths = {(stage, kind): 0 for row in rows for stage, kind, _ in row}
    lengths = {(stage, kind): _length(pipeline, stage, kind) for stage, kind in lengths}
    ends = _ends(pipeline, rows, lengths)
    if len(ends) < sum(map(len, rows)):
        return None
    busy = [sum(lengths[stage, kind] for stage, kind, _ in row) for row in rows]
    share = [0] * len(pipeline.plan_workers)
    for stage, (first, last) in enumerate(pipeline.spans):
        share[pipeline.worker_of_stage[stage]] += pipeline.plan_worker(stage).time_ns(
            sum(pipeline.costs.total_ns[first:last])
        )
    return StepMetrics(
        step_ns=max(
            (
                end + pipeline.lookup_ns * (one.stage == 0 and one.kind not in (Kind.FORWARD, *SHARD_KINDS))
                for one, end in ends.items()
            ),
            default=0,
        ),
        busy_ns=tuple(busy),
        peak_memory_bytes=tuple(_peak(pipeline, worker, row) for worker, row in enumerate(pipeline.order)),
        bottleneck_ns=max(share),
    )
