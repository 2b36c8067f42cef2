"""Compares the measured step time of a plan with its prediction, and names the likely cause of a gap.

The causes are tried in the order in which they explain the most with the least doubt: a worker with a measured low
speed, waits for batches, processes that take the processor from all workers, and otherwise what is left of a step:
transfers between workers, or layers whose costs changed after the plan was made.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from statistics import median

from ...formats.incident import Incident
from ..monitoring.worker_speed import NORMAL, SpeedSample, WorkerSpeed

MAX_GAP = 0.2
WINDOW = 20
# Wall time over processor time from which the processors of all workers count as contended.
_CONTENDED = 1.2


@dataclass(frozen=True, kw_only=True)
class StepTimes:
    """A profiled step on rank 0.

    Attributes:
        step_ns: wall time of the step.
        data_ns: time that it waited for its batch.
        busy_ns: arithmetic of the busiest worker.
        stall: smallest wall time over processor time of the workers.
    """

    step_ns: int
    data_ns: int
    busy_ns: int
    stall: float


def likely_cause(times: StepTimes, predicted_ns: int, speeds: Sequence[WorkerSpeed]) -> str:
    """Why a step takes longer than predicted, as a phrase.

    Args:
        times: medians over a window.
        predicted_ns: predicted step time.
        speeds: published speed of each worker.
    """
    excess_ns = times.step_ns - predicted_ns
    slow = [str(position) for position, speed in enumerate(speeds) if speed != NORMAL]
    if slow:
        return f"slow worker at position {', '.join(slow)}"
    if 2 * times.data_ns > excess_ns:
        return f"input: {times.data_ns / 1e6:.1f} ms of a step wait for the batch"
    if times.stall > _CONTENDED:
        return f"host contention: wall time is {times.stall:.1f} x the processor time of every worker"
    if times.busy_ns > predicted_ns:
        return "costs: the busiest worker alone computes longer than the predicted step"
    return "link: transfers and waits between workers"


@dataclass(kw_only=True)
class StepGap:
    """The steps since a plan was applied; reports at most one gap.

    Attributes:
        plan_id: number of the plan.
        predicted_ns: its predicted step time.
    """

    plan_id: int
    predicted_ns: int
    _steps: deque[StepTimes] = field(default_factory=lambda: deque(maxlen=WINDOW))
    _is_reported: bool = False

    def add(self, step: int, times: StepTimes, speeds: Sequence[WorkerSpeed]) -> Incident | None:
        """Add a step; the incident of a gap above 20 % over the last 20 steps, once.

        Args:
            step: its number.
            times: its times.
            speeds: published speed of each worker.
        """
        self._steps.append(times)
        if self._is_reported or len(self._steps) < WINDOW or self.predicted_ns <= 0:
            return None
        found = StepTimes(
            step_ns=round(median(each.step_ns for each in self._steps)),
            data_ns=round(median(each.data_ns for each in self._steps)),
            busy_ns=round(median(each.busy_ns for each in self._steps)),
            stall=median(each.stall for each in self._steps),
        )
        gap = found.step_ns / self.predicted_ns - 1.0
        if gap <= MAX_GAP:
            return None
        self._is_reported = True
        cause = likely_cause(found, self.predicted_ns, speeds)
        message = (
            f"a step takes {found.step_ns / 1e6:.1f} ms, {gap:.0%} more than the {self.predicted_ns / 1e6:.1f} ms that"
            f" plan {self.plan_id} predicted; likely cause: {cause}"
        )
        return Incident(incident="slow_step", message=message, cause=cause, step=step)


def times_of(step_ns: int, data_ns: int, busy_ns: Sequence[int], samples: Sequence[SpeedSample]) -> StepTimes:
    """The times of a profiled step.

    Args:
        step_ns: wall time of the step.
        data_ns: time that it waited for its batch.
        busy_ns: arithmetic of each worker.
        samples: speed sample of each worker.
    """
    return StepTimes(
        step_ns=step_ns,
        data_ns=data_ns,
        busy_ns=max(busy_ns, default=0),
        stall=min((sample.stall for sample in samples), default=1.0),
    )
