"""The minimum bottleneck of a problem and its blocking run, derived for ``verify`` without the solvers.

The solvers bisect over greedy probes, follow reachable sets as intervals, and use tables as arrays. Here a bottleneck
is *decided*: a table over stages and cuts contains the cuts at which the first stages can end. A bound is correct if
its bottleneck is feasible and one nanosecond less is not. Times and memory only increase with a stage, so the first cut
at which a stage may begin only increases with its end: two pointers pass through a row of the table.

What the bound is depends on the placement, as ``formats/plan.md`` defines:

* one stage per worker: the minimum bottleneck of all partitions that satisfy the constraints;
* two stages per worker in a V: the same; beyond ``LARGEST_FULL_V`` with stages that may be empty where pins permit;
* looped stages, or a V that is too large for a table: work over speed, or the heaviest unit;
* an own order of operations: memory limits are ignored, because the order decides how much is in flight.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

from ...costs.cost_window import SPEED_UNIT
from .step import Pipeline, PlanWorker, in_flight

LARGEST_V = 4_000_000
"""Maximum of workers times units squared for the exact bound of a V; ``formats/plan.md`` states the same number."""
LARGEST_FULL_V = 4_000_000
"""Maximum of workers times units cubed for the exact bound of a V whose stages must not be empty, as there."""
NOWHERE = -1


@dataclass(frozen=True, kw_only=True)
class BoundProblem:
    """The problem of a bound: consecutive units, the worker of each stage, and the constraints.

    Attributes:
        pipeline: the plan; its partition is ignored.
        cuts: item positions where a stage may begin or end.
        min_units: minimum number of units per stage.
        pins: ``(item position, stage)``.
        is_v: whether the stages form a V over the workers.
        own_order: whether the plan has its own order of operations.
    """

    pipeline: Pipeline
    cuts: tuple[int, ...]
    min_units: int
    pins: tuple[tuple[int, int], ...]
    is_v: bool
    own_order: bool

    @property
    def units(self) -> int:
        """The number of units."""
        return len(self.cuts) - 1

    @property
    def stages(self) -> int:
        """The number of stages."""
        return len(self.pipeline.spans)

    def sums(self, values: Sequence[int]) -> list[int]:
        """Sums of per-item values up to each cut."""
        upto = [0, *accumulate(values)]
        return [upto[cut] for cut in self.cuts]

    def window(self, cut: int) -> tuple[int, int]:
        """The range of the ``cut``-th boundary (0 is the front), given minimum layers and pins."""
        low = min(self.units, cut * self.min_units) if cut < self.stages else self.units
        high = max(0, self.units - (self.stages - cut) * self.min_units) if cut else 0
        for item, stage in self.pins:
            unit = max(at for at in range(self.units) if self.cuts[at] <= item)
            between = self.min_units * (stage - cut if cut <= stage else cut - stage - 1)
            low, high = (low, min(high, unit - between)) if cut <= stage else (max(low, unit + 1 + between), high)
        return low, high


@dataclass(frozen=True, kw_only=True)
class Bound:
    """The lower bound in ns, and the item positions of the blocking run; ``(0, 0)`` without one."""

    least_ns: int
    blocking: tuple[int, int]


class _StageFeasibility:
    """Decides whether a stage can have a run of units within a time."""

    def __init__(self, question: BoundProblem, limited: bool) -> None:
        pipeline = question.pipeline
        self.work = question.sums(pipeline.costs.total_ns)
        stored = [0] * pipeline.frozen + list(pipeline.costs.activation_bytes[pipeline.frozen :])
        self.state, self.stored = question.sums(pipeline.state_bytes), question.sums(stored)
        self.limited = limited
        self.flight = [
            max(count for (count,) in in_flight(pipeline.order[pipeline.worker_of_stage[stage]], (stage,)))
            for stage in range(question.stages)
        ]

    def holds(self, plan_worker: PlanWorker, flight: int, begin: int, end: int, time_ns: int) -> bool:
        """Whether the worker executes the units ``[begin, end)`` within ``time_ns`` and its memory.

        ``flight`` is the maximum number of microbatches in flight on the stage.
        """
        if plan_worker.time_ns(self.work[end] - self.work[begin]) > time_ns:
            return False
        if not self.limited or plan_worker.memory_bytes is None:
            return True
        need = self.state[end] - self.state[begin] + flight * (self.stored[end] - self.stored[begin])
        return need <= plan_worker.memory_bytes


def bound_of(question: BoundProblem, claimed_ns: int) -> Bound:
    """The bound and its blocking run; ``claimed_ns`` is only where the search begins."""
    pipeline = question.pipeline
    virtual = question.stages // len(pipeline.plan_workers)
    if virtual == 1:
        stages = _StageFeasibility(question, not question.own_order)
        least = _least(lambda time_ns: _row_by_row(question, stages, time_ns), claimed_ns, _most(question))
        begin, end = _blocking(question, stages, least)
        return Bound(least_ns=least, blocking=(question.cuts[begin], question.cuts[end]))
    least = _share(question)
    if question.is_v and len(pipeline.plan_workers) * question.units**2 <= LARGEST_V:
        is_v = _VScheduleFeasibility(question)
        is_small = len(pipeline.plan_workers) * question.units**3 <= LARGEST_FULL_V
        decide = is_v.decide_full if question.min_units and is_small else is_v.decide
        least = _least(decide, max(least, claimed_ns), _most(question))
    return Bound(least_ns=least, blocking=(0, 0))


def _most(question: BoundProblem) -> int:
    """A time in ns above any bottleneck."""
    total = sum(question.pipeline.costs.total_ns)
    return 2 * question.stages + 2 * max(plan_worker.time_ns(total) for plan_worker in question.pipeline.plan_workers)


def _share(question: BoundProblem) -> int:
    """Total work over total speed, or the heaviest unit on the fastest worker."""
    plan_workers, work = question.pipeline.plan_workers, question.sums(question.pipeline.costs.total_ns)
    fastest = max(plan_workers, key=lambda plan_worker: plan_worker.speed_ppm)
    heaviest = max(after - before for before, after in pairwise(work))
    whole, rest = divmod(work[-1] * SPEED_UNIT, sum(plan_worker.speed_ppm for plan_worker in plan_workers))
    return max(whole + bool(rest), fastest.time_ns(heaviest))


def _least(decide: Callable[[int], bool], claimed_ns: int, most_ns: int) -> int:
    """The minimum feasible time: the claim, if it is feasible and one nanosecond less is not; else by bisection.

    If nothing is feasible, ``most_ns + 1``.
    """
    # A correct claim takes two decisions; only a wrong one is searched for.
    if 0 <= claimed_ns <= most_ns and decide(claimed_ns):
        if not decide(claimed_ns - 1):
            return claimed_ns
        below, above = -1, claimed_ns - 1
    else:
        below, above = min(claimed_ns, -1), most_ns + 1
    while above - below > 1:
        middle = (below + above) // 2
        below, above = (below, middle) if decide(middle) else (middle, above)
    return above


def _row_by_row(question: BoundProblem, stages: _StageFeasibility, time_ns: int) -> bool:
    """Whether some partition with one stage per worker is within the time."""
    reached = [True] + [False] * question.units
    for stage in range(question.stages):
        plan_worker, flight = question.pipeline.plan_worker(stage), stages.flight[stage]
        starts = [0, *accumulate(reached)]
        low, high = question.window(stage + 1)
        # ``starts`` counts the reached cuts, so a difference shows whether one lies in a range, without a loop.
        begin, ends = 0, [False] * (question.units + 1)
        for end in range(question.units + 1):
            while begin < end and not stages.holds(plan_worker, flight, begin, end, time_ns):
                begin += 1
            last = end - question.min_units
            ends[end] = low <= end <= high and last >= begin and starts[last + 1] > starts[begin]
        reached = ends
    return reached[question.units]


def _blocking(question: BoundProblem, stages: _StageFeasibility, least_ns: int) -> tuple[int, int]:
    """The shortest run of units that one stage would have to contain below the bound, the first of several.

    The stages before it reach no further than its begin, those after it begin no earlier than its end.
    """
    if least_ns == 0:
        return 0, 0
    time_ns, count = least_ns - 1, question.stages
    reach, back = [0], [question.units]
    for stage in range(count):
        at, high = reach[-1], question.window(stage + 1)[1]
        plan_worker, flight = question.pipeline.plan_worker(stage), stages.flight[stage]
        while at < question.units and stages.holds(plan_worker, flight, reach[-1], at + 1, time_ns):
            at += 1
        reach.append(min(at, high))
    for stage in reversed(range(count)):
        at, low = back[-1], question.window(stage)[0]
        plan_worker, flight = question.pipeline.plan_worker(stage), stages.flight[stage]
        while at > 0 and stages.holds(plan_worker, flight, at - 1, back[-1], time_ns):
            at -= 1
        back.append(max(at, low))
    back.reverse()
    runs = [(reach[stage], back[stage + 1]) for stage in range(count) if reach[stage] < back[stage + 1]]
    return min(runs, key=lambda run: (run[1] - run[0], run[0]), default=(0, 0))


class _VScheduleFeasibility:
    """Decides times of a V: worker ``p`` has the ``p``-th stage from the front and the ``p``-th from the back.

    Of all assignments of the front up to a cut, the one that has assigned most of the back is best, because what
    remains is part of what any other assignment leaves.
    """

    def __init__(self, question: BoundProblem) -> None:
        self.question = question
        self.stages = _StageFeasibility(question, not question.own_order)
        count = len(question.pipeline.plan_workers)
        self.windows = [question.window(cut) for cut in range(question.stages + 1)]
        self.flights = []
        for worker in range(count):
            row = question.pipeline.order[worker]
            found = in_flight(row, (worker, 2 * count - 1 - worker))
            larger = [one for one in found if not any(o != one and o[0] >= one[0] and o[1] >= one[1] for o in found)]
            self.flights.append(larger)

    def decide(self, time_ns: int) -> bool:
        """Whether a V with stages that may be empty is within ``time_ns``."""
        question, units = self.question, self.question.units
        back = [units] + [NOWHERE] * units
        for worker in range(len(question.pipeline.plan_workers)):
            further = [NOWHERE] * (units + 1)
            low, high = self.windows[worker + 1]
            for front, until in enumerate(back):
                if until == NOWHERE:
                    continue
                for end in range(max(front, low), min(until, high) + 1):
                    least = self._back(worker, front, end, until, time_ns)
                    if least != NOWHERE and (further[end] == NOWHERE or least < further[end]):
                        further[end] = least
            back = further
        return any(cut == front for front, cut in enumerate(back))

    def decide_full(self, time_ns: int) -> bool:
        """Whether a V with ``min_units`` in each stage is within ``time_ns``."""
        question, units = self.question, self.question.units
        # For each front cut the back cuts that the workers so far can have, as bits: most of the back may be too much.
        backs = {0: 1 << units}
        for worker in range(len(question.pipeline.plan_workers)):
            further: dict[int, int] = {}
            (low, high), last = self.windows[worker + 1], self.windows[self.question.stages - 1 - worker][1]
            for front, cuts in backs.items():
                for until in (cut for cut in range(units + 1) if cuts >> cut & 1):
                    highest = min(until - question.min_units, last)
                    for end in range(max(front + question.min_units, low), min(highest, high) + 1):
                        least = self._back(worker, front, end, until, time_ns)
                        if least != NOWHERE and least <= highest:
                            further[end] = further.get(end, 0) | (1 << highest + 1) - (1 << least)
            backs = further
        return any(cuts >> front & 1 for front, cuts in backs.items())

    def _back(self, worker: int, begin: int, end: int, until: int, time_ns: int) -> int:
        """The lowest cut from which the worker with ``[begin, end)`` can also have the units up to ``until``."""
        stages, count = self.stages, len(self.question.pipeline.plan_workers)
        plan_worker = self.question.pipeline.plan_workers[worker]
        left_ns = time_ns - plan_worker.time_ns(stages.work[end] - stages.work[begin])
        if left_ns < 0:
            return NOWHERE
        work = left_ns * plan_worker.speed_ppm // SPEED_UNIT
        low, high = self.windows[2 * count - 1 - worker]
        at = max(end, low, bisect_left(stages.work, stages.work[until] - work))
        if stages.limited and plan_worker.memory_bytes is not None:
            for front, behind in self.flights[worker]:
                need = stages.state[end] - stages.state[begin] + front * (stages.stored[end] - stages.stored[begin])
                room = plan_worker.memory_bytes - need
                if room < 0:
                    return NOWHERE
                while at < until and (
                    stages.state[until] - stages.state[at] + behind * (stages.stored[until] - stages.stored[at]) > room
                ):
                    at += 1
        return at if at <= min(until, high) else NOWHERE
