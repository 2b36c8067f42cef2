"""A gap between predicted and measured step time is reported once, with its likely cause."""

from __future__ import annotations

import pytest

from dynmo_train.trainer.monitoring.worker_speed import NORMAL, SpeedSample, WorkerSpeed
from dynmo_train.trainer.rebalance.step_gap import WINDOW, StepGap, StepTimes, times_of

MS = 1_000_000
NORMALS = (NORMAL, NORMAL)


def times(step=100, data=0, busy=60, stall=1.0):
    return StepTimes(step_ns=step * MS, data_ns=data * MS, busy_ns=busy * MS, stall=stall)


def incidents(rows, speeds=NORMALS):
    gap = StepGap(plan_id=3, predicted_ns=80 * MS)
    return [found for number, row in enumerate(rows, 1) if (found := gap.add(number, row, speeds)) is not None]


@pytest.mark.parametrize(
    ("row", "speeds", "cause"),
    [
        (times(), (NORMAL, WorkerSpeed(speed=0.2)), "slow worker at position 1"),
        (times(data=15), NORMALS, "input: 15.0 ms of a step wait for the batch"),
        (times(stall=3.0), NORMALS, "host contention: wall time is 3.0 x the processor time of every worker"),
        (times(busy=95), NORMALS, "costs: the busiest worker alone computes longer than the predicted step"),
        (times(), NORMALS, "link: transfers and waits between workers"),
    ],
)
def test_gap_above_a_fifth_is_reported_once_with_its_cause(row, speeds, cause):
    [found] = incidents([row] * 3 * WINDOW, speeds)
    assert (found.incident, found.step, found.cause) == ("slow_step", WINDOW, cause)
    assert found.message.startswith("a step takes 100.0 ms, 25% more than the 80.0 ms that plan 3 predicted")


def test_smaller_gaps_and_single_slow_steps_are_not_reported():
    assert not incidents([times(step=96)] * 3 * WINDOW)
    assert not incidents(([times(step=80)] * 3 + [times(step=900)]) * WINDOW)
    assert not incidents([times(step=900)] * (WINDOW - 1))


def test_times_are_those_of_the_busiest_and_the_least_starved_worker():
    samples = [SpeedSample(calibration_ns=1, stall=2.0), SpeedSample(calibration_ns=1, stall=1.5)]
    assert times_of(9, 1, [4, 5], samples) == StepTimes(step_ns=9, data_ns=1, busy_ns=5, stall=1.5)
