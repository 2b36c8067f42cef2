"""From the step records of a profile to one integer cost per item: the median of a window, gaps carried forward."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, replace

from ..formats.profile import Header, Samples, Step

SPEED_UNIT = 1_000_000
"""Speeds are integer parts in a million of the normal speed, so that solvers stay exact."""


@dataclass(frozen=True, kw_only=True)
class ItemCosts:
    """What each item costs in one microbatch on a worker of normal speed, in the header's order.

    Where the profile does not split the backward, ``split`` is false, ``backward_input_ns`` holds all of it and
    ``backward_weight_ns`` is zero.
    """

    forward_ns: tuple[int, ...]
    backward_input_ns: tuple[int, ...]
    backward_weight_ns: tuple[int, ...]
    activation_bytes: tuple[int, ...]
    split: bool
    records: int
    from_step: int
    to_step: int

    @property
    def total_ns(self) -> tuple[int, ...]:
        """Forward and backward of each item together."""
        return tuple(map(sum, zip(self.forward_ns, self.backward_input_ns, self.backward_weight_ns, strict=True)))


def median(values: Sequence[int]) -> int:
    """The median, of an even number the lower-rounded mean of the middle two."""
    ordered = sorted(values)
    middle = len(ordered) // 2
    return ordered[middle] if len(ordered) % 2 else (ordered[middle - 1] + ordered[middle]) // 2


def normal_speed(samples: Samples, speeds_ppm: Sequence[int]) -> Samples:
    """What the samples would be at normal speed: an item measured on a worker of half the speed counts half."""
    return tuple(
        None if ns is None else ns * speed // SPEED_UNIT for ns, speed in zip(samples, speeds_ppm, strict=True)
    )


class CostWindow:
    """The last records of a run, and of each item the last known sample.

    ``expire`` is for events that make earlier costs void; ``renew`` starts a new window but keeps what is known of
    items that the new window has not sampled yet.
    """

    def __init__(self, items: int, size: int) -> None:
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
        """Forget everything: the model changed."""
        self._records.clear()
        self._known.clear()

    def renew(self) -> None:
        """Start a new window: the partition changed, the model did not."""
        self._records.clear()

    def add(self, step: Step) -> None:
        """Take in the next record."""
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
        if len(columns) == 1:
            return tuple(carried if value is None else value for value, carried in zip(columns[0], known, strict=True))
        result = []
        for index, carried in enumerate(known):
            known_values = [value for column in columns if (value := column[index]) is not None]
            result.append(median(known_values) if known_values else carried)
        return tuple(result)

    def unsampled(self) -> int:
        """The number of items of which no forward or backward time is known yet."""
        names = [name for name in ("backward_ns", "backward_input_ns", "backward_weight_ns") if name in self._known]
        lists = [self._known.get("forward_ns", [None] * self._items), *(self._known[name] for name in names)]
        return sum(any(column[i] is None for column in lists) for i in range(self._items))

    def works(self, speeds_ppm: Sequence[int]) -> list[tuple[int, ...]]:
        """Forward and backward of each item in each record of the window; gaps are the last known sample."""
        known: list[int] | None = None
        result = []
        for record in self._records:
            if record.backward_ns is not None:
                backward: tuple[Samples, ...] = (record.backward_ns,)
            else:
                backward = (record.backward_input_ns or (), record.backward_weight_ns or ())
            work = [_total(*parts) for parts in zip(record.forward_ns, *backward, strict=True)]
            if known is None:
                names = ("forward_ns", "backward_ns", "backward_input_ns", "backward_weight_ns")
                columns = [self._known[name] for name in names if name in self._known]
                known = [sum(value or 0 for value in values) for values in zip(*columns, strict=True)]
            known = [last if value is None else value for value, last in zip(work, known, strict=True)]
            pairs = zip(known, speeds_ppm, strict=True)
            result.append(tuple(value * speed // SPEED_UNIT for value, speed in pairs))
        return result

    def costs(self, speeds_ppm: Sequence[int] | None = None, parity: int | None = None) -> ItemCosts | None:
        """The costs, or None while some item has no sample.

        Args:
            speeds_ppm: the speed of the worker that each item was measured on; normal where not given.
            parity: 0 or 1 to use only every second record, for out-of-sample checks.
        """
        records = [r for i, r in enumerate(self._records) if parity is None or i % 2 == parity]
        if not records or self.unsampled():
            return None
        split = records[-1].backward_ns is None
        names = ("backward_input_ns", "backward_weight_ns") if split else ("backward_ns",)
        times = [self._medians(name, records) for name in ("forward_ns", *names)]
        if any(None in column for column in times):
            return None  # the run changed from split to whole backward within the window
        if speeds_ppm is not None:
            times = [normal_speed(column, speeds_ppm) for column in times]
        forward, first, second = (*times, (0,) * self._items)[:3]
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
        )


def _total(forward: int | None, *backward: int | None) -> int | None:
    parts = [value for value in backward if value is not None]
    return None if forward is None or len(parts) < len(backward) else forward + sum(parts)


def _certain(samples: Samples) -> tuple[int, ...]:
    return tuple(value for value in samples if value is not None)


def scaled(costs: ItemCosts, factors: Sequence[float], kinds: tuple[str, ...] = ("forward", "backward")) -> ItemCosts:
    """The costs with each item's times multiplied by its factor, rounded to whole nanoseconds."""

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


SPLIT_SCHEDULES = ("zero-bubble", "zb-v", "custom")
"""The schedules that do the weight gradient as an operation of its own."""


def split_in_half(costs: ItemCosts) -> ItemCosts:
    """Costs whose backward was measured whole, with half of it taken for the weight gradient."""
    halves = [backward // 2 for backward in costs.backward_input_ns]
    rest = tuple(b - h for b, h in zip(costs.backward_input_ns, halves, strict=True))
    return replace(costs, backward_input_ns=rest, backward_weight_ns=tuple(halves), split=True)


def costs_for(schedule: str, costs: ItemCosts) -> ItemCosts:
    """The costs as a schedule needs them: one that splits the backward takes half of a whole one for each part."""
    return costs if costs.split or schedule not in SPLIT_SCHEDULES else split_in_half(costs)


def speed_ppm(relative_speed: float) -> int:
    """A relative speed as an integer, at least one part in a million."""
    return max(1, round(relative_speed * SPEED_UNIT))


def speeds_of_items(header: Header, owner: dict[str, int]) -> tuple[int, ...]:
    """The speed of the worker that each item is on, for ``normal_speed``."""
    speeds = {worker.worker: speed_ppm(worker.relative_speed) for worker in header.workers}
    return tuple(speeds.get(owner.get(item.name, -1), SPEED_UNIT) for item in header.items)
