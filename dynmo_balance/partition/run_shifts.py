"""The best shift of a run of neighboring cuts, without the loads of each candidate.

With ``S`` stages there are about ``S^2`` runs. A shift of the cuts ``first`` to ``last`` changes one end of the stages
``first - 1`` and ``last``, and both ends of the stages between them. So the loads of the workers are the sum of a row
that depends on ``first`` and a row that depends on ``last``, both made of prefix sums over the stages::

    loads[first, last] = from_first[first] + to_last[last]

A candidate is left out at the first worker, the slowest first, that is not faster than the slowest is now.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    from .interleaved import WorkerLoads

Array = npt.NDArray[np.int64]
Worth = tuple[int, int, float]
"""Bytes above the memory limits, time of the slowest worker in ns, sum of the squares of all times; less is better."""
BLOCK = 256
"""Number of partitions whose memory is compared with the limits at a time."""


@dataclass(frozen=True, kw_only=True, eq=False)
class _Shifts:
    """Runs of cuts shifted by the same number of units.

    Attributes:
        shift: in units.
        from_first, to_last: ``[workers, stages - 1]``, the two summands of the loads for each cut.
        first, last: ``[runs]``, indices of the first and the last cut of each run, from 0 for the first inner cut.
    """

    shift: int
    from_first: Array
    to_last: Array
    first: Array
    last: Array


def best_shift(loads: WorkerLoads, cuts: Array, worth: Worth, reach: int = 3) -> tuple[Worth, Array] | None:
    """The best partition with one cut shifted by up to ``reach``, or a run of cuts by one; None if none is better.

    It is the first of the best among ``interleaved.neighbors``.

    Args:
        loads: of the problem.
        cuts: ``[stages + 1]`` cut indices of a permitted partition within the memory limits.
        worth: of these cuts.
        reach: maximum shift of a single cut, in units.
    """
    _, slowest, squares = worth
    tables = [_shifts(loads, cuts, sign * by, runs=by == 1) for by in range(1, reach + 1) for sign in (-1, 1)]
    times = loads.times(cuts[None, :])[0]
    # First what makes the slowest worker faster; only if nothing does, what makes others more even.
    faster = [_reduced(each, times, slowest - 1) for each in tables]
    for limit in np.unique(np.concatenate([most for _, _, most in faster])):
        chosen = [(first[most == limit], last[most == limit]) for first, last, most in faster]
        for found in _by_squares(loads, cuts, tables, chosen, np.inf):
            return (0, int(limit), found[0]), found[1]
    even = [_reduced(each, times, slowest) for each in tables]
    for found in _by_squares(loads, cuts, tables, [(first, last) for first, last, _ in even], squares):
        return (0, slowest, found[0]), found[1]
    return None


def _shifts(loads: WorkerLoads, cuts: Array, shift: int, *, runs: bool) -> _Shifts:
    """The permitted shifts by ``shift`` units; of single cuts, or with ``runs`` of runs of cuts, too."""
    limits, stages = loads.limits, len(cuts) - 1
    moved = cuts.copy()
    moved[1:-1] = np.clip(cuts[1:-1] + shift, 0, limits.units)
    load = np.array(limits.load, dtype=np.int64)
    now, then = load[cuts], load[moved]
    before = loads.stage_times(now[1:] - now[:-1])
    end, both, begin = (
        loads.stage_times(work) - before for work in (then[1:] - now[:-1], then[1:] - then[:-1], now[1:] - then[:-1])
    )
    positions, inner = np.array(loads.positions), np.arange(stages - 1)

    def on_workers(values: Array) -> Array:
        """``[stages]`` as ``[stages, workers]``, each on its worker."""
        result = np.zeros((stages, loads.workers), dtype=np.int64)
        result[np.arange(stages), positions] = values
        return result

    # Up to a cut, the sum of the changes of the stages before it that are shifted at both ends.
    sums = np.cumsum(on_workers(both), axis=0)[:-1]
    from_first = loads.times(cuts[None, :]) + on_workers(end)[:-1] - sums
    to_last = sums + on_workers(begin)[1:]
    low, high = (np.array(each)[1:-1] for each in (limits.lowest, limits.highest))
    target = cuts[1:-1] + shift
    outside = np.flatnonzero((target < low) | (target > high))
    # A run ends before the next cut that may not be shifted.
    stop = np.append(outside, stages - 1)[np.searchsorted(outside, inner)]
    sizes = np.diff(cuts)
    can_begin = np.flatnonzero((sizes[:-1] + shift >= limits.min_units) & (stop > inner))
    can_end = sizes[1:] - shift >= limits.min_units
    stop = stop if runs else np.minimum(stop, inner + 1)
    first = np.repeat(can_begin, stop[can_begin] - can_begin)
    last = np.concatenate([np.arange(at, stop[at]) for at in can_begin]) if len(can_begin) else first
    return _Shifts(
        shift=shift,
        from_first=np.ascontiguousarray(from_first.T),
        to_last=np.ascontiguousarray(to_last.T),
        first=first[can_end[last]],
        last=last[can_end[last]],
    )


def _reduced(shifts: _Shifts, times: Array, most_ns: int) -> tuple[Array, Array, Array]:
    """The runs after whose shift no worker takes more than ``most_ns``: first and last cut, and the slowest worker."""
    first, last = shifts.first, shifts.last
    slowest = np.zeros(len(first), dtype=np.int64)
    for worker in np.argsort(-times, kind="stable"):
        slowest = np.maximum(slowest, shifts.from_first[worker, first] + shifts.to_last[worker, last])
        is_within = slowest <= most_ns
        if not is_within.all():
            first, last, slowest = first[is_within], last[is_within], slowest[is_within]
    return first, last, slowest


def _by_squares(
    loads: WorkerLoads, cuts: Array, tables: list[_Shifts], runs: list[tuple[Array, Array]], below: float
) -> Iterator[tuple[float, Array]]:
    """The partitions within the memory limits, the least sum of squares below ``below`` first, and that sum."""
    squares = []
    for table, (first, last) in zip(tables, runs, strict=True):
        parts = [slice(at, at + BLOCK) for at in range(0, len(first), BLOCK)]
        # Squares of ns overflow int64 above 3 s; they only break ties of the slowest worker, so float64 is precise
        # enough.
        squares += [
            (
                np.ascontiguousarray((table.from_first[:, first[at]] + table.to_last[:, last[at]]).T).astype(np.float64)
                ** 2
            ).sum(axis=1)
            for at in parts
        ]
    every = np.concatenate(squares) if squares else np.zeros(0)
    first, last = (np.concatenate([run[at] for run in runs]) for at in (0, 1))
    table_of = np.repeat(np.arange(len(tables)), [len(run[0]) for run in runs])
    chosen = np.flatnonzero(every < below)
    # Of equals, the first among ``interleaved.neighbors``: by the first cut, the last cut, the shift.
    chosen = chosen[np.lexsort((table_of[chosen], last[chosen], first[chosen], every[chosen]))]
    index = np.arange(len(cuts))[None, :]
    shift = np.array([table.shift for table in tables])[table_of]
    for at in range(0, len(chosen), BLOCK):
        block = chosen[at : at + BLOCK]
        inside = (index > first[block, None]) & (index <= last[block, None] + 1)
        candidates = cuts + inside * shift[block, None]
        for row in np.flatnonzero(loads.excess_bytes(candidates) == 0):
            yield float(every[block[row]]), candidates[row]
