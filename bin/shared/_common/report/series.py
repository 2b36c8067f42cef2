"""Bounded series: whatever the length of a run, a chart has at most ``MAX_POINTS`` points or ``MAX_COLUMNS`` columns.

``Track`` stores one number per step. ``Columns`` stores vectors (a cost per layer) in columns of several steps: when
all columns are in use, neighbors are merged in pairs, so memory is bounded while the file is read once, line by line.
Both forget what comes after a step that is recorded again, as after a resume from an older checkpoint.
"""

from __future__ import annotations

import math
from array import array
from bisect import bisect_left
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

MAX_POINTS = 600
"""Points of a line."""
MAX_COLUMNS = 300
"""Columns of a heat map."""

Values = list[float | None]


class Track:
    """A number per step, in the order of steps."""

    def __init__(self) -> None:
        self.steps = array("q")
        self.values = array("d")

    def __len__(self) -> int:
        """The number of steps."""
        return len(self.steps)

    def add(self, step: int, value: float) -> None:
        """Record a value; what was recorded for this and later steps is dropped."""
        self.resume(step)
        self.steps.append(step)
        self.values.append(value)

    def resume(self, step: int) -> None:
        """Drop the values of this step and of later ones."""
        if self.steps and step <= self.steps[-1]:
            at = bisect_left(self.steps, step)
            del self.steps[at:], self.values[at:]

    def mean(self, first: int, last: int) -> float | None:
        """The mean of the values at positions ``first`` to ``last``, exclusive; None without any."""
        values = self.values[first:last]
        return math.fsum(values) / len(values) if values else None


class Columns:
    """The mean of a vector over each range of steps, at most ``limit`` ranges.

    Args:
        limit: maximum number of columns.
    """

    def __init__(self, limit: int = MAX_COLUMNS) -> None:
        self.limit = limit
        self.first: int | None = None
        self.width = 1
        self.sums: list[list[float]] = []
        self.counts: list[list[int]] = []

    @property
    def rows(self) -> int:
        """The length of the longest vector."""
        return max(map(len, self.sums), default=0)

    def add(self, step: int, vector: Sequence[float | None]) -> None:
        """Add the vector of a step; None is "not measured"."""
        if self.first is None or step < self.first:
            self.first, self.width, self.sums, self.counts = step, 1, [], []
        while (at := (step - self.first) // self.width) >= self.limit:
            self._merge()
        while len(self.sums) <= at:
            self.sums.append([])
            self.counts.append([])
        sums, counts = self.sums[at], self.counts[at]
        if len(sums) < len(vector):
            missing = len(vector) - len(sums)
            sums.extend([0.0] * missing)
            counts.extend([0] * missing)
        for row, value in enumerate(vector):
            if value is not None:
                sums[row] += value
                counts[row] += 1

    def resume(self, step: int) -> None:
        """Drop the columns that contain this step or later ones."""
        if self.first is not None:
            at = max(0, (step - self.first) // self.width)
            del self.sums[at:], self.counts[at:]

    def _merge(self) -> None:
        self.width *= 2
        self.sums = [_added(self.sums[at : at + 2]) for at in range(0, len(self.sums), 2)]
        self.counts = [[int(n) for n in _added(self.counts[at : at + 2])] for at in range(0, len(self.counts), 2)]

    def means(self) -> list[Values]:
        """The vectors of all columns; a column without a measurement is empty.

        Columns narrower than the distance of recorded steps, such as ten, would be empty in between: they are merged.
        """
        recorded = sum(max(counts, default=0) for counts in self.counts)
        distance = len(self.counts) * self.width / max(1, recorded)
        while len(self.sums) > 2 and self.width + 0.5 <= distance:
            self._merge()
        rows = self.rows
        result: list[Values] = []
        for sums, counts in zip(self.sums, self.counts, strict=True):
            means: Values = [total / n if n else None for total, n in zip(sums, counts, strict=True)]
            result.append(means + [None] * (rows - len(means)) if any(counts) else [None] * rows)
        return result


def _added(pair: Sequence[Sequence[float]]) -> list[float]:
    if len(pair) == 1:
        return list(pair[0])
    long, short = sorted(pair, key=len, reverse=True)
    return [value + (short[at] if at < len(short) else 0) for at, value in enumerate(long)]


@dataclass(frozen=True, kw_only=True)
class Lines:
    """Several series over one list of steps.

    Attributes:
        steps: the steps, or the middles of ranges of ``width`` steps.
        width: steps per point.
        means: name to values.
        least, most: the extremes of each range; empty where a point is one step.
    """

    steps: list[float]
    width: int
    means: Mapping[str, Values]
    least: Mapping[str, Values]
    most: Mapping[str, Values]


def joined(tracks: Mapping[str, Track], limit: int = MAX_POINTS) -> Lines:
    """The tracks over their common steps, reduced to at most ``limit`` points."""
    all_steps = sorted(set().union(*(track.steps for track in tracks.values())))
    if not all_steps:
        return Lines(steps=[], width=1, means={name: [] for name in tracks}, least={}, most={})
    first = all_steps[0]
    width = 1 if len(all_steps) <= limit else -(-(all_steps[-1] - first + 1) // limit)
    if width == 1:
        index = {step: at for at, step in enumerate(all_steps)}
        return Lines(
            steps=[float(step) for step in all_steps],
            width=1,
            means={name: _placed(track, index) for name, track in tracks.items()},
            least={},
            most={},
        )
    count = (all_steps[-1] - first) // width + 1
    means, least, most = {}, {}, {}
    for name, track in tracks.items():
        bins: list[list[float]] = [[] for _ in range(count)]
        for step, value in zip(track.steps, track.values, strict=True):
            bins[(step - first) // width].append(value)
        means[name] = [math.fsum(values) / len(values) if values else None for values in bins]
        least[name] = [min(values, default=None) for values in bins]
        most[name] = [max(values, default=None) for values in bins]
    steps = [first + (at + 0.5) * width - 0.5 for at in range(count)]
    return Lines(steps=steps, width=width, means=means, least=least, most=most)


def _placed(track: Track, index: Mapping[int, int]) -> Values:
    values: Values = [None] * len(index)
    for step, value in zip(track.steps, track.values, strict=True):
        values[index[step]] = value
    return values


def significant(values: Iterable[float | None], digits: int = 4) -> Values:
    """The values with this number of significant digits: what a chart shows, in fewer bytes."""
    result: Values = []
    for value in values:
        if value is None or not math.isfinite(value):
            result.append(None)
        elif value == 0:
            result.append(0)
        else:
            rounded = round(value, digits - 1 - math.floor(math.log10(abs(value))))
            result.append(int(rounded) if float(rounded).is_integer() else rounded)
    return result


def row_groups(names: Sequence[str], groups: Sequence[str], limit: int) -> list[tuple[str, int, int]]:
    """Rows of a heat map: name, first element and end of each, at most ``limit``.

    Args:
        names: name of each element of a vector.
        groups: name of the group that an element belongs to, such as its layer; the elements of a group are neighbors.
        limit: maximum number of rows. Above it elements become groups, and then neighboring groups are merged.
    """
    rows = [(name, at, at + 1) for at, name in enumerate(names)]
    if len(rows) > limit:
        rows = []
        for at, group in enumerate(groups):
            if rows and rows[-1][0] == group:
                rows[-1] = (group, rows[-1][1], at + 1)
            else:
                rows.append((group, at, at + 1))
    size = -(-len(rows) // limit) if rows else 1
    if size == 1:
        return rows
    merged = [rows[at : at + size] for at in range(0, len(rows), size)]
    return [(f"{each[0][0]} to {each[-1][0]}", each[0][1], each[-1][2]) for each in merged]
