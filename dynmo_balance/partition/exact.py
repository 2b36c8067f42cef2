"""The optimal contiguous partition: the least bottleneck, in whole nanoseconds.

::

    PartitionProblem --make_limits--> Limits --minimize_bottleneck--> bottleneck, cuts
                                                |  ^                       |
                                     bottleneck |  | next candidate        +--minimize_moved_bytes--> cuts
                                                v  |                       +--find_blocking_run--> certificate
                                               _probe

* A probe decides whether some partition has a given bottleneck. The greedy probe extends each stage as far as the
  bottleneck allows. On success it returns the bottleneck that it reached, on failure the least larger bottleneck that
  would have changed one of its choices. Bisection between such values ends after a few probes with equality: the
  result is exact, not within a tolerance.
* The greedy probe is exact if stages may be empty, or if only the work limits a stage. Otherwise (no empty stages,
  and unequal memory or speed) the reachable sets of ``feasible_cuts`` decide.
* Of all partitions with the least bottleneck, a dynamic program over the cuts selects the one that moves the fewest
  bytes from the active partition.
* The certificate is the blocking run: units that one stage would have to contain below the bottleneck, and cannot.

``_work_only_greedy`` and ``_work_only_ends`` repeat ``greedy`` and ``find_blocking_run`` without a function call in
their loops. This case is the usual one, and a plan at a thousand layers takes milliseconds only with them.

Invariants that a change must keep (``tests/unit/dynmo_balance/partition/test_exact.py`` compares with brute force):

* Everything is an integer. Floats would turn "no partition has a lower bottleneck" into "within a tolerance".
* Work and memory are monotone in the units of a stage; each greedy step and each two-pointer loop needs that.
* A failed probe returns no value above the least one that could change it. A larger one would skip the optimum.
* Ties are broken by fixed rules (fewest moved bytes, then the latest begin; the shortest, then the first blocking run).
  So the same profile gives the same plan, on every machine and after a restart.

Sources: Han, Narahari and Choi, "Mapping a chain task to chained processors" (1992) for the probe.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

from ..costs.cost_window import SPEED_UNIT
from .constraints import Limits, make_limits
from .feasible_cuts import OversizedUnits, partition_from_sets, reachable_cuts, reaches_end
from .problem import InfeasibleError, PartitionProblem, check_size


@dataclass(frozen=True, kw_only=True)
class Solution:
    """A partition with its certificate; positions are item positions.

    Attributes:
        boundaries: the first item of each stage, then the number of items.
        bottleneck_ns: the time of the slowest worker in one microbatch.
        lower_bound_ns: no partition that satisfies the constraints has a lower bottleneck.
        optimal: whether the two are equal.
        blocking: the run ``(begin, end)`` of items that rules out a lower bottleneck; ``(0, 0)`` without a proof.
        objective: what was minimized, ``bottleneck`` or ``simulated`` (the simulated step). The other fields describe
            the bottleneck in both cases.
    """

    boundaries: tuple[int, ...]
    bottleneck_ns: int
    lower_bound_ns: int
    optimal: bool
    blocking: tuple[int, int]
    objective: str = "bottleneck"


@dataclass(frozen=True, kw_only=True)
class _Probe:
    cuts: tuple[int, ...] | None
    value: int | None
    """On success the bottleneck reached; on failure the next candidate, None if no bottleneck is feasible."""


def partition_bottleneck_ns(limits: Limits, cuts: Sequence[int]) -> int:
    """The time of the slowest stage of a partition."""
    return max(limits.time_ns(stage, a, b) for stage, (a, b) in enumerate(pairwise(cuts)))


def greedy(limits: Limits, bottleneck: int) -> _Probe:
    """Extend each stage as far as possible, even by no unit; a failure proves that no partition has the bottleneck."""
    cuts, following = [0], None
    for stage in range(limits.stages):
        begin, high = cuts[-1], limits.highest[stage + 1]
        end = min(limits.latest_end(stage, begin, limits.slots[stage].work_ns(bottleneck)), high)
        if end < high:
            # Any bottleneck below ``longer`` ends this stage at the same cut. So the least such value over the stages
            # is the next bottleneck that is worth a probe.
            longer = limits.time_ns(stage, begin, end + 1)
            if longer > bottleneck and (following is None or longer < following):
                following = longer
        if end < limits.lowest[stage + 1]:
            return _Probe(cuts=None, value=following)
        cuts.append(end)
    if cuts[-1] < limits.units:
        return _Probe(cuts=None, value=following)
    return _Probe(cuts=tuple(cuts), value=partition_bottleneck_ns(limits, cuts))


def is_work_only(limits: Limits) -> bool:
    """Whether only the work limits a stage; then a greedy probe that leaves one unit per later stage is exact."""
    return limits.min_units <= 1 and limits.equal_speeds and not limits.static and limits.free


def simple_lower_bound(limits: Limits) -> int:
    """A lower bound of the bottleneck: total work over total speed, and the heaviest unit on the fastest worker."""
    speed = sum(slot.speed_ppm for slot in limits.slots)
    fastest = max(limits.slots, key=lambda slot: slot.speed_ppm)
    return max(-(-limits.load[-1] * SPEED_UNIT // speed), fastest.time_ns(limits.heaviest_unit_ns))


def _upper_bound(limits: Limits) -> int:
    """A bottleneck that some partition has if any exists; tight where only the work counts."""
    if is_work_only(limits):
        # A greedy stage that cannot take its next unit has at least the mean load, so the stages reach the end.
        return limits.slots[0].time_ns(-(-limits.load[-1] // limits.stages) + limits.heaviest_unit_ns)
    return max(slot.time_ns(limits.load[-1]) for slot in limits.slots)


def _probe(limits: Limits, bottleneck: int, plain: bool, oversize: OversizedUnits) -> _Probe:
    if plain:
        return _work_only_greedy(limits, bottleneck)
    probe = greedy(limits, bottleneck)
    if probe.cuts is None or all(b - a >= limits.min_units for a, b in pairwise(probe.cuts)):
        return probe
    sets, following = reachable_cuts(limits, bottleneck, oversize)
    if not reaches_end(limits, sets):
        # With min_units > 1, the next candidate of blocked starts is unknown: try the next nanosecond.
        return _Probe(cuts=None, value=following if limits.min_units < 2 else bottleneck + 1)
    cuts = partition_from_sets(limits, sets, bottleneck)
    return _Probe(cuts=cuts, value=partition_bottleneck_ns(limits, cuts))


def _work_only_greedy(limits: Limits, bottleneck: int) -> _Probe:
    """``greedy`` at equal speeds without memory limits, the usual case, without a call in its loop."""
    load, slot = limits.load, limits.slots[0]
    highest, least = limits.highest, limits.min_units
    work = slot.work_ns(bottleneck)
    # Local names, no attribute look-ups and no calls: ``tests/benchmarks/plan_results.md`` has the times.
    units, whole, width = limits.units, load[-1], limits.search_width
    begin, cuts, following, done = 0, [0], whole + 1, load[0]
    left = limits.stages
    for high in highest[1:]:
        # Most stages end within ``width`` cuts. A search there takes fewer steps than one over all cuts, which runs
        # only where the end may lie outside.
        near = begin + width
        end = bisect_right(load, done + work, begin, near) - 1 if near < units else near
        if end >= near - 1:
            end = bisect_right(load, done + work, begin) - 1
        if end >= high:
            end = high
        else:
            longer = load[end + 1] - done
            if longer < following:
                following = longer
        if end < begin + least:
            end = -1
            break
        cuts.append(end)
        begin, done = end, load[end]
        left -= 1
        if whole - done > left * work:  # the rest is too much, unless a choice changes or stages do more
            following = min(following, -(-(whole - done) // left)) if left else following
            end = -1
            break
    if end < units:
        return _Probe(cuts=None, value=None if following > load[-1] else slot.time_ns(following))
    return _Probe(cuts=tuple(cuts), value=slot.time_ns(max(load[b] - load[a] for a, b in pairwise(cuts))))


def minimize_bottleneck(limits: Limits) -> tuple[int, tuple[int, ...]]:
    """The least bottleneck in ns, and the cuts of a partition that has it.

    Raises:
        InfeasibleError: no partition satisfies the constraints.
    """
    plain = is_work_only(limits)
    oversize = OversizedUnits(limits)
    ceiling = _upper_bound(limits)
    low, high = simple_lower_bound(limits), ceiling
    best: tuple[int, ...] | None = None
    trial = low  # often already optimal
    # Invariant: no partition has a bottleneck below ``low``, and ``best`` has the bottleneck ``high``. Both are values
    # that a probe found, so the bisection ends with equality.
    while True:
        probe = _probe(limits, trial, plain, oversize)
        if probe.cuts is not None and probe.value is not None:
            best, high = probe.cuts, probe.value
        elif probe.value is None or probe.value > ceiling:
            raise InfeasibleError(infeasibility_reason(limits))
        else:
            low = probe.value
        if best is not None and low >= high:
            return high, best
        trial = (low + high) // 2


def infeasibility_reason(limits: Limits) -> str:
    """The limit that cannot be met, as a message with its remedy."""
    for unit in range(limits.units):
        if not any(limits.fits(stage, unit, unit + 1) for stage in range(limits.stages)):
            need = min(limits.memory_bytes(stage, unit, unit + 1) for stage in range(limits.stages))
            most = max(slot.memory_bytes or 0 for slot in limits.slots)
            return (
                f"unit {unit} needs {need:,} bytes with its activations in flight, the largest worker has {most:,};"
                " give more memory, fewer microbatches in flight or --granularity sublayer"
            )
    total = limits.static[-1] - limits.static[0]
    caps = [slot.memory_bytes for slot in limits.slots if slot.memory_bytes is not None]
    return (
        f"no contiguous partition on {limits.stages} stages keeps within the memory limits: the model's state alone is"
        f" {total:,} bytes, the workers have {sum(caps):,}; use more workers, more memory"
        " or fewer microbatches in flight"
    )


def find_blocking_run(limits: Limits, bottleneck: int) -> tuple[int, int]:
    """The shortest run of units that one stage would need to contain below the bottleneck, but cannot.

    Below the bottleneck, the stages before ``p`` end at ``left[p]`` at the latest, and those after it begin at
    ``right[p + 1]`` at the earliest. So stage ``p`` has to contain the units between, which take at least the
    bottleneck or do not fit.
    """
    if bottleneck == 0:
        return 0, 0  # nothing is below 0, so no run is needed to prove it
    if is_work_only(limits):
        left, right = _work_only_ends(limits, bottleneck)
        runs = [(a, b) for a, b in zip(left, right[1:], strict=False) if a < b]
        return min(runs, key=lambda run: (run[1] - run[0], run[0]), default=(0, 0))
    left, right = [0], [limits.units]
    for stage in range(limits.stages):
        work = limits.slots[stage].work_ns(bottleneck - 1)
        left.append(min(limits.latest_end(stage, left[-1], work), limits.highest[stage + 1]))
    for stage in range(limits.stages - 1, -1, -1):
        work = limits.slots[stage].work_ns(bottleneck - 1)
        right.append(max(limits.earliest_begin(stage, right[-1], work), limits.lowest[stage]))
    right.reverse()
    runs = [(left[p], right[p + 1]) for p in range(limits.stages) if left[p] < right[p + 1]]
    return min(runs, key=lambda run: (run[1] - run[0], run[0]), default=(0, 0))


def _work_only_ends(limits: Limits, bottleneck: int) -> tuple[list[int], list[int]]:
    """Latest ends and earliest begins below the bottleneck for ``find_blocking_run``, without calls in the loops."""
    load, units, width = limits.load, limits.units, limits.search_width
    work = limits.slots[0].work_ns(bottleneck - 1)
    left, at = [0], 0
    for high in limits.highest[1:]:
        near = at + width
        end = bisect_right(load, load[at] + work, at, near) - 1 if near < units else near
        if end >= near - 1:
            end = bisect_right(load, load[at] + work, at) - 1
        at = end if end < high else high
        left.append(at)
    right, at = [units], units
    for low in reversed(limits.lowest[:-1]):
        near = at - width
        begin = bisect_left(load, load[at] - work, near, at) if near > 0 else near
        if begin <= near:
            begin = bisect_left(load, load[at] - work, 0, at)
        at = begin if begin > low else low
        right.append(at)
    right.reverse()
    return left, right


def minimize_moved_bytes(
    limits: Limits, bottleneck: int, resident: Sequence[int], current: Sequence[tuple[int, int]]
) -> tuple[int, ...]:
    """Of all partitions within the bottleneck, the one that leaves the most bytes where they are.

    A stage that gets ``[b, e)`` and now has ``[x, y)`` keeps ``G(e) - G(b)`` bytes, where ``G`` is the prefix sum
    ``resident`` at the cut clamped to ``[x, y]``. So the best partition up to a cut is one sliding-window maximum per
    stage.

    Args:
        limits: the problem.
        bottleneck: in ns; some partition must have it.
        resident: prefix sums, at the cuts, of the bytes that a move would transfer.
        current: for each stage the units ``(x, y)`` that its worker has now, as cut indices.
    """
    floors = _floors(limits, bottleneck)
    # Below every reachable score. Subtracting ``resident`` only lowers it, so an unreachable cut stays unreachable.
    nothing = -1 - resident[-1] * (limits.stages + 1)
    best, offset = [0], 0
    choices: list[tuple[int, list[int]]] = []
    for stage in range(limits.stages):
        x, y = current[stage]
        ends = range(max(floors[stage + 1], limits.lowest[stage + 1]), limits.highest[stage + 1] + 1)
        values = [score - resident[x if begin < x else min(begin, y)] for begin, score in enumerate(best, start=offset)]
        chosen = _window_maxima(limits, stage, limits.slots[stage].work_ns(bottleneck), values, offset, ends, nothing)
        best = [
            nothing if at < 0 else values[at - offset] + resident[x if end < x else min(end, y)]
            for end, at in zip(ends, chosen, strict=False)
        ]
        offset = ends.start
        choices.append((offset, chosen))
    cuts = [limits.units]
    for low, chosen in reversed(choices):
        cuts.append(chosen[cuts[-1] - low])
    return tuple(reversed(cuts))


def _window_maxima(
    limits: Limits, stage: int, work: int, values: Sequence[int], offset: int, ends: range, nothing: int
) -> list[int]:
    """For each end the best feasible begin, or -1; the result stops where no later end can have one.

    ``values[i]`` is the score of beginning at ``offset + i``; values of at most ``nothing`` are unreachable.
    """
    load, least, limited = limits.load, limits.min_units, bool(limits.static)
    last = offset + len(values) - 1
    window: deque[int] = deque()
    following = first = offset
    chosen = []
    for end in ends:
        # The feasible begins of an end are those from ``first`` on. Load and memory grow with the end, so ``first``
        # never moves back, and all ends together take linear time.
        while first < end and load[end] - load[first] > work:
            first += 1
        while limited and first < end and not limits.fits(stage, first, end):
            first += 1
        if first > last:
            break
        newest = min(end - least, last)
        while following <= newest:
            value = values[following - offset]
            if value > nothing:
                # The values in the window decrease, so its front is the best begin. Of equal begins the latest remains,
                # because it stays feasible for longest.
                while window and values[window[-1] - offset] <= value:
                    window.pop()
                window.append(following)
            following += 1
        while window and window[0] < first:
            window.popleft()
        chosen.append(window[0] if window else -1)
    return chosen


def _floors(limits: Limits, bottleneck: int) -> list[int]:
    """For each position the least cut from which the later stages can still finish, by a greedy argument."""
    floors = [limits.units]
    for stage in range(limits.stages - 1, 0, -1):
        floors.append(limits.earliest_begin(stage, floors[-1], limits.slots[stage].work_ns(bottleneck)))
    return [0, *reversed(floors)]


def solve(problem: PartitionProblem, weights: Sequence[int] | None = None) -> Solution:
    """The partition with the minimum bottleneck; of equal ones, the one that moves the fewest bytes.

    Args:
        problem: the chain, the workers and the constraints; ``problem.current`` is the active partition.
        weights: per item, what to balance instead of the work; the certificate then refers to these weights.

    Raises:
        InfeasibleError: no partition satisfies the constraints.
        UsageError: there are more stages than units.
    """
    check_size(problem)
    limits = make_limits(problem, weights)
    bottleneck, cuts = minimize_bottleneck(limits)
    positions = problem.chain.cuts
    # Only after the bottleneck: moving fewer bytes once does not make up for a slower step for the rest of the run.
    if problem.current is not None:
        cuts = minimize_moved_bytes(limits, bottleneck, *_current_cuts(problem))
    begin, end = find_blocking_run(limits, bottleneck)
    # With several stages per worker, the load is their sum: the bound of the chain is not that of the workers.
    bound = bottleneck if problem.virtual_stages == 1 else simple_lower_bound(replace(limits, slots=problem.slots))
    return Solution(
        boundaries=tuple(positions[cut] for cut in cuts),
        bottleneck_ns=bottleneck,
        lower_bound_ns=bound,
        optimal=bound == bottleneck,
        blocking=(positions[begin], positions[end]) if problem.virtual_stages == 1 else (0, 0),
    )


def _current_cuts(problem: PartitionProblem) -> tuple[list[int], list[tuple[int, int]]]:
    """The bytes of moves at the cuts, and the units that each stage's worker has now, as cut indices.

    Each item counts one byte more than it has, so that items without parameters stay where they are as well.
    """
    chain = problem.chain
    spans = []
    for begin, end in problem.current or ():
        x = min(bisect_left(chain.cuts, begin), len(chain.cuts) - 1)
        spans.append((x, max(x, bisect_right(chain.cuts, end) - 1)))
    return chain.prefix_at_cuts([size + 1 for size in chain.move_bytes]), spans
