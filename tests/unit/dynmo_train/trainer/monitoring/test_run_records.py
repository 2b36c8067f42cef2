"""Curves of a whole run in bounded memory."""

from __future__ import annotations

import pytest

from dynmo_train.trainer.monitoring.run_records import CURVE_POINTS, Curve, mean, resample


def test_curve_has_bounded_points_and_exact_means():
    curve = Curve()
    for step in range(5000):
        curve.add(step, step)
    values = curve.values()
    assert CURVE_POINTS // 2 <= len(values) <= CURVE_POINTS
    assert values[0] == pytest.approx(7.5)
    curve.cut(100)
    assert curve.values() == pytest.approx([7.5 + 16 * at for at in range(len(curve.values()))])
    assert len(curve.values()) == 7


def test_resample_averages_neighbors():
    assert resample([1, 2, 3, 4], 2) == [1.5, 3.5]
    assert resample([1, 2], 5) == [1, 2]


def test_mean_of_no_values_is_none():
    assert mean([]) is None
    assert mean([1, 2]) == 1.5
