"""Speeds of workers: a slow device and a starved host are found, named and forgotten; noise changes nothing."""

from __future__ import annotations

import time

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dynmo_train.parallel.device_clock import CpuClock
from dynmo_train.pipeline.profiler import LayerProfiler
from dynmo_train.trainer.monitoring.worker_speed import (
    MIN_SAMPLES,
    NORMAL,
    SpeedMonitor,
    SpeedSample,
    WorkerSpeed,
    elapsed_costs,
    faster_half,
    header_speeds,
    relative_speeds,
    samples_of,
)


def sample(clock=1.0, stall=1.0, busy=1000):
    """A worker whose product takes ``clock`` times as long, starved by ``stall``."""
    return SpeedSample(calibration_ns=round(100_000 * clock), stall=stall, busy_ns=busy)


def changes(monitor, rows):
    return [(number, change) for number, row in enumerate(rows, 1) if (change := monitor.add(row)) is not None]


def test_faster_half_is_the_faster_of_two():
    assert [faster_half(rates) for rates in ([1.0], [1.0, 0.2], [1.0, 1.0, 0.1], [4.0, 1.0, 3.0, 1.0])] == [
        1.0,
        1.0,
        1.0,
        3.5,
    ]


@pytest.mark.parametrize(
    ("slow", "cause", "time_factor"),
    [
        (sample(clock=5.0), "slow device: a fixed product takes 5.0 x the time of others", 1.0),
        (sample(stall=5.0), "starved of processor time: 5.0 x the wall time of others", 5.0),
    ],
)
def test_slow_worker_is_found_within_seven_samples_and_recovers(slow, cause, time_factor):
    monitor = SpeedMonitor()
    assert not changes(monitor, [[sample(), sample()]] * 10)
    [(number, change)] = changes(monitor, [[sample(), slow]] * 10)
    assert number <= 7
    assert (change.slow, change.recovered) == ((1,), ())
    assert change.speeds[0] == NORMAL
    assert change.speeds[1].speed == pytest.approx(0.2)
    assert change.speeds[1].cause == cause
    assert change.speeds[1].time_factor == pytest.approx(time_factor)
    [(number, change)] = changes(monitor, [[sample(), sample()]] * 10)
    assert number <= 7
    assert (change.slow, change.recovered) == ((), (1,))
    assert monitor.published == (NORMAL, NORMAL)


def test_a_few_slow_steps_change_nothing():
    monitor = SpeedMonitor()
    rows = [[sample(), sample()]] * 4 + [[sample(), sample(stall=50.0)]] * 3
    assert not changes(monitor, rows * 5)


def test_slow_worker_keeps_its_state_between_the_thresholds():
    monitor = SpeedMonitor()
    assert not changes(monitor, [[sample(), sample(clock=1.25)]] * 10)  # 0.8: not slow yet
    assert changes(monitor, [[sample(), sample(clock=1.5)]] * 10)
    assert not changes(monitor, [[sample(), sample(clock=1.25)]] * 10)  # 0.8: not recovered yet
    assert changes(monitor, [[sample(), sample(clock=1.05)]] * 10)


def test_host_that_starves_all_workers_slows_none():
    assert not changes(SpeedMonitor(), [[sample(stall=6.0), sample(stall=6.4), sample(stall=5.8)]] * 20)


def test_speed_of_a_starved_worker_belongs_to_its_load():
    """Under a quota a worker with few layers looks healthy; its layers return late, and later after each relapse."""
    monitor, healthy_for = SpeedMonitor(), []
    for _ in range(3):
        assert changes(monitor, [[sample(), sample(stall=5.0)]] * 50)[0][1].slow == (1,)
        [(number, change)] = changes(monitor, [[sample(), sample(busy=300)]] * 300)
        assert change.recovered == (1,)
        healthy_for.append(number)
    assert [14 <= healthy_for[0] <= 24, healthy_for[1] >= 4 * 14, healthy_for[2] >= 16 * 14] == [True] * 3


def test_speeds_that_flap_are_published_less_and_less_often():
    monitor, found = SpeedMonitor(), []
    for round_ in range(24):
        found += changes(monitor, [[sample(), sample(stall=1.0 if round_ % 2 else 3.0)]] * 8)
    assert len(found) <= 6
    assert sum(len(change.slow) for _, change in found) <= 3


def test_released_workers_start_a_new_comparison():
    monitor = SpeedMonitor()
    changes(monitor, [[sample(), sample(), sample(clock=4.0)]] * 10)
    assert monitor.published[2] != NORMAL
    assert not changes(monitor, [[sample(), sample()]] * (MIN_SAMPLES + 2))
    assert monitor.published == (NORMAL, NORMAL)


@settings(deadline=None, derandomize=True, database=None)
@given(st.lists(st.tuples(st.integers(0, 10**9), st.floats(1.0, 1e4)), min_size=1, max_size=8))
def test_speeds_are_positive_and_some_worker_is_normal(values):
    found = relative_speeds([SpeedSample(calibration_ns=time, stall=stall) for time, stall in values])
    assert all(each.speed > 0 and each.time_factor >= 1.0 for each in found)
    monitor = SpeedMonitor()
    for _ in range(10):
        monitor.add([SpeedSample(calibration_ns=time, stall=stall) for time, stall in values])
    assert all(each == NORMAL or 0 < each.speed < 0.75 for each in monitor.published)


def test_header_has_the_speed_of_slow_workers_only():
    assert header_speeds([100, 110, 95, 500]) == [1.0, 1.0, 1.0, pytest.approx(0.2, rel=0.1)]
    assert header_speeds([0, 0]) == [1.0, 1.0]


def test_costs_of_a_starved_worker_are_the_time_that_they_take():
    costs = {
        "forward_ns": [10, None],
        "backward_ns": [20, 0],
        "backward_weight_ns": None,
        "busy_ns": 40,
        "calibration_ns": 7,
        "stall_ppm": 5_000_000,
    }
    starved = WorkerSpeed(speed=0.2, time_factor=5.0)
    scaled, normal = elapsed_costs([costs, costs], [starved, NORMAL])
    assert (scaled["forward_ns"], scaled["backward_ns"], scaled["busy_ns"]) == ([50, None], [100, 0], 200)
    assert normal == costs
    assert samples_of([costs]) == [SpeedSample(calibration_ns=7, stall=5.0, busy_ns=40)]


def test_profiler_measures_product_and_stall_in_measured_steps_only():
    profiler = LayerProfiler(CpuClock(1))
    profiler.measures_stall = True
    device = torch.device("cpu")
    profiler.begin_step(False, 1)
    profiler.calibrate(device)
    assert profiler.measurements().result((), 1)["calibration_ns"] == 0
    profiler.begin_step(True, 2)
    profiler.calibrate(device)
    with profiler.busy():
        product = torch.ones(64, 64) @ torch.ones(64, 64)
        torch.ones(1).item()
    result = profiler.measurements().result((), 1)
    assert product[0, 0] == 64
    assert 0 < result["calibration_ns"] < 1e9
    assert result["stall_ppm"] == 1_000_000  # too short a time
    with profiler.busy():
        end = time.thread_time_ns() + 25_000_000
        while time.thread_time_ns() < end:
            pass
        time.sleep(0.1)
    assert profiler.measurements().result((), 1)["stall_ppm"] > 2_000_000
    assert profiler.calibration_ns(device) > 0
    assert profiler.measurements().result((), 1)["calibration_ns"] == 0
