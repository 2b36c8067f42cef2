"""Regret of keeping the partition, measured out of sample, and a forecast of the best partition.

A partition that was chosen by noisy costs looks better on these than it is (the winner's curse), and one that fits
the last steps may not fit the next ones. So several *forecasts* (the mean over a short or a long window, or a trend
that is extrapolated further the more expensive moves are) each name a candidate partition at every decision::

    decision k      forecast f names candidate c[f, k] from the records so far
    steps k..k+1    scores[f] += step time under candidates that f named 1, lag / 2 and lag decisions ago
    decision k+1    best forecast b = argmin scores;  regret += step(active) - step(c[b, k + 1 - lag])

The best forecast is followed, and the regret is the difference between the active partition and a candidate that this
forecast named some decisions ago. On noise alone it does not become positive.
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
"""For each forecast: the number of records, and how far their trend is extrapolated, in units of the horizon."""
MAX_FORECAST_RECORDS = max(records for records, _ in FORECASTS)
TRACE_RECORDS = 4 * MAX_FORECAST_RECORDS
"""Length of the trace: several periods of oscillating costs, so that the mean is not that of a single phase."""
MAX_HORIZON_STEPS = 400
"""Maximum number of steps of an extrapolated trend, and of remembered candidates."""
DRIFT_PER_STEP = 1e-4
"""Assumed loss per step of drift, as a share of the step; converts pauses into horizons."""
SCORE_DECAY = 0.98
"""Factor on the earlier scores at each decision."""
SLOPE_CONFIDENCE = 4.0
"""A slope is shrunk by this multiple of its variance over its square."""


def work_of(step: Step) -> Works:
    """Forward plus backward time of each item in a record, ``[items]`` in ns as measured; NaN if it was not sampled."""
    parts = [step.forward_ns]
    if step.backward_ns is not None:
        parts.append(step.backward_ns)
    else:
        parts += [part for part in (step.backward_input_ns, step.backward_weight_ns) if part is not None]
    row: Works = np.sum(np.array(parts, dtype=np.float64), axis=0)  # None becomes NaN
    return row


SpeedsOfPlan = Callable[[int], Sequence[int]]
"""From a plan id to the speed, in parts per million, of each item's worker under that plan."""


class WorkTrace:
    """The work of each item in the last records, in ns; gaps are filled with the last known value."""

    def __init__(self, size: int = TRACE_RECORDS) -> None:
        self._rows: deque[tuple[int, Works]] = deque(maxlen=size)
        # The records ever added, not those present: policies take the difference to find the new ones.
        self.records = 0
        self.generation = 0

    def expire(self) -> None:
        """Clear the trace, because the model changed."""
        self._rows.clear()
        self.records = 0
        self.generation += 1

    def add(self, step: Step) -> None:
        """Append a record."""
        row = work_of(step)
        if self._rows:
            row = np.where(np.isnan(row), self._rows[-1][1], row)
        self._rows.append((step.plan_id, row))
        self.records += 1

    def works(self, speeds_of: SpeedsOfPlan) -> Works:
        """The work in ns at normal speed, ``[records, items]``; items that were never sampled count 0.

        Args:
            speeds_of: speeds by plan, because a record was measured on the workers of the plan that was active then.
        """
        if not self._rows:
            return np.zeros((0, 0))
        speeds = {plan: np.array(speeds_of(plan), dtype=np.float64) for plan, _ in self._rows}
        rows = [row * speeds[plan] for plan, row in self._rows]
        return np.asarray(np.nan_to_num(np.array(rows)) / SPEED_UNIT)


@dataclass(frozen=True, kw_only=True)
class RegretState:
    """The state of the policy ``regret`` between decisions.

    Attributes:
        generation, records: of the trace at the last decision.
        candidates: for each forecast the partitions that it named, newest last.
        scores: for each forecast the decayed sum of the mean step in ns of its candidates.
        regret_ns: cost of keeping the partition since the last move.
        variance: of the regret, in ns^2.
        steps: number of steps in the regret.
    """

    generation: int = -1
    records: int = 0
    candidates: tuple[tuple[tuple[int, ...], ...], ...] = ()
    scores: tuple[float, ...] = ()
    regret_ns: float = 0.0
    variance: float = 0.0
    steps: int = 0

    @property
    def confident_ns(self) -> float:
        """The regret in ns, less one standard error."""
        return self.regret_ns - math.sqrt(self.variance)

    def after_move(self) -> RegretState:
        """The state at the start of another partition."""
        return replace(self, regret_ns=0.0, variance=0.0, steps=0)


def step_times(problem: PartitionProblem, works: Works, boundaries: Sequence[int]) -> Works:
    """The step of each record under a partition, in ns: all stages once, and the slowest ``M - 1`` times more.

    Args:
        problem: workers and microbatches.
        works: ``[records, items]`` in ns at normal speed.
        boundaries: item positions.

    Returns:
        ``[records]``.
    """
    prefix = np.concatenate([np.zeros((len(works), 1)), np.cumsum(works, axis=1)], axis=1)
    stages = np.diff(prefix[:, list(boundaries)], axis=1)
    speeds = np.array([problem.slot(stage).speed_ppm for stage in range(problem.num_stages)]) / SPEED_UNIT
    workers = np.zeros((len(works), len(problem.slots)))
    for stage, at in enumerate(problem.positions):
        workers[:, at] += stages[:, stage] / speeds[stage]
    shards, count = problem.chain.vocabulary, len(problem.slots)
    if shards is not None:
        passes_ns = shards.forward_ns + shards.weight_ns
        for at, slot in enumerate(problem.slots):
            workers[:, at] += slot.time_ns(shards.share(passes_ns, at, count))
    return np.asarray(workers.sum(axis=1) + (problem.microbatches - 1) * workers.max(axis=1))


def horizon_steps(pause_ns: float, step_ns: float) -> float:
    """Half of the steps until a move breaks even while costs drift: longer pauses need longer horizons.

    If the loss per step increases by ``d = DRIFT_PER_STEP x step`` with each step, it adds up to ``d n^2 / 2`` after
    ``n`` steps, which equals the pause at ``n = sqrt(2 pause / d)``.

    Args:
        pause_ns: cost of a move.
        step_ns: mean step.
    """
    if step_ns <= 0:
        return 1.0
    return min(float(MAX_HORIZON_STEPS), 0.5 * math.sqrt(2 * pause_ns / (step_ns * DRIFT_PER_STEP)))


def forecast_work(works: Works, ahead_steps: float) -> list[int]:
    """The work of each item ``ahead_steps`` from now: the mean, plus the significant part of the trend.

    Args:
        works: ``[records, items]`` in ns.
        ahead_steps: 0 for the mean alone.

    Returns:
        ``[items]`` in ns.
    """
    mean = works.mean(axis=0)
    count = len(works)
    # Least squares for all items at once. In fewer records a slope is hidden by noise.
    if ahead_steps and count >= 8:
        at = np.arange(count) - (count - 1) / 2
        spread = float((at**2).sum())
        slope = (at[:, None] * (works - mean)).sum(axis=0) / spread
        noise = ((works - mean - at[:, None] * slope) ** 2).sum(axis=0) / (count - 2)
        certainty = slope**2 * spread / np.maximum(noise, 1.0)
        # A slope that is not clearly above its noise becomes 0, because an extrapolated one would move layers by
        # chance.
        slope = slope * np.maximum(0.0, 1 - SLOPE_CONFIDENCE / np.maximum(certainty, 1e-9))
        # An extrapolated time stays positive: a layer that gets cheaper does not become free.
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
    """The new regret, and the partition to move to if it is large enough.

    Args:
        before: state after the previous decision.
        problem: the exact balancer ignores its costs.
        current: boundaries of the active partition.
        trace: the records.
        works: ``trace.works``, ``[records, items]`` in ns, newest last.
        pause_ns: cost of a move.
        balancer: a balancer other than ``exact`` has one forecast only, its own partition.
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
    # A poll may bring several records or none; with none, the last one is measured again.
    fresh = works[-min(len(works), max(1, trace.records - before.records)) :]
    staying = step_times(problem, fresh, current)
    horizon = max(float(len(fresh)), horizon_steps(pause_ns, float(staying.mean())))
    lag = max(1, int(horizon / len(fresh)))
    after = _scored(before, problem, fresh, lag)
    best = min(range(len(forecasts)), key=after.scores.__getitem__)
    if exact:
        candidates = [
            solve(problem, forecast_work(works[-size:], ahead * horizon)).boundaries for size, ahead in forecasts
        ]
    else:
        candidates = [run_balancer(problem, balancer)]
    after = replace(
        after,
        records=trace.records,
        candidates=tuple(
            (*old, new)[-MAX_HORIZON_STEPS:] for old, new in zip(after.candidates, candidates, strict=True)
        ),
    )
    if before.candidates[best]:
        history = before.candidates[best]
        # This candidate was named before the new records existed, so the gain is measured out of sample.
        gain = staying - step_times(problem, fresh, history[max(0, len(history) - lag)])
        total_ns = after.regret_ns + float(gain.sum())
        variance = after.variance + len(gain) * float(gain.var())
        # A negative sum is reset to 0: steps in which the active partition was better must not delay a later move.
        is_negative = total_ns < 0
        after = replace(
            after,
            regret_ns=0.0 if is_negative else total_ns,
            variance=0.0 if is_negative else variance,
            steps=0 if is_negative else after.steps + len(gain),
        )
    return after, candidates[best]


def _scored(before: RegretState, problem: PartitionProblem, fresh: Works, lag: int) -> RegretState:
    """The scores with the step times, on the new records, of candidates named one, half a lag and a lag ago."""
    if not before.candidates[0]:
        return before
    count = len(before.candidates[0])
    ago = sorted({min(count, max(1, one)) for one in (1, lag // 2, lag)})
    scores = []
    for history, score in zip(before.candidates, before.scores, strict=True):
        mean = sum(float(step_times(problem, fresh, history[-one]).mean()) for one in ago) / len(ago)
        scores.append(SCORE_DECAY * score + mean)
    return replace(before, scores=tuple(scores))
