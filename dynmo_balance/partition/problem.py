"""The partitioning problem: a chain of items with integer costs, the workers, the schedule and the constraints.

Every solver, the simulator and the planner read this one immutable object::

    items   embedding | layers.0.attention | layers.0.mlp | layers.1.attention | ... | head
    cuts    0                                             3                    ...         len(items)
            |-------------- unit 0 ----------------------|---- unit 1 ----                a stage is a run of units
    stages  stage 0 = items[0:3]        stage 1 = items[3:7]        ...                   boundaries (0, 3, 7, ...)
               |                           |
    slots   worker 0 (speed, memory)    worker 1                                          positions[stage] -> slot

* ``Chain``: the items, the costs of each in one microbatch, and the positions where the model permits a cut.
* ``WorkerSlot``: the speed and memory of one worker. Speeds are integers in parts per million, times are integers in
  ns, and times are rounded up, so that "optimal" means equality rather than a tolerance.
* ``PartitionProblem``: chain, slots, schedule, microbatches and constraints. With several stages per worker, the
  load of a worker is the sum over its stages.

Boundaries are item positions, cuts are indices into ``chain.cuts``; ``chain.cuts[cut]`` converts the one to the
other.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import accumulate

from .._common.errors import DynmoError, UsageError
from .._common.vocabulary_order import MAX_PENDING
from ..costs.cost_window import SPEED_UNIT, ItemCosts, speed_ppm
from ..costs.vocabulary import ShardCosts
from ..formats.plan import CUSTOM, V_SCHEDULES, position_of
from ..formats.profile import Header, Item
from ..schedules.registry import (
    InFlightSets,
    Order,
    build_order,
    count_in_flight,
    from_order,
    in_flight,
    in_flight_sets,
    in_flight_sets_of,
)
from ..schedules.vocabulary import peak_pending, sharded_order, with_shards

EXIT_INFEASIBLE = 3


class InfeasibleError(DynmoError):
    """No partition satisfies the constraints; the message names the constraint that cannot be met."""

    exit_code = EXIT_INFEASIBLE


@dataclass(frozen=True, kw_only=True)
class WorkerSlot:
    """A worker of the pipeline.

    Attributes:
        worker: id of the worker in the profile.
        speed_ppm: speed in parts per million of a normal worker.
        memory_bytes: memory limit; None is unlimited.
        releasable: whether a plan may release the worker.
    """

    worker: int
    speed_ppm: int = SPEED_UNIT
    memory_bytes: int | None = None
    releasable: bool = True

    def time_ns(self, work_ns: int) -> int:
        """The time in ns that work of ``work_ns`` (on a normal worker) takes here, rounded up."""
        # ``//`` rounds down; negated twice it rounds up. Integers have no limit here, while a float loses single ns
        # above 2^53.
        return -(-work_ns * SPEED_UNIT // self.speed_ppm)

    def work_ns(self, time_ns: int) -> int:
        """The most work, in ns on a normal worker, that takes at most ``time_ns`` here.

        ``self.time_ns(work) <= time`` holds if and only if ``work <= self.work_ns(time)``.
        """
        return time_ns * self.speed_ppm // SPEED_UNIT


@dataclass(frozen=True, kw_only=True)
class Chain:
    """The items in order, with their costs in one microbatch.

    Attributes:
        items: the layer list, at the finest granularity of the profile.
        costs: times in ns on a normal worker, and activations in bytes.
        cuts: the item positions where a stage may begin or end, from 0 to the number of items. The items between two
            neighboring cuts form a unit.
        granularity: ``layer`` or ``sublayer``, the granularity that permits these cuts.
        vocabulary: costs of an output layer in shards on all workers, outside of the items; None without.
    """

    items: tuple[Item, ...]
    costs: ItemCosts
    cuts: tuple[int, ...]
    granularity: str = "layer"
    vocabulary: ShardCosts | None = None

    @cached_property
    def names(self) -> tuple[str, ...]:
        """The names of the items."""
        return tuple(item.name for item in self.items)

    @cached_property
    def work_ns(self) -> tuple[int, ...]:
        """Forward plus backward time of each item."""
        return self.costs.total_ns

    @cached_property
    def stored_bytes(self) -> tuple[int, ...]:
        """Activations that each item stores for its backward pass; 0 in the frozen front."""
        frozen = self.frozen_items
        return (0,) * frozen + self.costs.activation_bytes[frozen:]

    @cached_property
    def static_bytes(self) -> tuple[int, ...]:
        """Parameters, and gradients and optimizer state of trained items, all present for the whole step."""
        return tuple(
            item.param_bytes + (item.gradient_bytes + item.optimizer_bytes) * trained
            for item, trained in zip(self.items, self.is_trained, strict=True)
        )

    @cached_property
    def is_trained(self) -> tuple[bool, ...]:
        """Whether each item has gradients and optimizer state: all but the frozen front.

        An item of the front that shares a weight with another item counts as trained: the weight may be trained there.
        """
        tied = {item.tied_to for item in self.items}
        return tuple(
            index >= self.frozen_items or item.tied_to is not None or item.name in tied
            for index, item in enumerate(self.items)
        )

    @property
    def freed_bytes(self) -> int:
        """Bytes of gradients and optimizer state that the frozen front does not need."""
        pairs = zip(self.items, self.is_trained, strict=True)
        return sum(item.gradient_bytes + item.optimizer_bytes for item, trained in pairs if not trained)

    @cached_property
    def move_bytes(self) -> tuple[int, ...]:
        """Bytes that moving each item transfers: parameters, and optimizer state of trained items.

        Gradients do not exist between two steps; freezing frees the optimizer state.
        """
        pairs = zip(self.items, self.is_trained, strict=True)
        return tuple(item.param_bytes + item.optimizer_bytes * trained for item, trained in pairs)

    @cached_property
    def frozen_items(self) -> int:
        """The number of items at the front that have no backward pass; they also receive no gradient."""
        # Only the front counts: behind a trained item, a frozen one still passes its input gradient on.
        backward = zip(self.costs.backward_input_ns, self.costs.backward_weight_ns, strict=True)
        count = 0
        for input_ns, weight_ns in backward:
            if input_ns or weight_ns:
                break
            count += 1
        # Costs without any backward time, such as parameter counts in place of times, do not mean a frozen model.
        return count if count < len(self.items) else 0

    def prefix_at_cuts(self, values: Sequence[int]) -> list[int]:
        """Prefix sums of the per-item ``values`` at the positions of ``cuts``."""
        prefix = list(accumulate(values, initial=0))
        if len(self.cuts) == len(prefix):
            return prefix
        return [prefix[cut] for cut in self.cuts]


def permitted_cuts(items: Sequence[Item], granularity: str) -> tuple[int, ...]:
    """The positions where a stage may begin: where the model permits it and, at layer granularity, a layer begins."""
    inner = (
        index
        for index in range(1, len(items))
        if items[index].cut_before and (granularity == "sublayer" or items[index].layer != items[index - 1].layer)
    )
    return (0, *inner, len(items))


def tied_pairs(items: Sequence[Item]) -> tuple[tuple[int, int], ...]:
    """The positions of items that share a weight, the earlier one first."""
    index = {item.name: at for at, item in enumerate(items)}
    pairs = [(at, index[item.tied_to]) for at, item in enumerate(items) if item.tied_to is not None]
    return tuple((min(pair), max(pair)) for pair in pairs)


def with_ties_together(problem: PartitionProblem) -> PartitionProblem:
    """The problem with tied items on one worker: in one stage, or in a V on the first and the last stage.

    Raises:
        InfeasibleError: this leaves fewer units than the stages need.
    """
    chain, last = problem.chain, problem.num_stages - 1
    cuts, pins = list(chain.cuts), list(problem.pins)
    for first, second in tied_pairs(chain.items):
        if problem.schedule in V_SCHEDULES and first == 0 and second == len(chain.items) - 1:
            # In a V, one worker has the first and the last stage: two pins suffice, and no cut is lost.
            pins += [(first, 0), (second, last)]
        else:
            # Without the cuts between them, the tied items are one unit, which no partition separates.
            cuts = [cut for cut in cuts if cut <= first or cut > second]
    units = len(cuts) - 1
    if units < problem.num_stages * problem.min_units:
        pair = tied_pairs(chain.items)[0]
        raise InfeasibleError(
            f"{chain.names[pair[0]]} and {chain.names[pair[1]]} share a weight; on one worker they leave {units} units"
            f" for {problem.num_stages} stages; use --schedule zb-v, whose first and last stage share a worker"
        )
    return replace(problem, chain=replace(chain, cuts=tuple(cuts)), pins=tuple(pins), tied_together=True)


@dataclass(frozen=True, kw_only=True)
class PartitionProblem:
    """A chain, the workers in the order of their first stages, and the constraints of a partition.

    Attributes:
        chain: the items, their costs and the permitted cuts.
        slots: the workers.
        schedule: name of the pipeline schedule.
        microbatches: of one step.
        virtual_stages: stages per worker.
        link_bandwidth: bytes per second between workers; None is unlimited.
        link_latency_ns: latency of a transfer between workers.
        min_units: minimum number of units per stage; 0 permits empty stages.
        pins: ``(item position, stage)`` of the items that must be on a stage.
        tied_together: whether items that share a weight are on one worker; ``with_ties_together`` sets it.
        current: for each stage, the item range ``(begin, end)`` that its worker has now. Of equally good partitions,
            the solvers choose the one that moves the fewest bytes.
        order: with the schedule ``custom``, the operations of each worker.
        layout: with the schedule ``custom``, the index of each stage's worker in ``slots``.
    """

    chain: Chain
    slots: tuple[WorkerSlot, ...]
    schedule: str
    microbatches: int
    virtual_stages: int = 1
    link_bandwidth: int | None = None
    link_latency_ns: int = 0
    min_units: int = 1
    pins: tuple[tuple[int, int], ...] = ()
    tied_together: bool = False
    current: tuple[tuple[int, int], ...] | None = field(default=None)
    order: Order | None = None
    layout: tuple[int, ...] | None = None

    @property
    def num_stages(self) -> int:
        """The number of stages on all workers together."""
        return len(self.slots) * self.virtual_stages

    @cached_property
    def positions(self) -> tuple[int, ...]:
        """The index in ``slots`` of each stage's worker: looped, in a V, or as laid out by ``layout``."""
        if self.layout is not None:
            return self.layout
        return tuple(position_of(self.schedule, stage, len(self.slots)) for stage in range(self.num_stages))

    @property
    def operations(self) -> Order:
        """The operations of each worker, in execution order."""
        if self.order is not None:
            return self.order if self.chain.vocabulary is None else with_shards(self.order)
        build = build_order if self.chain.vocabulary is None else sharded_order
        return build(self.schedule, len(self.slots), self.virtual_stages, self.microbatches)

    @property
    def in_flight(self) -> tuple[int, ...]:
        """The maximum number of microbatches in flight on each stage."""
        if self.order is not None or self.chain.vocabulary is not None:
            return count_in_flight(from_order(self.operations))
        return in_flight(self.schedule, len(self.slots), self.virtual_stages, self.microbatches)

    @property
    def in_flight_sets(self) -> InFlightSets:
        """Per worker, the combinations of microbatches in flight on its stages, see ``schedules``."""
        if self.order is not None or self.chain.vocabulary is not None:
            return in_flight_sets_of(from_order(self.operations))
        return in_flight_sets(self.schedule, len(self.slots), self.virtual_stages, self.microbatches)

    def slot(self, stage: int) -> WorkerSlot:
        """The worker of a stage; its memory is what the shards of the output layer leave."""
        at = self.positions[stage]
        slot = self.slots[at]
        if self.chain.vocabulary is None or slot.memory_bytes is None:
            return slot
        return replace(slot, memory_bytes=max(0, slot.memory_bytes - self.shard_bytes[at]))

    @cached_property
    def shard_bytes(self) -> tuple[int, ...]:
        """For each worker the memory of its shards of the output layer, with the microbatches between S and T."""
        shards, workers = self.chain.vocabulary, len(self.slots)
        if shards is None:
            return (0,) * workers
        # A search for orders has limits before it has an order.
        is_open = self.schedule == CUSTOM and self.order is None
        pending = (MAX_PENDING + 1,) * workers if is_open else peak_pending(self.operations)
        return tuple(
            shards.share(shards.static_bytes, at, workers) + count * shards.share(shards.activation_bytes, at, workers)
            for at, count in enumerate(pending)
        )

    def transfer_ns(self, size_bytes: int) -> int:
        """The time in ns that a tensor of ``size_bytes`` takes between two workers, rounded up."""
        if not self.link_bandwidth:
            return self.link_latency_ns
        return self.link_latency_ns - (-size_bytes * 1_000_000_000 // self.link_bandwidth)


def check_size(problem: PartitionProblem) -> None:
    """Check that there are enough units for the stages.

    Raises:
        UsageError: there are not.
    """
    units = len(problem.chain.cuts) - 1
    if problem.num_stages * problem.min_units > units:
        raise UsageError(
            f"{problem.num_stages} stages of at least {problem.min_units} units need"
            f" {problem.num_stages * problem.min_units} units, but the model has {units};"
            " use fewer stages, --granularity sublayer or --min-layers 0"
        )


def worker_slots(header: Header, count: int | None = None, memory_bytes: int | None = None) -> tuple[WorkerSlot, ...]:
    """The first ``count`` workers of a profile (default: all); where there are fewer, copies of the first are added.

    Args:
        header: of the profile.
        count: number of workers; None is all of the profile.
        memory_bytes: memory limit of each worker; None is that of the profile.
    """
    slots = [
        WorkerSlot(
            worker=worker.worker,
            speed_ppm=speed_ppm(worker.relative_speed),
            memory_bytes=memory_bytes if memory_bytes is not None else worker.memory_bytes,
            releasable=worker.releasable,
        )
        for worker in header.workers
    ]
    total = len(slots) if count is None else count
    number = max(slot.worker for slot in slots)
    while len(slots) < total:
        number += 1
        slots.append(WorkerSlot(worker=number, memory_bytes=slots[0].memory_bytes))
    return tuple(slots[:total])
