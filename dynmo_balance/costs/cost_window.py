"""From step records to one integer cost per item: the median over a window, with gaps carried forward.

::

    Step records --add--> last ``size`` records --------------- costs: median per item --> ItemCosts (normal speed)
                    +---> last known sample of each item --+-- fills the gaps
                                                           +-- works: every record of the window, for policies

The median and not the mean: one slow step (a checkpoint, an evaluation, other processes) must not move layers. Trainers
sample only some items in a step (``null``), so gaps are usual. Times on slow workers are converted to normal speed
before they are compared, because a plan may move the item to a faster worker.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, replace

from ..formats.profile import Header, Samples, Step
from .vocabulary import ShardTimes, measured_times

SPEED_UNIT = 1_000_000
"""Speeds are integers in parts per million of the normal speed, so that solvers are exact."""


@dataclass(frozen=True, kw_only=True)
class ItemCosts:
    """The costs of each item in one microbatch on a worker of normal speed, in the header's order.

    Attributes:
        forward_ns: forward time.
        backward_input_ns: time of the input gradient, or of the full backward pass if it is not split.
        backward_weight_ns: time of the weight gradient; 0 if the backward pass is not split.
        activation_bytes: stored from forward to backward.
        split: whether the backward pass is split.
        records: number of step records; 0 for computed costs.
        from_step, to_step: the steps of the records.
        vocabulary: times of the shards of an output layer that is on all workers; None without.
    """

    forward_ns: tuple[int, ...]
    backward_input_ns: tuple[int, ...]
    backward_weight_ns: tuple[int, ...]
    activation_bytes: tuple[int, ...]
    split: bool
    records: int
    from_step: int
    to_step: int
    vocabulary: ShardTimes | None = None

    @property
    def total_ns(self) -> tuple[int, ...]:
        """Forward plus backward time of each item."""
        return tuple(map(sum, zip(self.forward_ns, self.backward_input_ns, self.backward_weight_ns, strict=True)))


def median(values: Sequence[int]) -> int:
    """The median; of an even number of values, the mean of the middle two, rounded down."""
    ordered = sorted(values)
    middle = len(ordered) // 2
    return ordered[middle] if len(ordered) % 2 else (ordered[middle - 1] + ordered[middle]) // 2


def normal_speed(samples: Samples, speeds_ppm: Sequence[int]) -> Samples:
    """The samples at normal speed: time measured on a worker of half the speed counts half.

    Args:
        samples: per item, in ns; None is not sampled.
        speeds_ppm: per item, the speed of its worker in parts per million.
    """
    return tuple(
        None if ns is None else ns * speed // SPEED_UNIT for ns, speed in zip(samples, speeds_ppm, strict=True)
    )


class CostWindow:
    """The last step records of a run, and the last known sample of each item.

    ``expire`` clears both when events make earlier costs void. ``renew`` starts a new window, but keeps the last
    known samples of items that the new window has not sampled yet.
    """

    def __init__(self, items: int, size: int) -> None:
        """``items`` is the length of every sample list; ``size`` the maximum number of records in the window."""
        self._items = items
        self._records: deque[Step] = deque(maxlen=size)
        self._known: dict[str, list[int | None]] = {}

    def __len__(self) -> int:
        """The number of records in the window."""
        return len(self._records)

    @property
    def records(self) -> tuple[Step, ...]:
        """The records in the window, oldest first."""
        return tuple(self._records)

    def expire(self) -> None:
        """Clear everything, because the model changed."""
        self._records.clear()
        self._known.clear()

    def renew(self) -> None:
        """Start a new window, because the partition changed but not the model."""
        self._records.clear()

    def add(self, step: Step) -> None:
        """Add the next record."""
        self._records.append(step)
        for name in ("forward_ns", "activation_bytes", "backward_ns", "backward_input_ns", "backward_weight_ns"):
            samples = getattr(step, name)
            if samples is not None:
                known = self._known.setdefault(name, [None] * self._items)
                for index, sample in enumerate(samples):
                    if sample is not None:
                        known[index] = sample

    def _medians(self, name: str, records: Sequence[Step]) -> Samples:
        columns = [samples for record in records if (samples := getattr(record, name)) is not None]
        known = self._known.get(name, [None] * self._items)
        # The usual case of an analytic profile, which has one record; it needs no sort per item.
        if len(columns) == 1:
            return tuple(carried if value is None else value for value, carried in zip(columns[0], known, strict=True))
        result = []
        for index, carried in enumerate(known):
            known_values = [value for column in columns if (value := column[index]) is not None]
            result.append(median(known_values) if known_values else carried)
        return tuple(result)

    def unsampled(self) -> int:
        """The number of items without a known forward or backward time."""
        names = [name for name in ("backward_ns", "backward_input_ns", "backward_weight_ns") if name in self._known]
        lists = [self._known.get("forward_ns", [None] * self._items), *(self._known[name] for name in names)]
        return sum(any(column[i] is None for column in lists) for i in range(self._items))

    def works(self, speeds_ppm: Sequence[int]) -> list[tuple[int, ...]]:
        """Forward plus backward time of each item in each record of the window; gaps have the last known sample."""
        known: list[int] | None = None
        result = []
        for record in self._records:
            if record.backward_ns is not None:
                backward: tuple[Samples, ...] = (record.backward_ns,)
            else:
                backward = (record.backward_input_ns or (), record.backward_weight_ns or ())
            work = [_total(*parts) for parts in zip(record.forward_ns, *backward, strict=True)]
            # Items that the first record does not sample start with their newest value: an older one is not stored,
            # and 0 would look like a cost change.
            if known is None:
                names = ("forward_ns", "backward_ns", "backward_input_ns", "backward_weight_ns")
                columns = [self._known[name] for name in names if name in self._known]
                known = [sum(value or 0 for value in values) for values in zip(*columns, strict=True)]
            known = [last if value is None else value for value, last in zip(work, known, strict=True)]
            pairs = zip(known, speeds_ppm, strict=True)
            result.append(tuple(value * speed // SPEED_UNIT for value, speed in pairs))
        return result

    def costs(self, speeds_ppm: Sequence[int] | None = None) -> ItemCosts | None:
        """The costs, or None while an item has no sample.

        Args:
            speeds_ppm: speed of the worker that each item was measured on; default: normal.
        """
        records = list(self._records)
        if not records or self.unsampled():
            return None
        split = records[-1].backward_ns is None
        names = ("backward_input_ns", "backward_weight_ns") if split else ("backward_ns",)
        times = [self._medians(name, records) for name in ("forward_ns", *names)]
        if any(None in column for column in times):
            return None  # the run changed between split and full backward passes within the window
        if speeds_ppm is not None:
            times = [normal_speed(column, speeds_ppm) for column in times]
        forward, first, second = (*times, (0,) * self._items)[:3]
        # A trainer without memory statistics writes null; memory limits are then those of parameters and state alone.
        activation = tuple(value or 0 for value in self._medians("activation_bytes", records))
        return ItemCosts(
            forward_ns=_certain(forward),
            backward_input_ns=_certain(first),
            backward_weight_ns=_certain(second),
            activation_bytes=activation,
            split=split,
            records=len(records),
            from_step=records[0].step,
            to_step=records[-1].step,
            vocabulary=measured_times(records),
        )


def _total(forward: int | None, *backward: int | None) -> int | None:
    parts = [value for value in backward if value is not None]
    return None if forward is None or len(parts) < len(backward) else forward + sum(parts)


def _certain(samples: Samples) -> tuple[int, ...]:
    return tuple(value for value in samples if value is not None)


def scaled(costs: ItemCosts, factors: Sequence[float], kinds: tuple[str, ...] = ("forward", "backward")) -> ItemCosts:
    """The costs with the times of each item multiplied by its factor, rounded to whole nanoseconds.

    Args:
        costs: of all items.
        factors: one per item.
        kinds: the passes whose times change.
    """

    def times(values: tuple[int, ...]) -> tuple[int, ...]:
        return tuple(round(value * factor) for value, factor in zip(values, factors, strict=True))

    if "forward" in kinds:
        costs = replace(costs, forward_ns=times(costs.forward_ns))
    if "backward" in kinds:
        costs = replace(
            costs,
            backward_input_ns=times(costs.backward_input_ns),
            backward_weight_ns=times(costs.backward_weight_ns),
        )
    return costs


SPLIT_SCHEDULES = ("zero-bubble", "zb-v", "dualpipe-v", "custom")
"""The schedules with a separate operation for the weight gradient."""


def split_in_half(costs: ItemCosts) -> ItemCosts:
    """Costs with half of a backward pass that was measured whole as the weight gradient."""
    # The two gradients of a matrix product take the same number of operations, ``2 b s n`` (``analytic``). The odd
    # nanosecond goes to the input gradient, so that the sum is exact.
    halves = [backward // 2 for backward in costs.backward_input_ns]
    rest = tuple(b - h for b, h in zip(costs.backward_input_ns, halves, strict=True))
    return replace(costs, backward_input_ns=rest, backward_weight_ns=tuple(halves), split=True)


def costs_for(schedule: str, costs: ItemCosts) -> ItemCosts:
    """The costs for a schedule: if it splits the backward pass, a backward time measured whole is divided in half."""
    return costs if costs.split or schedule not in SPLIT_SCHEDULES else split_in_half(costs)


def speed_ppm(relative_speed: float) -> int:
    """``relative_speed``, a factor of the normal speed, in parts per million; at least 1, as times divide by it."""
    return max(1, round(relative_speed * SPEED_UNIT))


def speeds_of_items(header: Header, owner: dict[str, int]) -> tuple[int, ...]:
    """The speed of each item's worker in parts per million, for ``normal_speed``."""
    speeds = {worker.worker: speed_ppm(worker.relative_speed) for worker in header.workers}
    return tuple(speeds.get(owner.get(item.name, -1), SPEED_UNIT) for item in header.items)
