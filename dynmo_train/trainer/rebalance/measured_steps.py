"""Writes the costs of profiled steps, and what they show: speeds of workers, and gaps to the prediction of a plan."""

from __future__ import annotations

from ..monitoring.profile_writer import RunLogger
from ..monitoring.worker_speed import SpeedMonitor, elapsed_costs, samples_of
from ..step_result import StepResult
from .step_gap import StepGap, times_of


class MeasuredSteps:
    """The profiled steps of a run.

    Args:
        logger: writer of profile and events.
    """

    def __init__(self, logger: RunLogger) -> None:
        self._logger, self._speeds = logger, SpeedMonitor()
        self._gap: StepGap | None = None

    def expect(self, plan_id: int, predicted_ns: int | None) -> None:
        """Compare the steps of a plan with its prediction from now on.

        Args:
            plan_id: number of the plan.
            predicted_ns: predicted step time; None where the plan has none.
        """
        self._gap = None if predicted_ns is None else StepGap(plan_id=plan_id, predicted_ns=predicted_ns)

    def log(self, step: int, plan_id: int, data_ns: int, result: StepResult) -> None:
        """Write the costs of a step; no effect where it was not profiled.

        Args:
            step: number of the step.
            plan_id: number of the active plan.
            data_ns: time that the step waited for its batch.
            result: result of the step; waits for the costs of the other ranks.
        """
        measured = result.costs
        if measured is None:
            return
        samples = samples_of(measured)
        if (change := self._speeds.add(samples)) is not None:
            self._logger.log_worker_speeds(step, change)
        costs = elapsed_costs(measured, self._speeds.published)
        self._logger.log_costs(step, plan_id, result.step_ns, costs, result.counts)
        if self._gap is not None and self._gap.plan_id == plan_id:
            times = times_of(result.step_ns, data_ns, [one["busy_ns"] for one in costs], samples)
            if (incident := self._gap.add(step, times, self._speeds.published)) is not None:
                self._logger.log_incident(incident)
