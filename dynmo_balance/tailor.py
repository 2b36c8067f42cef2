"""A partition and an order of operations made for each other: the schedule ``custom``.

Two steps take turns. For a partition, list schedules by several rules give an order (``schedules.listed``). For an order,
thousands of partitions near the present one are simulated at once (``batch``), and the best few get orders of their own.
A heuristic with a fixed number of rounds and a fixed seed: the same problem gives the same answer.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from .batch import compile_order, costs_of, run_compiled
from .errors import DynmoError
from .formats.plan import CUSTOM, position_of
from .partition import balance
from .partition.several import Array, Loads, make_loads, permitted
from .problem import Problem
from .schedules import Order
from .schedules.listed import RULES, Lengths, list_order
from .simulate import stage_costs

PLACEMENTS = (("1f1b", 1), ("interleaved-1f1b", 2), ("zb-v", 2), ("interleaved-1f1b", 3))
"""Where stages go, as a schedule by name does it, and how many a worker has."""
POOL = 600
TRIED = 6
SHIFTS = (-1, 1, -1, 1, -1, 1, -2, 2, -3, 3)
LARGEST = 8_000
"""A step of more operations than this is not tailored: a round would take seconds."""


@dataclass(frozen=True, kw_only=True)
class Tailored:
    """A problem with its own order, the cuts that it was made for, and the step in ns."""

    problem: Problem
    cuts: tuple[int, ...]
    step_ns: int

    @property
    def boundaries(self) -> tuple[int, ...]:
        """The cuts as item positions."""
        return tuple(self.problem.chain.cuts[cut] for cut in self.cuts)


def lengths_of(problem: Problem, boundaries: Sequence[int]) -> Lengths:
    """What a list schedule needs to know of a partition."""
    costs = stage_costs(problem, boundaries)
    return Lengths(
        forward=[cost.forward_ns for cost in costs],
        first=[cost.backward_input_ns for cost in costs],
        second=[cost.backward_weight_ns for cost in costs],
        send=[cost.send_ns for cost in costs],
        trained=[cost.has_backward for cost in costs],
        positions=problem.positions,
    )


class _Tailor:
    """The search over one placement."""

    def __init__(self, problem: Problem) -> None:
        layout = problem.positions
        self.problem = replace(problem, schedule=CUSTOM, layout=layout, current=None)
        self.positions = np.array(problem.chain.cuts, dtype=np.int64)
        self.loads: Loads = make_loads(problem)
        self.random = np.random.default_rng(0)
        most = problem.microbatches
        workers = len(problem.places)
        self.caps = sorted({min(most, cap) for cap in (most, 2 * workers, workers, (workers + 1) // 2)}, reverse=True)
        self.rules: tuple[str, ...] = tuple(RULES)
        self.limited = any(place.memory_bytes is not None for place in problem.places)

    def order(self, cuts: Sequence[int]) -> Tailored | None:
        """The best list schedule for these cuts within the memory."""
        boundaries = [self.problem.chain.cuts[cut] for cut in cuts]
        lengths = lengths_of(self.problem, boundaries)
        for cap in self.caps:
            made = [list_order(lengths, self.problem.microbatches, cap, rule) for rule in self.rules]
            fitting = [(step, at) for at, (order, step) in enumerate(made) if self._fits(order, cuts)]
            if fitting:
                step, at = min(fitting)
                problem = replace(self.problem, order=made[at][0])
                return Tailored(problem=problem, cuts=tuple(int(cut) for cut in cuts), step_ns=step)
        return None

    def _fits(self, order: Order, cuts: Sequence[int]) -> bool:
        if not self.limited:
            return True
        loads = make_loads(replace(self.problem, order=order))
        return int(loads.excess(np.array([cuts], dtype=np.int64))[0]) == 0

    def focus(self, cuts: Sequence[int]) -> None:
        """Keep the three rules that do best here."""
        lengths = lengths_of(self.problem, [self.problem.chain.cuts[cut] for cut in cuts])
        microbatches = self.problem.microbatches
        steps = {rule: list_order(lengths, microbatches, self.caps[0], rule)[1] for rule in RULES}
        self.rules = tuple(sorted(steps, key=lambda rule: steps[rule])[:3])

    def pool(self, cuts: Sequence[int]) -> Array:
        """Partitions near these: up to three runs of neighbouring cuts shifted."""
        stages = len(cuts) - 1
        found = np.repeat(np.array([cuts], dtype=np.int64), POOL, axis=0)
        index = np.arange(stages + 1)[None, :]
        for _ in range(3):
            one, other = self.random.integers(1, max(2, stages), (2, POOL))
            other = np.where(self.random.random(POOL) < 0.6, one, other)
            inside: npt.NDArray[np.bool_] = index >= np.minimum(one, other)[:, None]
            inside &= index <= np.maximum(one, other)[:, None]
            found += (inside & (self.random.random(POOL) < 0.6)[:, None]) * self.random.choice(SHIFTS, POOL)[:, None]
        return np.unique(found[permitted(self.loads.limits, found)], axis=0)

    def round(self, now: Tailored) -> Tailored:
        """The best of the partitions near the present one, with its order or a new one."""
        pool = self.pool(now.cuts)
        order = now.problem.order
        if not len(pool) or order is None:
            return now
        steps = run_compiled(compile_order(order), costs_of(self.problem, self.positions[pool]))
        best = now
        loads = make_loads(now.problem)
        for at in np.argsort(steps, kind="stable")[:TRIED]:
            same = pool[at : at + 1]
            if steps[at] < best.step_ns and not loads.excess(same)[0]:
                best = replace(now, cuts=tuple(int(cut) for cut in pool[at]), step_ns=int(steps[at]))
            other = self.order(pool[at])
            if other is not None and other.step_ns < best.step_ns:
                best = other
        return best


def tailor(problem: Problem, rounds: int) -> list[Tailored]:
    """The best that was found, best first: one for each placement that was worth following.

    Args:
        problem: its schedule and stages a worker are not looked at; its backward must be split.
        rounds: how long to search; the placements that begin best get them all.
    """
    begun: list[tuple[Tailored, _Tailor]] = []
    for schedule, virtual in PLACEMENTS:
        if 3 * len(problem.places) * virtual * problem.microbatches > LARGEST:
            continue
        placed = replace(problem, schedule=schedule, virtual_stages=virtual, order=None, layout=None, current=None)
        layout = tuple(position_of(schedule, stage, len(problem.places)) for stage in range(placed.num_stages))
        try:
            start = balance(replace(placed, layout=None), "exact").boundaries
        except DynmoError:
            continue
        search = _Tailor(replace(placed, layout=layout))
        cuts = [int(cut) for cut in np.searchsorted(search.positions, np.array(start))]
        first = search.order(cuts)
        if first is not None:
            search.focus(cuts)
            begun.append((first, search))
    begun.sort(key=lambda one: one[0].step_ns)
    found = []
    for first, search in begun[:2]:
        now = first
        for _ in range(rounds):
            now = search.round(now)
        found.append(now)
    return sorted([*found, *(first for first, _ in begun[2:])], key=lambda one: one.step_ns)
