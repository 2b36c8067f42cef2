"""What is to be partitioned: a chain of items with integer costs, the workers, the schedule and the constraints."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import accumulate

from .._common.errors import DynmoError, UsageError
from ..costs.cost_window import SPEED_UNIT, ItemCosts, speed_ppm
from ..formats.plan import V_SCHEDULES, position_of
from ..formats.profile import Header, Item
from ..schedules.registry import (
    InFlightSets,
    Order,
    build_order,
    count_in_flight,
    in_flight,
    in_flight_sets,
    in_flight_sets_of,
)

EXIT_INFEASIBLE = 3


class InfeasibleError(DynmoError):
    """No partition obeys the constraints; the message names the one that cannot be met."""

    exit_code = EXIT_INFEASIBLE


@dataclass(frozen=True, kw_only=True)
class WorkerSlot:
    """A worker as the planner sees it."""

    worker: int
    speed_ppm: int = SPEED_UNIT
    memory_bytes: int | None = None
    releasable: bool = True

    def time_ns(self, work_ns: int) -> int:
        """How long the work of a normal worker takes here, rounded up."""
        return -(-work_ns * SPEED_UNIT // self.speed_ppm)

    def work_ns(self, time_ns: int) -> int:
        """The most work that fits into the time.

        ``time_ns(work) <= time`` holds if and only if ``work <= work_ns(time)``.
        """
        return time_ns * self.speed_ppm // SPEED_UNIT


@dataclass(frozen=True, kw_only=True)
class Chain:
    """The items in order, with their costs. Times in ns and activations in bytes are of one microbatch.

    ``cuts`` are the positions where a stage may begin or end, with 0 and the number of items; what lies between two
    neighbouring cuts is a *unit*. ``granularity`` is what the cuts were permitted by.
    """

    items: tuple[Item, ...]
    costs: ItemCosts
    cuts: tuple[int, ...]
    granularity: str = "layer"

    @cached_property
    def names(self) -> tuple[str, ...]:
        """The names of the items."""
        return tuple(item.name for item in self.items)

    @cached_property
    def work_ns(self) -> tuple[int, ...]:
        """Forward and backward of each item."""
        return self.costs.total_ns

    @cached_property
    def stored_bytes(self) -> tuple[int, ...]:
        """Activations that each item keeps for its backward, which the frozen front does not have."""
        frozen = self.frozen_items
        return (0,) * frozen + self.costs.activation_bytes[frozen:]

    @cached_property
    def static_bytes(self) -> tuple[int, ...]:
        """Parameters, gradients and optimizer state of each item."""
        return tuple(item.param_bytes + item.gradient_bytes + item.optimizer_bytes for item in self.items)

    @cached_property
    def move_bytes(self) -> tuple[int, ...]:
        """What a move of each item carries: parameters and optimizer state; gradients are gone at a boundary."""
        return tuple(item.param_bytes + item.optimizer_bytes for item in self.items)

    @cached_property
    def frozen_items(self) -> int:
        """How many items at the front have no backward at all: they send no gradient."""
        backward = zip(self.costs.backward_input_ns, self.costs.backward_weight_ns, strict=True)
        count = 0
        for first, second in backward:
            if first or second:
                break
            count += 1
        return count if count < len(self.items) else 0

    def prefix_at_cuts(self, values: Sequence[int]) -> list[int]:
        """Prefix sums of ``values`` at the positions of ``cuts``."""
        prefix = list(accumulate(values, initial=0))
        if len(self.cuts) == len(prefix):
            return prefix
        return [prefix[cut] for cut in self.cuts]


def permitted_cuts(items: Sequence[Item], granularity: str) -> tuple[int, ...]:
    """Where a stage may begin: where the model lets it, at layer granularity only at the first item of a layer."""
    inner = (
        index
        for index in range(1, len(items))
        if items[index].cut_before and (granularity == "sublayer" or items[index].layer != items[index - 1].layer)
    )
    return (0, *inner, len(items))


def tied_pairs(items: Sequence[Item]) -> tuple[tuple[int, int], ...]:
    """The positions of items that share a weight, the earlier first."""
    index = {item.name: at for at, item in enumerate(items)}
    pairs = [(at, index[item.tied_to]) for at, item in enumerate(items) if item.tied_to is not None]
    return tuple((min(pair), max(pair)) for pair in pairs)


def with_ties_together(problem: PartitionProblem) -> PartitionProblem:
    """The problem with tied items on one worker: in one stage, or in a V in the first and the last.

    Raises:
        InfeasibleError: that leaves fewer places to cut than the stages need.
    """
    chain, last = problem.chain, problem.num_stages - 1
    cuts, pins = list(chain.cuts), list(problem.pins)
    for first, second in tied_pairs(chain.items):
        if problem.schedule in V_SCHEDULES and first == 0 and second == len(chain.items) - 1:
            pins += [(first, 0), (second, last)]
        else:
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
    """A chain, the workers in the order of their stages, and what a partition must obey.

    Attributes:
        min_units: how many units each stage holds at least; 0 lets stages be empty.
        pins: the stage that an item must be in, by the item's index.
        tied_together: whether items that share a weight are kept on one worker; ``with_ties_together`` sets it.
        current: the item ranges that each stage's worker holds now (``(begin, end)`` per stage), for least migration.
        order, layout: with the schedule ``custom`` the operations of each worker, and of each stage the index of its
            worker in ``slots``.
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
        """Stages on all workers together."""
        return len(self.slots) * self.virtual_stages

    @cached_property
    def positions(self) -> tuple[int, ...]:
        """Of each stage, the index of its worker in ``slots``: in rotation, in a V, or as laid out."""
        if self.layout is not None:
            return self.layout
        return tuple(position_of(self.schedule, stage, len(self.slots)) for stage in range(self.num_stages))

    @property
    def operations(self) -> Order:
        """What each worker does, one operation after the other."""
        if self.order is not None:
            return self.order
        return build_order(self.schedule, len(self.slots), self.virtual_stages, self.microbatches)

    @property
    def in_flight(self) -> tuple[int, ...]:
        """The most microbatches whose activations each stage holds at once."""
        if self.order is not None:
            return count_in_flight(self.order)
        return in_flight(self.schedule, len(self.slots), self.virtual_stages, self.microbatches)

    @property
    def in_flight_sets(self) -> InFlightSets:
        """Of each worker, the microbatches in flight on its stages at the same time; see ``schedules.registry``."""
        if self.order is not None:
            return in_flight_sets_of(self.order)
        return in_flight_sets(self.schedule, len(self.slots), self.virtual_stages, self.microbatches)

    def slot(self, stage: int) -> WorkerSlot:
        """The worker of a stage."""
        return self.slots[self.positions[stage]]

    def transfer_ns(self, size_bytes: int) -> int:
        """How long a tensor takes between two workers, rounded up."""
        if not self.link_bandwidth:
            return self.link_latency_ns
        return self.link_latency_ns - (-size_bytes * 1_000_000_000 // self.link_bandwidth)


def check_size(problem: PartitionProblem) -> None:
    """Refuse more stages than units, unless stages may be empty."""
    units = len(problem.chain.cuts) - 1
    if problem.num_stages * problem.min_units > units:
        raise UsageError(
            f"{problem.num_stages} stages of at least {problem.min_units} units need"
            f" {problem.num_stages * problem.min_units} units, the model has {units};"
            " use fewer stages, --granularity sublayer or --min-layers 0"
        )


def worker_slots(header: Header, count: int | None = None, memory_bytes: int | None = None) -> tuple[WorkerSlot, ...]:
    """The first ``count`` workers of a profile; where there are fewer, further ones like the first are made up."""
    slots = [
        WorkerSlot(
            worker=worker.worker,
            speed_ppm=speed_ppm(worker.relative_speed),
            memory_bytes=memory_bytes if memory_bytes is not None else worker.memory_bytes,
            releasable=worker.releasable,
        )
        for worker in header.workers
    ]
    wanted = len(slots) if count is None else count
    number = max(slot.worker for slot in slots)
    while len(slots) < wanted:
        number += 1
        slots.append(WorkerSlot(worker=number, memory_bytes=slots[0].memory_bytes))
    return tuple(slots[:wanted])
