"""Feasible cuts: the set of positions at which stage ``p`` can end, represented as a few intervals.

If stages may be empty, the furthest greedy end answers this. If every stage must contain a unit it does not: a later
stage may be unable to contain one particular unit, so an earlier stage must stop before it::

    units           0    1    2    3    4    5            stage 1 cannot contain unit 3 (memory)
    starts of 1         [1 ............ 5]                where stage 0 can end
    feasible            [1 .. 2]   [4 .. 5]               without a start at unit 3
    ends of 1                [2, 3]     [5 ...]           intervals again: a run of starts has a run of ends

The last line holds because work and memory only grow with a stage: the ends of neighboring feasible starts overlap or
adjoin. So a few intervals represent the exact set.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Sequence
from functools import cached_property
from itertools import pairwise

from .constraints import Limits

Interval = tuple[int, int]


def reachable_cuts(
    limits: Limits, bottleneck: int, oversize: OversizedUnits
) -> tuple[list[list[Interval]], int | None]:
    """For each ``p`` the cuts at which ``p`` stages can end within the bottleneck, as closed intervals.

    Returns:
        the intervals, and the least larger bottleneck in ns at which any of these sets could differ (None: no larger
        one changes them).
    """
    sets: list[list[Interval]] = [[(0, 0)]]
    following: int | None = None
    for stage in range(limits.stages):
        work = limits.slots[stage].work_ns(bottleneck)
        high = limits.highest[stage + 1]
        found: list[Interval] = []
        for first, last in _feasible_starts(limits, oversize, sets[-1], stage, work):
            # Both ends of the run move right with its starts, so its first start has the first end, its last the last.
            start = max(first + limits.min_units, limits.lowest[stage + 1])
            end = min(limits.latest_end(stage, last, work), high)
            if end < high:
                following = _least(following, limits.time_ns(stage, last, end + 1), bottleneck)
            if start > end:
                continue
            if found and start <= found[-1][1] + 1:
                found[-1] = (found[-1][0], max(found[-1][1], end))
            else:
                found.append((start, end))
        heavier = oversize.next_load(work)
        if heavier is not None:
            following = _least(following, limits.slots[stage].time_ns(heavier), bottleneck)
        sets.append(found)
        if not found:
            break
    return sets, following


def _least(known: int | None, value: int, above: int) -> int | None:
    return value if value > above and (known is None or value < known) else known


class OversizedUnits:
    """The units that are too heavy for a stage on their own; they are sorted once, on the first query."""

    def __init__(self, limits: Limits) -> None:
        self._limits = limits

    @cached_property
    def _loads(self) -> list[tuple[int, int]]:
        return sorted((b - a, unit) for unit, (a, b) in enumerate(pairwise(self._limits.load)))

    @cached_property
    def _static(self) -> int:
        return max((b - a for a, b in pairwise(self._limits.static)), default=0)

    @cached_property
    def _activation(self) -> int:
        return max((b - a for a, b in pairwise(self._limits.activation)), default=0)

    def next_load(self, work: int) -> int | None:
        """The work in ns of the lightest unit that is heavier than ``work``."""
        at = bisect_right(self._loads, (work, self._limits.units))
        return self._loads[at][0] if at < len(self._loads) else None

    def units(self, stage: int, work: int) -> list[int]:
        """The units that the stage cannot contain within ``work`` ns or its memory, in order."""
        limits = self._limits
        found = {unit for _, unit in self._loads[bisect_right(self._loads, (work, limits.units)) :]}
        cap = limits.slots[stage].memory_bytes
        # The two maxima may belong to different units. Only if their sum exceeds the limit can a unit exceed it; then
        # each unit is checked.
        if cap is not None and self._static + limits.in_flight[stage] * self._activation > cap:
            found.update(unit for unit in range(limits.units) if not limits.fits(stage, unit, unit + 1))
        return sorted(found)


def _feasible_starts(
    limits: Limits, oversize: OversizedUnits, starts: list[Interval], stage: int, work: int
) -> Iterator[Interval]:
    """The starts from which the stage can contain its minimum number of units, as runs without gaps.

    From a run ``[x, y]`` of starts, the reachable ends are all of ``[x + min_units, latest_end(y)]``.
    """
    if limits.min_units == 0:
        yield from starts
        return
    bad = oversize.units(stage, work)
    for first, last in starts:
        last = min(last, limits.units - limits.min_units)
        # A stage of one unit is blocked by units that are too large, which are sorted once for all stages. More units
        # per stage are rare, and each start is checked.
        if limits.min_units > 1:
            blocked: Sequence[int] = [
                begin
                for begin in range(first, last + 1)
                if limits.latest_end(stage, begin, work) < begin + limits.min_units
            ]
        else:
            blocked = bad[bisect_left(bad, first) : bisect_right(bad, last)]
        for hole in blocked:
            if first < hole:
                yield first, hole - 1
            first = hole + 1
        if first <= last:
            yield first, last


def reaches_end(limits: Limits, sets: list[list[Interval]]) -> bool:
    """Whether all stages together reach the last cut."""
    return len(sets) == limits.stages + 1 and any(a <= limits.units <= b for a, b in sets[-1])


def partition_from_sets(limits: Limits, sets: list[list[Interval]], bottleneck: int) -> tuple[int, ...]:
    """A partition within the bottleneck, built backwards; each stage begins as late as possible."""
    cuts = [limits.units]
    for stage in range(limits.stages - 1, -1, -1):
        end = cuts[-1]
        first = limits.earliest_begin(stage, end, limits.slots[stage].work_ns(bottleneck))
        last = end - limits.min_units
        cuts.append(next(min(b, last) for a, b in reversed(sets[stage]) if a <= last and min(b, last) >= first))
    return tuple(reversed(cuts))
