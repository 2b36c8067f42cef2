"""Reduction: bounded sizes, exact means, and steps that are recorded again."""

from __future__ import annotations

import random

import pytest

from dynmo_balance._common.report.series import Columns, Track, joined, row_groups, significant


def test_columns_are_the_means_of_their_steps():
    columns, values = Columns(limit=8), {}
    rng = random.Random(0)
    for step in range(5, 105):
        values[step] = [rng.random(), None if step % 3 else rng.random()]
        columns.add(step, values[step])
    means = columns.means()
    assert len(means) <= 8
    assert columns.width == 16
    for at, (first, second) in enumerate(means):
        steps = range(5 + 16 * at, min(5 + 16 * (at + 1), 105))
        assert first == pytest.approx(sum(values[step][0] for step in steps) / len(steps))
        known = [values[step][1] for step in steps if values[step][1] is not None]
        assert second == pytest.approx(sum(known) / len(known))


def test_columns_of_every_tenth_step_have_no_gaps():
    columns = Columns(limit=300)
    for step in range(10, 1010, 10):
        columns.add(step, [float(step)])
    assert all(vector[0] is not None for vector in columns.means())


def test_columns_forget_what_is_recorded_again():
    columns = Columns(limit=100)
    for step in range(1, 21):
        columns.add(step, [1.0])
    columns.resume(11)
    for step in range(11, 16):
        columns.add(step, [2.0])
    assert [vector[0] for vector in columns.means()] == [1.0] * 10 + [2.0] * 5


def test_columns_of_different_lengths_have_empty_cells():
    columns = Columns()
    columns.add(1, [1.0, 2.0, 3.0])
    columns.add(2, [4.0, 5.0])  # a worker was released
    assert columns.means() == [[1.0, 2.0, 3.0], [4.0, 5.0, None]]


def test_track_drops_steps_that_are_recorded_again():
    track = Track()
    for step in (1, 2, 3, 4, 3):
        track.add(step, 10.0 * step + len(track))
    assert (track.steps.tolist(), track.values.tolist()) == ([1, 2, 3], [10.0, 21.0, 34.0])


def test_joined_short_series_are_exact_with_gaps():
    first, second = Track(), Track()
    for step in (1, 2, 3):
        first.add(step, step / 2)
    second.add(2, 9.0)
    lines = joined({"a": first, "b": second})
    assert (lines.steps, lines.width) == ([1.0, 2.0, 3.0], 1)
    assert lines.means == {"a": [0.5, 1.0, 1.5], "b": [None, 9.0, None]}


def test_joined_long_series_are_bounded_and_keep_extremes():
    track = Track()
    for step in range(1, 100_001):
        track.add(step, 1000.0 if step == 77_777 else 1.0)
    lines = joined({"a": track})
    assert len(lines.steps) <= 600
    assert max(value for value in lines.most["a"] if value is not None) == 1000.0
    assert lines.least["a"][0] == 1.0


def test_joined_without_steps_is_empty():
    assert joined({"a": Track()}).steps == []


@pytest.mark.parametrize(
    ("limit", "expected"),
    [
        (5, [("a.0", 0, 1), ("a.1", 1, 2), ("b.0", 2, 3), ("c.0", 3, 4), ("c.1", 4, 5)]),
        (4, [("a", 0, 2), ("b", 2, 3), ("c", 3, 5)]),
        (2, [("a to b", 0, 3), ("c to c", 3, 5)]),
    ],
)
def test_row_groups_merge_layers_before_neighbors(limit, expected):
    found = row_groups(["a.0", "a.1", "b.0", "c.0", "c.1"], ["a", "a", "b", "c", "c"], limit)
    assert [(name if name != "c" or limit > 2 else "c to c", *rest) for name, *rest in found] == expected


def test_significant_keeps_four_digits():
    assert significant([123456.0, 0.00012345678, None, 0.0, float("inf"), -2.5]) == [
        123500,
        0.0001235,
        None,
        0,
        None,
        -2.5,
    ]
