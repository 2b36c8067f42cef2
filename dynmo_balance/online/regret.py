"""What staying has missed, measured out of sample, and which partition the next while asks for.

A partition chosen by noisy costs looks better on these than it is (the winner's curse), and one that suits the last
steps may not suit those to come. So several *views* of the past (the mean of a short or a long window; a trend, drawn
out farther where moves are dear) each name a partition at every decision, and what they named before is measured on the
steps since: the view whose partitions have done best is followed, and what staying has missed is the difference between
the partition in force and the one that this view had named a while ago. On noise alone it is not above zero.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from ..costs.cost_window import SPEED_UNIT
from ..formats.profile import Step
from ..partition.exact import solve
from ..partition.problem import PartitionProblem
from ..partition.registry import run_balancer

Works = npt.NDArray[np.float64]
FORECASTS = ((40, 0.0), (160, 0.0), (80, 0.5), (160, 1.0))
"""Records that a view looks at, and how far it draws out their trend, in times of the horizon."""
MAX_FORECAST_RECORDS = max(records for records, _ in FORECASTS)
TRACE_RECORDS = 4 * MAX_FORECAST_RECORDS
"""Records that are kept: several periods of costs that oscillate, so that their mean is that of no single phase."""
MAX_HORIZON_STEPS = 400
"""Steps; no trend is drawn out, and no partition tried, for longer."""
DRIFT_PER_STEP = 1e-4
"""The share of a step that a partition is taken to lose with each step of drift: it makes pauses into horizons."""
SCORE_DECAY = 0.98
"""What is left of a view's earlier scores at each decision."""
SLOPE_CONFIDENCE = 4.0
"""A slope counts as far as its square is above so many times its variance."""


def work_of(step: Step) -> Works:
    """Forward and backward of each item in a record, ``[items]`` in ns as measured; NaN where it was not sampled."""
    parts = [step.forward_ns]
    if step.backward_ns is not None:
        parts.append(step.backward_ns)
    else:
        parts += [part for part in (step.backward_input_ns, step.backward_weight_ns) if part is not None]
    row: Works = np.sum(np.array(parts, dtype=np.float64), axis=0)  # None becomes NaN
    return row


SpeedsOfPlan = Callable[[int], Sequence[int]]
"""From the number of a plan to the speed, in parts per million, of the worker that each item is on under it."""


class WorkTrace:
    """The work of each item in the last records, in ns, gaps filled with what was known before."""

    def __init__(self, size: int = TRACE_RECORDS) -> None:
        self._rows: deque[tuple[int, Works]] = deque(maxlen=size)
        self.records = 0
        self.generation = 0

    def expire(self) -> None:
        """Forget everything: the model changed."""
        self._rows.clear()
        self.records = 0
        self.generation += 1

    def add(self, step: Step) -> None:
        """Take in the next record."""
        row = work_of(step)
        if self._rows:
            row = np.where(np.isnan(row), self._rows[-1][1], row)
        self._rows.append((step.plan_id, row))
        self.records += 1

    def works(self, speeds_of: SpeedsOfPlan) -> Works:
        """``[records, items]`` at normal speed; items that were never sampled count nothing.

        Args:
            speeds_of: a record is measured on the workers of the plan that was active then, not of today's.
        """
        if not self._rows:
            return np.zeros((0, 0))
        speeds = {plan: np.array(speeds_of(plan), dtype=np.float64) for plan, _ in self._rows}
        rows = [row * speeds[plan] for plan, row in self._rows]
        return np.asarray(np.nan_to_num(np.array(rows)) / SPEED_UNIT)


@dataclass(frozen=True, kw_only=True)
class RegretState:
    """What a decision leaves for the next.

    Attributes:
        generation, records: of the trace, at the last decision.
        candidates: for each view the partitions that it named, newest last.
        scores: for each view the mean step that its partitions took, with ``weight`` decisions in it.
        regret_ns, variance: what staying has missed since the last move, and how uncertain that is, in ns and ns^2.
        steps: over how many steps.
    """

    generation: int = -1
    records: int = 0
    candidates: tuple[tuple[tuple[int, ...], ...], ...] = ()
    scores: tuple[float, ...] = ()
    weight: float = 0.0
    regret_ns: float = 0.0
    variance: float = 0.0
    steps: int = 0

    @property
    def confident_ns(self) -> float:
        """What has been missed, less one standard error."""
        return self.regret_ns - math.sqrt(self.variance)

    def after_move(self) -> RegretState:
        """The same at the beginning of another partition."""
        return replace(self, regret_ns=0.0, variance=0.0, steps=0)


def step_times(problem: PartitionProblem, works: Works, boundaries: Sequence[int]) -> Works:
    """The step of each record under a partition: all stages once, the slowest ``M - 1`` times more, in ns."""
    prefix = np.concatenate([np.zeros((len(works), 1)), np.cumsum(works, axis=1)], axis=1)
    stages = np.diff(prefix[:, list(boundaries)], axis=1)
    speeds = np.array([problem.slot(stage).speed_ppm for stage in range(problem.num_stages)]) / SPEED_UNIT
    workers = np.zeros((len(works), len(problem.slots)))
    for stage, at in enumerate(problem.positions):
        workers[:, at] += stages[:, stage] / speeds[stage]
    return np.asarray(workers.sum(axis=1) + (problem.microbatches - 1) * workers.max(axis=1))


def horizon_steps(pause_ns: float, step_ns: float) -> float:
    """Half of how long a move takes to pay where costs drift: the dearer moves, the longer a partition must hold."""
    if step_ns <= 0:
        return 1.0
    return min(float(MAX_HORIZON_STEPS), 0.5 * math.sqrt(2 * pause_ns / (step_ns * DRIFT_PER_STEP)))


def forecast_work(works: Works, ahead_steps: float) -> list[int]:
    """The work of each item so many steps from now: the mean, and the trend as far as it is certain."""
    mean = works.mean(axis=0)
    count = len(works)
    if ahead_steps and count >= 8:
        at = np.arange(count) - (count - 1) / 2
        spread = float((at**2).sum())
        slope = (at[:, None] * (works - mean)).sum(axis=0) / spread
        noise = ((works - mean - at[:, None] * slope) ** 2).sum(axis=0) / (count - 2)
        certainty = slope**2 * spread / np.maximum(noise, 1.0)
        slope = slope * np.maximum(0.0, 1 - SLOPE_CONFIDENCE / np.maximum(certainty, 1e-9))
        mean = np.maximum(0.05 * mean, mean + slope * ((count - 1) / 2 + ahead_steps))
    return [round(float(value)) for value in mean]


def update_regret(
    before: RegretState,
    problem: PartitionProblem,
    current: Sequence[int],
    trace: WorkTrace,
    works: Works,
    pause_ns: float,
    balancer: str = "exact",
) -> tuple[RegretState, tuple[int, ...]]:
    """What has been missed up to now, and the partition to go to if it is enough.

    Args:
        before: what the decision before has left.
        problem: what to partition; its own costs are not looked at by the exact balancer.
        current: the boundaries in force.
        trace: the records, and ``works`` as it gives them.
        works: ``[records, items]``, the newest last.
        pause_ns: what a move costs.
        balancer: another than ``exact`` has one view only, its own answer.
    """
    exact = balancer == "exact" and problem.virtual_stages == 1
    forecasts = FORECASTS if exact else FORECASTS[:1]
    if before.generation != trace.generation or len(before.candidates) != len(forecasts):
        empty: tuple[tuple[int, ...], ...] = ()
        before = RegretState(
            generation=trace.generation,
            candidates=(empty,) * len(forecasts),
            scores=(0.0,) * len(forecasts),
        )
    fresh = works[-min(len(works), max(1, trace.records - before.records)) :]
    staying = step_times(problem, fresh, current)
    horizon = max(float(len(fresh)), horizon_steps(pause_ns, float(staying.mean())))
    lag = max(1, int(horizon / len(fresh)))
    after = _scored(before, problem, fresh, lag)
    best = min(range(len(forecasts)), key=lambda view: after.scores[view])
    if exact:
        candidates = [
            solve(problem, forecast_work(works[-size:], ahead * horizon)).boundaries for size, ahead in forecasts
        ]
    else:
        candidates = [run_balancer(problem, balancer)]
    kept = MAX_HORIZON_STEPS
    after = replace(
        after,
        records=trace.records,
        candidates=tuple((*old, new)[-kept:] for old, new in zip(after.candidates, candidates, strict=True)),
    )
    if before.candidates[best]:
        history = before.candidates[best]
        gain = staying - step_times(problem, fresh, history[max(0, len(history) - lag)])
        total_ns = after.regret_ns + float(gain.sum())
        variance = after.variance + len(gain) * float(gain.var())
        lost = total_ns < 0
        after = replace(
            after,
            regret_ns=0.0 if lost else total_ns,
            variance=0.0 if lost else variance,
            steps=0 if lost else after.steps + len(gain),
        )
    return after, candidates[best]


def _scored(before: RegretState, problem: PartitionProblem, fresh: Works, lag: int) -> RegretState:
    """The scores with how the partitions named one, half a lag and a lag ago have done on the new records."""
    if not before.candidates[0]:
        return before
    count = len(before.candidates[0])
    ago = sorted({min(count, max(1, one)) for one in (1, lag // 2, lag)})
    scores = []
    for history, score in zip(before.candidates, before.scores, strict=True):
        mean = sum(float(step_times(problem, fresh, history[-one]).mean()) for one in ago) / len(ago)
        scores.append(SCORE_DECAY * score + mean)
    return replace(before, scores=tuple(scores), weight=SCORE_DECAY * before.weight + 1)
