"""Several stages per worker: balance the sums over the workers, not the stages.

With ``v`` stages per worker, a load is the sum of ``v`` runs of the chain, so the exact solver of the chain does not
apply.

* In a V (worker ``p`` has the ``p``-th run from the front and the ``p``-th from the back), a table over the front cut
  gives the least bottleneck: of all assignments of the front up to a cut, the one that has assigned most of the back
  is best. If stages must not be empty this is a bound; where it is not reached, a table over both cuts is exact.
* Looped, the search starts from the exact partition into ``P v`` stages. It shifts runs of neighboring cuts as long
  as the slowest worker, or else the sum of squares, decreases. This is a heuristic; its bound is work over workers and
  the heaviest unit.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate, pairwise
from typing import Any

import numpy as np
import numpy.typing as npt

from ..costs.cost_window import SPEED_UNIT
from ..formats.plan import V_SCHEDULES
from .constraints import Limits, make_limits
from .exact import Solution, infeasibility_reason, minimize_bottleneck, simple_lower_bound
from .problem import InfeasibleError, PartitionProblem, check_size
from .run_shifts import best_shift

Array = npt.NDArray[np.int64]
MAX_ROUNDS = 300
"""Maximum number of improvements of a descent; each is strict, so it usually ends earlier."""
MAX_RUN_CUTS = 129
"""Most cuts of which all runs are tried by their partitions: 16,000 of 128 stages, 17 MB. Above it, single cuts."""
NUM_PERTURBATIONS = 150
NUM_NEIGHBORS = 600
"""Rounds of random shifts, and candidates per round. A round is a few array operations, so candidates are cheap."""
SHIFTS = (-1, 1, -1, 1, -1, 1, -2, 2, -3, 3)
"""Shifts in units to draw from; repeated ones are more likely."""
MAX_TABLE_CELLS = 4_000_000
"""Largest table of the exact V solver; it has ``workers * units^2`` cells."""
MAX_STAGE_TABLE_WORK = 4_000_000
"""Largest ``workers * units^3`` for which a V whose stages must not be empty is solved exactly; a trial takes 0.1 s."""


@dataclass(frozen=True, kw_only=True)
class WorkerLoads:
    """The limits of a problem with several stages per worker, as arrays.

    Attributes:
        limits: of the stages.
        positions: the index of each stage's worker.
        in_flight_sets: per worker, the combinations of microbatches in flight on its stages; one number per stage.
        extra_ns: per worker, the time in ns per microbatch that it does not have for work.
    """

    limits: Limits
    positions: tuple[int, ...]
    in_flight_sets: tuple[tuple[tuple[int, ...], ...], ...]
    extra_ns: tuple[int, ...] = ()

    @property
    def workers(self) -> int:
        """The number of workers."""
        return len(self.in_flight_sets)

    def times(self, cuts: Array) -> Array:
        """The time in ns of each worker in one microbatch.

        Args:
            cuts: ``[candidates, stages + 1]`` cut indices.

        Returns:
            ``[candidates, workers]``.
        """
        load = np.array(self.limits.load, dtype=np.int64)
        times = self.stage_times(np.diff(load[cuts], axis=1))
        return self._summed(times) + np.array(self.extra_ns or [0] * self.workers, dtype=np.int64)

    def stage_times(self, work: Array) -> Array:
        """The time in ns of each stage on its worker; ``work`` is ``[..., stages]`` in ns on a normal worker."""
        speeds = np.array([slot.speed_ppm for slot in self.limits.slots], dtype=np.int64)
        if (speeds == SPEED_UNIT).all():
            return work
        # ns times parts per million fit into int64 up to 9.2e12 ns, 2.5 hours of work in one microbatch.
        return np.asarray(-(-work * SPEED_UNIT // speeds))

    def excess_bytes(self, cuts: Array) -> Array:
        """The bytes above the workers' memory limits, summed over workers.

        Args:
            cuts: ``[candidates, stages + 1]`` cut indices.

        Returns:
            ``[candidates]``.
        """
        over = np.zeros(len(cuts), dtype=np.int64)
        if not self.limits.static:
            return over
        static = self._summed(np.diff(np.array(self.limits.static, dtype=np.int64)[cuts], axis=1))
        stored = np.diff(self._activation[cuts], axis=1)
        for worker, (stages, counts) in enumerate(self._combinations):
            cap = self.limits.slots[worker].memory_bytes
            if cap is not None:
                # The stages of a worker reach their maxima at different times, so combinations are compared.
                most = np.max(stored[:, stages] @ counts, axis=1).astype(np.int64)
                over += np.maximum(0, static[:, worker] + most - cap)
        return over

    @cached_property
    def _combinations(self) -> tuple[tuple[list[int], npt.NDArray[Any]], ...]:
        """For each worker its stages, and ``[stages, combinations]`` microbatches in flight."""
        stages: list[list[int]] = [[] for _ in range(self.workers)]
        for stage, worker in enumerate(self.positions):
            stages[worker].append(stage)
        dtype = self._activation.dtype
        return tuple(
            (own, np.array(counts, dtype=dtype).T) for own, counts in zip(stages, self.in_flight_sets, strict=True)
        )

    @cached_property
    def _activation(self) -> npt.NDArray[Any]:
        """The prefix sums of activation bytes; as float64 where products with microbatches are exact in it."""
        most = max((sum(each) for counts in self.in_flight_sets for each in counts), default=0)
        # A product of float64 matrices is ten times faster than one of integers.
        is_exact = self.limits.activation[-1] * most < 1 << 53
        return np.array(self.limits.activation, dtype=np.float64 if is_exact else np.int64)

    def _summed(self, of_stages: Array) -> Array:
        result = np.zeros((len(of_stages), self.workers), dtype=np.int64)
        for stage, worker in enumerate(self.positions):
            result[:, worker] += of_stages[:, stage]
        return result


def make_worker_loads(problem: PartitionProblem) -> WorkerLoads:
    """The loads of a problem; also with one stage per worker."""
    return WorkerLoads(
        limits=make_limits(problem),
        positions=problem.positions,
        in_flight_sets=problem.in_flight_sets,
    )


def neighbors(limits: Limits, cuts: Sequence[int], *, runs: bool = True, reach: int = 3) -> Array:
    """All permitted partitions with one cut shifted by up to ``reach``, or (``runs``) a run of neighboring cuts by one.

    Args:
        limits: the constraints.
        cuts: ``[stages + 1]`` cut indices.
        runs: whether to shift runs of neighboring cuts as well.
        reach: maximum shift of a single cut, in units.

    Returns:
        ``[candidates, stages + 1]`` cut indices; memory limits are not checked.
    """
    inner = len(cuts) - 2
    rows = []
    for first in range(1, inner + 1):
        for last in range(first, (inner if runs else first) + 1):
            shifts = range(1, reach + 1) if first == last else (1,)
            rows += [(first, last, sign * shift) for shift in shifts for sign in (-1, 1)]
    found = np.repeat(np.array([cuts], dtype=np.int64), len(rows), axis=0)
    for at, (first, last, shift) in enumerate(rows):
        found[at, first : last + 1] += shift
    return found[is_permitted(limits, found)]


def is_permitted(limits: Limits, cuts: Array) -> npt.NDArray[np.bool_]:
    """Whether partitions satisfy pins and minimum units.

    Args:
        limits: the constraints.
        cuts: ``[candidates, stages + 1]`` cut indices.

    Returns:
        ``[candidates]``.
    """
    low, high = np.array(limits.lowest), np.array(limits.highest)
    inside = ((cuts >= low) & (cuts <= high)).all(axis=1)
    return np.asarray(inside & (np.diff(cuts, axis=1) >= limits.min_units).all(axis=1))


def minimize_worker_loads(loads: WorkerLoads, cuts: Sequence[int]) -> tuple[int, ...]:
    """Cuts that no shift improves: first memory excess, then the slowest worker, then squares."""

    def solve_best(candidates: Array) -> tuple[tuple[int, int, float], int]:
        excess_bytes, times = loads.excess_bytes(candidates), loads.times(candidates)
        # Squares of ns overflow int64 above 3 s; they only break ties of the slowest worker, so float64 is precise
        # enough.
        slowest, squares = times.max(axis=1), (times.astype(np.float64) ** 2).sum(axis=1)
        at = int(np.lexsort((squares, slowest, excess_bytes))[0])
        return (int(excess_bytes[at]), int(slowest[at]), float(squares[at])), at

    now = np.array([cuts], dtype=np.int64)
    worth, _ = solve_best(now)
    for _ in range(MAX_ROUNDS):
        if worth[0] == 0 and is_permitted(loads.limits, now)[0]:
            shifted = best_shift(loads, now[0], worth)
            if shifted is None:
                break
            worth, now = shifted[0], shifted[1][None, :]
            continue
        others = neighbors(loads.limits, [int(cut) for cut in now[0]], runs=now.shape[1] <= MAX_RUN_CUTS)
        if not len(others):
            break
        found, at = solve_best(others)
        if found >= worth:
            break
        worth, now = found, others[at : at + 1]
    return tuple(int(cut) for cut in now[0])


def random_neighbors(random: np.random.Generator, limits: Limits, cuts: Sequence[int]) -> Array:
    """Permitted partitions near ``cuts``, drawn at random: up to three runs of neighboring cuts shifted.

    Args:
        random: the generator.
        limits: the constraints.
        cuts: ``[stages + 1]`` cut indices.

    Returns:
        ``[candidates, stages + 1]`` distinct cut indices; memory limits are not checked.
    """
    stages = len(cuts) - 1
    found = np.repeat(np.array([cuts], dtype=np.int64), NUM_NEIGHBORS, axis=0)
    index = np.arange(stages + 1)[None, :]
    for _ in range(3):
        one, other = random.integers(1, max(2, stages), (2, NUM_NEIGHBORS))
        other = np.where(random.random(NUM_NEIGHBORS) < 0.6, one, other)
        inside: npt.NDArray[np.bool_] = index >= np.minimum(one, other)[:, None]
        inside &= index <= np.maximum(one, other)[:, None]
        found += (inside & (random.random(NUM_NEIGHBORS) < 0.6)[:, None]) * random.choice(SHIFTS, NUM_NEIGHBORS)[
            :, None
        ]
    return np.unique(found[is_permitted(limits, found)], axis=0)


def _perturb(loads: WorkerLoads, cuts: tuple[int, ...], bound: int) -> tuple[int, ...]:
    """Cuts with a faster slowest worker, by random shifts; some that make it slower are accepted on the way."""
    # A fixed seed: the same profile must give the same plan.
    random = np.random.default_rng(0)

    def worth(candidates: Array) -> Array:
        return np.asarray(loads.times(candidates).max(axis=1) + (loads.excess_bytes(candidates) > 0) * (1 << 60))

    now = best = np.array(cuts, dtype=np.int64)
    value = least = int(worth(now[None, :])[0])
    for number in range(NUM_PERTURBATIONS):
        if least <= bound:
            break
        pool = random_neighbors(random, loads.limits, [int(cut) for cut in now])
        if not len(pool):
            break
        values = worth(pool)
        at = int(values.argmin())
        # As in simulated annealing, a slower partition is accepted to leave a local minimum: by up to 10% in the
        # beginning, by nothing in the end.
        if values[at] <= value * (1 + 0.1 * (1 - number / NUM_PERTURBATIONS) * random.random()):
            now, value = pool[at], int(values[at])
        if value < least:
            best, least = now, value
        elif number % 15 == 14:
            now, value = best, least
    return tuple(int(cut) for cut in best)


def solve_interleaved(problem: PartitionProblem) -> Solution:
    """A partition for several stages per worker, with its lower bound.

    Raises:
        UsageError: there are more stages than units.
        InfeasibleError: no partition was found; in a V, none exists.
    """
    check_size(problem)
    loads = make_worker_loads(problem)
    limits = loads.limits
    bound = simple_lower_bound(replace(limits, slots=problem.slots))
    # Memory limits hold for workers, not for stages. So one start ignores them, and the search reduces the excess
    # first.
    starts = [minimize_bottleneck(replace(limits, static=(), activation=()))[1]]
    if problem.schedule in V_SCHEDULES and limits.units**2 * loads.workers <= MAX_TABLE_CELLS:
        bound, best = minimize_v_bottleneck(loads, bound)
        starts += [] if best is None else [best]
    elif limits.static:
        with suppress(InfeasibleError):  # a stage that does not fit may still be shifted to where it does
            starts.append(minimize_bottleneck(limits)[1])
    found = [minimize_worker_loads(loads, cuts) for cuts in starts]
    cuts = min(found, key=lambda c: (int(loads.excess_bytes(np.array([c]))[0]), int(loads.times(np.array([c])).max())))
    if over := int(loads.excess_bytes(np.array([cuts]))[0]):
        raise InfeasibleError(
            f"no partition with {problem.virtual_stages} stages per worker fits the memory limits; the best found"
            f" exceeds them by {over:,} bytes; use more memory, more workers, fewer microbatches or one stage each"
        )
    cuts = _perturb(loads, cuts, bound)
    if problem.current is not None:
        cuts = _minimize_migration(problem, loads, cuts)
    bottleneck = int(loads.times(np.array([cuts])).max())
    positions = problem.chain.cuts
    return Solution(
        boundaries=tuple(positions[cut] for cut in cuts),
        bottleneck_ns=bottleneck,
        lower_bound_ns=bound,
        optimal=bound == bottleneck,
        blocking=(0, 0),
    )


def _minimize_migration(problem: PartitionProblem, loads: WorkerLoads, cuts: tuple[int, ...]) -> tuple[int, ...]:
    """Cuts of the same bottleneck that move fewer bytes from the active partition, by the same shifts."""
    positions, sizes = problem.chain.cuts, problem.chain.move_bytes
    owner = [-1] * len(sizes)
    for stage, (begin, end) in enumerate(problem.current or ()):
        owner[begin:end] = [problem.positions[stage]] * (end - begin)
    stays = np.zeros((loads.workers, len(positions)), dtype=np.int64)
    for worker in range(loads.workers):
        prefix = [0, *accumulate(size + 1 if at == worker else 0 for size, at in zip(sizes, owner, strict=True))]
        stays[worker] = [prefix[position] for position in positions]
    of_stage = np.array(loads.positions)

    def unmoved_bytes(candidates: Array) -> Array:
        return np.asarray((stays[of_stage, candidates[:, 1:]] - stays[of_stage, candidates[:, :-1]]).sum(axis=1))

    now = np.array([cuts], dtype=np.int64)
    limit, best = loads.times(now).max(), unmoved_bytes(now)[0]
    for _ in range(MAX_ROUNDS):
        others = neighbors(loads.limits, [int(cut) for cut in now[0]], runs=now.shape[1] <= MAX_RUN_CUTS)
        if len(others):
            others = others[(loads.times(others).max(axis=1) <= limit) & (loads.excess_bytes(others) == 0)]
        if not len(others) or unmoved_bytes(others).max() <= best:
            break
        at = int(unmoved_bytes(others).argmax())
        now, best = others[at : at + 1], unmoved_bytes(others)[at]
    return tuple(int(cut) for cut in now[0])


def minimize_v_bottleneck(loads: WorkerLoads, low: int) -> tuple[int, tuple[int, ...] | None]:
    """A lower bound of the bottleneck of a V in ns, and cuts that have the least bottleneck that was found.

    The two agree unless stages must not be empty and the table that proves that is larger than
    ``MAX_STAGE_TABLE_WORK``; the cuts may then be None as well.

    Args:
        loads: of the problem.
        low: lower bound of the bottleneck in ns, where the bisection starts.

    Raises:
        InfeasibleError: memory limits or pins rule out every partition.
    """
    limits = loads.limits
    ceiling = max(slot.time_ns(limits.load[-1]) for slot in limits.slots) + 1

    def least(
        from_ns: int, partition: Callable[[int], tuple[int, ...] | None], known: tuple[int, ...] | None = None
    ) -> tuple[int, tuple[int, ...]] | None:
        """The least bottleneck from ``from_ns`` on at which there is a partition, and its cuts; None if none."""
        found = known or partition(ceiling)
        if found is None:
            return None
        below, above = from_ns - 1, int(loads.times(np.array([found])).max())
        trial = from_ns  # often already optimal
        while above - below > 1:
            cuts = partition(trial)
            if cuts is None:
                below = trial
            else:
                found, above = cuts, min(trial, int(loads.times(np.array([cuts])).max()))
            trial = (below + above) // 2
        return above, found

    best = least(low, lambda bottleneck: _v_partition(loads, bottleneck, 0))
    if best is None:
        raise InfeasibleError(infeasibility_reason(limits))
    if limits.min_units == 0 or all(b - a >= limits.min_units for a, b in pairwise(best[1])):
        return best
    # Stages must not be empty: this table then no longer proves anything, because the assignment with most of the back
    # may leave a later stage without a unit. What it finds at the bound is optimal all the same.
    full = least(best[0], lambda bottleneck: _v_partition(loads, bottleneck, limits.min_units))
    if full is not None and full[0] == best[0]:
        return full
    if loads.workers * limits.units**3 > MAX_STAGE_TABLE_WORK:
        return best[0], None if full is None else full[1]
    exact = least(best[0], lambda bottleneck: _v_partition_of_full_stages(loads, bottleneck), full and full[1])
    if exact is None:
        raise InfeasibleError(
            f"no partition with at least {limits.min_units} unit{'s' * (limits.min_units > 1)} per stage fits the"
            " memory limits, one with empty stages does; use --min-layers 0, more memory or more workers"
        )
    return exact


def _v_partition_of_full_stages(loads: WorkerLoads, bottleneck: int) -> tuple[int, ...] | None:
    """Cuts of a V within the bottleneck and the limits with ``min_units`` units per stage; None if there are none.

    A table has for each front cut and each back cut whether the workers so far can have all that is outside of them.
    """
    limits, size = loads.limits, loads.limits.units + 1
    table = np.zeros((size, size), dtype=bool)
    table[0, -1] = True
    tables = [table]
    for worker in range(loads.workers):
        highest = limits.highest[2 * loads.workers - 1 - worker]
        # The back may begin anywhere from the least cut on, so each row adds a run, which is marked at its two ends.
        ends = np.zeros((size, size + 1), dtype=np.int64)
        for first in np.flatnonzero(table.any(axis=1)):
            until = np.flatnonzero(table[first])[:, None]
            down = _earliest_back_cuts(loads, worker, bottleneck, limits.min_units, np.full_like(until, first), until)
            row, front = np.nonzero(down < size)
            np.add.at(ends, (front, down[row, front]), 1)
            np.add.at(ends, (front, np.minimum(until[row, 0] - limits.min_units, highest) + 1), -1)
        table = ends.cumsum(axis=1)[:, :size] > 0
        tables.append(table)
    middle = np.flatnonzero(table.diagonal())
    if not len(middle):
        return None
    left, right = [int(middle[0])], [int(middle[0])]
    for worker in range(loads.workers - 1, -1, -1):
        pairs = np.argwhere(tables[worker])
        pairs = pairs[pairs[:, 1] >= right[-1] + limits.min_units]
        down = _earliest_back_cuts(loads, worker, bottleneck, limits.min_units, pairs[:, :1], pairs[:, 1:])
        begin, end = pairs[np.flatnonzero(down[:, left[-1]] <= right[-1])[0]]
        left.append(int(begin))
        right.append(int(end))
    return (*reversed(left), *right[1:])


def _v_partition(loads: WorkerLoads, bottleneck: int, min_units: int) -> tuple[int, ...] | None:
    """Cuts of a V within the bottleneck and the memory limits, or None.

    ``back[l]`` is the lowest cut down to which the workers so far can have the back if they have the front up to
    ``l``.
    """
    limits, workers = loads.limits, loads.workers
    nowhere = limits.units + 1
    front = np.arange(limits.units + 1)
    # No worker has anything yet: the front up to 0, and the back from the last cut on.
    back = np.where(front == 0, limits.units, nowhere)
    backs, came_from = [back], []
    for worker in range(workers):
        first = np.flatnonzero(back < nowhere)[:, None]
        if not len(first):
            return None
        down = _earliest_back_cuts(loads, worker, bottleneck, min_units, first, back[first])
        best = down.argmin(axis=0)
        came_from.append(first[best, 0])
        back = down[best, front]
        backs.append(back)
    # Where the front that the workers have ends at the begin of their back, all units are assigned.
    middle = np.flatnonzero(back == front)
    if not len(middle):
        return None
    left, right = [int(middle[0])], []
    for worker in range(workers - 1, -1, -1):
        left.append(int(came_from[worker][left[-1]]))
        right.append(int(backs[worker][left[-1]]))
    return (*reversed(left), *right)


def _earliest_back_cuts(
    loads: WorkerLoads, worker: int, bottleneck: int, min_units: int, first: Array, until: Array
) -> Array:
    """For each front ``[first, l)`` of a worker, the least cut from which it can also have the back.

    Args:
        loads: of the problem.
        worker: index of the worker.
        bottleneck: in ns.
        min_units: minimum number of units per stage.
        first: ``[rows, 1]``, the begin of the front that is left.
        until: ``[rows, 1]``, the end of the back that is left.

    Returns:
        ``[rows, units + 1]``, one column for each ``l``; ``units + 1`` where it is impossible.
    """
    limits, load = loads.limits, np.array(loads.limits.load, dtype=np.int64)
    front = np.arange(limits.units + 1)[None, :]
    other = 2 * loads.workers - 1 - worker
    slot = limits.slots[worker]
    spent = -(-(load[front] - load[first]) * SPEED_UNIT // slot.speed_ppm)
    handicap = loads.extra_ns[worker] if loads.extra_ns else 0
    rest = (bottleneck - handicap - spent) * slot.speed_ppm // SPEED_UNIT
    allowed = (front >= first + min_units) & (rest >= 0)
    allowed &= (front >= limits.lowest[worker + 1]) & (front <= limits.highest[worker + 1])
    down = np.maximum(np.searchsorted(load, load[until] - np.maximum(rest, 0)), front)
    down = np.maximum(down, limits.lowest[other])
    if limits.static and slot.memory_bytes is not None:
        static, stored = (np.array(values, dtype=np.int64) for values in (limits.static, limits.activation))
        # Each combination in flight limits the back by itself; the tightest one counts.
        for before, after in loads.in_flight_sets[worker]:
            ahead, behind = static + before * stored, static + after * stored
            free = slot.memory_bytes - (ahead[front] - ahead[first])
            allowed &= free >= 0
            down = np.maximum(down, np.searchsorted(behind, behind[until] - np.maximum(free, 0)))
    allowed &= (down <= until - min_units) & (down <= limits.highest[other])
    return np.where(allowed, down, limits.units + 1)
